#include "product.cuh"

namespace nanovllm::packed {

cudaError_t int4_product(const Product& p, const Launch& how, Real x, Real scale, bool zero, cudaStream_t stream) {
  return zero ? with_types<Storage::int4_zero>(p, how, x, scale, stream) : with_types<Storage::int4>(p, how, x, scale, stream);
}

}  // namespace nanovllm::packed
