#include "product.cuh"

namespace nanovllm::fp8 {

cudaError_t float16_product(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  return columns ? launch<__half, true>(p, how, stream) : launch<__half, false>(p, how, stream);
}

}  // namespace nanovllm::fp8
