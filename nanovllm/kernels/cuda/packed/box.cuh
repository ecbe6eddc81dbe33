// The kernel of int4 with one token: tensor maps bring weights to shared memory, integer tensor cores multiply them.
//
// A block has all columns of its tiles of 16 rows, and a multiprocessor has one block. A stage is a tile's next 4,096 columns,
// which one thread copies as two boxes of 8 rows, beginning before the kernel in front has ended. A warp multiplies 256 columns,
// two groups, of every tile before the next 4,096 columns. So it holds their x in registers.
//
// x becomes integers of 16 bits: 256 columns share a float32 scale, by which the largest of them is 32,512. An integer is 256
// times a signed byte plus a signed byte, and these are two of the 8 columns of `mma.m16n8k32`; the others are zeros. Three
// instructions of the machine make bytes of eight weights. Sums of integers are exact. They begin with the bits of 1.5 * 2^23
// less the zero point times the sum of x, so they are the bits of a float32. It is multiplied by the scale of its group of
// weights in float32. An infinity or a NaN of x makes every result NaN. Among 256 columns that are all below 2^-100, those below
// 2^-116 count as zeros.
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
constexpr uint32_t BFLOAT16_INFINITY = 0x7f80;
constexpr uint32_t ZEROS = 0x08080808;  // zero points of four weights

struct Maps {
  CUtensorMap weight;  // [columns / 256][rows][128 bytes]
  CUtensorMap scale;   // [rows][groups]
};

// The larger magnitudes of two 16-bit floats each.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b & 0x7fff7fffu); }

// x of a warp's columns in the order of the decoded pairs: words[group][word of a lane][even, odd columns].
struct BoxToken {
  uint32_t words[BOX_GROUPS][4][2];
  int32_t first[BOX_GROUPS][2];  // what sums of a group begin with: of high bytes and low ones
  float scale;

  // Lanes of g 0 have the high bytes, of g 1 the low ones, and others zeros.
  __device__ __forceinline__ void load(const __nv_bfloat16* x, bool live) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(x) + t * 64;
    live = live && g < 2;
    const uint4 raw[BOX_GROUPS][4] = {{load_token<0>(from, live), load_token<16>(from, live), load_token<32>(from, live),
                                       load_token<48>(from, live)},
                                      {load_token<256>(from, live), load_token<272>(from, live),
                                       load_token<288>(from, live), load_token<304>(from, live)}};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4& v = raw[i][j];
        most = larger_halves(larger_halves(larger_halves(larger_halves(most, v.x), v.y), v.z), v.w);
      }
    }
    most = max(most & 0xffffu, most >> 16);
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const float largest = fmaxf(Half<__nv_bfloat16>::widen_bits(most), SMALLEST);
    const float factor = LARGEST * 0x1p-20f * reciprocal(largest * 0x1p-20f);  // the reciprocal of a large one would be 0
    scale = __shfl_sync(~0u, most < BFLOAT16_INFINITY ? largest * (1 / LARGEST) : __int_as_float(0x7fffffff), 0);
    const uint32_t choose = g & 1 ? 0x40 : 0x51, sign = g & 1 ? 0x80808080u : 0;
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
      int32_t sum[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pairs[4] = {raw[i][j].x, raw[i][j].y, raw[i][j].z, raw[i][j].w};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          uint32_t bits[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {  // 128 more, so that the low byte minus 128 is signed
            const float v = Half<__nv_bfloat16>::widen_bits(odd ? pairs[k] >> 16 : pairs[k] & 0xffffu);
            bits[k] = __float_as_uint(fmaf(v, factor, INTEGER + 128));
          }
          const uint32_t low = __byte_perm(bits[0], bits[1], choose), high = __byte_perm(bits[2], bits[3], choose);
          words[i][j][odd] = __byte_perm(low, high, 0x5410) ^ sign;
        }
        multiply_bytes(sum, ZEROS, ZEROS, ZEROS, ZEROS, words[i][j][0], words[i][j][1], sum[0], sum[1], sum[2], sum[3]);
      }
      first[i][0] = INTEGER_BITS - sum[0];
      first[i][1] = INTEGER_BITS - sum[1];
    }
  }
};

