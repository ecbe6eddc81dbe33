// silu(gate) * up, where gate and up are the two halves of each row of one matrix, the result of a fused projection.
#include "rowwise.cuh"

namespace nanovllm {

template <typename T>
struct SiluAndMul {
  static __device__ float apply(const float (&in)[2]) {
    return rounded<T>(activate<T, Activation::silu>(in[0])) * in[1];
  }
};

void silu_and_mul(Rows gate, Rows up, void* y, int64_t rows, int64_t cols, Dtype dtype, cudaStream_t stream) {
  with_type(dtype, [&](auto number) {
    using T = decltype(number);
    launch<T, SiluAndMul<T>, 2>({{gate, up}}, y, rows, cols, stream);
  });
}

}  // namespace nanovllm
