#include "ring.cuh"

namespace nanovllm::packed {

cudaError_t ring_int4_product(const Product& p, const Launch& how, Real scale, cudaStream_t stream) {
  return scale == Real::float16 ? ring_with_tokens<__half, Storage::int4>(p, how, stream)
                                : ring_with_tokens<__nv_bfloat16, Storage::int4>(p, how, stream);
}

}  // namespace nanovllm::packed
