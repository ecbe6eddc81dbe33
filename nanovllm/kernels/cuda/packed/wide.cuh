// The kernel of int4 for Hopper: a warpgroup decodes 64 rows in registers, `wgmma` multiplies them with all tokens.
//
// A block has GROUPS warpgroups that multiply, of which COLUMNS share rows, and one warp that copies x. Decoded weights are the
// first operand. x is the second, in shared memory, as a tensor map brings it: 64 columns of all tokens, swizzled by 128 bytes.
// Eight columns in a row belong to four lanes there, two to each. These are a byte of a weight. So a lane needs a byte of each
// word of its row, and the four lanes that share a row read all of it. Stages pass between the warps through barriers.
//
// From 33 tokens on two neighbouring blocks are a cluster: each copies a half of a stage of x to both, so that L2 is read half
// as often. A stage is free when the warps of both have read it.
//
// Copies may end in another order than they began. A barrier only tells a phase from the one before it. So the number of stages
// is a multiple of COLUMNS: then the same warpgroups read a stage each time. It is at least twice that number, for a warpgroup
// frees a stage when it has begun with its next one.
//
// Weights go through a ring of shared memory that a warp has for itself. They are asked for before the kernel in front has
// ended.
#pragma once

#include "box_machine.cuh"
#include "ring.cuh"
#include "tensor_map.cuh"

namespace nanovllm::packed {

template <int N>
constexpr int WIDE_CLUSTER = N <= 32 ? 1 : 2;  // blocks

// D [64 rows, N tokens] += A B^T, for A [64, 16] in registers and B [N, 16] in shared memory.
template <typename T, int N>
struct Wgmma;

#define NANOVLLM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NANOVLLM_F16(i) NANOVLLM_F4(i), NANOVLLM_F4(i + 4), NANOVLLM_F4(i + 8), NANOVLLM_F4(i + 12)
#define NANOVLLM_WGMMA(T, TYPE, N, D, A, B, ...)                                                                           \
  template <>                                                                                                              \
  struct Wgmma<T, N> {                                                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {               \
      asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
                   " {" D "}, {" A "}, " B ", p, 1, 1, 0; }"                                                               \
                   : __VA_ARGS__                                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                  \
    }                                                                                                                      \
  };
#define NANOVLLM_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NANOVLLM_D32 NANOVLLM_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NANOVLLM_D64                                                                                       \
  NANOVLLM_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
               "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NANOVLLM_WGMMAS(T, TYPE)                                                                                             \
  NANOVLLM_WGMMA(T, TYPE, 32, NANOVLLM_D16, "%16,%17,%18,%19", "%20", NANOVLLM_F16(0))                                       \
  NANOVLLM_WGMMA(T, TYPE, 64, NANOVLLM_D32, "%32,%33,%34,%35", "%36", NANOVLLM_F16(0), NANOVLLM_F16(16))                     \
  NANOVLLM_WGMMA(T, TYPE, 128, NANOVLLM_D64, "%64,%65,%66,%67", "%68", NANOVLLM_F16(0), NANOVLLM_F16(16), NANOVLLM_F16(32), \
                 NANOVLLM_F16(48))
NANOVLLM_WGMMAS(__nv_bfloat16, "bf16")
NANOVLLM_WGMMAS(__half, "f16")

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) {  // of x: swizzled by 128 bytes, 8 tokens are 1024 bytes
  uint64_t d;
  asm("mov.b64 %0, {%1, 0x40000040};" : "=l"(d) : "r"(low));
  return d;
}

