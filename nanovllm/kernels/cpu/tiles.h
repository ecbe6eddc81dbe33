// Weights as the products read them: tiles of 16 rows, so that a vector holds one column of 16 rows.
//
// A tile is a row of super-blocks. Each holds the scales of its 16 rows, then 1 or 8 groups of 32 columns. Quantised
// weights keep their bits: a tile of a GGUF format is as large as 16 rows of the file.
#pragma once

#include "formats.h"

namespace nanovllm {

constexpr int TILE = LANES;  // rows

// The interface of a tile format, for groups j = 0 to GROUPS - 1 of a super-block at `from`:
//   Source    the row format that it is made of
//   GROUPS    groups of 32 columns in a super-block;  BYTES  of a super-block
//   OFFSET    whether weights have a minimum
//   pack      writes a super-block from 16 pointers to the rows' blocks
//   scale(from, j, h), offset(from, j)   16 rows; h: columns 0 to 15 or 16 to 31
//   pair(from, j, i, low, high)   columns i and i + 16 as floats. A weight is scale * column + offset.

inline Floats halves_at(const uint8_t* from) { return floats_of_f16((const uint16_t*)from); }

template <typename S>
struct PlainTile {
    using Source = S;
    static constexpr int GROUPS = 1, BYTES = GROUP * TILE * S::BYTES;
    static constexpr bool OFFSET = false, SCALED = false;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        for (int k = 0; k < GROUP; k++)
            for (int r = 0; r < TILE; r++)
                std::memcpy(to + (k * TILE + r) * S::BYTES, rows[r] + k * S::BYTES, S::BYTES);
    }
    static Floats scale(const uint8_t*, int, int) { return broadcast(1.0f); }
    static Floats offset(const uint8_t*, int) { return Floats{}; }
    static Floats column(const uint8_t* from) {
        if constexpr (std::is_same_v<S, F32>) return load<Floats>(from);
        else if constexpr (std::is_same_v<S, BF16>) return floats_of_bf16((const uint16_t*)from);
        else return floats_of_f16((const uint16_t*)from);
    }
    static void pair(const uint8_t* from, int, int i, Floats& low, Floats& high) {
        low = column(from + i * TILE * S::BYTES);
        high = column(from + (i + LANES) * TILE * S::BYTES);
    }
};

// 4-bit parts: byte [i][row] has column i in its low half and column i + 16 in its high half, as each row's block has.
inline void pack_nibbles(const uint8_t* const* rows, int at, uint8_t* to) {
    for (int i = 0; i < LANES; i++)
        for (int r = 0; r < TILE; r++) to[i * TILE + r] = rows[r][at + i];
}

inline void nibbles(const uint8_t* from, int i, Bytes& low, Bytes& high) {
    Bytes both = load<Bytes>(from + i * TILE);
    low = both & 15;
    high = both >> 4;
}

// Fifth bits: word [k] has a bit for each row.
inline void pack_fifth_bits(const uint32_t* bits, uint8_t* to) {  // bits[row]: a bit for each of 32 columns
    for (int k = 0; k < GROUP; k++) {
        uint16_t word = 0;
        for (int r = 0; r < TILE; r++) word |= ((bits[r] >> k) & 1) << r;
        std::memcpy(to + 2 * k, &word, 2);
    }
}

inline void pack_halves(const uint8_t* const* rows, int at, uint8_t* to) {
    for (int r = 0; r < TILE; r++) std::memcpy(to + 2 * r, rows[r] + at, 2);
}

struct Q8_0Tile {
    using Source = Q8_0;
    static constexpr int GROUPS = 1, BYTES = TILE * Source::BYTES;
    static constexpr bool OFFSET = false, SCALED = true;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 0, to);
        for (int k = 0; k < GROUP; k++)
            for (int r = 0; r < TILE; r++) to[32 + k * TILE + r] = rows[r][2 + k];
    }
    static Floats scale(const uint8_t* from, int, int) { return halves_at(from); }
    static Floats offset(const uint8_t*, int) { return Floats{}; }
    static void pair(const uint8_t* from, int, int i, Floats& low, Floats& high) {
        low = to_floats(load<SignedBytes>(from + 32 + i * TILE));
        high = to_floats(load<SignedBytes>(from + 32 + (i + LANES) * TILE));
    }
};

