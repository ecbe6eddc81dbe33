// Barriers in shared memory, through which the warps of a block pass buffers on: for the kernels in fp8/ and packed/.
#pragma once

#include <cstdint>

namespace nanovllm {

// at: an address in shared memory, of 8 bytes. A phase is over when `count` threads have arrived.
__device__ __forceinline__ void barrier_init(uint32_t at, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// Until the phase of this parity, 0 or 1, is over.
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra.uni over;\n bra.uni again;\n over:\n}"
      ::"r"(at), "r"(parity) : "memory");
}

}  // namespace nanovllm
