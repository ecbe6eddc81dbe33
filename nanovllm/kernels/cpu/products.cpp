// The products. To compile quickly this file is compiled several times at once, as part NANOVLLM_PART of NANOVLLM_PARTS:
// each holds the formats whose number leaves that remainder.
#include <vector>

#include "products.h"

namespace nanovllm {

constexpr int FEW = 8;         // tokens that one pass over the weights takes
constexpr int FEW_PASSES = 2;  // passes up to which decoding the weights anew is cheaper than the panels of `many`
#if defined(__AVX512F__)
constexpr int PANEL_TOKENS = 8;
#else
constexpr int PANEL_TOKENS = 2;
#endif
constexpr int PANEL_ROWS = 2 * TILE;
constexpr int PANEL_GROUPS = 8;  // of 32 columns: a panel takes 32 KiB

// R tiles for M tokens, at most FEW.
template <typename T, int R, int M>
inline void few(const Weight& w, int64_t tile, const Tokens& x, int64_t token, const Output& out) {
    const int64_t blocks = blocks_of<T>(w.columns), bytes = blocks * T::BYTES;
    const float* values = x.values + token * x.stride;
    const float* sums = x.sums + token * x.sum_stride;
    Floats acc[R][M] = {};
    for (int64_t b = 0; b < blocks; b++) {
        for (int j = 0; j < T::GROUPS; j++) {
            const int64_t g = b * T::GROUPS + j;
            const float* at = values + g * GROUP;
            Floats part[R][M][2] = {};
#pragma GCC unroll 2
            for (int i = 0; i < LANES; i++) {
                for (int r = 0; r < R; r++) {
                    Floats low, high;
                    T::pair(w.data + (tile + r) * bytes + b * T::BYTES, j, i, low, high);
                    for (int m = 0; m < M; m++) {
                        part[r][m][0] += low * at[m * x.stride + i];
                        part[r][m][1] += high * at[m * x.stride + i + LANES];
                    }
                }
            }
            for (int r = 0; r < R; r++) {
                const uint8_t* from = w.data + (tile + r) * bytes + b * T::BYTES;
                const Floats low = T::scale(from, j, 0), high = T::scale(from, j, 1), offset = T::offset(from, j);
                for (int m = 0; m < M; m++) {
                    if (T::SCALED) acc[r][m] += low * part[r][m][0] + high * part[r][m][1];
                    else acc[r][m] += part[r][m][0] + part[r][m][1];
                    if (T::OFFSET) acc[r][m] += offset * sums[m * x.sum_stride + g];
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) out.put(token + m, tile + r, acc[r][m]);
}

template <typename T, int M>
inline void few_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, int64_t token, const Output& out) {
    constexpr int R = M == 1 ? 4 : M <= 4 ? 2 : 1;
    int64_t tile = begin;
    for (; tile + R <= end; tile += R) few<T, R, M>(w, tile, x, token, out);
    for (; tile < end; tile++) few<T, 1, M>(w, tile, x, token, out);
}

template <typename T>
inline void few_tokens(const Weight& w, int64_t begin, int64_t end, const Tokens& x, int64_t token, int count, const Output& out) {
    if (count == FEW) return few_tiles<T, FEW>(w, begin, end, x, token, out);
    if (count >= 4) {  // a case for each number of tokens would take long to compile
        few_tiles<T, 4>(w, begin, end, x, token, out);
        token += 4;
        count -= 4;
    }
    if (count == 1) few_tiles<T, 1>(w, begin, end, x, token, out);
    if (count == 2) few_tiles<T, 2>(w, begin, end, x, token, out);
    if (count == 3) few_tiles<T, 3>(w, begin, end, x, token, out);
}

// A panel [columns][PANEL_ROWS] of decoded weights times COUNT tokens, added to sums [token][PANEL_ROWS].
template <int COUNT>
inline void panel_times(const float* panel, int64_t columns, const float* x, int64_t stride, float* sums) {
    Floats acc[COUNT][2];
    for (int m = 0; m < COUNT; m++) {
        acc[m][0] = load<Floats>(sums + m * PANEL_ROWS);
        acc[m][1] = load<Floats>(sums + m * PANEL_ROWS + LANES);
    }
    for (int64_t k = 0; k < columns; k++) {
        const Floats low = load<Floats>(panel + k * PANEL_ROWS), high = load<Floats>(panel + k * PANEL_ROWS + LANES);
        for (int m = 0; m < COUNT; m++) {
            const float value = x[m * stride + k];
            acc[m][0] += low * value;
            acc[m][1] += high * value;
        }
    }
    for (int m = 0; m < COUNT; m++) {
        store(sums + m * PANEL_ROWS, acc[m][0]);
        store(sums + m * PANEL_ROWS + LANES, acc[m][1]);
    }
}

// Tiles `first` and `first` + 1, if there, for any number of tokens.
template <typename T>
inline void many(const Weight& w, int64_t first, const Tokens& x, const Output& out) {
    const int64_t blocks = blocks_of<T>(w.columns), bytes = blocks * T::BYTES;
    const int64_t groups = blocks * T::GROUPS;
    const int tiles = first + 1 < tiles_of(w.rows) ? 2 : 1;
    alignas(64) thread_local float panel[PANEL_GROUPS * GROUP * PANEL_ROWS];
    thread_local std::vector<float> sums;
    sums.assign((size_t)x.count * PANEL_ROWS, 0.0f);
    for (int64_t g0 = 0; g0 < groups; g0 += PANEL_GROUPS) {
        const int64_t some = std::min<int64_t>(PANEL_GROUPS, groups - g0);
        for (int r = 0; r < tiles; r++) {
            for (int64_t g = 0; g < some; g++) {
                const int j = (int)((g0 + g) % T::GROUPS);
                const uint8_t* from = w.data + (first + r) * bytes + (g0 + g) / T::GROUPS * T::BYTES;
                const Floats s0 = T::scale(from, j, 0), s1 = T::scale(from, j, 1), offset = T::offset(from, j);
                float* to = panel + g * GROUP * PANEL_ROWS + r * TILE;
#pragma GCC unroll 2
                for (int i = 0; i < LANES; i++) {
                    Floats low, high;
                    T::pair(from, j, i, low, high);
                    if (T::SCALED) low = low * s0 + offset, high = high * s1 + offset;
                    store(to + i * PANEL_ROWS, low);
                    store(to + (i + LANES) * PANEL_ROWS, high);
                }
            }
        }
        const float* values = x.values + g0 * GROUP;
        int64_t m = 0;
        for (; m + PANEL_TOKENS <= x.count; m += PANEL_TOKENS)
            panel_times<PANEL_TOKENS>(panel, some * GROUP, values + m * x.stride, x.stride, sums.data() + m * PANEL_ROWS);
        for (; m < x.count; m++)
            panel_times<1>(panel, some * GROUP, values + m * x.stride, x.stride, sums.data() + m * PANEL_ROWS);
    }
    for (int64_t m = 0; m < x.count; m++)
        for (int r = 0; r < tiles; r++) out.put(m, first + r, load<Floats>(sums.data() + m * PANEL_ROWS + r * TILE));
}

template <int PART>
void product_part(Threads& threads, const Weight& w, const Tokens& x, const Output& out) {
    with_tile<NANOVLLM_PARTS, PART>(w.format, [&](auto format) {
        using T = decltype(format);
        const int64_t tiles = tiles_of(w.rows);
        if (x.count <= FEW * FEW_PASSES) {
            // A few times as many tasks as threads, so that a thread that is slow takes fewer.
            const int64_t wanted = (tiles + 6 * threads.count() - 1) / (6 * threads.count());
            const int64_t chunk = (wanted + 3) / 4 * 4;
            threads.run((tiles + chunk - 1) / chunk, [&](int64_t task) {
                const int64_t begin = task * chunk, end = std::min(tiles, begin + chunk);
                for (int64_t m = 0; m < x.count; m += FEW)
                    few_tokens<T>(w, begin, end, x, m, (int)std::min<int64_t>(FEW, x.count - m), out);
            });
        } else {
            threads.run((tiles + 1) / 2, [&](int64_t task) { many<T>(w, 2 * task, x, out); });
        }
    });
}

template void product_part<NANOVLLM_PART>(Threads&, const Weight&, const Tokens&, const Output&);

}  // namespace nanovllm
