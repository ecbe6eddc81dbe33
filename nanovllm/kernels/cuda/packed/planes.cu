#include "product.cuh"

namespace nanovllm::packed {

cudaError_t planes_product(const Product& p, const Launch& how, Storage storage, cudaStream_t stream) {
  using T = __nv_bfloat16;
  switch (storage) {
    case Storage::planes4: return with_tokens<T, __half, Storage::planes4>(p, how, stream);
    case Storage::planes4_minimum: return with_tokens<T, __half, Storage::planes4_minimum>(p, how, stream);
    case Storage::planes8: return with_tokens<T, __half, Storage::planes8>(p, how, stream);
    case Storage::planes8_minimum: return with_tokens<T, __half, Storage::planes8_minimum>(p, how, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace nanovllm::packed