// A box, and a count of its bytes, to the same places of all blocks of a cluster.
template <int BLOCKS>
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap* map, int a, int b, int c, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(a), "r"(b), "r"(c), "r"(barrier), "h"(uint16_t((1 << BLOCKS) - 1))
      : "memory");
}
__device__ __forceinline__ uint32_t place_in_block(uint32_t at, uint32_t block) {  // of the cluster
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ void barrier_arrive_there(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// An integer's bits are a subnormal bfloat16 number: 2^-133 times it, and 16 times that from the high half of a byte. A weight
// becomes 2^-48 times itself, with room for scales of bfloat16 up to 2^42.
constexpr float WIDE_UNIT = 0x1p-48f;
constexpr uint32_t WIDE_FACTORS = 0x68006a00;  // 2^85, of the high half 2^81
constexpr uint32_t WIDE_MIDDLE = 0xa900a900;   // -8 * WIDE_UNIT

// For so many threads a multiprocessor has registers. With 96 each the kernel that adds sums and norms has room beside a block.
constexpr int wide_bound(int n, int groups) { return n == 32 ? 640 : groups * 128 + 32; }

// PAIRS: two steps pass through a stage at once, and their scales are neighbours. Else one does.
template <typename T, typename SCALE, bool ZERO, int N, int GROUPS, int COLUMNS, bool PAIRS>
__global__ void __cluster_dims__(WIDE_CLUSTER<N>, 1, 1) __launch_bounds__(wide_bound(N, GROUPS), 1)
    wide_kernel(const __grid_constant__ Product p, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool FAST = Half<T>::bf16 && !ZERO;  // one fma scales a pair, else it is made an exact integer first
  static_assert(FAST || !PAIRS);
  constexpr bool AHEAD = N <= 64;  // weights are read from shared memory before the last ones are decoded: it takes registers
  constexpr int CLUSTER = WIDE_CLUSTER<N>;
  constexpr int STEPS = PAIRS ? 2 : 1;  // of a unit, which is what passes through a stage at once
  constexpr int RING = WIDE_STAGES / STEPS, ROW_GROUPS = GROUPS / COLUMNS;
  constexpr uint32_t STEP_BYTES = N * 256, STAGE_BYTES = STEPS * STEP_BYTES, SLOT_BYTES = STEPS * 1024;
  extern __shared__ __align__(1024) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform, as the compiler then knows
  const int stages = p.phase_turns / STEPS;
  const int first_step = blockIdx.y * p.split_steps, units = min(p.split_steps, p.steps - first_step) / STEPS;
  const int turns = (units + COLUMNS - 1) / COLUMNS;  // a column group has so many adjacent units
  // Units pass through the stages in turns, one of each group. Clusters begin with different ones: else all would read the same
  // part of x from L2 at the same time.
  const int first_turn = blockIdx.x / CLUSTER % turns, block = blockIdx.x % CLUSTER;
  auto unit_of = [&](int turn) { return turn + first_turn < turns ? turn + first_turn : turn + first_turn - turns; };

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t x_shared = ring + GROUPS * (4 * RING * SLOT_BYTES);
  const uint32_t full = x_shared + stages * STAGE_BYTES, empty = full + stages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, CLUSTER * ROW_GROUPS * 4);
    }
    barriers_are_ready();
  }
  __syncwarp();
  cluster_arrive();
  launch_dependents();

  if (warp >= GROUPS * 4) {
    prefetch_map(&x_map);
    cluster_wait();
    if (lane > 0) return;
    wait_for_dependencies();
    asm volatile("fence.proxy.async;" ::: "memory");  // x was written by ordinary stores
    int stage = 0;
    uint32_t parity = 1;
    for (int turn = 0; turn < turns; ++turn) {
      for (int c = 0; c < COLUMNS; ++c) {
        const int unit = c * turns + unit_of(turn);
        barrier_wait(empty + stage * 8, parity);
        if (unit < units) {
          barrier_expect(full + stage * 8, STAGE_BYTES);
          constexpr int BOXES = 2 * STEPS / CLUSTER;  // of 64 columns
          const uint32_t to = x_shared + stage * STAGE_BYTES + block * (BOXES * N * 128);
          copy_box_to_all<CLUSTER>(to, &x_map, 0, 0, 2 * (first_step + unit * STEPS) + block * BOXES, full + stage * 8);
        } else {
          barrier_arrive(full + stage * 8);
        }
        if (++stage == stages) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  const int group = warp >> 2, row_group = group / COLUMNS, column_group = group - row_group * COLUMNS;
  const int g = lane >> 2, t = lane & 3, half = p.rows >> 1;
  const int fragment = (blockIdx.x * ROW_GROUPS + row_group) * 4 + (warp & 3);
  const int my_first = column_group * turns, mine = max(0, min(turns, units - my_first));
  int unit = first_turn < mine ? first_turn : 0;  // whose scales are loaded next
  int copied = 0, copy_unit = unit;               // copy_unit: whose weights are copied next
  const uint8_t *from[2], *scale_from[2];         // scale_from: with PAIRS
  uint32_t scale_at[2];
  int row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = p.gated ? fragment * 8 + g + h * half : fragment * 16 + g + h * 8;
    const uint32_t r = min(row[h], (p.gated ? (h + 1) * half : p.rows) - 1), step = first_step + (my_first + unit) * STEPS;
    from[h] = p.weight + (r * p.weight_stride + step * 64 + t * 16);
    scale_at[h] = r * p.scale_stride;
    scale_from[h] = static_cast<const uint8_t*>(p.scale) + uint64_t(scale_at[h] + step) * 2;
  }
  // A row of a step is four pieces of 16 bytes, of which piece i is where i ^ (g >> 1) would be: four rows are in all banks.
  const uint32_t warp_ring = ring + warp * (RING * SLOT_BYTES);
  const uint32_t copy_at = g * 64 + (t ^ (g >> 1)) * 16, read_at = g * 64 + (g >> 1) * 16;
  auto copy = [&](uint32_t slot) {  // the next unit's weights
    if (copied < mine) {
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) copy16(slot + copy_at + e * 1024 + h * 512, from[h] + e * 64);
      }
      ++copied;
      ++copy_unit;
      const bool last = copy_unit == mine;
      if (last) copy_unit = 0;
      const int by = last ? 64 * STEPS * (1 - mine) : 64 * STEPS;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        from[h] += by;
        asm volatile("" : "+l"(from[h]));  // else it is computed anew each time
      }
    }
    commit();
  };
  uint32_t scale[2], zero[2];  // scale: of the steps of a unit
  auto load_scales = [&] {
    const bool last = unit + 1 == mine;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (PAIRS) {
        scale[h] = load_small<uint32_t>(scale_from[h], 0);
        scale_from[h] += last ? 4 * (1 - mine) : 4;
        asm volatile("" : "+l"(scale_from[h]));
      } else {
        const uint32_t index = scale_at[h] + (uint32_t(first_step + my_first + unit) >> p.step_shift);
        scale[h] = load_small<uint16_t>(p.scale, index * 2);
        if constexpr (ZERO) zero[h] = load_small<uint8_t>(p.zero, index);
      }
    }
    unit = last ? 0 : unit + 1;
  };

