#include "held.cuh"

namespace nanovllm::fp8 {

cudaError_t float16_product(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  return launch(columns ? kernel<__half, true>(how) : kernel<__half, false>(how), p, how, stream);
}

}  // namespace nanovllm::fp8
