// x for the kernel of wide.cuh.
#include "box_machine.cuh"

namespace nanovllm::packed {
namespace {

// x, in tiles of 128 columns: [16 chunks][width][8 numbers]. Chunk 4 j + i has, of each token, pair i of chunk j of each of the
// four lanes that share a decoded row. Tokens that are not there stay as they are, for no result depends on them.
__global__ void __launch_bounds__(128) order_kernel(const __grid_constant__ Product p, uint4* ordered, int width) {
  launch_dependents();
  const int lane = threadIdx.x & 31, j = lane >> 3, warp = blockIdx.x * 4 + (threadIdx.x >> 5), eights = width >> 3;
  const int step = warp / eights, token = (warp - step * eights) * 8 + (lane & 7);
  if (step >= p.steps || token >= p.tokens) return;
  wait_for_dependencies();
  const uint16_t* from = static_cast<const uint16_t*>(p.x) + token * p.x_stride + int64_t(step) * 128 + j * 8;
  uint4 v[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) v[t] = *reinterpret_cast<const uint4*>(from + t * 32);
  uint4* to = ordered + (int64_t(step) * 16 + 4 * j) * width + token;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // columns (0, 4), (1, 5), (2, 6), (3, 7)
    const uint32_t how = i & 1 ? 0x7632 : 0x5410;
    uint32_t pair[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) pair[t] = i < 2 ? __byte_perm(v[t].x, v[t].z, how) : __byte_perm(v[t].y, v[t].w, how);
    to[i * width] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

}  // namespace

cudaError_t order_x(const Product& p, void* ordered, cudaStream_t stream) {
  const int width = wide_width(p.tokens), blocks = (p.steps * (width / 8) + 3) / 4;
  return enqueue_dependent(order_kernel, dim3(blocks), 128, 0, stream, p, static_cast<uint4*>(ordered), width);
}

}  // namespace nanovllm::packed