// Q4_0, Q4_1, Q5_0 and Q5_1: scale, perhaps minimum, perhaps fifth bits, nibbles. CENTRE: what zero is stored as.
template <typename S, bool MINIMUM, bool FIFTH, int CENTRE>
struct SmallTile {
    using Source = S;
    static constexpr int GROUPS = 1, BYTES = TILE * S::BYTES;
    static constexpr bool OFFSET = true, SCALED = true;
    static constexpr int ROW_FIFTH = MINIMUM ? 4 : 2, ROW_NIBBLES = ROW_FIFTH + (FIFTH ? 4 : 0);
    static constexpr int FIFTH_AT = TILE * ROW_FIFTH, NIBBLES_AT = TILE * ROW_NIBBLES;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 0, to);
        if (MINIMUM) pack_halves(rows, 2, to + 32);
        if (FIFTH) {
            uint32_t bits[TILE];
            for (int r = 0; r < TILE; r++) bits[r] = field<uint32_t>(rows[r] + ROW_FIFTH);
            pack_fifth_bits(bits, to + FIFTH_AT);
        }
        pack_nibbles(rows, ROW_NIBBLES, to + NIBBLES_AT);
    }
    static Floats scale(const uint8_t* from, int, int) { return halves_at(from); }
    static Floats offset(const uint8_t* from, int) {
        return MINIMUM ? halves_at(from + 32) : halves_at(from) * (float)-CENTRE;
    }
    static void pair(const uint8_t* from, int, int i, Floats& low, Floats& high) {
        Bytes a, b;
        nibbles(from + NIBBLES_AT, i, a, b);
        if (FIFTH) {
            a |= fifth_bits(field<uint16_t>(from + FIFTH_AT + 2 * i));
            b |= fifth_bits(field<uint16_t>(from + FIFTH_AT + 2 * (i + LANES)));
        }
        low = to_floats(a);
        high = to_floats(b);
    }
};

// Q4_K and Q5_K: two halves a row, then for each group a scale, a minimum, perhaps fifth bits, nibbles.
template <typename S, bool FIFTH>
struct LargeTile {
    using Source = S;
    static constexpr int GROUPS = 8, GROUP_BYTES = TILE * (2 + (FIFTH ? 4 : 0) + 16), HEAD = TILE * 4;
    static constexpr int BYTES = HEAD + GROUPS * GROUP_BYTES;
    static constexpr bool OFFSET = true, SCALED = true;
    static constexpr int FIFTH_AT = 2 * TILE, NIBBLES_AT = FIFTH_AT + (FIFTH ? 4 * TILE : 0);
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 0, to);
        pack_halves(rows, 2, to + 32);
        for (int j = 0; j < GROUPS; j++) {
            uint8_t* group = to + HEAD + j * GROUP_BYTES;
            uint32_t bits[TILE] = {};
            for (int r = 0; r < TILE; r++) {
                float scale, minimum;
                scale_and_min(rows[r] + 4, j, scale, minimum);
                group[r] = (uint8_t)scale;
                group[TILE + r] = (uint8_t)minimum;
                const uint8_t* q = rows[r] + (FIFTH ? 48 : 16) + 32 * (j / 2);
                for (int i = 0; i < LANES; i++) {
                    const int shift = 4 * (j & 1);
                    group[NIBBLES_AT + i * TILE + r] = ((q[i] >> shift) & 15) | (((q[i + 16] >> shift) & 15) << 4);
                }
                if (FIFTH)
                    for (int k = 0; k < GROUP; k++) bits[r] |= (uint32_t)((rows[r][16 + k] >> j) & 1) << k;
            }
            if (FIFTH) pack_fifth_bits(bits, group + FIFTH_AT);
        }
    }
    static const uint8_t* group_at(const uint8_t* from, int j) { return from + HEAD + j * GROUP_BYTES; }
    static Floats scale(const uint8_t* from, int j, int) {
        return halves_at(from) * to_floats(load<Bytes>(group_at(from, j)));
    }
    static Floats offset(const uint8_t* from, int j) {
        return -(halves_at(from + 32) * to_floats(load<Bytes>(group_at(from, j) + TILE)));
    }
    static void pair(const uint8_t* from, int j, int i, Floats& low, Floats& high) {
        const uint8_t* group = group_at(from, j);
        Bytes a, b;
        nibbles(group + NIBBLES_AT, i, a, b);
        if (FIFTH) {
            a |= fifth_bits(field<uint16_t>(group + FIFTH_AT + 2 * i));
            b |= fifth_bits(field<uint16_t>(group + FIFTH_AT + 2 * (i + LANES)));
        }
        low = to_floats(a);
        high = to_floats(b);
    }
};

