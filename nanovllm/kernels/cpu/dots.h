// Products of bytes: 32 codes of each of 16 rows times the 8-bit parts of 32 activations.
#pragma once

#include "activations.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace nanovllm {

inline int32_t four_at(const int8_t* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef float Eight __attribute__((vector_size(32), may_alias));  // rows

// With AVX2 alone GCC makes functions of some of these, which pass sums in memory, once there are all formats.
#if defined(__AVX512F__) || defined(__AVXVNNI__)
#define NANOVLLM_INLINE inline
#else
#define NANOVLLM_INLINE inline __attribute__((always_inline))
#endif

// GCC adds integers in pairs, and the pairs in pairs: that takes more registers than there are.
inline void in_this_order(__m256i& sum) { asm("" : "+x"(sum)); }

// Else GCC loads codes anew for each product.
inline void in_registers(__m256i (&codes)[2]) { asm("" : "+x"(codes[0]), "+x"(codes[1])); }

#if defined(__AVXVNNI__)
constexpr bool MULTIPLIES_BYTES = true;
#else
constexpr bool MULTIPLIES_BYTES = false;
#endif
// How many products of neighbours fit in 16 bits if they are added: FIT * 2 * TOP * 128 < 2^15.
template <int TOP>
constexpr int FIT = 32767 / (256 * TOP);
// Whether codes are multiplied as words of 16 bits: where not even one fits.
template <int TOP>
constexpr bool BY_WORDS = !MULTIPLIES_BYTES && FIT<TOP> == 0;
// Whether a group's exact products are a function of their own, which has all 16 registers. Within a tile's loops GCC keeps
// scales of a whole super-block in four of them, and writes sums to the stack. Words of one token take the loops well.
template <int TOP, int P, int M>
constexpr bool ALONE = ONLY_AVX2 && P > 1 && !(BY_WORDS<TOP> && M == 1);

// sums[rows] += codes [COUNT] of rows 8 * rows and on times the activations from column `first` on.
template <bool ALONE, int TOP, int COUNT, int P>
NANOVLLM_INLINE void dots_of_bytes(const Codes* codes, const Integers<P>& x, int first, __m256i (&sums)[2][DIGITS<P>]) {
    __m256i total[2][P] = {};
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int RUN = MULTIPLIES_BYTES || FIT<TOP> >= COUNT ? COUNT : FIT<TOP>;
#pragma GCC unroll 8
    for (int begin = 0; begin < COUNT; begin += RUN) {
        __m256i run[2][P];
#pragma GCC unroll 8
        for (int v = begin; v < begin + RUN; v++) {
            __m256i code[2] = {_mm256_loadu_si256((const __m256i*)(codes + v)),
                               _mm256_loadu_si256((const __m256i*)(codes + v) + 1)};
            if constexpr (ALONE) in_registers(code);
#pragma GCC unroll 3
            for (int p = 0; p < P; p++) {
                const __m256i part = _mm256_set1_epi32(four_at(x.parts[p] + first + 4 * v));
#pragma GCC unroll 2
                for (int rows = 0; rows < 2; rows++) {
#if defined(__AVXVNNI__)
                    total[rows][p] = _mm256_dpbusd_avx_epi32(total[rows][p], code[rows], part);
#else
                    const __m256i pairs = _mm256_maddubs_epi16(code[rows], part);
                    run[rows][p] = v == begin ? pairs : _mm256_add_epi16(run[rows][p], pairs);
                    in_this_order(run[rows][p]);
#endif
                }
            }
        }
        if constexpr (!MULTIPLIES_BYTES)
#pragma GCC unroll 2
            for (int rows = 0; rows < 2; rows++)
#pragma GCC unroll 3
                for (int p = 0; p < P; p++)
                    total[rows][p] = _mm256_add_epi32(total[rows][p], _mm256_madd_epi16(run[rows][p], ones));
    }
#pragma GCC unroll 2
    for (int rows = 0; rows < 2; rows++) {
        sums[rows][0] = _mm256_add_epi32(sums[rows][0], total[rows][0]);
        if constexpr (P > 1)
            sums[rows][1] = _mm256_add_epi32(
                sums[rows][1], _mm256_add_epi32(total[rows][1], _mm256_slli_epi32(total[rows][2], 8)));
    }
}

// A group of 32 codes of 16 rows as words: columns 4 v and 4 v + 2 of vector v, then 4 v + 1 and 4 v + 3.
struct CodeWords {
    __m256i at[VECTORS][2][2];  // [v][which two columns][rows]
};
NANOVLLM_INLINE __m256i words_of(const Codes& codes, int odd, int rows) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)&codes + rows);
    return odd ? _mm256_srli_epi16(both, 8) : _mm256_and_si256(both, _mm256_set1_epi16(255));
}
NANOVLLM_INLINE void codes_to_words(const Codes* codes, CodeWords& to) {
    for (int v = 0; v < VECTORS; v++)
        for (int odd = 0; odd < 2; odd++)
            for (int rows = 0; rows < 2; rows++) to.at[v][odd][rows] = words_of(codes[v], odd, rows);
}

