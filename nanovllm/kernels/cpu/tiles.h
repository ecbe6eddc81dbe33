// Weights as the products read them: tiles of 16 rows, so that each lane of a vector belongs to a row.
//
// A tile is a row of super-blocks. Each holds the scales of its 16 rows, then 1 or 8 groups of 32 columns. Quantised
// weights keep their bits: a tile of a GGUF format is as large as 16 rows of the file. Plain weights have a vector for
// each column. Quantised ones have vectors of codes, four columns of a row side by side, since processors multiply and
// add four pairs of bytes in one lane.
#pragma once

#include "formats.h"

namespace nanovllm {

constexpr int TILE = LANES;  // rows

// The interface of a quantised tile format, for groups j = 0 to GROUPS - 1 of a super-block at `from`:
//   Source    the row format that it is made of
//   GROUPS    groups of 32 columns in a super-block;  BYTES  of a super-block;  IS_FLOATS  false
//   TOP       the largest code;  CENTRE  the code of zero;  SCALES  of a group: 1, or 2 of 16 columns each
//   MINIMUM   whether weights have a minimum
//   pack      writes a super-block from 16 pointers to the rows' blocks
//   codes(from, j, to)     to[v]: columns 4 v to 4 v + 3 of 16 rows
//   scale(from, j, h), minimum(from, j)   16 rows; h: which of SCALES. A weight is scale * (code - CENTRE) + minimum.

// That of a tile format of floats: Source, GROUPS, BYTES, pack, and
//   IS_FLOATS  true
//   column(from, j, k)     16 rows of column k of group j

inline Rows halves_at(const uint8_t* from) { return floats_of_f16((const uint16_t*)from); }

constexpr int VECTORS = 8;  // of codes in a group

template <typename S>
struct PlainTile {
    using Source = S;
    static constexpr int GROUPS = 1, BYTES = GROUP * TILE * S::BYTES;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        for (int k = 0; k < GROUP; k++)
            for (int r = 0; r < TILE; r++)
                std::memcpy(to + (k * TILE + r) * S::BYTES, rows[r] + k * S::BYTES, S::BYTES);
    }
    static constexpr bool IS_FLOATS = true;
    static Rows column(const uint8_t* from, int, int k) {
        from += k * TILE * S::BYTES;
        if constexpr (std::is_same_v<S, F32>) return load<Floats>(from);
        else if constexpr (std::is_same_v<S, BF16>) return floats_of_bf16((const uint16_t*)from);
        else return floats_of_f16((const uint16_t*)from);
    }
};

// Four bits of each code: byte [i][row][b] has column 4 i + b in its low half and that + 16 in its high half, as each
// row's block has.
inline void pack_nibbles(const uint8_t* const* rows, int at, uint8_t* to) {
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < TILE; r++) std::memcpy(to + (i * TILE + r) * 4, rows[r] + at + 4 * i, 4);
}

inline void nibbles(const uint8_t* from, Codes* to) {
    for (int i = 0; i < 4; i++) {
        const uint8_t* both = from + i * sizeof(Codes);
        by_register(both, to[i], [](CodePairs v) { return v & 0x0f0f; });
        by_register(both, to[i + 4], [](CodePairs v) { return (v >> 4) & 0x0f0f; });
    }
}

// Fifth bits: word [v] has a bit for each code of vector v.
inline void pack_fifth_bits(const uint32_t* bits, uint8_t* to) {  // bits[row]: a bit for each of 32 columns
    for (int v = 0; v < VECTORS; v++) {
        uint64_t word = 0;
        for (int r = 0; r < TILE; r++) word |= (uint64_t)((bits[r] >> (4 * v)) & 15) << (4 * r);
        std::memcpy(to + 8 * v, &word, 8);
    }
}

inline void add_fifth_bits(const uint8_t* from, Codes* to) {
    for (int v = 0; v < VECTORS; v++) add_fifth_bits(to[v], field<uint64_t>(from + 8 * v));
}

inline void pack_halves(const uint8_t* const* rows, int at, uint8_t* to) {
    for (int r = 0; r < TILE; r++) std::memcpy(to + 2 * r, rows[r] + at, 2);
}