// Q6_K: a half a row, then for each group two signed scales, nibbles, and the upper two bits of columns i and i + 16.
struct Q6_KTile {
    using Source = Q6_K;
    static constexpr int GROUPS = 8, GROUP_BYTES = TILE * (2 + 16 + 8), HEAD = TILE * 2;
    static constexpr int BYTES = HEAD + GROUPS * GROUP_BYTES;
    static constexpr bool OFFSET = false, SCALED = true;
    static constexpr int NIBBLES_AT = 2 * TILE, UPPER_AT = NIBBLES_AT + 16 * TILE;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 208, to);
        for (int j = 0; j < GROUPS; j++) {
            uint8_t* group = to + HEAD + j * GROUP_BYTES;
            const int half = j / 4, quarter = j % 4;
            for (int r = 0; r < TILE; r++) {
                const uint8_t *low = rows[r] + 64 * half + 32 * (quarter & 1), *high = rows[r] + 128 + 32 * half;
                group[r] = rows[r][192 + 8 * half + 2 * quarter];
                group[TILE + r] = rows[r][192 + 8 * half + 2 * quarter + 1];
                const int shift = 4 * (quarter >> 1);
                for (int i = 0; i < LANES; i++) {
                    group[NIBBLES_AT + i * TILE + r] = ((low[i] >> shift) & 15) | (((low[i + 16] >> shift) & 15) << 4);
                    const int upper = ((high[i] >> 2 * quarter) & 3) | (((high[i + 16] >> 2 * quarter) & 3) << 2);
                    uint8_t& two = group[UPPER_AT + (i / 2) * TILE + r];  // of columns i, i + 16, i + 1, i + 17
                    two = i % 2 ? (two | upper << 4) : upper;
                }
            }
        }
    }
    static const uint8_t* group_at(const uint8_t* from, int j) { return from + HEAD + j * GROUP_BYTES; }
    static Floats scale(const uint8_t* from, int j, int h) {
        return halves_at(from) * to_floats(load<SignedBytes>(group_at(from, j) + h * TILE));
    }
    static Floats offset(const uint8_t*, int) { return Floats{}; }
    static void pair(const uint8_t* from, int j, int i, Floats& low, Floats& high) {
        const uint8_t* group = group_at(from, j);
        Bytes a, b, upper = load<Bytes>(group + UPPER_AT + (i / 2) * TILE) >> (i % 2 ? 4 : 0);
        nibbles(group + NIBBLES_AT, i, a, b);
        low = to_floats((Bytes)(a | ((upper & 3) << 4))) - 32.0f;
        high = to_floats((Bytes)(b | ((upper & 12) << 2))) - 32.0f;
    }
};

using Q4_0Tile = SmallTile<Q4_0, false, false, 8>;
using Q4_1Tile = SmallTile<Q4_1, true, false, 0>;
using Q5_0Tile = SmallTile<Q5_0, false, true, 16>;
using Q5_1Tile = SmallTile<Q5_1, true, true, 0>;
using Q4_KTile = LargeTile<Q4_K, false>;
using Q5_KTile = LargeTile<Q5_K, true>;

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
