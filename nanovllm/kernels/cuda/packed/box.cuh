// The kernel of int4 and of Q4_K with one token: tensor maps bring weights to shared memory, integer tensor cores multiply them.
//
// A block has all columns of its tiles of 16 rows. A stage is a tile's next 4,096 columns, which one thread copies as boxes of
// 8 rows, beginning before the kernel in front has ended. A warp multiplies 256 columns of every tile before the next 4,096
// columns. So it holds their x in registers.
//
// x becomes integers of 16 bits: 256 columns share a float32 scale, by which the largest of them is 32,512. An integer is 256
// times a signed byte plus a signed byte, and these are two of the 8 columns of `mma.m16n8k32`. Three instructions of the
// machine make bytes of eight weights. Sums of integers are exact. box_int4.cu and box_q4_k.cu have what is done with them.
// An infinity or a NaN of x makes every result NaN. Among 256 columns that are all below 2^-100, those below 2^-116 count as
// zeros.
#pragma once

#include "box_machine.cuh"
#include "tensor_map.cuh"

namespace nanovllm::packed {

constexpr int BOX_GROUPS = 2;                                     // of 128 columns, of a warp in a stage
constexpr int BOX_COLUMNS = BOX_WARPS * BOX_GROUPS * 128;         // of a stage
constexpr int BOX_BYTES = BOX_COLUMNS / 2 * 8;                    // of the weights of 8 rows
constexpr int BOX_TOKEN_BYTES = 512;                              // of a warp's x, as bytes
constexpr int BOX_THREADS = BOX_WARPS * 32;
constexpr uint32_t INTEGER_BITS = 0x4b400000;                     // 1.5 * 2^23
constexpr float INTEGER = 12582912.0f, LARGEST = 32512.0f, SMALLEST = 0x1p-100f;
constexpr uint32_t BFLOAT16_INFINITY = 0x7f80;

// The larger magnitudes of two 16-bit floats each.
__device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b & 0x7fff7fffu); }

// x of a warp's columns in the order of the decoded pairs: words[group][word of a lane][even, odd columns].
struct BoxToken {
  uint32_t words[BOX_GROUPS][4][2];
  float scale;

  // Each lane makes the bytes of 8 columns, through which shared memory gives owners of t all of t: high bytes or low ones.
  // Lanes that own none have zeros. scratch: BOX_TOKEN_BYTES of this warp.
  __device__ __forceinline__ void load_bytes(const __nv_bfloat16* x, uint32_t scratch, bool live, int lane, bool owner, bool low) {
    const int t = lane & 3;
    const uint4 raw = load_token(reinterpret_cast<const uint8_t*>(x) + lane * 16, live);
    uint32_t most = larger_halves(larger_halves(larger_halves(larger_halves(0, raw.x), raw.y), raw.z), raw.w);
    most = __reduce_max_sync(~0u, max(most & 0xffffu, most >> 16));
    const float largest = fmaxf(Half<__nv_bfloat16>::widen_bits(most), SMALLEST);
    const float factor = LARGEST * 0x1p-20f * reciprocal(largest * 0x1p-20f);  // the reciprocal of a large one would be 0
    scale = most < BFLOAT16_INFINITY ? largest * (1 / LARGEST) : __int_as_float(0x7fffffff);
    const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t high_bytes[2], low_bytes[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t bits[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 128 more, so that the low byte minus 128 is signed
        const float v = Half<__nv_bfloat16>::widen_bits(odd ? pairs[k] >> 16 : pairs[k] & 0xffffu);
        bits[k] = __float_as_uint(fmaf(v, factor, INTEGER + 128));
      }
      const uint32_t first = __byte_perm(bits[0], bits[1], 0x5140), second = __byte_perm(bits[2], bits[3], 0x5140);
      low_bytes[odd] = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
      high_bytes[odd] = __byte_perm(first, second, 0x7632);
    }
    store_shared(scratch + lane * 16, high_bytes[0], high_bytes[1], low_bytes[0], low_bytes[1]);
    __syncwarp();
    const uint32_t from = scratch + t * 64 + (low ? 8 : 0);
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) load_shared_pair(words[i][j], from + i * 256 + j * 16, owner);
    }
  }

  // Adds the products of x with a group of all 16 rows: of rows g and g + 8, two columns each.
  __device__ __forceinline__ void multiply(int32_t (&sum)[4], const uint4 (&rows)[2], int group) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4& v = rows[h];
        const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
        a[h] = word & 0x0f0f0f0fu;
        a[2 + h] = word >> 4 & 0x0f0f0f0fu;
      }
      multiply_bytes(sum, a[0], a[1], a[2], a[3], words[group][j][0], words[group][j][1], sum[0], sum[1], sum[2], sum[3]);
    }
  }

  // The sum over a group of x times the same byte everywhere, in the same columns.
  __device__ __forceinline__ void total(int32_t (&sum)[4], uint32_t bytes, int group) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      multiply_bytes(sum, bytes, bytes, bytes, bytes, words[group][j][0], words[group][j][1], sum[0], sum[1], sum[2], sum[3]);
    }
  }
};

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

