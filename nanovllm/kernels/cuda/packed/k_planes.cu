#include "product.cuh"

namespace nanovllm::packed {

cudaError_t k_product(const Product& p, const Launch& how, Storage storage, cudaStream_t stream) {
  using T = __nv_bfloat16;
  switch (storage) {
    case Storage::q4_k: return with_tokens<T, __half, Storage::q4_k>(p, how, stream);
    case Storage::q5_k: return with_tokens<T, __half, Storage::q5_k>(p, how, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nanovllm::packed
