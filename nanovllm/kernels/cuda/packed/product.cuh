// The kernel: a warp decodes weights in registers, on their way to the tensor cores.
//
// The weight is the first operand of `mma.m16n8k16`, the tokens are the second: 16 rows, 8 tokens, 16 columns. Which columns
// those are does not matter, as long as both operands have the same. So a lane reads 16 bytes of a row at once, and decodes
// pairs of columns that are 16 bits apart in a word: two of them are made at once. The columns of x are brought into the order
// of these pairs while they are copied to shared memory.
//
// To make a number of an integer, its bits replace the last bits of the mantissa of a power of two, of which a multiple is then
// taken away: exact. bfloat16 has room for 7 bits, float16 for 10. Weights with a scale for a group are multiplied as integers,
// and sums by the scale. Those with a scale for fewer columns are scaled first and rounded to bfloat16.
//
// A block has `row_warps` times as many warps as share the columns of a row. Their sums are added in order at the end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "packed.cuh"

namespace nanovllm::packed {

template <Storage STORAGE>
struct Traits {
  static constexpr bool group = STORAGE <= Storage::int8_zero;
  static constexpr bool four = STORAGE == Storage::int4 || STORAGE == Storage::int4_zero || STORAGE == Storage::planes4 ||
                               STORAGE == Storage::planes4_minimum || STORAGE == Storage::q4_k || STORAGE == Storage::q6_k;
  static constexpr bool six = STORAGE == Storage::q6_k;  // and two bits in a plane of their own; the ring alone has it
  static constexpr bool zero = STORAGE == Storage::int4_zero || STORAGE == Storage::int8_zero;
  static constexpr bool signed_scales = six;
  static constexpr bool parts = STORAGE >= Storage::q4_k;  // blocks of 256 columns have parts with scales of their own
  static constexpr bool minimum =
      STORAGE == Storage::planes4_minimum || STORAGE == Storage::planes8_minimum || (parts && !signed_scales);
  static constexpr int columns = four ? 128 : 64;  // of a step: 16 bytes of each of the four lanes that share a row
  static constexpr int step_parts_shift = six ? 3 : four ? 2 : 1;  // a lane has two, one, or a half
  static constexpr int lane_shift = four ? 0 : 1;
  static constexpr int block_shift = four ? 1 : 2;  // steps of a block of 256 columns
};

__device__ __forceinline__ uint4 load_weights(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
template <typename T>
__device__ __forceinline__ T load_small(const void* p, uint32_t offset) {  // offset: bytes
  return __ldg(reinterpret_cast<const T*>(static_cast<const uint8_t*>(p) + offset));
}

__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 load_shared_pair(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_shared16(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_shared8(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

template <uint32_t TABLE>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
}

template <typename T>
struct Half;
template <>
struct Half<__nv_bfloat16> {
  static constexpr bool bf16 = true;
  static constexpr uint32_t one = 0x3f803f80;
  static __device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ uint32_t pair(float v) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
    return d;
  }
  static __device__ __forceinline__ float widen_bits(uint32_t v) { return __uint_as_float(v << 16); }
  static __device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
template <>
struct Half<__half> {
  static constexpr bool bf16 = false;
  static constexpr uint32_t one = 0x3c003c00;
  static __device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static __device__ __forceinline__ uint32_t pair(float v) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
    return d;
  }
  static __device__ __forceinline__ float widen_bits(uint32_t v) { return __half2float(__ushort_as_half(uint16_t(v))); }
  static __device__ __forceinline__ float widen(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// A byte in each half of a register, as numbers minus the zero point that `offset` stands for, exactly.
template <typename T>
__device__ __forceinline__ uint32_t number_of_bytes(uint32_t t, uint32_t offset) {
  if constexpr (Half<T>::bf16) {
    const uint32_t low = lop3<0xea>(t, 0x007f007f, 0x43004300);   // 128 + the low 7 bits
    const uint32_t high = lop3<0x6a>(t, 0x00800080, 0x43804380);  // 128 if the high bit is set, else 256
    return Half<T>::fma2(Half<T>::fma2(high, 0xbf80bf80, low), Half<T>::one, offset);
  } else {
    return Half<T>::fma2(lop3<0xea>(t, 0x00ff00ff, 0x64006400), Half<T>::one, offset);
  }
}
template <typename T, bool FOUR>
__device__ __forceinline__ uint32_t offset_of(int zero) {
  return Half<T>::pair((Half<T>::bf16 ? FOUR ? -128.0f : 128.0f : -1024.0f) - zero);
}
template <typename T, bool FOUR>
__device__ __forceinline__ uint32_t decode(uint32_t word, int i, uint32_t offset) {
  if constexpr (FOUR) {
    return Half<T>::fma2(lop3<0xea>(word >> (4 * i), 0x000f000f, Half<T>::bf16 ? 0x43004300 : 0x64006400), Half<T>::one, offset);
  } else {
    return number_of_bytes<T>(word >> (8 * i), offset);
  }
}
__device__ __forceinline__ float float_of_byte(uint32_t code) { return __uint_as_float(0x4b000000u | code) - 8388608.0f; }

// What belongs to the weights of a lane in a row for a step.
struct Scales {
  uint32_t scale, minimum, part_scale, part_minimum, zero;
};

// 8 columns of x, in the order of the decoded pairs.
template <bool FOUR>
__device__ __forceinline__ void store_pairs(uint32_t to, const uint4& v) {
  if constexpr (FOUR) {  // columns (0, 4), (1, 5), (2, 6), (3, 7)
    store_shared(to, __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                 __byte_perm(v.y, v.w, 0x7632));
  } else {  // (0, 2), (1, 3), (4, 6), (5, 7)
    store_shared(to, __byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410),
                 __byte_perm(v.z, v.w, 0x7632));
  }
}

// Chunks of 8 columns of all tokens, `count` of each, in the order of the decoded pairs at place(token, chunk) of shared memory.
// Warps share a token if there are more of them. A lane has four loads under way, since its next chunks are a constant away:
// their latency is what a block with several tokens begins with. MORE: eight, the last ones of a token too, for more registers.
template <bool FOUR, bool MORE, typename Place>
__device__ __forceinline__ void copy_tokens(const void* x, int64_t stride_bytes, int tokens, int count, Place place) {
  constexpr int AHEAD = MORE ? 8 : 4, ROUND = AHEAD * 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int sharers = max(1, warps / tokens), teams = warps / sharers, team = warp / sharers;
  const int each = ((count + sharers - 1) / sharers + ROUND - 1) & ~(ROUND - 1);
  const int begin = (warp - team * sharers) * each, end = min(count, begin + each);
  for (int token = team; token < tokens; token += teams) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x) + token * stride_bytes);
    if constexpr (MORE) {
#pragma unroll 1
      for (int c = begin + lane; c < end; c += ROUND) {
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (c + i * 32 < end) v[i] = from[c + i * 32];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (c + i * 32 < end) store_pairs<FOUR>(place(token, c + i * 32), v[i]);
        }
      }
    } else {
#pragma unroll AHEAD
      for (int c = begin + lane; c < end; c += 32) store_pairs<FOUR>(place(token, c), from[c]);
    }
  }
}