#pragma unroll
  for (int d = 0; d < RING - 1; ++d) copy(warp_ring + d * SLOT_BYTES);
  if (mine > 0) load_scales();
  const uint32_t empty_there = place_in_block(empty, lane % CLUSTER);
  auto release = [&](int stage) {
    if (lane < CLUSTER) barrier_arrive_there(empty_there + stage * 8);
  };
  cluster_wait();
  wait_for_dependencies();

  float acc[1][N / 8][4] = {};
  auto& sums = reinterpret_cast<float(&)[N / 2]>(acc);
  uint32_t a[2][2][4];  // of two words, two products each
  const uint32_t my_byte = 0x4040 + t * 0x0101;  // in both halves of a register, below zeros
  uint32_t slot = warp_ring, read_slot = warp_ring + (RING - 1) * SLOT_BYTES;
  int stage = column_group, read_stage = -1;  // read_stage: of products under way
  uint32_t parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (COLUMNS > 1 && unit_of(turn) >= mine) {  // none: x is not there, but the stage passes
      barrier_wait(full + stage * 8, parity);
      wgmma_wait<0>();
      if (read_stage >= 0) release(read_stage);
      release(stage);
      read_stage = -1;
    } else {
      wait_groups<RING - 2>();
      warp_barrier();  // all lanes' weights are there, and all have read those of the last turn
      copy(read_slot);
      uint4 words[AHEAD ? 2 : 1][2];  // 16 bytes of two rows, and the next 16
      auto read = [&](int piece) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          words[AHEAD ? piece & 1 : 0][h] = load_shared(((slot + read_at) ^ (piece & 3) * 16) + (piece >> 2) * 1024 + h * 512);
        }
      };
      read(0);
      uint32_t scale2[STEPS][2], offset[STEPS][2];
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t pair;
          if constexpr (Half<T>::bf16 == Half<SCALE>::bf16) {
            pair = __byte_perm(scale[h], 0, e > 0 ? 0x3232 : 0x1010);
          } else {
            pair = Half<T>::pair(Half<SCALE>::widen_bits(e > 0 ? scale[h] >> 16 : scale[h] & 0xffff));
          }
          scale2[e][h] = FAST ? multiply_pair(pair, WIDE_FACTORS) : pair;  // powers of two: exact
          offset[e][h] = FAST ? multiply_pair(pair, WIDE_MIDDLE) : offset_of<T, true>(ZERO ? zero[h] : p.middle);
        }
      }
      load_scales();

      barrier_wait(full + stage * 8, parity);
      const uint32_t x = (x_shared + stage * STAGE_BYTES) >> 4;
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (AHEAD && 4 * e + j + 1 < 4 * STEPS) read(4 * e + j + 1);
          wgmma_wait<1>();  // the products that read a[j & 1]
          if (e == 0 && j == 1 && read_stage >= 0) release(read_stage);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& w = words[AHEAD ? j & 1 : 0][h];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint32_t byte = __byte_perm(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, 0, my_byte);
              uint32_t value;
              if constexpr (FAST) {
                value = Half<T>::fma2(byte & 0x00f0000f, scale2[e][h], offset[e][h]);
              } else {
                const uint32_t both = (byte & 0x0000000f) | (byte >> 4 & 0x000f0000);
                value = Half<T>::fma2(decode<T, true>(both, 0, offset[e][h]), scale2[e][h], 0x80008000u);
              }
              a[j & 1][i >> 1][2 * (i & 1) + h] = value;
            }
          }
          if (!AHEAD && j < 3) read(j + 1);
          wgmma_fence();
          const uint32_t x_j = x + (2 * e + (j >> 1)) * (N * 8) + (j & 1) * 4;  // 64 columns of a token are 128 bytes
          Wgmma<T, N>::multiply(sums, a[j & 1][0], descriptor(x_j));
          Wgmma<T, N>::multiply(sums, a[j & 1][1], descriptor(x_j + 2));
          wgmma_commit();
        }
      }
      read_stage = stage;
      read_slot = slot;
      slot = slot == warp_ring + (RING - 1) * SLOT_BYTES ? warp_ring : slot + SLOT_BYTES;
    }
    stage += COLUMNS;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  wgmma_wait<0>();
  if (read_stage >= 0) release(read_stage);
  __syncwarp();
  cluster_arrive();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(sums[i]));  // ready
    if constexpr (FAST) sums[i] *= 1 / WIDE_UNIT;
  }

  auto barrier = [] { asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory"); };
  if (!add_column_warps(acc, shared, row_group * 4 + (warp & 3), column_group, COLUMNS, barrier)) return;
  store_results<T>(p, acc, [&](int, int h) { return row[h]; });
  __syncwarp();
  cluster_wait();  // the other block's warps have arrived at barriers of this one
#else
  __trap();  // other GPUs, for which the folder is compiled as well, lack these instructions: it is not launched there
#endif
}

