// Tiles of what checkpoints of safetensors hold: integers of 4 bits with a scale for some columns, and 8-bit floats.
#pragma once

#include <cmath>

#include "tiles.h"

namespace nanovllm {

inline Rows floats_at(const uint8_t* from) {
    Rows rows;
    std::memcpy(rows.at, from, sizeof rows.at);
    return rows;
}

inline void pack_floats(const uint8_t* const* rows, int at, uint8_t* to) {
    for (int r = 0; r < TILE; r++) std::memcpy(to + 4 * r, rows[r] + at, 4);
}

// 4 bits, with a scale and a minimum for the columns of a super-block: 16 of each, then the nibbles of each group.
template <typename S>
struct Int4Tile {
    using Source = S;
    static constexpr bool IS_FLOATS = false;
    static constexpr int GROUPS = S::BLOCK / GROUP, BYTES = TILE * S::BYTES;
    static constexpr int TOP = 15, CENTRE = 0, SCALES = 1;
    static constexpr bool MINIMUM = true;
    static constexpr int MINIMUM_AT = 4 * TILE, NIBBLES_AT = 8 * TILE;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        pack_floats(rows, 0, to);
        pack_floats(rows, 4, to + MINIMUM_AT);
        for (int j = 0; j < GROUPS; j++) pack_nibbles(rows, 8 + 16 * j, to + NIBBLES_AT + j * 16 * TILE);
    }
    static Rows scale(const uint8_t* from, int, int) { return floats_at(from); }
    static Rows minimum(const uint8_t* from, int) { return floats_at(from + MINIMUM_AT); }
    static void codes(const uint8_t* from, int j, Codes* to) { nibbles(from + NIBBLES_AT + j * 16 * TILE, to); }
};

// Floats of 8 bits with a scale for 128 columns: 16 scales, times 256, then a vector for each column. If one of a row's
// 128 is NaN, its scale is, so that products need not look for it.
struct E4M3Tile {
    using Source = E4M3;
    static constexpr bool IS_FLOATS = true;
    static constexpr int GROUPS = Source::BLOCK / GROUP, BYTES = TILE * Source::BYTES, VALUES_AT = 4 * TILE;
    static void pack(const uint8_t* const* rows, uint8_t* to) {
        for (int r = 0; r < TILE; r++) {
            float scale = field<float>(rows[r]) * 256.0f;
            for (int k = 0; k < Source::BLOCK; k++) {
                const uint8_t value = rows[r][4 + k];
                if ((value & 0x7f) == 0x7f) scale = NAN;
                to[VALUES_AT + k * TILE + r] = value;
            }
            std::memcpy(to + 4 * r, &scale, 4);
        }
    }
    static Rows column(const uint8_t* from, int j, int k) {
        return floats_of_e4m3(from + VALUES_AT + (j * GROUP + k) * TILE) * floats_at(from);
    }
};

}  // namespace nanovllm