// y: of rows g and g + 8 the products with the high bytes of x and with the low ones, in lanes of t 0.
template <typename SCALE>
__device__ __forceinline__ void multiply_tile(float (&y)[4], const uint4 (&words)[BOX_GROUPS][2], const uint32_t (&pairs)[2],
                                              const BoxToken& x) {
#pragma unroll
  for (int i = 0; i < BOX_GROUPS; ++i) {
    int32_t sum[4] = {x.first[i][0], x.first[i][1], x.first[i][0], x.first[i][1]};
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
      multiply_bytes(sum, a[0], a[1], a[2], a[3], x.words[i][j][0], x.words[i][j][1], sum[0], sum[1], sum[2], sum[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float scale = Half<SCALE>::widen_bits(i ? pairs[e / 2] >> 16 : pairs[e / 2] & 0xffffu);
      const float v = __uint_as_float(sum[e]) - INTEGER;
      y[e] = i ? fmaf(v, scale, y[e]) : v * scale;
    }
  }
}

// Adds the sums of the warps, in order: sums[tile][warp][16 rows].
__device__ __forceinline__ void write_results(const Product& p, const float* sums, int first_tile, int tiles) {
  using T = __nv_bfloat16;
  const int half = p.rows >> 1;
  const int each = p.gated ? 8 : 16;
  auto total = [&](int tile, int row) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < BOX_WARPS; ++w) v += sums[(tile * BOX_WARPS + w) * 16 + row];
    return v;
  };
  for (int i = threadIdx.x; i < tiles * each; i += BOX_THREADS) {
    const int row = i & (each - 1), tile = i / each;
    const int r = first_tile * each + i;
    const float v = total(tile, row);
    if (p.gated) {
      if (r >= half) continue;
      const float gate = Half<T>::widen(Half<T>::narrow(v)), up = Half<T>::widen(Half<T>::narrow(total(tile, 8 + row)));
      const float silu = Half<T>::widen(Half<T>::narrow(gate / (1.0f + __expf(-gate))));
      static_cast<T*>(p.y)[r] = Half<T>::narrow(silu * up);
    } else if (r < p.rows) {
      if (p.sums) {
        static_cast<float*>(p.y)[r] = v;
      } else {
        const T* bias = static_cast<const T*>(p.bias);
        static_cast<T*>(p.y)[r] = Half<T>::narrow(bias ? v + Half<T>::widen(bias[r]) : v);
      }
    }
  }
}

template <typename SCALE>
__global__ void __maxnreg__(BOX_REGISTERS) box_kernel(const __grid_constant__ Product p, const __grid_constant__ Maps maps) {
  using T = __nv_bfloat16;
  extern __shared__ __align__(1024) uint8_t box_shared[];  // the swizzle of boxes begins anew every 1,024 bytes

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int half = p.rows >> 1, stages = p.phase_turns;
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
  BoxToken x;
  int stage = 0, slot = 0, parity = 0;
  wait_for_dependencies();
  for (int round = 0; round < rounds; ++round) {
    const int column = round * BOX_COLUMNS + warp * (BOX_GROUPS * 128);
    x.load(static_cast<const T*>(p.x) + column, column < p.steps * 128);
    float* to = sums + warp * 16 + row;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, ++stage, to += BOX_WARPS * 16) {
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

      float y[4];
      multiply_tile<SCALE>(y, words, pairs, x);
      if (t == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v = fmaf(y[2 * h], 256, y[2 * h + 1]) * x.scale;
          to[h * 8] = round > 0 ? to[h * 8] + v : v;
        }
      }
      // Warps ask for stages in turns. By now, most warps have read this one, too.
      if (lane == 0 && warp == (stage & (BOX_WARPS - 1))) {
        barrier_wait(empty + slot * 8, parity);
        copy(slot, round, tile + stages);
      }
      __syncwarp();
      if (++slot == stages) slot = 0, parity ^= 1;
    }
  }
  __syncthreads();

  write_results(p, sums, first_tile, tiles);
}

}  // namespace nanovllm::packed
