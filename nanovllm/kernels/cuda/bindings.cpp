// The kernels as PyTorch operators: shapes, device and stream. Plain C++: nvcc would take three times as long.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "kernels.cuh"

namespace nanovllm {
namespace {

// The messages are plain text: the functions of nanovllm.kernels.cuda have checked before, and tell what came.

Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kHalf: return Dtype::float16;
    case at::kBFloat16: return Dtype::bfloat16;
    default: TORCH_CHECK_VALUE(false, "expected a tensor of float16, bfloat16 or float32");
  }
}

Activation activation_of(std::string_view kind) {
  if (kind == "gelu") return Activation::gelu;
  if (kind == "gelu_tanh") return Activation::gelu_tanh;
  if (kind == "silu") return Activation::silu;
  if (kind == "mish") return Activation::mish;
  if (kind == "relu") return Activation::relu;
  TORCH_CHECK_VALUE(false, "kind: expected one of gelu, gelu_tanh, silu, mish, relu");
}

void check_output(const at::Tensor& y, const at::Tensor& x, int64_t numel) {
  TORCH_CHECK_VALUE(y.device() == x.device() && y.scalar_type() == x.scalar_type(), "y: expected x's device and dtype");
  TORCH_CHECK_VALUE(y.is_contiguous() && y.numel() == numel, "y: expected a contiguous tensor of the result's size");
}

// The number of elements from one row of x [..., n] to the next, or nothing if there is no such number.
std::optional<int64_t> row_stride(const at::Tensor& x) {
  const int64_t dim = x.dim(), n = dim ? x.size(-1) : 1;
  if (x.is_contiguous()) return n;
  if (n > 1 && x.stride(-1) != 1) return std::nullopt;
  int64_t stride = n, covered = 0;  // `covered`: elements from one slice to the next of what is collapsed so far
  bool found = false;
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (!found) {
      stride = x.stride(d);
    } else if (x.stride(d) != covered) {
      return std::nullopt;
    }
    found = true;
    covered = x.stride(d) * x.size(d);
  }
  return stride;
}

// x itself if a kernel can address it, else a contiguous copy.
at::Tensor addressable(const at::Tensor& x) { return row_stride(x) ? x : x.contiguous(); }

Rows rows_of(const at::Tensor& x) { return {x.const_data_ptr(), *row_stride(x)}; }

// x [..., n] as a matrix [rows, n].
struct Extent {
  int64_t rows, cols;
};
Extent extent_of(const at::Tensor& x) {
  const int64_t cols = x.dim() ? x.size(-1) : 1;
  return {cols ? x.numel() / cols : 0, cols};
}

void add_gelu(const at::Tensor& x_, const at::Tensor& bias_, at::Tensor y, std::string_view kind) {
  const Dtype dtype = dtype_of(x_);
  const Activation activation = activation_of(kind);
  const auto [rows, cols] = extent_of(x_);
  const bool is_row = bias_.sizes() != x_.sizes();
  TORCH_CHECK_VALUE(!is_row || (bias_.dim() == 1 && bias_.size(0) == cols && x_.dim() > 0),
                    "bias: expected the shape of x or of its last dimension");
  TORCH_CHECK_VALUE(bias_.device() == x_.device() && bias_.scalar_type() == x_.scalar_type(),
                    "bias: expected x's device and dtype");
  check_output(y, x_, x_.numel());
  const c10::cuda::CUDAGuard guard(x_.device());
  const at::Tensor x = addressable(x_);
  const at::Tensor bias = is_row ? bias_.contiguous() : addressable(bias_);
  const Rows bias_rows = is_row ? Rows{bias.const_data_ptr(), 0} : rows_of(bias);
  fused_add_gelu(rows_of(x), bias_rows, y.mutable_data_ptr(), rows, cols, dtype, activation,
                 c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void activation(const at::Tensor& x_, at::Tensor y, std::string_view kind) {
  const Dtype dtype = dtype_of(x_);
  const Activation activation = activation_of(kind);
  check_output(y, x_, x_.numel());
  const c10::cuda::CUDAGuard guard(x_.device());
  const auto [rows, cols] = extent_of(x_);
  const at::Tensor x = addressable(x_);
  fused_activation(rows_of(x), y.mutable_data_ptr(), rows, cols, dtype, activation, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void silu_mul(const at::Tensor& gate_up_, at::Tensor y) {
  const Dtype dtype = dtype_of(gate_up_);
  const auto [rows, both] = extent_of(gate_up_);
  TORCH_CHECK_VALUE(both % 2 == 0 && gate_up_.dim() > 0, "gate_up: expected an even last dimension (gate, then up)");
  check_output(y, gate_up_, gate_up_.numel() / 2);
  const c10::cuda::CUDAGuard guard(gate_up_.device());
  const at::Tensor gate_up = addressable(gate_up_);
  const Rows gate = rows_of(gate_up);
  const Rows up{static_cast<const char*>(gate.data) + both / 2 * gate_up.element_size(), gate.stride};
  silu_and_mul(gate, up, y.mutable_data_ptr(), rows, both / 2, dtype, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace nanovllm

// TORCH_LIBRARY makes a string of its first argument; one more macro lets the build's -DTORCH_EXTENSION_NAME be replaced.
#define NANOVLLM_LIBRARY(name, library) TORCH_LIBRARY(name, library)

// The library's name carries the hash of its sources, so that two versions can live in one process.
NANOVLLM_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("fused_add_gelu(Tensor x, Tensor bias, Tensor(a!) y, str kind) -> ()");
  library.def("fused_activation(Tensor x, Tensor(a!) y, str kind) -> ()");
  library.def("silu_and_mul(Tensor gate_up, Tensor(a!) y) -> ()");
  library.impl("fused_add_gelu", c10::DispatchKey::CUDA, nanovllm::add_gelu);
  library.impl("fused_activation", c10::DispatchKey::CUDA, nanovllm::activation);
  library.impl("silu_and_mul", c10::DispatchKey::CUDA, nanovllm::silu_mul);
  // Outside of inference mode PyTorch would pass every call through a slow fallback that warns about the missing backward.
  for (const char* name : {"fused_add_gelu", "fused_activation", "silu_and_mul"}) {
    library.impl(name, c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
  }
}
