#include "held.cuh"

namespace nanovllm::fp8 {

cudaError_t bfloat16_product(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  return launch(columns ? kernel<__nv_bfloat16, true>(how) : kernel<__nv_bfloat16, false>(how), p, how, stream);
}

}  // namespace nanovllm::fp8
