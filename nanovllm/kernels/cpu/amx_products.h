// Products of many tokens by AMX, which multiplies bfloat16 and adds in float32.
//
// A float is the sum of three bfloat16, with 8 bits each. How they are multiplied depends on the weights:
//   - The codes of quantised weights, at most 8 bits, are bfloat16 themselves. They are multiplied with the three parts of
//     the activations, which takes three products; the sums of a group's 32 columns are then multiplied with its scale.
//   - Other weights are split, too: those that are floats, and codes with two scales a group. The products of parts i and j
//     with i + j < 3 are summed, six at most: those that are left out are below 2^-24 of the result.
//   - With int8 activations the first parts alone are multiplied: quantised weights are rounded to 8 bits, too. So are those
//     of bfloat16 weights with bfloat16 activations.
#pragma once

#include "products.h"

namespace nanovllm {

#if defined(NANOVLLM_AMX)
constexpr int ROWS = Split::TOKENS, PAIRS = GROUP / 2;  // of a register: tokens or lanes of weights; pairs of columns

// A row of a register of weights: two columns of each of 16 rows. Loads across two cache lines take twice as long.
struct alignas(64) Line {
    uint16_t pairs[TILE][2];
};

// Registers 0 to 3: the sums of two tiles of weights and BLOCKS blocks of 16 tokens, [BLOCKS][2].
inline void clear_sums() { Matrix<0>::clear(), Matrix<1>::clear(), Matrix<2>::clear(), Matrix<3>::clear(); }

template <int BLOCKS>
inline void store_sums(Floats (&to)[BLOCKS][2][ROWS]) {
    Matrix<0>::store(to[0][0], sizeof(Floats));
    Matrix<1>::store(to[0][1], sizeof(Floats));
    if constexpr (BLOCKS == 2) {
        Matrix<2>::store(to[1][0], sizeof(Floats));
        Matrix<3>::store(to[1][1], sizeof(Floats));
    }
}

// Adds a group's products to them: PARTS parts of two tiles, P parts of a group of BLOCKS blocks of tokens.
// stride: from part to part of the activations. A block has EXACT_PARTS.
template <int PARTS, int P, int BLOCKS>
inline void add_products(const Line* low, const Line* high, const Split* x, int64_t stride) {
    for (int i = 0; i < PARTS; i++) {
        Matrix<6>::load(low + i * PAIRS, sizeof(Line));
        Matrix<7>::load(high + i * PAIRS, sizeof(Line));
        for (int j = 0; j < std::min(P, EXACT_PARTS - i); j++) {
            Matrix<4>::load(x + j * stride, sizeof(Line));
            if constexpr (BLOCKS == 2) Matrix<5>::load(x + (EXACT_PARTS + j) * stride, sizeof(Line));
            Matrix<0>::add_product<4, 6>();
            Matrix<1>::add_product<4, 7>();
            if constexpr (BLOCKS == 2) {
                Matrix<2>::add_product<5, 6>();
                Matrix<3>::add_product<5, 7>();
            }
        }
    }
}

// Some tiles as AMX reads them: pairs of columns as bfloat16, and scales and minima as float32. Formats that are multiplied
// alike have the same type, which compiles faster.
//   P           parts of activations;  PARTS  of weights
//   IS_SCALED   a group's sums are multiplied with its scale;  MINIMUM  and its minimum with the sum of activations
template <int P, int PARTS, bool IS_SCALED, bool MINIMUM>
class AmxTiles {
   public:
    // Groups: those of 32 tokens stay in the first-level cache for all tiles. Scaled ones have sums of their own there, so
    // fewer fit. Others are added up over a chunk: another number of groups changes the last bits.
    static constexpr int CHUNK = P == 1 ? 16 : IS_SCALED ? 2 : 4;
    static constexpr int MOST = 16;  // tiles that are multiplied at once

    // Tiles to multiply at once, an even number: they stay in a second-level cache of 2 MiB, which all processors with AMX
    // have, beside 32 tokens. The more they are, the less often activations come from the third level.
    static int64_t at_once(int64_t groups) {
        const int64_t fit = (5 << 18) / (int64_t)sizeof(Line) / (groups * PARTS * PAIRS);
        return std::clamp<int64_t>(fit, 4, MOST) / 2 * 2;
    }

    template <typename T>
    void read(const Weight& w, int64_t begin, int64_t end) {
        groups_ = blocks_of<T>(w.columns) * T::GROUPS;
        const int64_t padded = (end - begin + 1) / 2 * 2;  // tiles are multiplied in pairs
        lines_.resize(padded * groups_ * PARTS * PAIRS);
        if (IS_SCALED) scales_.resize(padded * groups_);
        if (IS_SCALED && MINIMUM) minima_.resize(padded * groups_);
        for (int64_t tile = begin; tile < end; tile++)
            for (int64_t g = 0; g < groups_; g++) {
                const uint8_t* block = w.data + tile * tile_bytes<T>(w.columns) + g / T::GROUPS * T::BYTES;
                read_group<T>(block, (int)(g % T::GROUPS), (tile - begin) * groups_ + g);
            }
    }

