// LayerNorm over rows: a block a row. Mean, then squared distances from it, then the result: three reads, two from the cache.
#include "lab.cuh"

namespace lab {

// E[x^2] - mean^2 would need one pass less and lose all digits where the mean is large beside the spread.
template <typename T, int width>
__global__ void layernorm_kernel(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                 T* __restrict__ y, int cols, float eps) {
  using V = Vector<T, width>;
  __shared__ float scratch[32];
  const auto* from = reinterpret_cast<const V*>(x + int64_t(blockIdx.x) * cols);
  auto* to = reinterpret_cast<V*>(y + int64_t(blockIdx.x) * cols);
  const int vectors = cols / width;

  float sum = 0.0f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const V vector = from[i];
#pragma unroll
    for (int e = 0; e < width; ++e) sum += widen(vector.at[e]);
  }
  const float mean = over_block<Add>(sum, scratch) / cols;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const V vector = from[i];
#pragma unroll
    for (int e = 0; e < width; ++e) {
      const float distance = widen(vector.at[e]) - mean;
      squares = fmaf(distance, distance, squares);
    }
  }
  const float scale = rsqrtf(over_block<Add>(squares, scratch) / cols + eps);
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    V vector = from[i];
    const V w = reinterpret_cast<const V*>(weight)[i], b = reinterpret_cast<const V*>(bias)[i];
#pragma unroll
    for (int e = 0; e < width; ++e) {
      vector.at[e] = narrow<T>(fmaf((widen(vector.at[e]) - mean) * scale, widen(w.at[e]), widen(b.at[e])));
    }
    to[i] = vector;
  }
}

template <typename T, int width>
void launch_layernorm(const T* x, const T* weight, const T* bias, T* y, int rows, int cols, float eps, cudaStream_t stream) {
  int threads = 32;
  while (threads < 512 && threads * width * 2 < cols) threads *= 2;
  layernorm_kernel<T, width><<<rows, threads, 0, stream>>>(x, weight, bias, y, cols, eps);
}

}  // namespace lab

// y[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias for contiguous [rows, cols], both above 0.
LAB_EXPORT int lab_layernorm(const void* x, const void* weight, const void* bias, void* y, int rows, int cols, float eps,
                             int dtype, void* stream) {
  return lab::by_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int width = 16 / sizeof(T);
    const auto s = static_cast<cudaStream_t>(stream);
    const auto *from = static_cast<const T*>(x), *w = static_cast<const T*>(weight), *b = static_cast<const T*>(bias);
    auto* to = static_cast<T*>(y);
    bool vectors = true;
    for (const void* p : {x, weight, bias, static_cast<const void*>(y)}) vectors &= lab::in_vectors(p, cols, sizeof(T));
    if (vectors) {
      lab::launch_layernorm<T, width>(from, w, b, to, rows, cols, eps, s);
    } else {
      lab::launch_layernorm<T, 1>(from, w, b, to, rows, cols, eps, s);
    }
  });
}