// The same of one token, without a division: what a block begins with when the kernel in front has ended.
template <bool FOUR, typename Place>
__device__ __forceinline__ void copy_token(const void* x, int count, Place place) {
  const int lane = threadIdx.x & 31;
  for (int c = (threadIdx.x >> 5) * 128 + lane; c - lane < count; c += blockDim.x * 4) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (c + i * 32 < count) v[i] = static_cast<const uint4*>(x)[c + i * 32];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (c + i * 32 < count) store_pairs<FOUR>(place(c + i * 32), v[i]);
    }
  }
}

// The sums of warps that share columns, added in order. False: another warp has the result. barrier: of all those warps.
template <int FR, int NT, typename Barrier>
__device__ __forceinline__ bool add_column_warps(float (&acc)[FR][NT][4], uint8_t* shared, int row_warp, int column_warp,
                                                 int column_warps, Barrier barrier) {
  constexpr int COUNT = FR * NT * 4;
  if (column_warps == 1) return true;
  float* sums = reinterpret_cast<float*>(shared) + row_warp * (column_warps - 1) * COUNT * 32 + (threadIdx.x & 31);
  barrier();
  if (column_warp > 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[((column_warp - 1) * COUNT + i) * 32] = (&acc[0][0][0])[i];
  }
  barrier();
  if (column_warp > 0) return false;
  for (int w = 0; w < column_warps - 1; ++w) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) (&acc[0][0][0])[i] += sums[(w * COUNT + i) * 32];
  }
  return true;
}

