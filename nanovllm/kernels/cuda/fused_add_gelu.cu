// gelu(x + bias): two operations of PyTorch in one pass, so x + bias never travels to memory and back.
#include "rowwise.cuh"

namespace nanovllm {

template <typename T, Activation kind>
struct AddGelu {
  static __device__ float apply(const float (&in)[2]) { return activate<T, kind>(rounded<T>(in[0] + in[1])); }
};

void fused_add_gelu(
    Rows x, Rows bias, void* y, int64_t rows, int64_t cols, Dtype dtype, Activation kind, cudaStream_t stream) {
  with_type(dtype, [&](auto number) {
    using T = decltype(number);
    if (kind == Activation::gelu_tanh) {
      launch<T, AddGelu<T, Activation::gelu_tanh>, 2>({{x, bias}}, y, rows, cols, stream);
    } else {
      launch<T, AddGelu<T, Activation::gelu>, 2>({{x, bias}}, y, rows, cols, stream);
    }
  });
}

}  // namespace nanovllm
