// How files store the rows of weights: plain floats, and the blocks of GGUF.
// Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and the Python package gguf.
#pragma once

#include "simd.h"

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

enum Format : int32_t { f32, bf16, f16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

template <typename F>
inline int64_t row_bytes(int64_t columns) {
    return columns / F::BLOCK * F::BYTES;
}

}  // namespace nanovllm