// y, of the fragments of a warp. row(f, h): of fragment f, h is 0 or 1 for this lane's row of the first or the last eight.
template <typename T, int FR, int NT, typename Row>
__device__ __forceinline__ void store_results(const Product& p, const float (&acc)[FR][NT][4], Row row) {
  const int t = threadIdx.x & 3, half = p.rows >> 1;
  const T* bias = static_cast<const T*>(p.bias);
#pragma unroll
  for (int f = 0; f < FR; ++f) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = n * 8 + 2 * t + e;
        if (token >= p.tokens) continue;
        if (p.gated) {
          const int r = row(f, 0);
          if (r >= half) continue;
          const float gate = Half<T>::widen(Half<T>::narrow(acc[f][n][e])), up = Half<T>::widen(Half<T>::narrow(acc[f][n][2 + e]));
          const float silu = Half<T>::widen(Half<T>::narrow(__fdividef(gate, 1.0f + __expf(-gate))));
          static_cast<T*>(p.y)[int64_t(token) * half + r] = Half<T>::narrow(silu * up);
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int r = row(f, h);
            if (r >= p.rows) continue;
            float v = acc[f][n][2 * h + e];
            if (p.sums) {
              static_cast<float*>(p.y)[(int64_t(blockIdx.y) * p.tokens + token) * p.rows + r] = v;
            } else {
              if (bias) v += Half<T>::widen(bias[r]);
              static_cast<T*>(p.y)[int64_t(token) * p.y_stride + r] = Half<T>::narrow(v);
            }
          }
        }
      }
    }
  }
}

template <typename T, typename SCALE, Storage STORAGE, int NT>
__global__ void __launch_bounds__(256) product_kernel(const __grid_constant__ Product p) {
  using K = Traits<STORAGE>;
  constexpr int FR = 2;     // fragments of 16 rows of a warp
  constexpr int DEPTH = 2;  // steps whose weights are on their way
  static_assert(!K::six);
  constexpr bool FOUR = K::four;
  constexpr int CHUNKS = K::columns / 8;  // of 8 columns of x, in a step
  constexpr int LANE_CHUNKS = CHUNKS / 4;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int column_warps = warps / p.row_warps, row_warp = warp / column_warps, column_warp = warp - row_warp * column_warps;
  const int tokens = p.tokens;
  const int first_step = blockIdx.y * p.split_steps, steps = min(p.split_steps, p.steps - first_step);

  const int base = (blockIdx.x * p.row_warps + row_warp) * FR;
  int row[FR][2];
  uint32_t at[FR][2], scale_at[FR][2];  // where rows begin: bytes of the weight, elements of the scales
#pragma unroll
  for (int f = 0; f < FR; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int half = p.rows >> 1;
      row[f][h] = p.gated ? (base + f) * 8 + g + h * half : (base + f) * 16 + g + h * 8;
      const int r = min(row[f][h], (p.gated ? (h + 1) * half : p.rows) - 1);
      at[f][h] = uint32_t(r) * p.weight_stride;
      if constexpr (K::group) scale_at[f][h] = uint32_t(r) * p.scale_stride;
    }
  }

  uint4 words[DEPTH][FR][2];
  Scales scales[DEPTH][FR][2];
  const uint32_t fixed = offset_of<T, FOUR>(p.middle);

  auto load = [&](int d, int step) {  // step: of the whole row
#pragma unroll
    for (int f = 0; f < FR; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) words[d][f][h] = load_weights(p.weight + (at[f][h] + uint32_t(step * 64 + t * 16)));
    }
