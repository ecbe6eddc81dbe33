// The products. To compile quickly this file is compiled several times at once, as part NANOVLLM_PART of NANOVLLM_PARTS:
// each holds the formats whose number leaves that remainder.
#include "products.h"

#include "amx_products.h"
#include "dots.h"

namespace nanovllm {

// ---- Quantised weights

// Sums of one group's parts as floats.
template <int P>
inline Floats joined(const Ints* sums) {
    if constexpr (P == 1) return to_floats(sums[0]);
    // The upper two fit in 32 bits, three do not.
    else return to_floats((sums[2] << 8) + sums[1]) * 256.0f + to_floats(sums[0]);
}

// acc[m] += codes of group j of the super-block at `block` times group x[m * stride] of M tokens.
template <typename T, int P, int M>
inline void group_times(const uint8_t* block, int j, const Codes* codes, const Rows* scales, const Integers<P>* x,
                        int64_t stride, Floats* acc) {
    constexpr int HALVES = T::SCALES;
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    const Rows minimum = T::MINIMUM ? T::minimum(block, j) : Rows(Floats{});
    if constexpr (ALONE<T::TOP, P, M>)
        group_of_eights_alone<T::TOP, T::CENTRE, HALVES, T::MINIMUM, P, M>(codes, scales, minimum, x, stride, acc);
    else group_of_eights<T::TOP, T::CENTRE, HALVES, T::MINIMUM, P, M>(codes, scales, minimum, x, stride, acc);
#else
    Ints sums[HALVES][M][P];
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++)
            for (int p = 0; p < P; p++) {
                const auto& of = x[m * stride].sums;
                const int32_t sum = HALVES == 2 ? of[h][p] : of[0][p] + of[1][p];
                fill(sums[h][m][p], T::CENTRE ? -sum * T::CENTRE : 0);
            }
    dots<T::TOP, HALVES, M, P>(codes, x, stride, sums);
    for (int m = 0; m < M; m++) {
        for (int h = 0; h < HALVES; h++) add_product(acc[m], joined<P>(sums[h][m]), scales[h] * x[m * stride].step);
        if (T::MINIMUM) add_product(acc[m], T::minimum(block, j), x[m * stride].sum);
    }
#endif
}

// A tile for M tokens: several at once share the decoding of the weights, and as many as registers hold their loads.
template <typename T, int P, int M>
inline void tile_times(const Weight& w, int64_t tile, const Tokens& x, int64_t token, const Output& out) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    constexpr int AT_ONCE = 8;  // one after the other
#else
    constexpr int AT_ONCE = P == 1 ? 8 : 4;
#endif
    constexpr int AHEAD = 2048, PIECE = T::BYTES / T::GROUPS;
    const int64_t blocks = blocks_of<T>(w.columns);
    const uint8_t* block = w.data + tile * blocks * T::BYTES;
    Floats acc[M] = {};
    for (int64_t b = 0; b < blocks; b++, block += T::BYTES) {
        for (int j = 0; j < T::GROUPS; j++) {
            // Tiles follow each other in memory. A whole super-block at once would hold up the loads of its groups.
            for (int i = 0; i < PIECE; i += 64) __builtin_prefetch(block + AHEAD + j * PIECE + i);
            const Integers<P>* group = x.group<P>(token, b * T::GROUPS + j);
            Codes codes[VECTORS];
            T::codes(block, j, codes);
            Rows scales[T::SCALES];
            for (int h = 0; h < T::SCALES; h++) scales[h] = T::scale(block, j, h);
            if constexpr (M <= AT_ONCE) group_times<T, P, M>(block, j, codes, scales, group, x.groups(), acc);
            else
                for (int m = 0; m < M; m += AT_ONCE)
                    group_times<T, P, AT_ONCE>(block, j, codes, scales, group + m * x.groups(), x.groups(), acc + m);
        }
    }
    for (int m = 0; m < M; m++) out.put(token + m, tile, acc[m]);
}

// Some tiles for all tokens, a few tokens after the other: these stay in the first-level cache.
template <typename T, int P>
inline void quantised_tiles(const Weight& w, int64_t begin, int64_t end, const Tokens& x, const Output& out) {
    auto times = [&](auto count, int64_t token) {
        for (int64_t tile = begin; tile < end; tile++) tile_times<T, P, count>(w, tile, x, token, out);
    };
    int64_t m = 0;
    for (; m + 8 <= x.count; m += 8) times(std::integral_constant<int, 8>{}, m);
    if (m + 4 <= x.count) {  // a case for each number of tokens would take long to compile
        times(std::integral_constant<int, 4>{}, m);
        m += 4;
    }
    if (x.count - m == 1) times(std::integral_constant<int, 1>{}, m);
    if (x.count - m == 2) times(std::integral_constant<int, 2>{}, m);
    if (x.count - m == 3) times(std::integral_constant<int, 3>{}, m);
}

