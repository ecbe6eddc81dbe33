// The kernel of int4 with up to 8 tokens: tensor maps bring weights to shared memory, integer tensor cores multiply them.
//
// A block has all columns of its tiles of 16 rows, and a multiprocessor has one block. A stage is a tile's next 4,096 columns,
// which one thread copies as two boxes of 8 rows, beginning before the kernel in front has ended. A warp multiplies 256 columns,
// two groups, of every tile before the next 4,096 columns. So it holds their x in registers.
//
// x becomes integers of 16 bits: 256 columns of a token share a float32 scale, by which the largest of them is 32,512. An integer
// is 256 times a signed byte plus a signed byte, and these are two of the 8 columns of `mma.m16n8k32`. So four tokens take one
// such instruction, and three instructions of the machine make bytes of eight weights. Sums of integers are exact. They begin
// with the bits of 1.5 * 2^23 less the zero point times the sum of x, so they are the bits of a float32. It is multiplied by the
// scale of its group of weights in float32.
#pragma once

#include "box_machine.cuh"

namespace nanovllm::packed {

constexpr int BOX_GROUPS = 2;                                     // of a warp in a stage
constexpr int BOX_COLUMNS = BOX_WARPS * BOX_GROUPS * 128;         // of a stage
constexpr int BOX_BYTES = BOX_COLUMNS / 2 * 8;                    // of the weights of 8 rows
constexpr int BOX_SCALE_BYTES = BOX_WARPS * BOX_GROUPS * 2 * 8;   // of their scales
constexpr int BOX_THREADS = BOX_WARPS * 32;
constexpr int BOX_REGISTERS = 96;                                 // so a program of the norm's kernel has room beside a block
constexpr uint32_t INTEGER_BITS = 0x4b400000;                     // 1.5 * 2^23
constexpr float INTEGER = 12582912.0f, LARGEST = 32512.0f, SMALLEST = 0x1p-100f;

struct Maps {
  CUtensorMap weight;  // [columns / 256][rows][128 bytes]
  CUtensorMap scale;   // [rows][groups]
};

// The largest magnitude of 16-bit floats.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b & 0x7fff7fffu); }

// x of a warp's columns in the order of the decoded pairs: words[n][group][word of a lane][even, odd columns].
template <typename T, int NT>
struct BoxTokens {
  uint32_t words[NT][BOX_GROUPS][4][2];
  int32_t first[NT][BOX_GROUPS][2];  // what sums of a group begin with
  float scale[NT];                   // of this lane's token of the results

  // This lane's token of fragment n is n * 4 + g / 2, and an odd g has the low bytes.
  __device__ __forceinline__ void load(const void* x, int64_t stride_bytes, int tokens, bool live, int middle) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint4 raw[NT][BOX_GROUPS][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int token = n * 4 + (g >> 1);
      const uint8_t* from = static_cast<const uint8_t*>(x) + token * stride_bytes + t * 64;
      const bool any = live && token < tokens;  // else zeros
      raw[n][0][0] = load_tokens<0>(from, any), raw[n][0][1] = load_tokens<16>(from, any);
      raw[n][0][2] = load_tokens<32>(from, any), raw[n][0][3] = load_tokens<48>(from, any);
      raw[n][1][0] = load_tokens<256>(from, any), raw[n][1][1] = load_tokens<272>(from, any);
      raw[n][1][2] = load_tokens<288>(from, any), raw[n][1][3] = load_tokens<304>(from, any);
    }
    const uint32_t choose = g & 1 ? 0x40 : 0x51, sign = g & 1 ? 0x80808080u : 0;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4& v = raw[n][i][j];
          most = larger_halves(larger_halves(larger_halves(larger_halves(most, v.x), v.y), v.z), v.w);
        }
      }
      most = max(most & 0xffffu, most >> 16);
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      float largest = Half<T>::widen_bits(most);
      largest = largest < SMALLEST ? SMALLEST : largest;  // a NaN stays
      const float factor = LARGEST * 0x1p-20f * reciprocal(largest * 0x1p-20f);  // the reciprocal of a large one would be 0
      scale[n] = __shfl_sync(~0u, largest * (1 / LARGEST), t * 8);
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
        int32_t sum[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4& v = raw[n][i][j];
          const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
          uint32_t bits[2][4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {  // 128 more, so that the low byte minus 128 is signed
            bits[0][k] = __float_as_uint(fmaf(Half<T>::widen_bits(pairs[k] & 0xffffu), factor, INTEGER + 128));
            bits[1][k] = __float_as_uint(fmaf(Half<T>::widen_bits(pairs[k] >> 16), factor, INTEGER + 128));
          }
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t low = __byte_perm(bits[odd][0], bits[odd][1], choose);
            const uint32_t high = __byte_perm(bits[odd][2], bits[odd][3], choose);
            words[n][i][j][odd] = __byte_perm(low, high, 0x5410) ^ sign;
          }
          const uint32_t zero = middle * 0x01010101u;
          multiply_bytes(sum, zero, zero, zero, zero, words[n][i][j][0], words[n][i][j][1], sum[0], sum[1], sum[2], sum[3]);
        }
        first[n][i][0] = INTEGER_BITS - sum[0];
        first[n][i][1] = INTEGER_BITS - sum[1];
      }
    }
  }
};