#pragma unroll
    for (int f = 0; f < FR; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Scales& s = scales[d][f][h];
        if constexpr (K::group) {
          const uint32_t index = scale_at[f][h] + (uint32_t(step) >> p.step_shift);
          s.scale = load_small<uint16_t>(p.scale, index * 2);
          if constexpr (K::zero) s.zero = load_small<uint8_t>(p.zero, index);
        } else {
          const uint32_t part = (step << K::step_parts_shift) + (t >> K::lane_shift);
          const uint32_t block = K::parts ? step >> K::block_shift : part;
          s.scale = load_small<uint16_t>(p.weight, at[f][h] + p.d + block * 2);
          if constexpr (K::minimum) s.minimum = load_small<uint16_t>(p.weight, at[f][h] + p.m + block * 2);
          if constexpr (K::parts) s.part_scale = load_small<uint8_t>(p.weight, at[f][h] + p.sc + part);
          if constexpr (K::parts && K::minimum) s.part_minimum = load_small<uint8_t>(p.weight, at[f][h] + p.mn + part);
        }
      }
    }
  };

  // x in shared memory: [token][step of the phase][chunk of 8 columns], columns in the order of the decoded pairs, chunks
  // swizzled against bank conflicts.
  const uint32_t x_shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int phase_steps = p.phase_turns * column_warps;
  const uint32_t token_bytes = phase_steps * CHUNKS * 16;
  auto stage = [&](int begin) {
    const int count = min(phase_steps, steps - begin) * CHUNKS;
    const T* x = static_cast<const T*>(p.x) + int64_t(first_step + begin) * K::columns;
    copy_tokens<FOUR, false>(x, p.x_stride * 2, tokens, count, [&](int token, int c) {
      const int odd = token & 1, place = FOUR ? c ^ ((c >> 3) & 1) ^ (odd << 1) : c ^ odd;
      return x_shared + token * token_bytes + place * 16;
    });
  };

  uint32_t x_token[NT];  // where this lane's chunks of a token begin
#pragma unroll
  for (int n = 0; n < NT; ++n) x_token[n] = x_shared + min(n * 8 + g, tokens - 1) * token_bytes;
  uint32_t chunk[LANE_CHUNKS];  // bytes from there, of even tokens; `odd` swizzles those of odd ones
#pragma unroll
  for (int j = 0; j < LANE_CHUNKS; ++j) {
    const int c = LANE_CHUNKS * t + j;
    chunk[j] = (FOUR ? c ^ ((c >> 3) & 1) : c) * 16;
  }
  uint32_t odd[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) odd[n] = uint32_t(min(n * 8 + g, tokens - 1) & 1) << (FOUR ? 5 : 4);

  float acc[FR][NT][4] = {};
  auto multiply = [&](int d, int local) {
    const uint32_t x_step = local * CHUNKS * 16;
    float part[FR][NT][4];
    uint32_t scale2[FR][2], minimum2[FR][2], offset[FR][2];
#pragma unroll
    for (int f = 0; f < FR; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Scales& s = scales[d][f][h];
        offset[f][h] = fixed;
        if constexpr (K::zero) offset[f][h] = offset_of<T, FOUR>(s.zero);
        if constexpr (!K::group) {
          float v = __half2float(__ushort_as_half(uint16_t(s.scale)));
          if constexpr (K::parts) v *= float_of_byte(s.part_scale);
          scale2[f][h] = Half<T>::pair(v);
          if constexpr (K::minimum) {
            float m = __half2float(__ushort_as_half(uint16_t(s.minimum)));
            if constexpr (K::parts) m *= -float_of_byte(s.part_minimum);
            minimum2[f][h] = Half<T>::pair(m);
          } else {
            minimum2[f][h] = 0x80008000u;
          }
        }
      }
    }
    if constexpr (K::group) {
#pragma unroll
      for (int f = 0; f < FR; ++f)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) part[f][n][i] = 0;
    }