// Whether the scales of two steps are neighbours, at a multiple of 4 bytes, everywhere.
inline bool has_pairs(const Product& p) {
  return p.step_shift == 0 && p.scale_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.scale) % 4 == 0 && p.steps % 2 == 0 &&
         p.split_steps % 2 == 0;
}

template <typename T, typename SCALE, bool ZERO, int N, int GROUPS, int COLUMNS, bool PAIRS>
cudaError_t wide_enqueue(const Product& p, const Launch& how, cudaStream_t stream) {
  if (encoder() == nullptr) return cudaErrorNotSupported;
  CUtensorMap map;
  const cuuint64_t sizes[3] = {64, cuuint64_t(p.tokens), cuuint64_t(p.steps) * 2};
  const cuuint64_t strides[2] = {cuuint64_t(p.x_stride) * 2, 128};
  const cuuint32_t box[3] = {64, N, (PAIRS ? 4 : 2) / WIDE_CLUSTER<N>};
  if (!encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.x, 3, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B)) {
    return cudaErrorInvalidValue;
  }
  constexpr int ROWS = GROUPS / COLUMNS * 64 * WIDE_CLUSTER<N>;
  const dim3 blocks((p.rows + ROWS - 1) / ROWS * WIDE_CLUSTER<N>, how.splits);
  return enqueue_dependent(wide_kernel<T, SCALE, ZERO, N, GROUPS, COLUMNS, PAIRS>, blocks, 32 * how.warps, how.shared_bytes,
                           stream, p, map);
}

