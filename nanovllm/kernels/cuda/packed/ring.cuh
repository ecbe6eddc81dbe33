// The kernel of Q4_K, Q6_K and int4 where it is faster than that of product.cuh, of which it has the mapping to the tensor cores.
// Weights are scaled first and rounded to bfloat16, and so are scales in float16.
//
// Weights go through shared memory only to have RING_STAGES steps under way without registers: a lane copies the bytes that it
// will read itself, so no thread waits for another. Scales of all rows of the block are copied in pieces of 16 bytes. Weights
// and scales are asked for before the kernel in front has ended.
#pragma once

#include "product.cuh"

namespace nanovllm::packed {

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_groups() {  // until at most N of this thread's groups are under way
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// An integer q of 4 or 8 bits is a number without an instruction: as the bits of a bfloat16, it is q * 2^-133, below the smallest
// normal number and up to twice of it. One fma multiplies it by a scale times 2^105, which has room for any, and adds.
// Scales of a group are bfloat16, of a larger range: times 2^85.
template <bool GROUP>
constexpr float SCALE_FACTOR = GROUP ? 0x1p85f : 0x1p105f;
template <bool GROUP>
constexpr float SCALED_UNIT = GROUP ? 0x1p-48f : 0x1p-28f;

// Pair i of a word; FOUR: an odd one is 16 times its number.
template <bool FOUR>
__device__ __forceinline__ uint32_t bits_of(uint32_t word, int i) {
  if constexpr (FOUR) {
    return (i < 2 ? word : word >> 8) & (i & 1 ? 0x00f000f0 : 0x000f000f);
  } else {
    return __byte_perm(word, 0, i == 0 ? 0x4240 : 0x4341);
  }
}

// Four integers of 6 bits in the bytes of a register, columns 0, 2, 4 and 6 of a word of low bits, or, ODD, 1, 3, 5 and 7. high:
// the high bits of two words, of which this is the first or, SECOND, the second.
template <bool ODD, bool SECOND>
__device__ __forceinline__ uint32_t six_bits(uint32_t word, uint32_t high) {
  const uint32_t moved = SECOND ? (ODD ? high << 2 : high << 4) : (ODD ? high >> 2 : high);
  return ((ODD ? word >> 4 : word) & 0x0f0f0f0fu) | (moved & 0x30303030u);
}

// Of a thread, for up to so many tokens. The largest block, RING_WARPS warps, has room with any of them; with one token there is
// room for four blocks of 8 warps. With up to 8 tokens a multiprocessor has one block.
constexpr int registers(int tokens, int fragments) {
  return tokens == 1 ? 64 : tokens == 8 ? 168 : fragments == 1 ? 80 : 128;
}
static_assert(RING_WARPS * 32 * registers(8, 1) <= 65536);

// What a block does, the block-th of those with the same columns. WHOLE: shared memory has x for all of its steps, and the scales
// of whole rows. Else there are phases.
template <typename SCALE, Storage STORAGE, int TOKENS, int FR, bool WHOLE, int STAGES>
__device__ __forceinline__ void ring_block(const Product& p, int block) {
  constexpr int NT = (TOKENS + 7) / 8;
  using T = __nv_bfloat16;
  using K = Traits<STORAGE>;
  constexpr bool FOUR = K::four, SIX = K::six;
  constexpr int STEP_BYTES = FR * (SIX ? 1536 : 1024);  // of a warp
  constexpr int LANE_PARTS = SIX ? 2 : 1;               // with scales of their own
  static_assert(!WHOLE || !K::group);
  constexpr float FACTOR = SCALE_FACTOR<K::group>, UNIT = SCALED_UNIT<K::group>;
  constexpr int CHUNKS = K::columns / 8;  // of 8 columns of x, in a step
  constexpr int LANE_CHUNKS = CHUNKS / 4;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int column_warps = p.column_warps, row_warp = warp * p.column_share >> 16, column_warp = warp - row_warp * column_warps;
  const int tokens = p.tokens, half = p.rows >> 1;
  const int first_step = blockIdx.y * p.split_steps, steps = min(p.split_steps, p.steps - first_step);

  // Fragments of a block and the rows of each: h is 0 or 1, for its rows 0 to 7 and 8 to 15.
  const int block_fragment = block * p.row_warps * FR;
  auto row_of = [&](int fragment, int h, int i) {
    return p.gated ? (block_fragment + fragment) * 8 + i + h * half : (block_fragment + fragment) * 16 + i + h * 8;
  };
  auto valid_row = [&](int fragment, int h, int i) {
    return min(row_of(fragment, h, i), (p.gated ? (h + 1) * half : p.rows) - 1);
  };

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t panel = ring + warps * (STAGES * STEP_BYTES);
  const uint32_t x_shared = panel + p.row_warps * (FR * 16) * p.panel[4];

  // Weights: each lane copies the 16 bytes of each of its rows that it will read, so no thread waits for another. SIX: and 8 of
  // high bits, behind them in the ring.
  const uint8_t* from[FR][2];
  const uint8_t* from_high[FR][2];
#pragma unroll
  for (int f = 0; f < FR; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* row = p.weight + uint32_t(valid_row(row_warp * FR + f, h, g)) * p.weight_stride;
      from[f][h] = row + uint32_t((first_step + column_warp) * 64 + t * 16);
      if constexpr (SIX) from_high[f][h] = row + p.m + uint32_t((first_step + column_warp) * 32 + t * 8);
    }
  }
  const uint32_t lane_ring = ring + warp * (STAGES * STEP_BYTES) + lane * 16;
  const uint32_t to_high = FR * 1024 - lane * 8;  // from the lane's place of low bits
  const int turn_bytes = column_warps * 64;
  auto load = [&](uint32_t slot) {
#pragma unroll
    for (int f = 0; f < FR; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        copy16(slot + (f * 2 + h) * 512, from[f][h]);
        from[f][h] += turn_bytes;
        asm volatile("" : "+l"(from[f][h]));  // else it is computed anew each time, to have a register more
        if constexpr (SIX) {
          copy8(slot + to_high + (f * 2 + h) * 256, from_high[f][h]);
          from_high[f][h] += turn_bytes >> 1;
          asm volatile("" : "+l"(from_high[f][h]));
        }
      }
    }
  };