#pragma unroll
    for (int j = 0; j < LANE_CHUNKS; ++j) {
      uint32_t a[FR][2][4];  // of two products
#pragma unroll
      for (int f = 0; f < FR; ++f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4& v = words[d][f][h];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // pair i of the 8 columns
            const int w = FOUR ? j : 2 * j + (i >> 1);
            const uint32_t word = w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w;
            uint32_t value = decode<T, FOUR>(word, FOUR ? i : i & 1, offset[f][h]);
            if constexpr (!K::group) value = Half<T>::fma2(value, scale2[f][h], minimum2[f][h]);
            a[f][i >> 1][2 * (i & 1) + h] = value;
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 b = load_shared(x_token[n] + x_step + (chunk[j] ^ odd[n]));
#pragma unroll
        for (int f = 0; f < FR; ++f) {
          auto& to = K::group ? part[f][n] : acc[f][n];
          Half<T>::mma(to, a[f][0], b.x, b.y);
          Half<T>::mma(to, a[f][1], b.z, b.w);
        }
      }
    }
    if constexpr (K::group) {
#pragma unroll
      for (int f = 0; f < FR; ++f) {
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t bits = scales[d][f][h].scale;
          scale[h] = Half<SCALE>::widen_bits(bits);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[f][n][i] = fmaf(part[f][n][i], scale[i >> 1], acc[f][n][i]);
      }
    }
  };

  // Of this warp: local steps column_warp, column_warp + column_warps, ... below `steps`.
  const int turns = (steps - column_warp + column_warps - 1) / column_warps;
  const int all_turns = (steps + column_warps - 1) / column_warps;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#pragma unroll
  for (int d = 0; d < DEPTH; ++d) {
    if (d < turns) load(d, first_step + d * column_warps + column_warp);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  for (int first = 0; first < all_turns; first += p.phase_turns) {
    if (first > 0) __syncthreads();
    stage(first * column_warps);
    __syncthreads();
    const int last = min(p.phase_turns, turns - first);
    int local = column_warp, next = first_step + (first + DEPTH) * column_warps + column_warp;
    for (int turn = 0; turn < last; turn += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (turn + d < last) {
          multiply(d, local);
          if (first + turn + d + DEPTH < turns) load(d, next);
        }
        local += column_warps;
        next += column_warps;
      }
    }
  }

  if (!add_column_warps(acc, shared, row_warp, column_warp, column_warps, [] { __syncthreads(); })) return;
  store_results<T>(p, acc, [&](int f, int h) { return row[f][h]; });
}

// Enqueue a kernel that may begin before the one in front has ended.
template <typename... Arguments>
cudaError_t enqueue_dependent(void (*kernel)(Arguments...), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                              Arguments... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// rows: of a block.
inline cudaError_t enqueue(void (*kernel)(Product), int rows, const Product& p, const Launch& how, cudaStream_t stream) {
  const dim3 blocks((p.rows + rows - 1) / rows, how.splits, 1);
  return enqueue_dependent<Product>(kernel, blocks, 32 * how.warps, how.shared_bytes, stream, p);
}

template <typename T, typename SCALE, Storage STORAGE, int NT>
cudaError_t launch(const Product& p, const Launch& how, cudaStream_t stream) {
  return enqueue(product_kernel<T, SCALE, STORAGE, NT>, 32 * p.row_warps, p, how, stream);
}

template <typename T, typename SCALE, Storage STORAGE>
cudaError_t with_tokens(const Product& p, const Launch& how, cudaStream_t stream) {
  return p.tokens <= 8 ? launch<T, SCALE, STORAGE, 1>(p, how, stream) : launch<T, SCALE, STORAGE, 2>(p, how, stream);
}

// Float16 weights need no bfloat16 scales: a checkpoint in float16 has none.
template <Storage STORAGE>
cudaError_t with_types(const Product& p, const Launch& how, Real x, Real scale, cudaStream_t stream) {
  if (x == Real::float16) {
    return scale == Real::float16 ? with_tokens<__half, __half, STORAGE>(p, how, stream) : cudaErrorInvalidValue;
  }
  return scale == Real::float16 ? with_tokens<__nv_bfloat16, __half, STORAGE>(p, how, stream)
                                : with_tokens<__nv_bfloat16, __nv_bfloat16, STORAGE>(p, how, stream);
}

}  // namespace nanovllm::packed
