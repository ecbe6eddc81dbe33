// The instructions of box.cuh.
#pragma once

#include <cuda.h>

#include "../mbarrier.cuh"
#include "product.cuh"

namespace nanovllm::packed {

// Barriers become visible to the copies that complete them.
__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// A box of a tensor map to shared memory. It begins at the coordinates, the innermost first.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int a, int b, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(a), "r"(b), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int a, int b, int c, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          to),
      "l"(map), "r"(a), "r"(b), "r"(c), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// threadIdx.x, where what depends on it alone should not have registers from the kernel's begin on.
__device__ __forceinline__ int thread_again() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
// 16 bytes, or zeros.
__device__ __forceinline__ uint4 load_token(const uint8_t* p, bool live) {
  uint4 v;
  asm volatile(
      "{ .reg .pred live; setp.ne.u32 live, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "@live ld.global.v4.u32 {%0,%1,%2,%3}, [%4]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"(uint32_t(live)) : "memory");
  return v;
}
// 8 bytes of shared memory, or zeros.
__device__ __forceinline__ void load_shared_pair(uint32_t (&v)[2], uint32_t at, bool live) {
  asm volatile(
      "{ .reg .pred live; setp.ne.u32 live, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;\n"
      "@live ld.shared.v2.u32 {%0,%1}, [%2]; }"
      : "=&r"(v[0]), "=&r"(v[1]) : "r"(at), "r"(uint32_t(live)) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
// D [16, 8] = C + A B, for unsigned bytes A [16, 32] and signed bytes B [32, 8].
__device__ __forceinline__ void multiply_bytes(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                               uint32_t b1, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace nanovllm::packed
