// The kernel of int4 for Hopper: a warpgroup decodes 64 rows in registers, `wgmma` multiplies them with all tokens.
//
// A block has GROUPS warpgroups that multiply, of which COLUMNS share rows, and one warp that copies x. Decoded weights are the
// first operand, in the registers in which product.cuh has them. x is the second, in shared memory. A kernel in front has
// brought it into the order in which `wgmma` reads it, so one bulk copy brings a stage. Stages pass between the warps through
// barriers.
//
// Copies may end in another order than they began. A barrier only tells a phase from the one before it. So the number of stages
// is a multiple of COLUMNS: then the same warpgroups read a stage each time. It is at least twice that number, for a warpgroup
// frees a stage when it has begun with its next one.
//
// Weights go through a ring as in ring.cuh: a lane copies what it will read itself. They are asked for before the kernel in
// front has ended.
#pragma once

#include "box_machine.cuh"
#include "ring.cuh"

namespace nanovllm::packed {

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

__device__ __forceinline__ uint64_t descriptor(uint32_t low) {  // of x: groups of 8 tokens are 128 bytes apart
  uint64_t d;
  asm("mov.b64 %0, {%1, 8};" : "=l"(d) : "r"(low));
  return d;
}

__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// As SCALE_FACTOR and SCALED_UNIT, with room for scales of bfloat16 up to 2^42.
constexpr float WIDE_FACTOR = 0x1p85f, WIDE_UNIT = 0x1p-48f;

// PAIRS: two steps pass through a stage at once, and their scales are neighbours. Else one does.
template <typename T, typename SCALE, bool ZERO, int N, int GROUPS, int COLUMNS, bool PAIRS>
__global__ void __launch_bounds__(GROUPS * 128 + 32, 1) wide_kernel(const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool FAST = Half<T>::bf16 && !ZERO;  // one fma scales a pair, else it is made an exact integer first
  static_assert(FAST || !PAIRS);
  constexpr int STEPS = PAIRS ? 2 : 1;  // of a unit, which is what passes through a stage at once
  constexpr int RING = WIDE_STAGES / STEPS, ROW_GROUPS = GROUPS / COLUMNS;
  constexpr uint32_t STEP_BYTES = N * 256, STAGE_BYTES = STEPS * STEP_BYTES, SLOT_BYTES = STEPS * 1024;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform, as the compiler then knows
  const int stages = p.phase_turns / STEPS;
  const int first_step = blockIdx.y * p.split_steps, units = min(p.split_steps, p.steps - first_step) / STEPS;
  const int turns = (units + COLUMNS - 1) / COLUMNS;  // a column group has so many adjacent units
  // Units pass through the stages in turns, one of each group. Blocks begin with different ones: else all would read the same
  // part of x from L2 at the same time.
  const int first_turn = blockIdx.x % turns;
  auto unit_of = [&](int turn) { return turn + first_turn < turns ? turn + first_turn : turn + first_turn - turns; };

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t x_shared = ring + GROUPS * (4 * RING * SLOT_BYTES);
  const uint32_t full = x_shared + stages * STAGE_BYTES, empty = full + stages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, ROW_GROUPS * 4);
    }
    barriers_are_ready();
  }
  launch_dependents();

  if (warp >= GROUPS * 4) {
    __syncthreads();
    if (lane > 0) return;
    wait_for_dependencies();
    asm volatile("fence.proxy.async;" ::: "memory");  // x was written by ordinary stores
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + int64_t(first_step) * STEP_BYTES;
    int stage = 0;
    uint32_t parity = 1;
    for (int turn = 0; turn < turns; ++turn) {
      for (int c = 0; c < COLUMNS; ++c) {
        const int unit = c * turns + unit_of(turn);
        barrier_wait(empty + stage * 8, parity);
        if (unit < units) {
          barrier_expect(full + stage * 8, STAGE_BYTES);
          copy_bulk(x_shared + stage * STAGE_BYTES, x + int64_t(unit) * STAGE_BYTES, STAGE_BYTES, full + stage * 8);
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
  const uint32_t lane_ring = ring + warp * (RING * SLOT_BYTES) + lane * 16;
  auto copy = [&](uint32_t slot) {  // the next unit's weights
    if (copied < mine) {
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) copy16(slot + e * 1024 + h * 512, from[h] + e * 64);
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
  for (int d = 0; d < RING; ++d) copy(lane_ring + d * SLOT_BYTES);
  if (mine > 0) load_scales();
  __syncthreads();
  wait_for_dependencies();

  float acc[1][N / 8][4] = {};
  auto& sums = reinterpret_cast<float(&)[N / 2]>(acc);
  uint32_t a[2][2][4];  // of two words, two products each
  uint32_t slot = lane_ring;
  int stage = column_group, read_stage = -1;  // read_stage: of products under way
  uint32_t parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (COLUMNS > 1 && unit_of(turn) >= mine) {  // none: x is not there, but the stage passes
      barrier_wait(full + stage * 8, parity);
      wgmma_wait<0>();
      if (read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
      if (lane == 0) barrier_arrive(empty + stage * 8);
      read_stage = -1;
    } else {
      wait_groups<RING - 1>();
      uint4 words[STEPS][2];
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) words[e][h] = load_shared(slot + e * 1024 + h * 512);
      }
      copy(slot);
      slot = slot == lane_ring + (RING - 1) * SLOT_BYTES ? lane_ring : slot + SLOT_BYTES;
      uint32_t scale2[STEPS][2][2], offset[STEPS][2];  // scale2: of even and odd pairs
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v = Half<SCALE>::widen_bits(e > 0 ? scale[h] >> 16 : PAIRS ? scale[h] & 0xffff : scale[h]);
          scale2[e][h][0] = Half<T>::pair(FAST ? v * WIDE_FACTOR : v);
          if constexpr (FAST) {  // powers of two: exact
            scale2[e][h][1] = multiply_pair(scale2[e][h][0], 0x3d803d80);  // 1 / 16
            offset[e][h] = multiply_pair(scale2[e][h][0], 0x80088008);     // -8 * WIDE_UNIT / WIDE_FACTOR
          } else {
            scale2[e][h][1] = scale2[e][h][0];
            offset[e][h] = offset_of<T, true>(ZERO ? zero[h] : p.middle);
          }
        }
      }
      load_scales();

      barrier_wait(full + stage * 8, parity);
      // No swizzle: 8 tokens of a chunk are 128 bytes in a row. The next chunk is N * 16 bytes on, the next 8 tokens 128.
      const uint32_t x = (x_shared + stage * STAGE_BYTES) >> 4 | N << 16;
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_wait<1>();  // the products that read a[j & 1]
          if (e == 0 && j == 1 && read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& w = words[e][h];
            const uint32_t word = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t value;
              if constexpr (FAST) {
                value = Half<T>::fma2(bits_of<true>(word, i), scale2[e][h][i & 1], offset[e][h]);
              } else {
                value = Half<T>::fma2(decode<T, true>(word, i, offset[e][h]), scale2[e][h][0], 0x80008000u);
              }
              a[j & 1][i >> 1][2 * (i & 1) + h] = value;
            }
          }
          wgmma_fence();
          Wgmma<T, N>::multiply(sums, a[j & 1][0], descriptor(x + (16 * e + 4 * j) * N));
          Wgmma<T, N>::multiply(sums, a[j & 1][1], descriptor(x + (16 * e + 4 * j + 2) * N));
          wgmma_commit();
        }
      }
      read_stage = stage;
    }
    stage += COLUMNS;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  wgmma_wait<0>();
  if (read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(sums[i]));  // ready
    if constexpr (FAST) sums[i] *= 1 / WIDE_UNIT;
  }

  auto barrier = [] { asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory"); };
  if (!add_column_warps(acc, shared, row_group * 4 + (warp & 3), column_group, COLUMNS, barrier)) return;
  store_results<T>(p, acc, [&](int, int h) { return row[h]; });
#else
  __trap();  // other GPUs, for which the folder is compiled as well, lack these instructions: it is not launched there
#endif
}