template <typename SCALE, int NT>
__global__ void __maxnreg__(BOX_REGISTERS) box_kernel(const __grid_constant__ Product p, const __grid_constant__ Maps maps) {
  using T = __nv_bfloat16;
  extern __shared__ __align__(1024) uint8_t box_shared[];  // the swizzle of boxes begins anew every 1,024 bytes

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int tokens = p.tokens, half = p.rows >> 1, stages = p.phase_turns;
  const int all_tiles = p.gated ? (half + 7) >> 3 : (p.rows + 15) >> 4;
  const int first_tile = int64_t(all_tiles) * blockIdx.x / gridDim.x;
  const int tiles = int(int64_t(all_tiles) * (blockIdx.x + 1) / gridDim.x) - first_tile;
  const int rounds = (p.steps * 128 + BOX_COLUMNS - 1) / BOX_COLUMNS;

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(box_shared));
  const uint32_t scales = ring + stages * (2 * BOX_BYTES);
  const uint32_t full = scales + stages * (2 * BOX_SCALE_BYTES), empty = full + stages * 8;
  float* sums = reinterpret_cast<float*>(box_shared + stages * (2 * BOX_BYTES + 2 * BOX_SCALE_BYTES + 16));

  launch_dependents();
  auto copy = [&](int slot, int round, int tile) {
    for (; tile >= tiles; tile -= tiles) ++round;
    if (round >= rounds) return;
    tile += first_tile;
    barrier_expect(full + slot * 8, 2 * BOX_BYTES + 2 * BOX_SCALE_BYTES);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = p.gated ? tile * 8 + h * half : tile * 16 + h * 8;
      copy_box(ring + slot * (2 * BOX_BYTES) + h * BOX_BYTES, &maps.weight, 0, row, round * BOX_WARPS, full + slot * 8);
      copy_box(scales + slot * (2 * BOX_SCALE_BYTES) + h * BOX_SCALE_BYTES, &maps.scale, round * BOX_WARPS * BOX_GROUPS, row,
               full + slot * 8);
    }
  };
  if (threadIdx.x == 0) {
    prefetch_map(&maps.weight);
    prefetch_map(&maps.scale);
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, BOX_WARPS);
    }
    barriers_are_ready();
    for (int i = 0; i < stages; ++i) copy(i, 0, i);
  }
  __syncthreads();

  // Lanes of rows that differ in bit 2 are neighbours: a box is swizzled, and so eight lanes read 128 bytes of all banks.
  const int g = lane >> 2, t = lane & 3, row = g >> 1 | (g & 1) << 2;
  const uint32_t lane_ring = ring + warp * 1024 + row * 128 + (t ^ row) * 16;
  const uint32_t lane_scales = scales + row * (BOX_WARPS * BOX_GROUPS * 2) + warp * (BOX_GROUPS * 2);
  BoxTokens<T, NT> x;
  int stage = 0, slot = 0, parity = 0;
  wait_for_dependencies();
  for (int round = 0; round < rounds; ++round) {
    const int column = round * BOX_COLUMNS + warp * (BOX_GROUPS * 128);
    x.load(static_cast<const T*>(p.x) + column, p.x_stride * 2, tokens, column < p.steps * 128, p.middle);
    float* to = sums + (warp * 16 + row) * tokens + t;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, ++stage, to += BOX_WARPS * 16 * tokens) {
      barrier_wait(full + slot * 8, parity);
      uint4 words[BOX_GROUPS][2];
      uint32_t pairs[2];
      const uint32_t from = lane_ring + slot * (2 * BOX_BYTES), scale_from = lane_scales + slot * (2 * BOX_SCALE_BYTES);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < BOX_GROUPS; ++i) words[i][h] = load_shared((from ^ i * 64) + h * BOX_BYTES);
        pairs[h] = load_shared_word(scale_from + h * BOX_SCALE_BYTES);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + slot * 8);

      float y[NT][4];
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
        int32_t sum[NT][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t a[4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& v = words[i][h];
            const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
            a[h] = word & 0x0f0f0f0fu;
            a[2 + h] = word >> 4 & 0x0f0f0f0fu;
          }
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const int32_t c0 = j ? sum[n][0] : x.first[n][i][0], c1 = j ? sum[n][1] : x.first[n][i][1];
            const int32_t c2 = j ? sum[n][2] : c0, c3 = j ? sum[n][3] : c1;
            multiply_bytes(sum[n], a[0], a[1], a[2], a[3], x.words[n][i][j][0], x.words[n][i][j][1], c0, c1, c2, c3);
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = Half<SCALE>::widen_bits(i ? pairs[h] >> 16 : pairs[h] & 0xffffu);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; ++e) {
              const float v = __uint_as_float(sum[n][e]) - INTEGER;
              y[n][e] = i ? fmaf(v, scale, y[n][e]) : v * scale;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if (n * 4 + t >= tokens) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v = fmaf(y[n][2 * h], 256, y[n][2 * h + 1]) * x.scale[n];
          float* at = to + h * 8 * tokens + n * 4;
          if (round > 0) v += *at;
          *at = v;
        }
      }
      // Warps ask for stages in turns. By now, most warps have read this one, too.
      if (threadIdx.x == (stage & (BOX_WARPS - 1)) * 32) {
        barrier_wait(empty + slot * 8, parity);
        copy(slot, round, tile + stages);
      }
      __syncwarp();
      if (++slot == stages) slot = 0, parity ^= 1;
    }
  }
  __syncthreads();

  // The sums of the warps, in order.
  const int each = p.gated ? 8 : 16;
  auto total = [&](int tile, int row, int token) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < BOX_WARPS; ++w) v += sums[((tile * BOX_WARPS + w) * 16 + row) * tokens + token];
    return v;
  };
  for (int i = threadIdx.x; i < tiles * each * tokens; i += BOX_THREADS) {
    const int row = i & (each - 1), tile = i / each % tiles, token = i / each / tiles;
    const int r = (first_tile + tile) * each + row;
    const float v = total(tile, row, token);
    if (p.gated) {
      if (r >= half) continue;
      const float gate = Half<T>::widen(Half<T>::narrow(v)), up = Half<T>::widen(Half<T>::narrow(total(tile, 8 + row, token)));
      const float silu = Half<T>::widen(Half<T>::narrow(gate / (1.0f + __expf(-gate))));
      static_cast<T*>(p.y)[int64_t(token) * half + r] = Half<T>::narrow(silu * up);
    } else if (r < p.rows) {
      if (p.sums) {
        static_cast<float*>(p.y)[int64_t(token) * p.rows + r] = v;
      } else {
        const T* bias = static_cast<const T*>(p.bias);
        static_cast<T*>(p.y)[int64_t(token) * p.rows + r] = Half<T>::narrow(bias ? v + Half<T>::widen(bias[r]) : v);
      }
    }
  }
}

}  // namespace nanovllm::packed
