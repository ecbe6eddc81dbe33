// How rows of weights come to the kernels: plain floats, the blocks of GGUF, and blocks that library.py makes.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and the Python package gguf.
#pragma once

#include "small_floats.h"

namespace nanovllm {

constexpr int GROUP = 32;

template <typename Element>
inline Element field(const uint8_t* from) {
    Element value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// BLOCK: weights of a block;  BYTES: of a block.
struct F32 {
    static constexpr int BLOCK = 1, BYTES = 4;
};
struct BF16 {
    static constexpr int BLOCK = 1, BYTES = 2;
};
struct F16 {
    static constexpr int BLOCK = 1, BYTES = 2;
};
struct Q8_0 {
    static constexpr int BLOCK = 32, BYTES = 34;
};
struct Q4_0 {
    static constexpr int BLOCK = 32, BYTES = 18;
};
struct Q4_1 {
    static constexpr int BLOCK = 32, BYTES = 20;
};
struct Q5_0 {
    static constexpr int BLOCK = 32, BYTES = 22;
};
struct Q5_1 {
    static constexpr int BLOCK = 32, BYTES = 24;
};
struct Q4_K {
    static constexpr int BLOCK = 256, BYTES = 144;
};
struct Q5_K {
    static constexpr int BLOCK = 256, BYTES = 176;
};
struct Q6_K {
    static constexpr int BLOCK = 256, BYTES = 210;
};

// The six-bit scale and minimum of group j of a Q4_K or Q5_K block, from its 12 packed bytes.
inline void scale_and_min(const uint8_t* packed, int j, float& scale, float& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}

// A scale and a minimum in float32, and integers from 0 to 15: of each 32 columns, byte b has column b in its low half
// and column b + 16 in its high half, as in Q4_1. A weight is scale * integer + minimum.
template <int COLUMNS>
struct Int4 {
    static constexpr int BLOCK = COLUMNS, BYTES = 8 + COLUMNS / 2;
};

// A scale in float32, and 8-bit floats: 4 bits of exponent, 3 of fraction, no infinity; 0x7f and 0xff are NaN.
// Source: "FP8 formats for deep learning", https://arxiv.org/abs/2209.05433
struct E4M3 {
    static constexpr int BLOCK = 128, BYTES = 4 + 128;
};

enum Format : int32_t { f32, bf16, f16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, int4_32, int4_128, e4m3 };
constexpr int32_t LAST_FORMAT = e4m3;

template <typename F>
inline int64_t row_bytes(int64_t columns) {
    return (columns + F::BLOCK - 1) / F::BLOCK * F::BYTES;
}

}  // namespace nanovllm