// FORM: how weights are scaled, and what the scales of a stage are in shared memory.
template <typename FORM>
__global__ void __maxnreg__(FORM::REGISTERS)
    box_kernel(const __grid_constant__ Product p, const __grid_constant__ typename FORM::Maps maps) {
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
  const uint32_t full = scales + stages * FORM::SCALE_BYTES, empty = full + 8;  // of a stage both are neighbours
  const int stages_bytes = stages * (2 * BOX_BYTES + FORM::SCALE_BYTES + 16);
  float* sums = reinterpret_cast<float*>(box_shared + stages_bytes + BOX_WARPS * BOX_TOKEN_BYTES);

  launch_dependents();
  auto copy = [&](int slot, int round, int tile) {
    for (; tile >= tiles; tile -= tiles) ++round;
    if (round >= rounds) return;
    tile += first_tile;
    barrier_expect(full + slot * 16, 2 * BOX_BYTES + FORM::SCALE_BYTES);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = p.gated ? tile * 8 + h * half : tile * 16 + h * 8;
      copy_box(ring + slot * (2 * BOX_BYTES) + h * BOX_BYTES, &maps.weight, 0, row, round * BOX_WARPS, full + slot * 16);
      FORM::copy_scales(scales + slot * FORM::SCALE_BYTES, maps, h, round, row, full + slot * 16);
    }
  };
  if (threadIdx.x == 0) {
    FORM::prefetch(maps);
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + i * 16, 1);
      barrier_init(empty + i * 16, BOX_WARPS);
    }
    barriers_are_ready();
    for (int i = 0; i < stages; ++i) copy(i, 0, i);
  }
  __syncthreads();

  // Lanes of rows that differ in bit 2 are neighbours: a box is swizzled, and so eight lanes read 128 bytes of all banks.
  const int g = lane >> 2, t = lane & 3, row = g >> 1 | (g & 1) << 2;
  uint32_t lane_ring = ring + warp * 1024 + row * 128 + (t ^ row) * 16;
  asm volatile("" : "+r"(lane_ring));  // made before the wait
  const FORM form(scales, row);
  typename FORM::Token x;
  int slot = 0, parity = 0;
  wait_for_dependencies();
  for (int round = 0; round < rounds; ++round) {
    const int thread = thread_again();
    const int column = round * BOX_COLUMNS + (thread >> 5) * (BOX_GROUPS * 128);
    x.load(static_cast<const T*>(p.x) + column, ring + stages_bytes + (thread >> 5) * BOX_TOKEN_BYTES,
           column < p.steps * 128, thread & 31);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(full + slot * 16, parity);
      uint4 words[BOX_GROUPS][2];
      const uint32_t from = lane_ring + slot * (2 * BOX_BYTES);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < BOX_GROUPS; ++i) words[i][h] = load_shared((from ^ i * 64) + h * BOX_BYTES);
      }
      const auto of_rows = form.load(slot * FORM::SCALE_BYTES);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + slot * 16);

      form.add(sums + (tile * BOX_WARPS + warp) * 16 + row, round > 0, words, of_rows, x);
      // Warps ask for stages in turns. By now, most warps have read this one, too.
      if (lane == 0 && warp == (tile & (BOX_WARPS - 1))) {
        barrier_wait(empty + slot * 16, parity);
        copy(slot, round, tile + stages);
      }
      __syncwarp();
      if (++slot == stages) slot = 0, parity ^= 1;
    }
  }
  __syncthreads();

  write_results(p, sums, first_tile, tiles);
}

template <typename FORM>
cudaError_t box_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  typename FORM::Maps maps;
  if (p.tokens != 1 || how.warps != BOX_WARPS) return cudaErrorInvalidValue;
  if (encoder() == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {128, cuuint64_t(p.rows), cuuint64_t(p.steps / 2)}, strides[2] = {p.weight_stride, 128};
  const cuuint32_t box[3] = {128, 8, BOX_WARPS};
  if (!encode(maps.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight, 3, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !FORM::map_scales(maps, p)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = box_kernel<FORM>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.row_warps);
  config.blockDim = dim3(BOX_THREADS);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, maps);
}

}  // namespace nanovllm::packed
