// The product as a PyTorch operator. nanovllm.kernels.cuda.fp8.linear_fp8 has checked its arguments and made the plan.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>

#include "interface.cuh"

namespace nanovllm::fp8 {
namespace {

// numbers: the fields of Product from x_stride on, then those of Launch.
void product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& bias,
             at::Tensor y, at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(numbers.size() == 16, "numbers: expected 16");
  const auto n = [&](int i) { return static_cast<int32_t>(numbers[i]); };
  const Product p{x.const_data_ptr(), static_cast<const uint8_t*>(weight.const_data_ptr()), scale.const_data_ptr<float>(),
                  bias ? bias->const_data_ptr() : nullptr, y.mutable_data_ptr(), numbers[0], static_cast<uint32_t>(numbers[1]),
                  static_cast<uint32_t>(numbers[2]), n(3), n(4), n(5), n(6), n(7), n(8), n(9), n(10)};
  TORCH_CHECK_VALUE(p.tokens >= 1 && p.tokens <= MAX_TOKENS, "x: expected 1 to ", MAX_TOKENS, " tokens");
  const Launch how{n(11), n(12), n(13), n(14), n(15)};
  TORCH_CHECK_VALUE(how.turns == 1 || (how.turns == 2 && p.tokens <= OCTET), "turns: expected 1, or up to ", OCTET, " tokens 2");
  const bool columns = scale.size(1) > 1;
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (x.scalar_type() == at::kHalf) {
    C10_CUDA_CHECK(float16_product(p, how, columns, stream));
  } else {
    TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, "x: expected float16 or bfloat16");
    C10_CUDA_CHECK(bfloat16_product(p, how, columns, stream));
  }
}

}  // namespace
}  // namespace nanovllm::fp8

// TORCH_LIBRARY makes a string of its first argument; one more macro lets the build's -DTORCH_EXTENSION_NAME be replaced.
#define NANOVLLM_LIBRARY(name, library) TORCH_LIBRARY(name, library)

NANOVLLM_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("product(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor(a!) y, int[] numbers) -> ()");
  library.impl("product", c10::DispatchKey::CUDA, nanovllm::fp8::product);
  library.impl("product", c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
}
