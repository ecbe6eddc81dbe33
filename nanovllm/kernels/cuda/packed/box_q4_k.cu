// Q4_K with one token: parts of 32 columns have scales and minima.
//
// Lane t of a row has the 32 columns of part t, and of 4 + t, in its two words of 16 bytes. Only lanes of g 2 t and 2 t + 1 have
// bytes of x of these columns, high and low ones, and others have zeros. So each of four parts has two of the 8 columns of a
// product to itself, and lane t gets the sums of part t. With 6 bits of scale two of them stay below 2^31. A warp's 256 columns
// are a block, so the float16 scales are those of its rows.
#include "box.cuh"

namespace nanovllm::packed {

struct BoxQ4K {
  static constexpr int REGISTERS = 64;  // two blocks have room, or one and a program of the norm's kernel
  static constexpr int PLANE_BYTES = 8 * 128, PARTS_BYTES = 2 * PLANE_BYTES;  // of 8 rows: a byte for a part; and minima
  static constexpr int HALVES_BYTES = 8 * 32, BLOCKS_BYTES = 2 * HALVES_BYTES;  // two bytes for a block
  static constexpr int SCALE_BYTES = 2 * (PARTS_BYTES + BLOCKS_BYTES);

  struct Maps {
    CUtensorMap weight;  // [columns / 256][rows][128 bytes]
    CUtensorMap parts;   // [scale, minimum][rows][bytes]
    CUtensorMap blocks;  // the same of float16 numbers
  };
  static bool map_scales(Maps& maps, const Product& p) {
    const cuuint64_t rows = p.rows, steps = p.steps;  // of 4 parts, two of a block: behind them there are zeros
    const cuuint64_t sizes[3] = {steps * 4, rows, 2}, strides[2] = {p.weight_stride, p.mn - p.sc};
    const cuuint64_t block_sizes[3] = {steps, rows, 2}, block_strides[2] = {p.weight_stride, p.m - p.d};
    const cuuint32_t box[3] = {128, 8, 2}, block_box[3] = {32, 8, 2};
    return encode(maps.parts, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight + p.sc, 3, sizes, strides, box,
                  CU_TENSOR_MAP_SWIZZLE_128B) &&
           encode(maps.blocks, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight + p.d, 3, block_sizes, block_strides, block_box,
                  CU_TENSOR_MAP_SWIZZLE_32B);
  }
  static __device__ __forceinline__ void prefetch(const Maps& maps) {
    prefetch_map(&maps.weight);
    prefetch_map(&maps.parts);
    prefetch_map(&maps.blocks);
  }
  static __device__ __forceinline__ void copy_scales(uint32_t to, const Maps& maps, int h, int round, int row, uint32_t barrier) {
    copy_box(to + h * PARTS_BYTES, &maps.parts, round * 128, row, 0, barrier);
    copy_box(to + 2 * PARTS_BYTES + h * BLOCKS_BYTES, &maps.blocks, round * 32, row, 0, barrier);
  }

  struct Token : BoxToken {
    int32_t sum[BOX_GROUPS];  // of parts t and 4 + t

    __device__ __forceinline__ void load(const __nv_bfloat16* x, uint32_t scratch, bool live, int lane) {
      load_bytes(x, scratch, live, lane, lane >> 3 == (lane & 3), lane & 4);
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
        int32_t bytes[4] = {};
        total(bytes, 0x01010101, i);
        sum[i] = bytes[0] * 256 + bytes[1];
      }
    }
  };

  struct Scales {
    uint32_t part[2][BOX_GROUPS], minimum[2][BOX_GROUPS];  // of rows g and g + 8
    uint32_t block;                                        // of t 0 and 1 their d, of t 2 and 3 their m
  };
  uint32_t from_parts, from_blocks;  // boxes are swizzled, by 128 bytes and by 32
  __device__ __forceinline__ BoxQ4K(uint32_t scales, int row) {
    const int t = threadIdx.x & 3, warp = threadIdx.x >> 5;
    from_parts = scales + row * 128 + (((warp >> 1) ^ row) << 4) + (warp & 1) * 8 + t;
    from_blocks = scales + 2 * PARTS_BYTES + (t & 1) * BLOCKS_BYTES + (t >> 1) * HALVES_BYTES + row * 32 +
                  (((warp >> 3) ^ (row >> 2)) << 4) + (warp & 7) * 2;
    asm volatile("" : "+r"(from_parts), "+r"(from_blocks));  // made before the wait
  }
  __device__ __forceinline__ Scales load(uint32_t stage) const {
    Scales s;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
        s.part[h][i] = load_shared8(from_parts + stage + h * PARTS_BYTES + i * 4);
        s.minimum[h][i] = load_shared8(from_parts + stage + h * PARTS_BYTES + PLANE_BYTES + i * 4);
      }
    }
    s.block = load_shared16(from_blocks + stage);
    return s;
  }

  // Of four lanes t 0 and 2 add row g, the others row g + 8; t 0 and 1 products, the others minima.
  __device__ __forceinline__ void add(float* to, bool more, const uint4 (&words)[BOX_GROUPS][2], const Scales& scales,
                                      const Token& x) const {
    const int t = thread_again() & 3;
    const auto of_row = [&](const int32_t(&rows)[2]) {
      const float a = float(rows[0]), b = float(rows[1]);
      return (t & 1 ? b : a) + __shfl_xor_sync(~0u, t & 1 ? a : b, 1);
    };
    int32_t products[2] = {}, minima[2] = {};
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) minima[h] += int32_t(scales.minimum[h][i]) * x.sum[i];
    }
    const float minimum = of_row(minima);
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
      int32_t sum[4] = {};
      x.multiply(sum, words[i], i);
#pragma unroll
      for (int h = 0; h < 2; ++h) products[h] += (sum[2 * h] * 256 + sum[2 * h + 1]) * int32_t(scales.part[h][i]);
    }
    const float product = of_row(products);
    float v = (t & 2 ? minimum : product) + __shfl_xor_sync(~0u, t & 2 ? product : minimum, 2);
    v *= Half<__half>::widen_bits(scales.block);
    v = (v - __shfl_xor_sync(~0u, v, 2)) * x.scale;
    if (t < 2) to[t * 8] = more ? to[t * 8] + v : v;
  }
};

cudaError_t box_q4_k_product(const Product& p, const Launch& how, cudaStream_t stream) {
  return box_launch<BoxQ4K>(p, how, stream);
}

}  // namespace nanovllm::packed