// Whether the scales of two steps are neighbours, at a multiple of 4 bytes, everywhere.
inline bool has_pairs(const Product& p) {
  return p.step_shift == 0 && p.scale_stride % 2 == 0 && reinterpret_cast<uintptr_t>(p.scale) % 4 == 0 && p.steps % 2 == 0 &&
         p.split_steps % 2 == 0;
}

// COLUMNS: warpgroups that share the columns of 64 rows, where the plan has no three with rows of their own.
template <typename T, typename SCALE, bool ZERO, int N, int COLUMNS>
cudaError_t wide_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  constexpr bool MAY_PAIR = Half<T>::bf16 && !ZERO;
  const bool pairs = MAY_PAIR && has_pairs(p);
  if (p.row_warps == 1 && how.warps == COLUMNS * 4 + 1) {
    const auto kernel = N == 32 && pairs ? wide_kernel<T, SCALE, ZERO, N, COLUMNS, COLUMNS, MAY_PAIR && N == 32>
                                         : wide_kernel<T, SCALE, ZERO, N, COLUMNS, COLUMNS, false>;
    return enqueue(kernel, 64, p, how, stream);
  }
  if (p.row_warps != 3 || how.warps != 13) return cudaErrorInvalidValue;
  const auto kernel = N <= 64 && pairs ? wide_kernel<T, SCALE, ZERO, N, 3, 1, MAY_PAIR && N <= 64>
                                       : wide_kernel<T, SCALE, ZERO, N, 3, 1, false>;
  return enqueue(kernel, 192, p, how, stream);
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
