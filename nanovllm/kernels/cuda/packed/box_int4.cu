// int4 with one token: the zero point and the scales of groups of 128 columns.
//
// Lanes of g 0 have the high bytes of x and those of g 1 the low ones. Sums begin with the bits of 1.5 * 2^23 less the zero
// point times the sum of x, so they are the bits of a float32, which is multiplied by the scale of its group in float32.
#include "box.cuh"

namespace nanovllm::packed {

constexpr uint32_t ZEROS = 0x08080808;  // zero points of four weights

template <typename SCALE>
struct BoxInt4 {
  static constexpr int REGISTERS = 96;  // so a program of the norm's kernel has room beside a block
  static constexpr int ROWS_BYTES = BOX_WARPS * BOX_GROUPS * 2 * 8;  // of 8 rows
  static constexpr int SCALE_BYTES = 2 * ROWS_BYTES;

  struct Maps {
    CUtensorMap weight;  // [columns / 256][rows][128 bytes]
    CUtensorMap scale;   // [rows][groups]
  };
  static bool map_scales(Maps& maps, const Product& p) {
    const cuuint64_t sizes[2] = {cuuint64_t(p.steps), cuuint64_t(p.rows)}, strides[1] = {cuuint64_t(p.scale_stride) * 2};
    const cuuint32_t box[2] = {BOX_WARPS * BOX_GROUPS, 8};
    return encode(maps.scale, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.scale, 2, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  static __device__ __forceinline__ void prefetch(const Maps& maps) {
    prefetch_map(&maps.weight);
    prefetch_map(&maps.scale);
  }
  static __device__ __forceinline__ void copy_scales(uint32_t to, const Maps& maps, int h, int round, int row, uint32_t barrier) {
    copy_box(to + h * ROWS_BYTES, &maps.scale, round * BOX_WARPS * BOX_GROUPS, row, barrier);
  }

  struct Token : BoxToken {
    int32_t first[BOX_GROUPS][2];  // what sums of a group begin with: of high bytes and low ones

    __device__ __forceinline__ void load(const __nv_bfloat16* x, uint32_t scratch, bool live, int lane) {
      load_bytes(x, scratch, live, lane, lane < 8, lane & 4);
#pragma unroll
      for (int i = 0; i < BOX_GROUPS; ++i) {
        int32_t sum[4] = {};
        total(sum, ZEROS, i);
        first[i][0] = INTEGER_BITS - sum[0];
        first[i][1] = INTEGER_BITS - sum[1];
      }
    }
  };

  struct Scales {
    uint32_t pairs[2];
  };
  uint32_t from;
  __device__ __forceinline__ BoxInt4(uint32_t scales, int row)
      : from(scales + row * (BOX_WARPS * BOX_GROUPS * 2) + (threadIdx.x >> 5) * (BOX_GROUPS * 2)) {}
  __device__ __forceinline__ Scales load(uint32_t stage) const {
    return {{load_shared_word(from + stage), load_shared_word(from + stage + ROWS_BYTES)}};
  }

  // Lanes of t 0 have the sums of rows g and g + 8.
  __device__ __forceinline__ void add(float* to, bool more, const uint4 (&words)[BOX_GROUPS][2], const Scales& scales,
                                      const Token& x) const {
    float y[4];
#pragma unroll
    for (int i = 0; i < BOX_GROUPS; ++i) {
      int32_t sum[4] = {x.first[i][0], x.first[i][1], x.first[i][0], x.first[i][1]};
      x.multiply(sum, words[i], i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t pair = scales.pairs[e / 2];
        const float scale = Half<SCALE>::widen_bits(i ? pair >> 16 : pair & 0xffffu);
        const float v = __uint_as_float(sum[e]) - INTEGER;
        y[e] = i ? fmaf(v, scale, y[e]) : v * scale;
      }
    }
    if ((threadIdx.x & 3) == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float v = fmaf(y[2 * h], 256, y[2 * h + 1]) * x.scale;
        to[h * 8] = more ? to[h * 8] + v : v;
      }
    }
  }
};

cudaError_t box_int4_product(const Product& p, const Launch& how, Real scale, cudaStream_t stream) {
  return scale == Real::float16 ? box_launch<BoxInt4<__half>>(p, how, stream)
                                : box_launch<BoxInt4<__nv_bfloat16>>(p, how, stream);
}

}  // namespace nanovllm::packed
