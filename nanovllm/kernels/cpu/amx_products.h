// Products of many tokens by AMX, which multiplies bfloat16 and adds in float32.
//
// A float is the sum of three bfloat16, with 8 bits each. How they are multiplied depends on the weights:
//   - The codes of quantised weights, at most 8 bits, are bfloat16 themselves. They are multiplied with the three parts of
//     the activations, which takes three products; the sums of a group's 32 columns are then multiplied with its scale.
//   - Other weights are split, too: those that are floats, and codes with two scales a group. The products of parts i and j
//     with i + j < 3 are summed, six at most: those that are left out are below 2^-24 of the result.
//   - With int8 activations the first parts alone are multiplied: quantised weights are rounded to 8 bits, too.
#pragma once

#include "products.h"

namespace nanovllm {

#if defined(NANOVLLM_AMX)
constexpr int ROWS = Split::TOKENS, PAIRS = GROUP / 2;  // of a register: tokens or lanes of weights; pairs of columns

// A row of a register of weights: two columns of each of 16 rows. Loads across two cache lines take twice as long.
struct alignas(64) Line {
    uint16_t pairs[TILE][2];
};

template <typename T>
constexpr bool has_one_scale() {
    if constexpr (T::IS_FLOATS) return false;
    else return T::SCALES == 1;
}

template <typename T>
constexpr bool has_minimum() {
    if constexpr (T::IS_FLOATS) return false;
    else return T::MINIMUM;
}

// Some tiles as AMX reads them, for products with P parts of activations.
template <typename T, int P>
class AmxTiles {
   public:
    using S = typename T::Source;
    static constexpr int ACTIVATION_PARTS = P;
    static constexpr bool IS_SCALED = P == EXACT_PARTS && has_one_scale<T>();
    static constexpr int PARTS = P == 1 || IS_SCALED || std::is_same_v<S, BF16> ? 1 : std::is_same_v<S, F16> ? 2 : EXACT_PARTS;

    static constexpr bool MINIMUM = has_minimum<T>();
    static constexpr int CHUNK = P == 1 ? 16 : 4;  // groups: those of 32 tokens stay in the first-level cache for all tiles

    // Tiles that are multiplied at once, an even number: they stay in a second-level cache of 2 MiB, which all processors
    // with AMX have, beside 32 tokens. The more they are, the less often activations come from the third level.
    static int64_t at_once(int64_t columns) {
        const int64_t fit = (5 << 18) / (int64_t)sizeof(Line) / (blocks_of<T>(columns) * T::GROUPS * PARTS * PAIRS);
        return std::clamp<int64_t>(fit, 4, MOST) / 2 * 2;
    }
    static constexpr int64_t MOST = 16;

    void read(const Weight& w, int64_t begin, int64_t end) {
        groups_ = blocks_of<T>(w.columns) * T::GROUPS;
        const int64_t padded = (end - begin + 1) / 2 * 2;  // tiles are multiplied in pairs
        lines_.resize(padded * groups_ * PARTS * PAIRS);
        if (IS_SCALED) scales_.resize(padded * groups_), minima_.resize(padded * groups_);
        for (int64_t tile = begin; tile < end; tile++)
            for (int64_t g = 0; g < groups_; g++) {
                const uint8_t* block = w.data + tile * tile_bytes<T>(w.columns) + g / T::GROUPS * T::BYTES;
                read_group(block, (int)(g % T::GROUPS), tile - begin, g);
            }
    }

    int64_t groups() const { return groups_; }
    const Line* lines(int64_t tile, int64_t g) const { return &lines_[(tile * groups_ + g) * PARTS * PAIRS]; }
    const Floats& scale(int64_t tile, int64_t g) const { return scales_[tile * groups_ + g]; }
    const Floats& minimum(int64_t tile, int64_t g) const { return minima_[tile * groups_ + g]; }

