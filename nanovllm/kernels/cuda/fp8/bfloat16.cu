#include "product.cuh"

namespace nanovllm::fp8 {

cudaError_t bfloat16_product(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  return launch<__nv_bfloat16>(p, how, columns, stream);
}

}  // namespace nanovllm::fp8
