// gelu(x) with tanh, elementwise: a thread reads 16 bytes, computes, writes 16 bytes.
#include "lab.cuh"

namespace lab {

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), which has no cancellation for negative x and goes to x or 0 without overflow.
__device__ inline float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * x * fmaf(0.044715f * x, x, 1.0f);
  return x / (1.0f + expf(-2.0f * u));
}

template <typename T, int width>
__global__ void gelu_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;  // 64 bits: a tensor may have more than 2^31 elements
  if (i >= vectors) return;
  auto vector = reinterpret_cast<const Vector<T, width>*>(x)[i];
#pragma unroll
  for (int e = 0; e < width; ++e) vector.at[e] = narrow<T>(gelu_tanh(widen(vector.at[e])));
  reinterpret_cast<Vector<T, width>*>(y)[i] = vector;
}

template <typename T, int width>
void launch_gelu(const T* x, T* y, int64_t elements, cudaStream_t stream) {
  constexpr int threads = 256;
  const int64_t vectors = elements / width;
  gelu_kernel<T, width><<<unsigned((vectors + threads - 1) / threads), threads, 0, stream>>>(x, y, vectors);
}

}  // namespace lab

// y = gelu(x) over `elements` > 0 numbers; enqueues on `stream` and returns the launch's error code.
LAB_EXPORT int lab_gelu(const void* x, void* y, int64_t elements, int dtype, void* stream) {
  return lab::by_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int width = 16 / sizeof(T);
    const auto s = static_cast<cudaStream_t>(stream);
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    if (lab::in_vectors(x, elements, sizeof(T)) && lab::in_vectors(y, elements, sizeof(T))) {
      lab::launch_gelu<T, width>(from, to, elements, s);
    } else {
      lab::launch_gelu<T, 1>(from, to, elements, s);
    }
  });
}