// ---- Weights that are floats

// Tokens that one pass over a tile takes: their sums are in registers.
#if defined(__AVX512F__)
constexpr int FEW = 8;
#else
constexpr int FEW = 3;
#endif
// A panel: weights of some rows and columns as floats, in the first-level cache, that are multiplied with PANEL_TOKENS tokens
// at once. Registers hold a sum for each row and token: as a product takes four cycles, at least eight must be independent.
#if defined(__AVX512F__)
constexpr int PANEL_TOKENS = 8, PANEL_TILES = 2;
#elif defined(__AVX2__)
constexpr int PANEL_TOKENS = 6, PANEL_TILES = 1;
#else
constexpr int PANEL_TOKENS = 2, PANEL_TILES = 2;
#endif
constexpr int PANEL_ROWS = PANEL_TILES * TILE;
constexpr int PANEL_GROUPS = 16 / PANEL_TILES;  // of 32 columns: a panel of floats takes 32 KiB
// Columns whose products are one sum: sums of sums are as exact as products of integers. They take 2 % of the time.
constexpr int SUMMED = PANELS_OF_CODES ? 64 : PANEL_GROUPS * GROUP;
// An element of a panel: a float, or a pair of bfloat16, which are two columns.
template <typename Element>
constexpr int COLUMNS_OF = std::is_same_v<Element, float> ? 1 : 2;

// Whether one or two tokens, which leave a processor time to fetch a stream by itself, are faster if instructions fetch ahead
// as well: on Intel's, not on AMD's (docs/log/cpu.md).
inline bool fetches_for_one() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// A tile for M tokens, at most FEW, in the order of memory. AHEAD: bytes that are fetched ahead, 0: none. Even columns are one
// sum, odd ones another.
template <typename T, int M, int AHEAD>
inline void few(const Weight& w, int64_t tile, const Tokens& x, int64_t token, const Output& out) {
    constexpr int PIECE = T::BYTES / T::GROUPS / LANES;  // bytes of two columns
    const int64_t blocks = blocks_of<T>(w.columns);
    const float* values = x.values + token * x.stride;
    const uint8_t* block = w.data + tile * blocks * T::BYTES;
    Floats even[M] = {}, odd[M] = {};
    const auto two_columns = [&](int j, int i) {
        // Tiles follow each other in memory. One line after the other: many at once would hold up the loads between them.
        for (int k = 0; AHEAD && k < PIECE; k += 64) __builtin_prefetch(block + AHEAD + (j * LANES + i) * PIECE + k);
        const Rows left = T::column(block, j, 2 * i);
        for (int m = 0; m < M; m++) add_product(even[m], left, values[m * x.stride + 2 * i]);
        const Rows right = T::column(block, j, 2 * i + 1);
        for (int m = 0; m < M; m++) add_product(odd[m], right, values[m * x.stride + 2 * i + 1]);
    };
    for (int64_t b = 0; b < blocks; b++, block += T::BYTES)
        for (int j = 0; j < T::GROUPS; j++, values += GROUP)
            if constexpr (M <= 3) {  // with more tokens GCC would write sums to memory
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) two_columns(j, i);
            } else {
#pragma GCC unroll 4
                for (int i = 0; i < LANES; i++) two_columns(j, i);
            }
    for (int m = 0; m < M; m++) out.put(token + m, tile, even[m] + odd[m]);
}

// A tile for any number of tokens. After the first of them its weights are in a cache.
template <typename T, int M = FEW>
inline void few_tokens(const Weight& w, int64_t tile, const Tokens& x, int64_t token, const Output& out) {
    constexpr int AHEAD = 6144;
    const bool ahead = M >= 3 || fetches_for_one();
    for (; token + M <= x.count; token += M) (ahead ? few<T, M, AHEAD> : few<T, M, M < 3 ? 0 : AHEAD>)(w, tile, x, token, out);
    if constexpr (M > 1)
        if (token < x.count) few_tokens<T, M - 1>(w, tile, x, token, out);
}

