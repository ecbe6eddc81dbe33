#include "product.cuh"

namespace nanovllm::fp8 {

cudaError_t bfloat16_product(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  return columns ? launch<__nv_bfloat16, true>(p, how, stream) : launch<__nv_bfloat16, false>(p, how, stream);
}

}  // namespace nanovllm::fp8