// Signed bytes become codes from 0 to 255, unless the processor multiplies signed bytes.
struct Q8_0Tile {
    using Source = Q8_0;
    static constexpr bool IS_FLOATS = false;
    static constexpr int GROUPS = 1, BYTES = TILE * Source::BYTES;
    static constexpr int TOP = 255, CENTRE = SIGNED_CODES ? 0 : 128, SCALES = 1;
    static constexpr bool MINIMUM = false;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 0, to);
        for (int k = 0; k < GROUP; k++)
            for (int r = 0; r < TILE; r++) to[32 + (k / 4 * TILE + r) * 4 + k % 4] = rows[r][2 + k] ^ CENTRE;
    }
    static Rows scale(const uint8_t* from, int, int) { return halves_at(from); }
    static Rows minimum(const uint8_t*, int) { return Floats{}; }
    static void codes(const uint8_t* from, int, Codes* to) {
        for (int v = 0; v < VECTORS; v++) by_register(from + 32 + v * sizeof(Codes), to[v], [](CodePairs v) { return v; });
    }
};

// Q4_0, Q4_1, Q5_0 and Q5_1: scale, perhaps minimum, perhaps fifth bits, nibbles.
template <typename S, bool HAS_MINIMUM, bool FIFTH>
struct SmallTile {
    using Source = S;
    static constexpr bool IS_FLOATS = false;
    static constexpr int GROUPS = 1, BYTES = TILE * S::BYTES;
    static constexpr int TOP = FIFTH ? 31 : 15, CENTRE = HAS_MINIMUM ? 0 : (TOP + 1) / 2, SCALES = 1;
    static constexpr bool MINIMUM = HAS_MINIMUM;
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
    static Rows scale(const uint8_t* from, int, int) { return halves_at(from); }
    static Rows minimum(const uint8_t* from, int) { return MINIMUM ? halves_at(from + 32) : Rows(Floats{}); }
    static void codes(const uint8_t* from, int, Codes* to) {
        nibbles(from + NIBBLES_AT, to);
        if (FIFTH) add_fifth_bits(from + FIFTH_AT, to);
    }
};

// Q4_K and Q5_K: two halves a row, then for each group a scale, a minimum, perhaps fifth bits, nibbles.
template <typename S, bool FIFTH>
struct LargeTile {
    using Source = S;
    static constexpr bool IS_FLOATS = false;
    static constexpr int GROUPS = 8, GROUP_BYTES = TILE * (2 + (FIFTH ? 4 : 0) + 16), HEAD = TILE * 4;
    static constexpr int BYTES = HEAD + GROUPS * GROUP_BYTES;
    static constexpr int TOP = FIFTH ? 31 : 15, CENTRE = 0, SCALES = 1;
    static constexpr bool MINIMUM = true;
    static constexpr int FIFTH_AT = 2 * TILE, NIBBLES_AT = FIFTH_AT + (FIFTH ? 4 * TILE : 0);
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 0, to);
        pack_halves(rows, 2, to + 32);
        for (int j = 0; j < GROUPS; j++) {
            uint8_t* group = to + HEAD + j * GROUP_BYTES;
            uint32_t bits[TILE] = {};
            uint8_t packed[TILE][16];
            const uint8_t* at[TILE];
            for (int r = 0; r < TILE; r++) {
                float scale, minimum;
                scale_and_min(rows[r] + 4, j, scale, minimum);
                group[r] = (uint8_t)scale;
                group[TILE + r] = (uint8_t)minimum;
                const uint8_t* q = rows[r] + (FIFTH ? 48 : 16) + 32 * (j / 2);
                const int shift = 4 * (j & 1);
                for (int i = 0; i < 16; i++) packed[r][i] = ((q[i] >> shift) & 15) | (((q[i + 16] >> shift) & 15) << 4);
                at[r] = packed[r];
                if (FIFTH)
                    for (int k = 0; k < GROUP; k++) bits[r] |= (uint32_t)((rows[r][16 + k] >> j) & 1) << k;
            }
            pack_nibbles(at, 0, group + NIBBLES_AT);
            if (FIFTH) pack_fifth_bits(bits, group + FIFTH_AT);
        }
    }
    static const uint8_t* group_at(const uint8_t* from, int j) { return from + HEAD + j * GROUP_BYTES; }
    static Rows scale(const uint8_t* from, int j, int) {
        return halves_at(from) * to_floats(load<Bytes>(group_at(from, j)));
    }
    static Rows minimum(const uint8_t* from, int j) {
        return -(halves_at(from + 32) * to_floats(load<Bytes>(group_at(from, j) + TILE)));
    }
    static void codes(const uint8_t* from, int j, Codes* to) {
        nibbles(group_at(from, j) + NIBBLES_AT, to);
        if (FIFTH) add_fifth_bits(group_at(from, j) + FIFTH_AT, to);
    }
};