// to += weights times the float or pair at x.
inline void add_element(Register& to, const Register& weights, const float* x) { to += weights * *x; }
inline void add_element(Register& to, const Register& weights, const uint32_t* x) {
#if defined(__AVX512BF16__)
    to = (Register)_mm512_dpbf16_ps((__m512)to, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)*x));
#endif
}

// A panel [size][PANEL_ROWS] times COUNT tokens, added to sums [token][PANEL_ROWS], or their first part if it is the first
// panel. A function of its own, for which GCC keeps all in registers.
template <int COUNT, typename Element>
__attribute__((noinline)) void panel_times(const Element* panel, int64_t size, const Element* x, int64_t stride, float* sums,
                                           bool is_first) {
    constexpr int LENGTH = sizeof(Register) / sizeof(float), WIDTH = PANEL_ROWS / LENGTH;
    for (int64_t begin = 0; begin < size; begin += SUMMED) {
        Register acc[COUNT][WIDTH] = {};
        const int64_t end = std::min<int64_t>(size, begin + SUMMED);
        for (int64_t k = begin; k < end; k++) {
            Register weights[WIDTH];
            for (int i = 0; i < WIDTH; i++) weights[i] = load<Register>(panel + k * PANEL_ROWS + i * LENGTH);
            for (int m = 0; m < COUNT; m++)
                for (int i = 0; i < WIDTH; i++) add_element(acc[m][i], weights[i], x + m * stride + k);
        }
        for (int m = 0; m < COUNT; m++)
            for (int i = 0; i < WIDTH; i++) {
                float* to = sums + m * PANEL_ROWS + i * LENGTH;
                store(to, is_first && !begin ? acc[m][i] : load<Register>(to) + acc[m][i]);
            }
        asm volatile("" ::: "memory");  // or GCC copies all sums to the stack and back
    }
}

// The same for 1 to COUNT tokens.
template <int COUNT, typename Element>
inline void panel_times(int64_t count, const Element* panel, int64_t size, const Element* x, int64_t stride, float* sums,
                        bool is_first) {
    if (count == COUNT) return panel_times<COUNT>(panel, size, x, stride, sums, is_first);
    if constexpr (COUNT > 1) panel_times<COUNT - 1>(count, panel, size, x, stride, sums, is_first);
}

template <typename Element>
inline Element* panel_memory() {
    alignas(64) thread_local Element panel[PANEL_GROUPS * GROUP * PANEL_ROWS];
    return panel;
}

