// Products, and rounding to 8-bit floats, as PyTorch operators. linear_packed.py and packed_to_fp8.py have checked arguments.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "packed.cuh"

namespace nanovllm::packed {
namespace {

Real real_of(const at::Tensor& x) {
  if (x.scalar_type() == at::kHalf) return Real::float16;
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, "expected a tensor of float16 or bfloat16");
  return Real::bfloat16;
}

const void* data(const std::optional<at::Tensor>& x) { return x ? x->const_data_ptr() : nullptr; }

// numbers: the fields of Product from x_stride on, then those of Launch.
Product product_of(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias, const at::Tensor& y,
                   at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(numbers.size() == 32, "numbers: expected 32");
  const auto n = [&](int i) { return static_cast<int32_t>(numbers[i]); };
  const auto u = [&](int i) { return static_cast<uint32_t>(numbers[i]); };
  return Product{
      x.const_data_ptr(), static_cast<const uint8_t*>(weight.const_data_ptr()), data(scale),
      static_cast<const uint8_t*>(data(zero)), data(bias), y.mutable_data_ptr(), numbers[0], u(1), u(2), u(3), u(4), u(5),
      u(6), n(7), n(8), n(9), n(10), n(11), n(12), n(13), n(14), n(15), n(16),
      {n(17), n(18), n(19), n(20), n(21)}, n(22), n(23), n(24), u(25), n(26)};
}

Launch launch_of(at::IntArrayRef numbers) {
  const auto n = [&](int i) { return static_cast<int32_t>(numbers[i]); };
  return Launch{n(27), n(28), n(29), n(30), n(31)};
}

// Weights in Q4_K and in Q6_K: y4 and y6 are their columns of one tensor.
void stacked_product(const at::Tensor& x, const at::Tensor& q4_k, const at::Tensor& q6_k,
                     const std::optional<at::Tensor>& bias4, const std::optional<at::Tensor>& bias6, at::Tensor y4,
                     at::Tensor y6, at::IntArrayRef numbers4, at::IntArrayRef numbers6) {
  Stacked both{product_of(x, q4_k, {}, {}, bias4, y4, numbers4), product_of(x, q6_k, {}, {}, bias6, y6, numbers6), 0};
  Launch how = launch_of(numbers4);
  how.shared_bytes = std::max(how.shared_bytes, launch_of(numbers6).shared_bytes);
  both.q6_k_blocks = (both.q6_k.rows + 16 * both.q6_k.row_warps - 1) / (16 * both.q6_k.row_warps);
  TORCH_CHECK_VALUE(real_of(x) == Real::bfloat16, "x: expected bfloat16 with blocks of GGUF");
  const c10::cuda::CUDAGuard guard(x.device());
  C10_CUDA_CHECK(ring_stacked_product(both, how, c10::cuda::getCurrentCUDAStream()));
}

void product(int64_t storage_, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scale,
             const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias, at::Tensor y,
             at::IntArrayRef numbers) {
  const Product p = product_of(x, weight, scale, zero, bias, y, numbers);
  const Launch how = launch_of(numbers);
  const int most = how.fragments == 4 ? WIDE_TOKENS : MAX_TOKENS;
  TORCH_CHECK_VALUE(p.tokens >= 1 && p.tokens <= most, "x: expected 1 to ", most, " tokens");
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Real real = real_of(x);
  const auto storage = static_cast<Storage>(storage_);
  cudaError_t error;
  if (storage <= Storage::int4_zero) {
    const bool zeros = storage == Storage::int4_zero;
    if (how.fragments == 0) {
      error = int4_product(p, how, real, real_of(*scale), zeros, stream);
    } else if (how.fragments == 4) {
      error = (zeros ? wide_zero_product : wide_product)(p, how, real, real_of(*scale), stream);
    } else {
      TORCH_CHECK_VALUE(real == Real::bfloat16 && !zeros, "x: expected bfloat16, and no zero points, with this plan");
      error = (how.fragments == 8 ? box_int4_product : ring_int4_product)(p, how, real_of(*scale), stream);
    }
  } else if (storage <= Storage::int8_zero) {
    error = int8_product(p, how, real, real_of(*scale), storage == Storage::int8_zero, stream);
  } else {
    TORCH_CHECK_VALUE(real == Real::bfloat16, "x: expected bfloat16 with blocks of GGUF");
    if (how.fragments == 8) {
      TORCH_CHECK_VALUE(storage == Storage::q4_k, "weight: expected Q4_K, or int4, with this plan");
      error = box_q4_k_product(p, how, stream);
    } else if (how.fragments > 0) {
      error = ring_product(p, how, storage, stream);
    } else {
      error = storage < Storage::q4_k ? planes_product(p, how, storage, stream) : k_product(p, how, storage, stream);
    }
  }
  C10_CUDA_CHECK(error);
}

// A weight in int4 [rows, columns / 2] as the codes of e4m3: out, uint8 [rows, columns].
void to_fp8(const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& zero, const at::Tensor& factor,
            at::Tensor out, int64_t group_shift) {
  const auto whole = [](int64_t n) { return static_cast<int32_t>(n); };
  const Rounding p{
      static_cast<const uint8_t*>(weight.const_data_ptr()), scale.const_data_ptr(), static_cast<const uint8_t*>(data(zero)),
      factor.const_data_ptr<float>(), out.mutable_data_ptr<uint8_t>(), weight.stride(0), scale.stride(0), whole(out.size(0)),
      whole(out.size(1)), whole(group_shift)};
  const c10::cuda::CUDAGuard guard(weight.device());
  C10_CUDA_CHECK(int4_to_fp8(p, real_of(scale), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace
}  // namespace nanovllm::packed

// TORCH_LIBRARY makes a string of its first argument; one more macro lets the build's -DTORCH_EXTENSION_NAME be replaced.
#define NANOVLLM_LIBRARY(name, library) TORCH_LIBRARY(name, library)

NANOVLLM_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def(
      "product(int storage, Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, Tensor(a!) y, "
      "int[] numbers) -> ()");
  library.def(
      "stacked_product(Tensor x, Tensor q4_k, Tensor q6_k, Tensor? bias4, Tensor? bias6, Tensor(a!) y4, Tensor(b!) y6, "
      "int[] numbers4, int[] numbers6) -> ()");
  library.def("to_fp8(Tensor weight, Tensor scale, Tensor? zero, Tensor factor, Tensor(a!) out, int group_shift) -> ()");
  library.impl("product", c10::DispatchKey::CUDA, nanovllm::packed::product);
  library.impl("stacked_product", c10::DispatchKey::CUDA, nanovllm::packed::stacked_product);
  library.impl("to_fp8", c10::DispatchKey::CUDA, nanovllm::packed::to_fp8);
  for (const char* name : {"product", "stacked_product", "to_fp8"}) {
    library.impl(name, c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
  }
}