  // Scales of a phase in shared memory: for each row of the block pieces of 16 bytes that hold them.
  uint32_t plane_at[4];  // minus the place of the first
  uint32_t panel_row = panel + (row_warp * (FR * 16) + g) * p.panel[4];
  // Elements of `bytes` of each row. Rows are a multiple of 16 bytes apart.
  auto stage_plane = [&](int i, const void* base, uint32_t stride, int bytes, int begin, int end) {
    const int pieces = (p.panel[i + 1] - p.panel[i]) >> 4;
    for (int r = threadIdx.x >> 3; r < p.row_warps * FR * 16; r += blockDim.x >> 3) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(base) +
                              uintptr_t(uint32_t(valid_row(r >> 4, (r >> 3) & 1, r & 7))) * stride + begin * bytes;
      const int count = int((first & 15) + (end - begin) * bytes + 15) >> 4;
      for (int c = threadIdx.x & 7; c < min(count, pieces); c += 8) {
        copy16(panel + r * p.panel[4] + p.panel[i] + c * 16, reinterpret_cast<const void*>((first & ~uintptr_t(15)) + c * 16));
      }
    }
    plane_at[i] = panel_row + p.panel[i] + uint32_t((reinterpret_cast<uintptr_t>(base) + begin * bytes) & 15) - begin * bytes;
  };
  // The planes of a row are neighbours, so they are copied as one. Eight lanes share a row.
  auto stage_section = [&] {
    for (int r = threadIdx.x >> 3; r < p.row_warps * FR * 16; r += blockDim.x >> 3) {
      const uint8_t* from_row = p.weight + uint32_t(valid_row(r >> 4, (r >> 3) & 1, r & 7)) * p.weight_stride + p.section;
      const uint32_t to_row = panel + r * p.panel[4];
      for (int c = threadIdx.x & 7; c < p.section_pieces; c += 8) copy16(to_row + c * 16, from_row + c * 16);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) plane_at[i] = panel_row + p.panel[i];
  };
  auto stage_scales = [&](int begin, int end) {  // steps of the whole row
    if constexpr (K::group) {
      stage_plane(0, p.scale, p.scale_stride * 2, 2, begin >> p.step_shift, ((end - 1) >> p.step_shift) + 1);
      return;
    }
    const int part = begin << K::step_parts_shift, last_part = end << K::step_parts_shift;
    const int block = begin >> K::block_shift, last_block = ((end - 1) >> K::block_shift) + 1;
    stage_plane(0, p.weight + p.d, p.weight_stride, 2, block, last_block);
    if constexpr (K::minimum) stage_plane(1, p.weight + p.m, p.weight_stride, 2, block, last_block);
    stage_plane(2, p.weight + p.sc, p.weight_stride, 1, part, last_part);
    if constexpr (K::minimum) stage_plane(3, p.weight + p.mn, p.weight_stride, 1, part, last_part);
  };

  // x in shared memory: [token][step of the phase][chunk of a lane][lane of four][8 columns], columns in the order of the
  // decoded pairs. Rows of tokens end with 64 bytes that are not used: those of two tokens are in different banks.
  const int phase_steps = p.phase_turns * column_warps;
  const uint32_t token_bytes = phase_steps * CHUNKS * 16 + 64;
  auto stage = [&](int begin) {
    const int count = min(phase_steps, steps - begin) * CHUNKS;
    const T* x = static_cast<const T*>(p.x) + int64_t(first_step + begin) * K::columns;
    if constexpr (WHOLE && TOKENS == 1) {
      copy_token<FOUR>(x, count, [&](int c) {
        return x_shared + ((c & ~(CHUNKS - 1)) + (c % LANE_CHUNKS) * 4 + (c / LANE_CHUNKS) % 4) * 16;
      });
      return;
    }
    copy_tokens<FOUR, TOKENS == 8>(x, p.x_stride * 2, tokens, count, [&](int token, int c) {
      const int place = (c & ~(CHUNKS - 1)) + (c % LANE_CHUNKS) * 4 + (c / LANE_CHUNKS) % 4;
      return x_shared + token * token_bytes + place * 16;
    });
  };

  // Where this lane's chunks of a token begin. Sums of tokens that do not exist are not used, so any other will do.
  uint32_t x_lane = x_shared + min(g, tokens - 1) * token_bytes + t * 16;
  uint32_t x_second = g + 8 < tokens ? 8 * token_bytes : 0;
  asm volatile("" : "+r"(x_lane), "+r"(x_second));

  float acc[FR][NT][4] = {};
  auto multiply = [&](const uint4 (&words)[FR][2], const uint2 (&highs)[FR][2], int step, int local) {
    const uint32_t x_step = x_lane + local * (CHUNKS * 16);
    uint32_t scale2[FR][2][2], offset[FR][2][LANE_PARTS];  // scale2: of even and odd pairs; SIX: of two parts, as offset
#pragma unroll
    for (int f = 0; f < FR; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t row = (f * 16 + h * 8) * p.panel[4];
        const uint32_t part = (step << K::step_parts_shift) + (SIX ? 2 * t : t >> K::lane_shift);
        const uint32_t block = (step >> K::block_shift) * 2;
        const uint32_t scale_at = K::group ? (step >> p.step_shift) * 2 : block;
        float v = Half<SCALE>::widen_bits(load_shared16(plane_at[0] + row + scale_at));
        if constexpr (SIX) {  // signed
          const uint32_t bits = load_shared16(plane_at[2] + row + part) ^ 0x8080u;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float scaled = v * (float_of_byte(i ? bits >> 8 : bits & 0xff) - 128.0f);
            scale2[f][h][i] = Half<T>::pair(scaled * FACTOR);
            offset[f][h][i] = Half<T>::pair(scaled * (-UNIT * p.middle));
          }
        } else {
          if constexpr (!K::group) v *= float_of_byte(load_shared8(plane_at[2] + row + part));
          scale2[f][h][0] = Half<T>::pair(v * FACTOR);
          scale2[f][h][1] = Half<T>::pair(v * (FOUR ? FACTOR / 16 : FACTOR));
          if constexpr (K::minimum) {
            float m = __half2float(__ushort_as_half(uint16_t(load_shared16(plane_at[1] + row + block)))) * UNIT;
            m *= -float_of_byte(load_shared8(plane_at[3] + row + part));
            offset[f][h][0] = Half<T>::pair(m);
          } else {
            offset[f][h][0] = Half<T>::pair(v * (-UNIT * p.middle));  // a power of two times the rounded scale
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < LANE_CHUNKS; ++j) {
      uint32_t a[FR][2][4];  // of two products
#pragma unroll
      for (int f = 0; f < FR; ++f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4& v = words[f][h];
          if constexpr (SIX) {
            const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w, high = j < 2 ? highs[f][h].x : highs[f][h].y;
            const uint32_t even = j & 1 ? six_bits<false, true>(word, high) : six_bits<false, false>(word, high);
            const uint32_t odd = j & 1 ? six_bits<true, true>(word, high) : six_bits<true, false>(word, high);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint32_t four = i & 1 ? odd : even, bits = i < 2 ? four & 0x00ff00ffu : __byte_perm(four, 0, 0x4341);
              a[f][i >> 1][2 * (i & 1) + h] = Half<T>::fma2(bits, scale2[f][h][j >> 1], offset[f][h][LANE_PARTS * j >> 2]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // pair i of the 8 columns
              const int w = FOUR ? j : 2 * j + (i >> 1);
              const uint32_t word = w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
              const uint32_t bits = bits_of<FOUR>(word, FOUR ? i : i & 1);
              const uint32_t value = Half<T>::fma2(bits, scale2[f][h][FOUR ? i & 1 : 0], offset[f][h][0]);
              a[f][i >> 1][2 * (i & 1) + h] = value;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 b = load_shared(x_step + n * x_second + j * 64);
#pragma unroll
        for (int f = 0; f < FR; ++f) {
          Half<T>::mma(acc[f][n], a[f][0], b.x, b.y);
          Half<T>::mma(acc[f][n], a[f][1], b.z, b.w);
        }
      }
    }
  };

  // Of this warp: local steps column_warp, column_warp + column_warps, ... below `steps`.
  const int turns = (steps - column_warp + column_warps - 1) / column_warps;
  const int all_turns = (steps + column_warps - 1) / column_warps;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  constexpr int WITH_SCALES = WHOLE ? 1 : 0;  // steps whose weights are asked for before the scales, and waited for with them
  if constexpr (WHOLE) {
    if (turns > 0) load(lane_ring);
    stage_section();
  } else {
    stage_scales(first_step, first_step + min(phase_steps, steps));
  }
  commit();
#pragma unroll
  for (int d = WITH_SCALES; d < STAGES; ++d) {
    if (d < turns) load(lane_ring + d * STEP_BYTES);
    commit();
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint32_t slot = lane_ring;
  const uint32_t ring_end = lane_ring + STAGES * STEP_BYTES;
  auto run_turns = [&](int first, int last) {
    const int begin = first * column_warps;
    int local = column_warp;
#pragma unroll 2
    for (int turn = first; turn < last; ++turn, local += column_warps) {
      wait_groups<STAGES - 1>();
      uint4 words[FR][2];
      uint2 highs[FR][2];
#pragma unroll
      for (int f = 0; f < FR; ++f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          words[f][h] = load_shared(slot + (f * 2 + h) * 512);
          if constexpr (SIX) highs[f][h] = load_shared_pair(slot + to_high + (f * 2 + h) * 256);
        }
      }
      if (turn + STAGES < turns) load(slot);
      commit();
      slot = slot + STEP_BYTES == ring_end ? lane_ring : slot + STEP_BYTES;
      multiply(words, highs, first_step + begin + local, local);
    }
  };
  if constexpr (WHOLE) {
    stage(0);
    wait_groups<STAGES - WITH_SCALES>();
    __syncthreads();
    run_turns(0, turns);
  } else {
    for (int first = 0; first < all_turns; first += p.phase_turns) {
      if (first > 0) {
        const int begin = first * column_warps;
        __syncthreads();
        stage_scales(first_step + begin, first_step + min(begin + phase_steps, steps));
        commit();
        stage(begin);
        wait_groups<0>();
      } else {
        stage(0);
        wait_groups<STAGES - WITH_SCALES>();
      }
      __syncthreads();
      run_turns(first, min(first + p.phase_turns, turns));
    }
  }

#pragma unroll
  for (int i = 0; i < FR * NT * 4; ++i) (&acc[0][0][0])[i] *= 1 / UNIT;

  if (!add_column_warps(acc, shared, row_warp, column_warp, column_warps, [] { __syncthreads(); })) return;
  store_results<T>(p, acc, [&](int f, int h) { return row_of(row_warp * FR + f, h, g); });
}

template <typename SCALE, Storage STORAGE, int TOKENS, int FR, bool WHOLE, int STAGES>
__global__ void __maxnreg__(registers(TOKENS, FR)) ring_kernel(const __grid_constant__ Product p) {
  ring_block<SCALE, STORAGE, TOKENS, FR, WHOLE, STAGES>(p, blockIdx.x);
}

// Products of one x with two weights, in the columns of one y. Blocks of Q6_K have more bytes, so they begin first.
template <int TOKENS>
__global__ void __maxnreg__(registers(TOKENS, 1)) ring_stacked_kernel(const __grid_constant__ Stacked both) {
  if (int(blockIdx.x) < both.q6_k_blocks) {
    ring_block<__half, Storage::q6_k, TOKENS, 1, true, RING_SIX_STAGES>(both.q6_k, blockIdx.x);
  } else {
    ring_block<__half, Storage::q4_k, TOKENS, 1, true, RING_STAGES>(both.q4_k, blockIdx.x - both.q6_k_blocks);
  }
}

template <typename SCALE, Storage STORAGE, int TOKENS, int FR>
cudaError_t ring_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  constexpr bool MAY_BE_WHOLE = !Traits<STORAGE>::group && TOKENS <= 8;
  constexpr int STAGES = Traits<STORAGE>::six ? RING_SIX_STAGES : RING_STAGES;
  const bool whole = MAY_BE_WHOLE && p.section_pieces > 0;
  auto kernel = whole ? ring_kernel<SCALE, STORAGE, TOKENS, FR, MAY_BE_WHOLE, STAGES>
                      : ring_kernel<SCALE, STORAGE, TOKENS, FR, false, STAGES>;
  if (how.stages != 0) {
    if constexpr (MAY_BE_WHOLE && TOKENS == 1 && !Traits<STORAGE>::six) {
      if (!whole || how.stages != RING_FEW_STAGES) return cudaErrorInvalidValue;
      kernel = ring_kernel<SCALE, STORAGE, TOKENS, FR, true, RING_FEW_STAGES>;
    } else {
      return cudaErrorInvalidValue;
    }
  }
  return enqueue(kernel, 16 * FR * p.row_warps, p, how, stream);
}

template <typename SCALE, Storage STORAGE>
cudaError_t ring_with_tokens(const Product& p, const Launch& how, cudaStream_t stream) {
  if (how.warps > RING_WARPS || how.fragments > (p.tokens <= 8 ? 1 : 2)) return cudaErrorInvalidValue;
  if (p.tokens == 1) return ring_launch<SCALE, STORAGE, 1, 1>(p, how, stream);
  if (p.tokens <= 8) return ring_launch<SCALE, STORAGE, 8, 1>(p, how, stream);
  if constexpr (Traits<STORAGE>::group) {
    return cudaErrorInvalidValue;
  } else {
    return how.fragments == 1 ? ring_launch<SCALE, STORAGE, 16, 1>(p, how, stream)
                              : ring_launch<SCALE, STORAGE, 16, 2>(p, how, stream);
  }
}

}  // namespace nanovllm::packed
