// softmax over rows: a block a row. The row is read twice, but the second time it comes from the cache.
#include "lab.cuh"

namespace lab {

// Pass 1 keeps the largest number so far and the sum of exponentials relative to it, rescaled whenever the largest grows
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018); pass 2 writes.
template <typename T, int width>
__global__ void softmax_kernel(const T* __restrict__ x, T* __restrict__ y, int cols) {
  using V = Vector<T, width>;
  __shared__ float scratch[32];
  const auto* from = reinterpret_cast<const V*>(x + int64_t(blockIdx.x) * cols);
  auto* to = reinterpret_cast<V*>(y + int64_t(blockIdx.x) * cols);
  const int vectors = cols / width;

  float largest = -INFINITY, sum = 0.0f;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    const V vector = from[i];
    float new_largest = largest;
#pragma unroll
    for (int e = 0; e < width; ++e) new_largest = fmaxf(new_largest, widen(vector.at[e]));
    const float shift = new_largest == -INFINITY ? 0.0f : new_largest;  // inf - inf would be NaN
    sum *= expf(largest - shift);
#pragma unroll
    for (int e = 0; e < width; ++e) sum += expf(widen(vector.at[e]) - shift);
    largest = new_largest;
  }
  const float row_largest = over_block<Max>(largest, scratch);
  const float own = largest == -INFINITY ? 0.0f : sum * expf(largest - row_largest);  // a thread may have had no element
  const float scale = 1.0f / over_block<Add>(own, scratch);
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    V vector = from[i];
#pragma unroll
    for (int e = 0; e < width; ++e) vector.at[e] = narrow<T>(expf(widen(vector.at[e]) - row_largest) * scale);
    to[i] = vector;
  }
}

template <typename T, int width>
void launch_softmax(const T* x, T* y, int rows, int cols, cudaStream_t stream) {
  int threads = 32;
  while (threads < 512 && threads * width * 2 < cols) threads *= 2;  // at least two vectors a thread
  softmax_kernel<T, width><<<rows, threads, 0, stream>>>(x, y, cols);
}

}  // namespace lab

// y[r] = softmax(x[r]) for contiguous [rows, cols], both above 0; returns the launch's error code.
LAB_EXPORT int lab_softmax(const void* x, void* y, int rows, int cols, int dtype, void* stream) {
  return lab::by_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int width = 16 / sizeof(T);
    const auto s = static_cast<cudaStream_t>(stream);
    const auto* from = static_cast<const T*>(x);
    auto* to = static_cast<T*>(y);
    if (lab::in_vectors(x, cols, sizeof(T)) && lab::in_vectors(y, cols, sizeof(T))) {
      lab::launch_softmax<T, width>(from, to, rows, cols, s);
    } else {
      lab::launch_softmax<T, 1>(from, to, rows, cols, s);
    }
  });
}