   private:
    void read_group(const uint8_t* block, int j, int64_t tile, int64_t g) {
        Line* to = &lines_[(tile * groups_ + g) * PARTS * PAIRS];
        if constexpr (T::IS_FLOATS) {
            for (int k = 0; k < GROUP; k += 2) split(T::column(block, j, k), T::column(block, j, k + 1), to + k / 2);
        } else {
            Codes codes[VECTORS];
            T::codes(block, j, codes);
            const Floats minimum = T::minimum(block, j);
            if (IS_SCALED) scales_[tile * groups_ + g] = T::scale(block, j, 0), minima_[tile * groups_ + g] = minimum;
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
    std::vector<Line> lines_;               // [tiles][groups][PARTS][PAIRS]
    std::vector<Floats> scales_, minima_;  // [tiles][groups], if IS_SCALED
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

// Adds a group's products to them. x: a group of each block of tokens.
template <int PARTS, int P, int BLOCKS>
inline void add_products(const Line* low, const Line* high, const Split* const (&x)[BLOCKS]) {
    for (int i = 0; i < PARTS; i++) {
        Matrix<6>::load(low + i * PAIRS, sizeof(Line));
        Matrix<7>::load(high + i * PAIRS, sizeof(Line));
        for (int j = 0; j < std::min(P, EXACT_PARTS - i); j++) {
            Matrix<4>::load(x[0]->parts[j], sizeof(Line));
            if constexpr (BLOCKS == 2) Matrix<5>::load(x[1]->parts[j], sizeof(Line));
            Matrix<0>::add_product<4, 6>();
            Matrix<1>::add_product<4, 7>();
            if constexpr (BLOCKS == 2) {
                Matrix<2>::add_product<5, 6>();
                Matrix<3>::add_product<5, 7>();
            }
        }
    }
}

// results += two tiles, from `tile` on, times `count` groups from g0 on of the blocks of tokens at x.
template <int BLOCKS, typename Tiles>
inline void amx_chunk(const Tiles& tiles, int64_t tile, int64_t g0, int count, const Split* const (&x)[BLOCKS],
                      Floats (&results)[BLOCKS][2][ROWS]) {
    Floats sums[Tiles::IS_SCALED ? Tiles::CHUNK : 1][BLOCKS][2][ROWS];
    clear_sums();
    for (int g = 0; g < count; g++) {
        const Split* groups[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) groups[b] = x[b] + g0 + g;
        add_products<Tiles::PARTS, Tiles::ACTIVATION_PARTS, BLOCKS>(tiles.lines(tile, g0 + g), tiles.lines(tile + 1, g0 + g), groups);
        if (!Tiles::IS_SCALED) continue;
        store_sums<BLOCKS>(sums[g]);
        clear_sums();
    }
    if (!Tiles::IS_SCALED) store_sums<BLOCKS>(sums[0]);
    for (int b = 0; b < BLOCKS; b++)
        for (int r = 0; r < 2; r++) {
            Floats total[ROWS];  // registers
            for (int m = 0; m < ROWS; m++) total[m] = results[b][r][m];
            if constexpr (Tiles::IS_SCALED) {
                for (int g = 0; g < count; g++) {
                    const Floats scale = tiles.scale(tile + r, g0 + g), minimum = tiles.minimum(tile + r, g0 + g);
                    for (int m = 0; m < ROWS; m++) {
                        total[m] += sums[g][b][r][m] * scale;
                        if (Tiles::MINIMUM) total[m] += minimum * x[b][g0 + g].sums[m];
                    }
                }
            } else {
                for (int m = 0; m < ROWS; m++) total[m] += sums[0][b][r][m];
            }
            for (int m = 0; m < ROWS; m++) results[b][r][m] = total[m];
        }
}

// Tiles begin to end, which `tiles` holds, times BLOCKS blocks of tokens.
template <int BLOCKS, typename Tiles>
inline void amx_blocks(const Tiles& tiles, int64_t begin, int64_t end, const Tokens& x, int64_t block, const Output& out) {
    const Split* groups[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) groups[b] = x.splits + (block + b) * x.groups();
    Floats results[Tiles::MOST / 2][BLOCKS][2][ROWS] = {};
    for (int64_t g = 0; g < tiles.groups(); g += Tiles::CHUNK)
        for (int64_t tile = 0; tile < end - begin; tile += 2)
            amx_chunk<BLOCKS>(tiles, tile, g, (int)std::min<int64_t>(Tiles::CHUNK, tiles.groups() - g), groups, results[tile / 2]);
    for (int64_t m = 0; m < std::min<int64_t>(BLOCKS * ROWS, x.count - block * ROWS); m++)
        for (int64_t tile = 0; tile < end - begin; tile++)
            out.put(block * ROWS + m, begin + tile, results[tile / 2][m / ROWS][tile % 2][m % ROWS]);
}

// Some tiles for all tokens.
template <typename T, int P>
inline void amx_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, const Output& out) {
    thread_local AmxTiles<T, P> tiles;
    const MatrixShapes shapes;
    const int64_t blocks = (x.count + ROWS - 1) / ROWS, some = tiles.at_once(w.columns);
    for (; begin < end; begin += some) {
        const int64_t stop = std::min(end, begin + some);
        tiles.read(w, begin, stop);
        for (int64_t block = 0; block + 2 <= blocks; block += 2) amx_blocks<2>(tiles, begin, stop, x, block, out);
        if (blocks % 2) amx_blocks<1>(tiles, begin, stop, x, blocks - 1, out);
    }
}
#endif

}  // namespace nanovllm
