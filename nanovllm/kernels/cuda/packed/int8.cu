#include "product.cuh"

namespace nanovllm::packed {

cudaError_t int8_product(const Product& p, const Launch& how, Real x, Real scale, bool zero, cudaStream_t stream) {
  return zero ? with_types<Storage::int8_zero>(p, how, x, scale, stream) : with_types<Storage::int8>(p, how, x, scale, stream);
}

}  // namespace nanovllm::packed
