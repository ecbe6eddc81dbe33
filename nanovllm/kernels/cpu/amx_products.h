// Products of many tokens by AMX, which multiplies bfloat16 and adds in float32.
//
// A float is the sum of three bfloat16, with 8 bits each. Of weights that are floats the products of parts i and j with
// i + j < 3 are summed: those that are left out are below 2^-24 of the result. With int8 activations the first parts alone
// are multiplied, quantised weights are rounded to 8 bits, too.
#pragma once

#include "products.h"

namespace nanovllm {

#if defined(NANOVLLM_AMX)
constexpr int ROWS = 16, PAIRS = GROUP / 2;  // of a register: tokens or lanes of weights; pairs of columns

// bfloat16 that a weight of a tile format is split into.
template <typename T>
constexpr int weight_parts() {
    using S = typename T::Source;
    return !T::IS_FLOATS || std::is_same_v<S, BF16> ? 1 : std::is_same_v<S, F16> ? 2 : EXACT_PARTS;
}

// fn(columns k and k + 1 of 16 rows, k) for group j of the super-block at `block`.
template <typename T, typename Fn>
inline void column_pairs(const uint8_t* block, int j, Fn&& fn) {
    if constexpr (T::IS_FLOATS) {
        for (int k = 0; k < GROUP; k += 2) fn(T::column(block, j, k), T::column(block, j, k + 1), k);
    } else {
        Codes codes[VECTORS];
        T::codes(block, j, codes);
        const Floats minimum = T::minimum(block, j);
        for (int k = 0; k < GROUP; k += 2) {
            const Floats scale = T::scale(block, j, k * T::SCALES / GROUP);
            auto column = [&](int i) {
                const Ints code = ((Ints)codes[i / 4] >> 8 * (i % 4)) & 255;
                const Floats value = to_floats(code - T::CENTRE) * scale;
                return T::MINIMUM ? value + minimum : value;
            };
            fn(column(k), column(k + 1), k);
        }
    }
}

// A tile as AMX reads weights: [PARTS][groups][PAIRS][16 rows][2].
template <typename T, int PARTS>
inline void split_tile(const uint8_t* tile, int64_t groups, uint16_t* to) {
    for (int64_t g = 0; g < groups; g++)
        column_pairs<T>(tile + g / T::GROUPS * T::BYTES, (int)(g % T::GROUPS), [&](Floats a, Floats b, int k) {
#pragma GCC unroll 3
            for (int p = 0; p < PARTS; p++) {
                typedef uint32_t Bits __attribute__((vector_size(64)));
                const Bits high = (Bits)b + 0x8000, low = (Bits)a + 0x8000;  // to the nearest
                constexpr uint32_t upper = 0xffff0000;
                store(to + ((p * groups + g) * PAIRS + k / 2) * 2 * ROWS, (high & upper) | (low >> 16));
                a -= (Floats)(low & upper);
                b -= (Floats)(high & upper);
            }
        });
}

// Two tiles, weights [2][PARTS][groups], times BLOCKS times 16 tokens, or as many as the registers have rows.
// results: [2][BLOCKS][16].
template <int PARTS, int OF_ACTIVATIONS, int BLOCKS>
inline void amx_times(const uint16_t* weights, int64_t groups, const Tokens& x, int64_t token, Floats* results) {
    constexpr int64_t SIZE = GROUP * ROWS, BYTES = GROUP * sizeof(uint16_t);
    const int64_t part = x.split_stride(), row = EXACT_PARTS * part, pitch = row * sizeof(uint16_t);
    const uint16_t *low = x.splits + token * row, *high = low + ROWS * row;
    Matrix<0>::clear(), Matrix<1>::clear(), Matrix<2>::clear(), Matrix<3>::clear();
    for (int64_t g = 0; g < groups; g++)
        for (int j = 0; j < OF_ACTIVATIONS; j++) {
            Matrix<4>::load(low + j * part + g * GROUP, pitch);
            if constexpr (BLOCKS == 2) Matrix<5>::load(high + j * part + g * GROUP, pitch);
            for (int i = 0; i < std::min(PARTS, EXACT_PARTS - j); i++) {
                const uint16_t* from = weights + (i * groups + g) * SIZE;
                Matrix<6>::load(from, BYTES);
                Matrix<7>::load(from + PARTS * groups * SIZE, BYTES);
                Matrix<0>::add_product<4, 6>();
                Matrix<1>::add_product<4, 7>();
                if constexpr (BLOCKS == 2) {
                    Matrix<2>::add_product<5, 6>();
                    Matrix<3>::add_product<5, 7>();
                }
            }
        }
    Matrix<0>::store(results, sizeof(Floats));
    Matrix<1>::store(results + BLOCKS * ROWS, sizeof(Floats));
    if constexpr (BLOCKS == 2) {
        Matrix<2>::store(results + ROWS, sizeof(Floats));
        Matrix<3>::store(results + 3 * ROWS, sizeof(Floats));
    }
}

constexpr int AMX_TILES = 8;  // that are split at once: they and some tokens stay in the second-level cache

// Tiles begin to end, AMX_TILES at most, for all tokens.
template <typename T>
inline void some_amx_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, const Output& out) {
    constexpr int PARTS = weight_parts<T>(), OF_ACTIVATIONS = T::IS_FLOATS ? EXACT_PARTS : 1;
    const int64_t groups = blocks_of<T>(w.columns) * T::GROUPS, lines = PARTS * groups * PAIRS;
    thread_local std::vector<Line> weights;
    weights.resize((AMX_TILES + 1) * lines);  // pairs of tiles: the last may have none beside it
    for (int64_t tile = begin; tile < end; tile++)
        split_tile<T, PARTS>(w.data + tile * tile_bytes<T>(w.columns), groups, weights[(tile - begin) * lines].values);
    auto times = [&](auto blocks, int64_t token, int rows) {
        for (int64_t tile = begin; tile < end; tile += 2) {
            Floats results[2][blocks][ROWS];
            amx_times<PARTS, OF_ACTIVATIONS, blocks>(weights[(tile - begin) * lines].values, groups, x, token, results[0][0]);
            for (int r = 0; r < std::min<int64_t>(2, end - tile); r++)
                for (int b = 0; b < blocks; b++)
                    for (int m = 0; m < rows; m++) out.put(token + b * ROWS + m, tile + r, results[r][b][m]);
        }
    };
    const int64_t whole = x.count / ROWS * ROWS;
    {
        const MatrixShapes shapes(ROWS, PAIRS);
        for (int64_t m = 0; m + ROWS < whole; m += 2 * ROWS) times(std::integral_constant<int, 2>{}, m, ROWS);
        if (whole / ROWS % 2) times(std::integral_constant<int, 1>{}, whole - ROWS, ROWS);
    }
    if (const int rest = (int)(x.count - whole)) {
        const MatrixShapes shapes(rest, PAIRS);
        times(std::integral_constant<int, 1>{}, whole, rest);
    }
}

template <typename T>
inline void amx_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, const Output& out) {
    for (int64_t tile = begin; tile < end; tile += AMX_TILES)
        some_amx_tiles<T>(w, tile, std::min(end, tile + AMX_TILES), x, out);
}
#endif

}  // namespace nanovllm