// COLUMNS: warpgroups that share the columns of 64 rows, where the plan has no three with rows of their own.
template <typename T, typename SCALE, bool ZERO, int N, int COLUMNS>
cudaError_t wide_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  constexpr bool MAY_PAIR = Half<T>::bf16 && !ZERO;
  const bool pairs = MAY_PAIR && has_pairs(p);
  if (p.row_warps == 1 && how.warps == COLUMNS * 4 + 1) {
    return N == 32 && pairs ? wide_enqueue<T, SCALE, ZERO, N, COLUMNS, COLUMNS, MAY_PAIR && N == 32>(p, how, stream)
                            : wide_enqueue<T, SCALE, ZERO, N, COLUMNS, COLUMNS, false>(p, how, stream);
  }
  if (p.row_warps != 3 || how.warps != 13) return cudaErrorInvalidValue;
  return N <= 64 && pairs ? wide_enqueue<T, SCALE, ZERO, N, 3, 1, MAY_PAIR && N <= 64>(p, how, stream)
                          : wide_enqueue<T, SCALE, ZERO, N, 3, 1, false>(p, how, stream);
}

template <typename T, typename SCALE, bool ZERO>
cudaError_t with_width(const Product& p, const Launch& how, cudaStream_t stream) {
  const int width = wide_width(p.tokens);
  return (width == 32   ? wide_launch<T, SCALE, ZERO, 32, 3>
          : width == 64 ? wide_launch<T, SCALE, ZERO, 64, 3>
                        : wide_launch<T, SCALE, ZERO, 128, 2>)(p, how, stream);
}

template <bool ZERO>
cudaError_t with_wide_types(const Product& p, const Launch& how, Real x, Real scale, cudaStream_t stream) {
  if (x == Real::float16) {
    return scale == Real::float16 ? with_width<__half, __half, ZERO>(p, how, stream) : cudaErrorInvalidValue;
  }
  return scale == Real::float16 ? with_width<__nv_bfloat16, __half, ZERO>(p, how, stream)
                                : with_width<__nv_bfloat16, __nv_bfloat16, ZERO>(p, how, stream);
}

}  // namespace nanovllm::packed
