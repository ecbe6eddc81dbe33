// The tile of each format, and weights from rows to tiles.
#pragma once

#include <type_traits>

#include "checkpoint_tiles.h"

namespace nanovllm {

// Calls fn with an object of the format's tile type, if the format's number leaves the remainder PART.
template <int PARTS = 1, int PART = 0, typename Fn>
inline void with_tile(int32_t format, Fn&& fn) {
    auto call = [&](auto number, auto tile) {
        if constexpr (decltype(number)::value % PARTS == PART) fn(tile);
    };
    switch (format) {
        case f32: return call(std::integral_constant<int, f32>{}, PlainTile<F32>{});
        case bf16: return call(std::integral_constant<int, bf16>{}, PlainTile<BF16>{});
        case f16: return call(std::integral_constant<int, f16>{}, PlainTile<F16>{});
        case q8_0: return call(std::integral_constant<int, q8_0>{}, Q8_0Tile{});
        case q4_0: return call(std::integral_constant<int, q4_0>{}, Q4_0Tile{});
        case q4_1: return call(std::integral_constant<int, q4_1>{}, Q4_1Tile{});
        case q5_0: return call(std::integral_constant<int, q5_0>{}, Q5_0Tile{});
        case q5_1: return call(std::integral_constant<int, q5_1>{}, Q5_1Tile{});
        case q4_k: return call(std::integral_constant<int, q4_k>{}, Q4_KTile{});
        case q5_k: return call(std::integral_constant<int, q5_k>{}, Q5_KTile{});
        case q6_k: return call(std::integral_constant<int, q6_k>{}, Q6_KTile{});
        case int4_32: return call(std::integral_constant<int, int4_32>{}, Int4Tile<Int4<32>>{});
        case int4_128: return call(std::integral_constant<int, int4_128>{}, Int4Tile<Int4<128>>{});
        case e4m3: return call(std::integral_constant<int, e4m3>{}, E4M3Tile{});
    }
}

inline int64_t tiles_of(int64_t rows) { return (rows + TILE - 1) / TILE; }

template <typename T>
inline int64_t blocks_of(int64_t columns) {
    constexpr int width = GROUP * T::GROUPS;
    return (columns + width - 1) / width;
}

template <typename T>
inline int64_t tile_bytes(int64_t columns) {
    return blocks_of<T>(columns) * T::BYTES;
}

// Rows of a weight to tiles. Missing rows and columns become zeros.
template <typename T>
inline void pack_tile(const uint8_t* rows, int64_t first, int64_t num_rows, int64_t columns, uint8_t* to) {
    using S = typename T::Source;
    constexpr int per_block = S::BLOCK == 1 ? GROUP * S::BYTES : S::BYTES * (GROUP * T::GROUPS / S::BLOCK);
    const int64_t bytes = row_bytes<S>(columns);
    for (int64_t b = 0; b < blocks_of<T>(columns); b++) {
        alignas(64) uint8_t zeros[per_block] = {};
        alignas(64) uint8_t rest[TILE][per_block];
        const uint8_t* from[TILE];
        for (int r = 0; r < TILE; r++) {
            const int64_t at = b * per_block;
            from[r] = first + r < num_rows ? rows + (first + r) * bytes + at : zeros;
            if (first + r < num_rows && at + per_block > bytes) {
                std::memset(rest[r], 0, per_block);
                std::memcpy(rest[r], from[r], bytes - at);
                from[r] = rest[r];
            }
        }
        T::pack(from, to + b * T::BYTES);
    }
}

}  // namespace nanovllm
