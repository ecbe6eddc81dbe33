#include "ring.cuh"

namespace nanovllm::packed {

cudaError_t ring_product(const Product& p, const Launch& how, Storage storage, cudaStream_t stream) {
  switch (storage) {
    case Storage::q4_k: return ring_with_tokens<__half, Storage::q4_k>(p, how, stream);
    case Storage::q6_k: return ring_with_tokens<__half, Storage::q6_k>(p, how, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nanovllm::packed