// The same of a whole group by words, which `word(v, odd, rows)` returns.
template <bool ALONE, int P, typename Word>
NANOVLLM_INLINE void dots_of_words(Word&& word, const Integers<P>& x, __m256i (&sums)[2][DIGITS<P>]) {
    alignas(32) Words<P> made;
    if constexpr (!KEEPS_WORDS<P>) to_words(x, made);
    const Words<P>& pairs = KEEPS_WORDS<P> ? x.words[0] : made;
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            __m256i words[2] = {word(v, odd, 0), word(v, odd, 1)};
            if constexpr (ALONE) in_registers(words);
#pragma GCC unroll 2
            for (int digit = 0; digit < DIGITS<P>; digit++) {
                const __m256i pair = _mm256_set1_epi32(pairs[digit][odd][v]);
#pragma GCC unroll 2
                for (int rows = 0; rows < 2; rows++) {
                    sums[rows][digit] = _mm256_add_epi32(sums[rows][digit], _mm256_madd_epi16(words[rows], pair));
                    in_this_order(sums[rows][digit]);
                }
            }
        }
}

// acc[m] += scales * codes of a group times group x[m * stride] of M tokens, plus `minimum` times its sum. HALVES: 2 if
// each 16 columns have a scale.
template <int TOP, int CENTRE, int HALVES, bool MINIMUM, int P, int M>
NANOVLLM_INLINE void group_of_eights(const Codes* codes, const Rows* scales, const Rows& minimum, const Integers<P>* x,
                            int64_t stride, Floats* acc) {
    constexpr int COUNT = VECTORS / HALVES;
    static_assert(!BY_WORDS<TOP> || HALVES == 1);
    constexpr bool IS_ALONE = ALONE<TOP, P, M>;
    CodeWords words;
    if constexpr (BY_WORDS<TOP> && M > 1) codes_to_words(codes, words);
    for (int m = 0; m < M; m++) {
        const Codes* from = codes;
        const CodeWords* wide = &words;
        // Else GCC keeps codes in registers that the sums of three parts need.
        if (P > 1) asm("" : "+r"(from), "+r"(wide));
        const Integers<P>& of = x[m * stride];
        Eight* const to = (Eight*)&acc[m];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            __m256i sums[2][DIGITS<P>];
            auto sum_of = [&](int p) { return HALVES == 2 ? of.sums[h][p] : of.sums[0][p] + of.sums[1][p]; };
            sums[0][0] = sums[1][0] = _mm256_set1_epi32(CENTRE ? -CENTRE * sum_of(0) : 0);
            if constexpr (P > 1) sums[0][1] = sums[1][1] = _mm256_set1_epi32(CENTRE ? -CENTRE * (sum_of(1) + 256 * sum_of(2)) : 0);
            if constexpr (!BY_WORDS<TOP>) dots_of_bytes<IS_ALONE, TOP, COUNT>(from + h * COUNT, of, 4 * h * COUNT, sums);
            else
                dots_of_words<IS_ALONE>([&](int v, int odd, int rows) {
                    if constexpr (M > 1) return wide->at[v][odd][rows];
                    else return words_of(from[v], odd, rows);
                }, of, sums);
#pragma GCC unroll 2
            for (int rows = 0; rows < 2; rows++) {
                Eight sum = (Eight)_mm256_cvtepi32_ps(sums[rows][0]);
                if constexpr (P > 1) sum = (Eight)_mm256_cvtepi32_ps(sums[rows][1]) * 256.0f + sum;
                to[rows] += sum * (((const Eight*)&scales[h])[rows] * of.step);
            }
        }
        if (MINIMUM) add_product(acc[m], minimum, of.sum);
    }
}

template <int TOP, int CENTRE, int HALVES, bool MINIMUM, int P, int M>
__attribute__((noinline)) void group_of_eights_alone(const Codes* codes, const Rows* scales, const Rows& minimum,
                                                     const Integers<P>* x, int64_t stride, Floats* acc) {
    group_of_eights<TOP, CENTRE, HALVES, MINIMUM, P, M>(codes, scales, minimum, x, stride, acc);
}
#endif

// sums[h][m][p] += codes of half h times part p of token m, whose group is x[m * stride].
// TOP: the largest code. HALVES: 2 if each 16 columns have sums of their own.
template <int TOP, int HALVES, int M, int P>
inline void dots(const Codes* codes, const Integers<P>* x, int64_t stride, Ints (&sums)[HALVES][M][P]) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++) {
                Ints& sum = sums[v * HALVES / VECTORS][m][p];
                const __m512i four = _mm512_set1_epi32(four_at(x[m * stride].parts[p] + 4 * v));
                sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes[v], four);
            }
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++)
            for (int rows = 0; rows < 4; rows++) {
                int32x4_t sum[P];
                for (int p = 0; p < P; p++) sum[p] = vld1q_s32((const int32_t*)&sums[h][m][p] + 4 * rows);
#pragma GCC unroll 8
                for (int v = h * VECTORS / HALVES; v < (h + 1) * VECTORS / HALVES; v++) {
                    const int8x16_t code = vld1q_s8((const int8_t*)(codes + v) + 16 * rows);
                    for (int p = 0; p < P; p++) {
                        const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_at(x[m * stride].parts[p] + 4 * v)));
                        sum[p] = vdotq_s32(sum[p], code, four);
                    }
                }
                for (int p = 0; p < P; p++) vst1q_s32((int32_t*)&sums[h][m][p] + 4 * rows, sum[p]);
            }
#else
    for (int v = 0; v < VECTORS; v++)
        for (int m = 0; m < M; m++)
            for (int p = 0; p < P; p++)
                for (int i = 0; i < 4 * LANES; i++)
                    sums[v * HALVES / VECTORS][m][p][i / 4] += (int32_t)codes[v][i] * x[m * stride].parts[p][4 * v + i % 4];
#endif
}

}  // namespace nanovllm