// Group j of the super-block at `block`, a tile, as elements of a panel. Of pairs its weights are bfloat16.
template <typename T>
inline void to_panel(const uint8_t* block, int j, float* panel) {
    if constexpr (T::IS_FLOATS)
        for (int i = 0; i < GROUP; i++) store(panel + i * PANEL_ROWS, T::column(block, j, i));
    else {
        Codes codes[VECTORS];
        T::codes(block, j, codes);
        for (int h = 0; h < T::SCALES; h++) {
            const Rows scale = T::scale(block, j, h);
            // What a code of zero stands for: exact, so that each weight is rounded once.
            const Rows zero = T::MINIMUM ? T::minimum(block, j) : scale * -(float)T::CENTRE;
#pragma GCC unroll 4
            for (int i = h * GROUP / T::SCALES; i < (h + 1) * GROUP / T::SCALES; i++)
                store(panel + i * PANEL_ROWS, scale * column_of(codes[i / 4], i % 4) + zero);
        }
    }
}
template <typename T>
inline void to_panel(const uint8_t* block, int, uint32_t* panel) {
    static_assert(T::GROUPS == 1 && T::BYTES == GROUP / 2 * sizeof(Ints));
#if defined(__AVX512BF16__)
    const __m512i turns = _mm512_add_epi32(_mm512_set1_epi32(16 << 16), _mm512_mullo_epi32(  // 0, 16, 1, 17, ...
        _mm512_set1_epi32(0x10001), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
    for (int i = 0; i < GROUP / 2; i++)  // two columns of 16 rows
        store(panel + i * PANEL_ROWS, (Ints)_mm512_permutexvar_epi16(turns, _mm512_loadu_si512(block + i * sizeof(Ints))));
#endif
}

// `tiles` tiles, at most PANEL_TILES, for any number of tokens, whose activations begin at `values`.
template <typename T, typename Element>
inline void many(const Weight& w, int64_t first, int tiles, const Tokens& x, const Element* values, const Output& out) {
    constexpr int COLUMNS = COLUMNS_OF<Element>, GROUPS = PANEL_GROUPS * COLUMNS;
    const int64_t stride = x.stride / COLUMNS;
    const int64_t groups = blocks_of<T>(w.columns) * T::GROUPS, tile_size = tile_bytes<T>(w.columns);
    const int64_t passes = (x.count + PANEL_TOKENS - 1) / PANEL_TOKENS;
    Element* const panel = panel_memory<Element>();
    thread_local std::vector<float> sums;
    if (sums.size() < (size_t)x.count * PANEL_ROWS) sums.resize((size_t)x.count * PANEL_ROWS);
    for (int64_t g0 = 0; g0 < groups; g0 += GROUPS) {
        const int64_t some = std::min<int64_t>(GROUPS, groups - g0), size = some * GROUP / COLUMNS;
        const uint8_t* const from = w.data + first * tile_size + g0 / T::GROUPS * T::BYTES;
        for (int r = 0; r < tiles; r++)
            for (int64_t g = 0; g < some; g++) {
                const uint8_t* block = from + r * tile_size + g / T::GROUPS * T::BYTES;
                to_panel<T>(block, (int)(g % T::GROUPS), panel + g * GROUP / COLUMNS * PANEL_ROWS + r * TILE);
            }
        const bool is_last = g0 + some == groups;
        // Weights of the next panel come from memory, and results go to lines that no cache of this core has: both are
        // fetched meanwhile.
        const uint8_t* const next = is_last ? from + PANEL_TILES * tile_size - g0 / T::GROUPS * T::BYTES
                                            : from + some / T::GROUPS * T::BYTES;
        const int64_t piece = (some * T::BYTES / T::GROUPS / passes + 63) / 64 * 64;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t m = pass * PANEL_TOKENS, count = std::min<int64_t>(PANEL_TOKENS, x.count - m);
            for (int r = 0; r < tiles; r++)
                for (int64_t i = 0; i < piece; i += 64) __builtin_prefetch(next + r * tile_size + pass * piece + i, 0, 2);
            if (is_last)
                for (int64_t i = 0; i < count; i++)
                    for (int r = 0; r < tiles; r++)
                        __builtin_prefetch(out.values + (m + i) * out.stride + (first + r) * TILE, 1);
            panel_times<PANEL_TOKENS>(count, panel, size, values + m * stride + g0 * GROUP / COLUMNS, stride,
                                      sums.data() + m * PANEL_ROWS, g0 == 0);
            if (is_last)
                for (int64_t i = m; i < m + count; i++)
                    for (int r = 0; r < tiles; r++)
                        out.put(i, first + r, sums.data() + i * PANEL_ROWS + r * TILE);
        }
    }
}

// ---- Any weights

// Some tiles of a product.
template <int PART>
void tiles_part(const Product& product, int64_t begin, int64_t end, const Tokens& x) {
    const Weight& w = product.weight;
    const Output& out = product.out;
    with_tile<NANOVLLM_PARTS, PART>(w.format, [&](auto format) {
        using T = decltype(format);
#if defined(NANOVLLM_AMX)
        if (x.splits) {
            if constexpr (!T::IS_FLOATS || std::is_same_v<typename T::Source, BF16>)
                if (w.parts == 1 || w.rounds) return amx_tiles<T, 1>(w, begin, end, x, out);
            return amx_tiles<T, EXACT_PARTS>(w, begin, end, x, out);
        }
#endif
        const auto panels = [&](auto values) {
            for (int64_t tile = begin; tile < end; tile += PANEL_TILES)
                many<T>(w, tile, (int)std::min<int64_t>(PANEL_TILES, end - tile), x, values, out);
        };
        if constexpr (!T::IS_FLOATS) {
            if constexpr (PANELS_OF_CODES)
                if (!x.integers) return panels(x.values);
            if (w.parts == 1) quantised_tiles<T, 1>(w, begin, end, x, out);
            else quantised_tiles<T, EXACT_PARTS>(w, begin, end, x, out);
        } else {
            if constexpr (CAN_ROUND && std::is_same_v<typename T::Source, BF16>)
                if (w.rounds && x.pairs) return panels(x.pairs);
            if (x.count >= PANEL_FROM) return panels(x.values);
            for (int64_t tile = begin; tile < end; tile++) few_tokens<T>(w, tile, x, 0, out);
        }
    });
}

template void tiles_part<NANOVLLM_PART>(const Product&, int64_t, int64_t, const Tokens&);

}  // namespace nanovllm
