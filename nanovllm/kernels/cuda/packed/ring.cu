#include "ring.cuh"

namespace nanovllm::packed {

cudaError_t ring_product(const Product& p, const Launch& how, Storage storage, cudaStream_t stream) {
  switch (storage) {
    case Storage::q4_k: return ring_with_tokens<__half, Storage::q4_k>(p, how, stream);
    case Storage::q6_k: return ring_with_tokens<__half, Storage::q6_k>(p, how, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t ring_stacked_product(const Stacked& both, const Launch& how, cudaStream_t stream) {
  const int rows = 16 * both.q4_k.row_warps, tokens = both.q4_k.tokens;
  if (how.warps > RING_WARPS || how.fragments != 1 || how.splits != 1 || tokens > 8) return cudaErrorInvalidValue;
  if (both.q6_k.row_warps != both.q4_k.row_warps) return cudaErrorInvalidValue;
  const dim3 blocks(both.q6_k_blocks + (both.q4_k.rows + rows - 1) / rows);
  return enqueue_dependent<Stacked>(tokens == 1 ? ring_stacked_kernel<1> : ring_stacked_kernel<8>, blocks, 32 * how.warps,
                                    how.shared_bytes, stream, both);
}

}  // namespace nanovllm::packed
