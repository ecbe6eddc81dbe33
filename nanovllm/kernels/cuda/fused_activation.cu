// An activation by name, in one pass.
#include "rowwise.cuh"

namespace nanovllm {

template <typename T, Activation kind>
struct Activate {
  static __device__ float apply(const float (&in)[1]) { return activate<T, kind>(in[0]); }
};

void fused_activation(Rows x, void* y, int64_t rows, int64_t cols, Dtype dtype, Activation kind, cudaStream_t stream) {
  with_type(dtype, [&](auto number) {
    using T = decltype(number);
    const Inputs<1> inputs{{x}};
    switch (kind) {
      case Activation::gelu: return launch<T, Activate<T, Activation::gelu>>(inputs, y, rows, cols, stream);
      case Activation::gelu_tanh: return launch<T, Activate<T, Activation::gelu_tanh>>(inputs, y, rows, cols, stream);
      case Activation::silu: return launch<T, Activate<T, Activation::silu>>(inputs, y, rows, cols, stream);
      case Activation::mish: return launch<T, Activate<T, Activation::mish>>(inputs, y, rows, cols, stream);
      case Activation::relu: return launch<T, Activate<T, Activation::relu>>(inputs, y, rows, cols, stream);
    }
  });
}

}  // namespace nanovllm
