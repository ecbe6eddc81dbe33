// What the bindings (C++, PyTorch) and the kernels (CUDA, no PyTorch) know of each other.
//
// The .cu files include no header of PyTorch: those take nvcc 20 s a file, and a kernel needs none of them.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace nanovllm {

enum class Dtype { float32, float16, bfloat16 };
enum class Activation { gelu, gelu_tanh, silu, mish, relu };

// A matrix in device memory whose rows start `stride` elements apart; the elements of a row are neighbours.
// A stride of 0 repeats one row: a bias. So a broadcast operand is read like any other, in whole vectors.
struct Rows {
  const void* data;
  int64_t stride;
};

// All of these enqueue on `stream` and return; y is a contiguous [rows, cols] of the dtype. Launch errors are left for
// cudaGetLastError.

// y = gelu(x + bias), `kind` gelu or gelu_tanh. The sum is rounded to the dtype first, as two PyTorch operations would.
void fused_add_gelu(Rows x, Rows bias, void* y, int64_t rows, int64_t cols, Dtype, Activation kind, cudaStream_t stream);

// y = activation(x)
void fused_activation(Rows x, void* y, int64_t rows, int64_t cols, Dtype, Activation kind, cudaStream_t stream);

// y = silu(gate) * up. SiLU is rounded to the dtype before the product.
void silu_and_mul(Rows gate, Rows up, void* y, int64_t rows, int64_t cols, Dtype, cudaStream_t stream);

}  // namespace nanovllm
