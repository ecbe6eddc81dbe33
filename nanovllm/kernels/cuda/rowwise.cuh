// One kernel for everything elementwise: y = f(inputs...), row by row.
//
// Such a kernel does little arithmetic, so its time is that of moving the bytes. What matters then:
//
// 1. Wide loads. A thread moves 16 bytes with one instruction (LDG.128): 4 float32 or 8 float16. The addresses must be
//    multiples of 16; where a pointer, a stride or a row length is not, single elements are moved (`width` 1).
// 2. Neighbouring threads touch neighbouring addresses, so that a warp's 32 loads are whole 128-byte lines.
// 3. Enough bytes in flight to cover the memory's latency. One vector a thread and input is enough if a multiprocessor holds
//    many threads, so few registers a thread beat more loads a thread: on an H200, gelu(x + bias) of 67 MB bfloat16 took
//    34.8, 38.5 and 42.2 us with 1, 2 and 4 vectors a thread. Single elements are loaded four at a time.
// 4. One tile a block, and as many blocks as there are tiles: the hardware hands a new block to a multiprocessor as soon as
//    one ends, which balances better than a fixed grid that strides, and there is no state worth keeping between tiles.
// 5. A small kernel's time is mostly its launch. With a programmatic dependent launch (compute capability 9.0) it is set up
//    while the kernel before it still runs, and waits there for its results: 0.9 instead of 1.3 us in a CUDA graph of such
//    kernels. Large kernels do without: the wait in each of their many blocks cost 15 %.
//
// The vectors of the whole matrix are numbered in a row; the row of a vector is its number divided by the vectors a row.
// That is one division for a vector, not for an element, and it is a multiplication (see Divisor).
#pragma once

#include "math.cuh"

namespace nanovllm {

constexpr int kThreads = 128;              // 4 warps; 16 such blocks fill a multiprocessor's 2048 threads
constexpr int64_t kFewBytes = 8 << 20;     // of the result: up to here the launch matters more than the bytes
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // what nvcc compiles for now: 900 is compute capability 9.0
constexpr bool kDependentLaunch = kArchitectures[0] >= 900;
constexpr int kVectorBytes = 16;

// `alignas` is what lets the compiler load or store the whole array with one instruction.
template <typename T, int width>
struct alignas(sizeof(T) * width) Vector {
  T elements[width];
};

// n / divisor for n < 2^31 as a multiplication, an addition and a shift (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication", 1994). An integer division takes some twenty instructions.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

template <int count>
struct Inputs {
  Rows rows[count];
};

// F applied to element e of one vector of each input. F: the function, `static float apply(const float (&)[count])`.
template <typename F, typename V, int count>
__device__ float result_of(const V (&vectors)[count], int e) {
  float arguments[count];
#pragma unroll
  for (int i = 0; i < count; ++i) arguments[i] = widen(vectors[i].elements[e]);
  return F::apply(arguments);
}

// `vectors` whole vectors, and the `rest` elements behind the last one if the matrix is one long row.
template <typename T, typename F, int count, int width, int unroll, bool dependent>
__global__ void __launch_bounds__(kThreads)
    rowwise_kernel(Inputs<count> inputs, T* __restrict__ y, int64_t cols, uint32_t vectors, Divisor vectors_per_row,
                   int rest) {
  using V = Vector<T, width>;
  const auto start_of_row = [&](int i, uint32_t row) {
    return static_cast<const T*>(inputs.rows[i].data) + row * inputs.rows[i].stride;
  };

#if __CUDA_ARCH__ >= 900
  if constexpr (dependent) {
    // Nothing may be read or written before this: the kernel before may still run. All blocks wait here, and a next kernel
    // that is launched like this one does the same, so that it may be set up now.
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
  }
#endif
  const uint32_t first = blockIdx.x * (kThreads * unroll) + threadIdx.x;
  V loaded[unroll][count];
#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const uint32_t vector = first + u * kThreads;
    if (vector >= vectors) break;
    const uint32_t row = vectors_per_row.divide(vector);
    const uint32_t in_row = vector - row * vectors_per_row.divisor;
#pragma unroll
    for (int i = 0; i < count; ++i) loaded[u][i] = reinterpret_cast<const V*>(start_of_row(i, row))[in_row];
  }

#pragma unroll
  for (int u = 0; u < unroll; ++u) {
    const uint32_t vector = first + u * kThreads;
    if (vector >= vectors) break;
    V result;
    if constexpr (width == 1) {
      result.elements[0] = narrow<T>(result_of<F>(loaded[u], 0));
    } else {
#pragma unroll
      for (int e = 0; e < width; e += 2) {
        narrow2<T>(result_of<F>(loaded[u], e), result_of<F>(loaded[u], e + 1), result.elements + e);
      }
    }
    reinterpret_cast<V*>(y)[vector] = result;  // y has no gaps: its vectors lie in the order of their numbers
  }