    // results += two tiles, from `tile` on, times BLOCKS blocks of tokens from `block` on: `count` groups from g0 on.
    template <int BLOCKS>
    void multiply(int64_t tile, const Tokens& x, int64_t block, int64_t g0, int count,
                  Floats (&results)[BLOCKS][2][ROWS]) const {
        const Split* splits = x.splits + block * EXACT_PARTS * x.groups() + g0;
        Floats sums[IS_SCALED ? CHUNK : 1][BLOCKS][2][ROWS];
        clear_sums();
        for (int g = 0; g < count; g++) {
            add_products<PARTS, P, BLOCKS>(lines(tile, g0 + g), lines(tile + 1, g0 + g), splits + g, x.groups());
            if (!IS_SCALED) continue;
            store_sums<BLOCKS>(sums[g]);
            clear_sums();
        }
        if (!IS_SCALED) store_sums<BLOCKS>(sums[0]);
        for (int b = 0; b < BLOCKS; b++)
            for (int r = 0; r < 2; r++) {
                Floats total[ROWS];  // registers
                for (int m = 0; m < ROWS; m++) total[m] = results[b][r][m];
                for (int g = 0; g < (IS_SCALED ? count : 1); g++) {
                    const int64_t at = (tile + r) * groups_ + g0 + g;
                    const float* of_tokens = (const float*)(x.sums + (block + b) * x.groups() + g0 + g);
                    for (int m = 0; m < ROWS; m++) {
                        total[m] += IS_SCALED ? sums[g][b][r][m] * scales_[at] : sums[g][b][r][m];
                        if (IS_SCALED && MINIMUM) total[m] += minima_[at] * of_tokens[m];
                    }
                }
                for (int m = 0; m < ROWS; m++) results[b][r][m] = total[m];
            }
    }

    int64_t groups() const { return groups_; }

   private:
    const Line* lines(int64_t tile, int64_t g) const { return &lines_[(tile * groups_ + g) * PARTS * PAIRS]; }

    // Group j of the super-block at `block`, to place `at` of [tiles][groups].
    template <typename T>
    void read_group(const uint8_t* block, int j, int64_t at) {
        Line* to = &lines_[at * PARTS * PAIRS];
        if constexpr (T::IS_FLOATS) {
            for (int k = 0; k < GROUP; k += 2) split(T::column(block, j, k), T::column(block, j, k + 1), to + k / 2);
        } else {
            Codes codes[VECTORS];
            T::codes(block, j, codes);
            const Floats minimum = T::minimum(block, j);
            if (IS_SCALED) scales_[at] = T::scale(block, j, 0);
            if (IS_SCALED && MINIMUM) minima_[at] = minimum;
            for (int k = 0; k < GROUP; k += 2) {
                const Floats scale = T::scale(block, j, k * T::SCALES / GROUP);
                auto column = [&](int i) {
                    const Floats code = to_floats((((Ints)codes[i / 4] >> 8 * (i % 4)) & 255) - T::CENTRE);
                    return IS_SCALED ? code : T::MINIMUM ? code * scale + minimum : code * scale;
                };
                split(column(k), column(k + 1), to + k / 2);
            }
        }
    }

    // Two columns to `to[p * PAIRS]` for each part p.
    static void split(Floats a, Floats b, Line* to) {
        typedef uint32_t Bits __attribute__((vector_size(64)));
        constexpr uint32_t upper = 0xffff0000, half = IS_SCALED ? 0 : 0x8000;  // to the nearest, or exact
#pragma GCC unroll 3
        for (int p = 0; p < PARTS; p++) {
            const Bits low = (Bits)a + half, high = (Bits)b + half;
            store(to + p * PAIRS, (high & upper) | (low >> 16));
            a -= (Floats)(low & upper);
            b -= (Floats)(high & upper);
        }
    }

    int64_t groups_ = 0;
    std::vector<Line> lines_;              // [tiles][groups][PARTS][PAIRS]
    std::vector<Floats> scales_, minima_;  // [tiles][groups]
};

// Those of a tile format.
template <typename T, int P>
auto amx_tiles_of() {
    using S = typename T::Source;
    if constexpr (T::IS_FLOATS)
        return AmxTiles<P, std::is_same_v<S, BF16> ? 1 : std::is_same_v<S, F16> ? 2 : P, false, false>{};
    else if constexpr (P == 1) return AmxTiles<1, 1, false, false>{};
    else return AmxTiles<P, T::SCALES == 1 ? 1 : P, T::SCALES == 1, T::SCALES == 1 && T::MINIMUM>{};
}

// Tiles begin to end, which `tiles` holds, times BLOCKS blocks of tokens.
template <int BLOCKS, typename Tiles>
inline void amx_blocks(const Tiles& tiles, int64_t begin, int64_t end, const Tokens& x, int64_t block, const Output& out) {
    Floats results[Tiles::MOST / 2][BLOCKS][2][ROWS] = {};
    for (int64_t g = 0; g < tiles.groups(); g += Tiles::CHUNK) {
        const int count = (int)std::min<int64_t>(Tiles::CHUNK, tiles.groups() - g);
        for (int64_t tile = 0; tile < end - begin; tile += 2)
            tiles.template multiply<BLOCKS>(tile, x, block, g, count, results[tile / 2]);
    }
    for (int64_t m = 0; m < std::min<int64_t>(BLOCKS * ROWS, x.count - block * ROWS); m++)
        for (int64_t tile = 0; tile < end - begin; tile++)
            out.put(block * ROWS + m, begin + tile, results[tile / 2][m / ROWS][tile % 2][m % ROWS]);
}

// Some tiles for all tokens.
template <typename T, int P>
inline void amx_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, const Output& out) {
    thread_local auto tiles = amx_tiles_of<T, P>();
    const MatrixShapes shapes;
    const int64_t blocks = (x.count + ROWS - 1) / ROWS, some = tiles.at_once(blocks_of<T>(w.columns) * T::GROUPS);
    for (; begin < end; begin += some) {
        const int64_t stop = std::min(end, begin + some);
        tiles.template read<T>(w, begin, stop);
        for (int64_t block = 0; block + 2 <= blocks; block += 2) amx_blocks<2>(tiles, begin, stop, x, block, out);
        if (blocks % 2) amx_blocks<1>(tiles, begin, stop, x, blocks - 1, out);
    }
}
#endif

}  // namespace nanovllm
