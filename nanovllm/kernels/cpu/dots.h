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
// GCC adds integers in pairs, and the pairs in pairs: that takes more registers than there are.
inline void in_this_order(__m256i& sum) { asm("" : "+x"(sum)); }

// Half h of the codes, COUNT vectors, in registers of 8 rows: sums[p] += codes times part p.
template <int TOP, int COUNT, int P>
inline void dots_of_eights(const Codes* codes, const Integers<P>& x, int h, Ints (&sums)[P]) {
    auto code_at = [&](int v, int rows) { return _mm256_loadu_si256((const __m256i*)(codes + v) + rows); };
    auto four = [&](int v, int p) { return _mm256_set1_epi32(four_at(x.parts[p] + 4 * (h * COUNT + v))); };
    auto add_to = [&](int rows, int p, __m256i value) {
        __m256i* sum = (__m256i*)&sums[p] + rows;
        _mm256_storeu_si256(sum, _mm256_add_epi32(_mm256_loadu_si256(sum), value));
    };
#if defined(__AVXVNNI__)
    __m256i total[2][P] = {};
#pragma GCC unroll 8
    for (int v = 0; v < COUNT; v++) {
        const __m256i code[2] = {code_at(v, 0), code_at(v, 1)};
        for (int p = 0; p < P; p++) {
            const __m256i part = four(v, p);
            for (int rows = 0; rows < 2; rows++) total[rows][p] = _mm256_dpbusd_avx_epi32(total[rows][p], code[rows], part);
        }
    }
    for (int rows = 0; rows < 2; rows++)
        for (int p = 0; p < P; p++) add_to(rows, p, total[rows][p]);
#else
    // Products of neighbours are added in 16 bits, as many as fit: RUN * 2 * TOP * 128 < 2^15.
    constexpr int FIT = 32767 / (256 * TOP), RUN = FIT < COUNT ? FIT : COUNT;
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (FIT > 0) {
#pragma GCC unroll 8
        for (int begin = 0; begin < COUNT; begin += RUN) {
            __m256i run[2][P];
#pragma GCC unroll 8
            for (int v = begin; v < begin + RUN; v++) {
                const __m256i code[2] = {code_at(v, 0), code_at(v, 1)};
                for (int p = 0; p < P; p++) {
                    const __m256i part = four(v, p);
                    for (int rows = 0; rows < 2; rows++) {
                        const __m256i pairs = _mm256_maddubs_epi16(code[rows], part);
                        run[rows][p] = v == begin ? pairs : _mm256_add_epi16(run[rows][p], pairs);
                        in_this_order(run[rows][p]);
                    }
                }
            }
            for (int rows = 0; rows < 2; rows++)
                for (int p = 0; p < P; p++) add_to(rows, p, _mm256_madd_epi16(run[rows][p], ones));
        }
    } else {  // two digits of 4 bits, whose sums fit
        const __m256i nibble = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi16(16);
        for (int rows = 0; rows < 2; rows++) {
            __m256i low[P] = {}, high[P] = {};
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) {
                const __m256i code = code_at(v, rows);
                const __m256i lower = _mm256_and_si256(code, nibble);
                const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), nibble);
                for (int p = 0; p < P; p++) {
                    const __m256i part = four(v, p);
                    low[p] = _mm256_add_epi16(low[p], _mm256_maddubs_epi16(lower, part));
                    high[p] = _mm256_add_epi16(high[p], _mm256_maddubs_epi16(upper, part));
                    in_this_order(low[p]);
                    in_this_order(high[p]);
                }
            }
            for (int p = 0; p < P; p++)
                add_to(rows, p, _mm256_add_epi32(_mm256_madd_epi16(low[p], ones), _mm256_madd_epi16(high[p], sixteen)));
        }
    }
#endif
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
#elif defined(__AVX2__)
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++) dots_of_eights<TOP, VECTORS / HALVES>(codes + h * VECTORS / HALVES, x[m * stride], h, sums[h][m]);
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
