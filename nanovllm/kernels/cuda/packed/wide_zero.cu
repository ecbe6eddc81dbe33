#include "wide.cuh"

namespace nanovllm::packed {

cudaError_t wide_zero_product(const Product& p, const Launch& how, Real x, Real scale, cudaStream_t stream) {
  return with_wide_types<true>(p, how, x, scale, stream);
}

}  // namespace nanovllm::packed