  // The tail, fewer than `width` elements: one each for some threads of the last block.
  if (width > 1 && blockIdx.x == gridDim.x - 1 && threadIdx.x < rest) {
    const int64_t col = cols - rest + threadIdx.x;
    Vector<T, 1> operands[count];
#pragma unroll
    for (int i = 0; i < count; ++i) operands[i].elements[0] = start_of_row(i, 0)[col];
    y[col] = narrow<T>(result_of<F>(operands, 0));
  }
}

inline bool is_multiple(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <typename T, typename F, int count, int width, bool dependent>
void launch_width(const Inputs<count>& inputs, T* y, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t per_row = cols / width;  // what is left over is not 0 only if there is one row
  const int64_t vectors = rows * per_row;
  if (vectors > INT32_MAX) {
    // More than the division takes: in two halves, by rows, or of a single long row.
    const bool by_rows = rows > 1;
    const int64_t half_rows = by_rows ? rows / 2 : 0, half_cols = by_rows ? 0 : per_row / 2 * width;
    Inputs<count> others = inputs;
    for (Rows& r : others.rows) r.data = static_cast<const T*>(r.data) + half_rows * r.stride + half_cols;
    launch_width<T, F, count, width, dependent>(inputs, y, by_rows ? half_rows : 1, by_rows ? cols : half_cols, stream);
    launch_width<T, F, count, width, dependent>(
        others, y + half_rows * cols + half_cols, rows - half_rows, cols - half_cols, stream);
    return;
  }
  constexpr int unroll = width == 1 ? 4 : 1;
  constexpr int64_t tile = kThreads * unroll;
  const int64_t blocks = vectors > tile ? (vectors + tile - 1) / tile : 1;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = dependent ? 1 : 0;
  cudaLaunchKernelEx(&config, rowwise_kernel<T, F, count, width, unroll, dependent>, inputs, y, cols,
                     static_cast<uint32_t>(vectors), Divisor(static_cast<uint32_t>(per_row > 0 ? per_row : 1)),
                     static_cast<int>(cols % width));
}

// Chooses the widest kernel that the addresses allow, and launches it.
template <typename T, typename F, int count>
void launch(Inputs<count> inputs, void* y, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int width = kVectorBytes / sizeof(T);
  if (rows == 0 || cols == 0) return;  // a grid of no blocks is an error
  // Without gaps and repetitions the matrix is one long row, with at most one incomplete vector, at its end.
  bool flat = true;
  for (const Rows& r : inputs.rows) flat = flat && (r.stride == cols || rows == 1);
  if (flat) {
    cols *= rows;
    rows = 1;
  }
  // The rows of y are `cols` apart.
  bool aligned = is_multiple(y, kVectorBytes) && (flat || cols % width == 0);
  for (const Rows& r : inputs.rows) {
    aligned = aligned && is_multiple(r.data, kVectorBytes) && (flat || r.stride % width == 0);
  }
  T* out = static_cast<T*>(y);
  if (!aligned) {
    launch_width<T, F, count, 1, false>(inputs, out, rows, cols, stream);
  } else if (kDependentLaunch && rows * cols * int64_t{sizeof(T)} <= kFewBytes) {
    launch_width<T, F, count, width, kDependentLaunch>(inputs, out, rows, cols, stream);
  } else {
    launch_width<T, F, count, width, false>(inputs, out, rows, cols, stream);
  }
}

// Calls f with a value of the element type that `dtype` stands for: a run-time number becomes a template argument.
template <typename F>
void with_type(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::float32: return f(float{});
    case Dtype::float16: return f(__half{});
    case Dtype::bfloat16: return f(__nv_bfloat16{});
  }
}

}  // namespace nanovllm