// Q6_K: a half a row, then for each group two signed scales, nibbles, and the upper two bits: those of vector i in bits
// 2 i and 2 i + 1 of the first vector, those of vector i + 4 in the second.
struct Q6_KTile {
    using Source = Q6_K;
    static constexpr bool IS_FLOATS = false;
    static constexpr int GROUPS = 8, GROUP_BYTES = TILE * (2 + 16 + 8), HEAD = TILE * 2;
    static constexpr int BYTES = HEAD + GROUPS * GROUP_BYTES;
    static constexpr int TOP = 63, CENTRE = 32, SCALES = 2;
    static constexpr bool MINIMUM = false;
    static constexpr int NIBBLES_AT = 2 * TILE, UPPER_AT = NIBBLES_AT + 16 * TILE;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_halves(rows, 208, to);
        for (int j = 0; j < GROUPS; j++) {
            uint8_t* group = to + HEAD + j * GROUP_BYTES;
            const int half = j / 4, quarter = j % 4, shift = 4 * (quarter >> 1);
            std::memset(group + UPPER_AT, 0, 2 * sizeof(Codes));
            for (int r = 0; r < TILE; r++) {
                const uint8_t *low = rows[r] + 64 * half + 32 * (quarter & 1), *high = rows[r] + 128 + 32 * half;
                group[r] = rows[r][192 + 8 * half + 2 * quarter];
                group[TILE + r] = rows[r][192 + 8 * half + 2 * quarter + 1];
                for (int k = 0; k < 16; k++) {
                    const int at = (k / 4 * TILE + r) * 4 + k % 4;
                    group[NIBBLES_AT + at] = ((low[k] >> shift) & 15) | (((low[k + 16] >> shift) & 15) << 4);
                }
                for (int k = 0; k < GROUP; k++)
                    group[UPPER_AT + k / 16 * sizeof(Codes) + r * 4 + k % 4] |= ((high[k] >> 2 * quarter) & 3) << (k % 16 / 4 * 2);
            }
        }
    }
    static const uint8_t* group_at(const uint8_t* from, int j) { return from + HEAD + j * GROUP_BYTES; }
    static Rows scale(const uint8_t* from, int j, int h) {
        return halves_at(from) * to_floats(load<SignedBytes>(group_at(from, j) + h * TILE));
    }
    static Rows minimum(const uint8_t*, int) { return Floats{}; }
    static void codes(const uint8_t* from, int j, Codes* to) {
        const uint8_t* group = group_at(from, j);
        nibbles(group + NIBBLES_AT, to);
        for (int h = 0; h < 2; h++) {
            const uint8_t* upper = group + UPPER_AT + h * sizeof(Codes);
            auto add = [&](int v, auto&& bits) { add_by_register(upper, to[4 * h + v], bits); };
            add(0, [](CodePairs v) { return (v << 4) & 0x3030; });
            add(1, [](CodePairs v) { return (v << 2) & 0x3030; });
            add(2, [](CodePairs v) { return v & 0x3030; });
            add(3, [](CodePairs v) { return (v >> 2) & 0x3030; });
        }
    }
};

using Q4_0Tile = SmallTile<Q4_0, false, false>;
using Q4_1Tile = SmallTile<Q4_1, true, false>;
using Q5_0Tile = SmallTile<Q5_0, false, true>;
using Q5_1Tile = SmallTile<Q5_1, true, true>;
using Q4_KTile = LargeTile<Q4_K, false>;
using Q5_KTile = LargeTile<Q5_K, true>;

}  // namespace nanovllm
