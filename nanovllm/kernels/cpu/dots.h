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
    // Vectors of 8 rows. Without VNNI products of neighbours are added in 16 bits, without overflow for codes to 15:
    // 8 * 2 * 15 * 128 < 2^15. Larger codes are two digits.
    for (int m = 0; m < M; m++)
        for (int h = 0; h < HALVES; h++)
            for (int rows = 0; rows < 2; rows++) {
                __m256i low[P] = {}, high[P] = {};
#pragma GCC unroll 8
                for (int v = h * VECTORS / HALVES; v < (h + 1) * VECTORS / HALVES; v++) {
                    const __m256i code = _mm256_loadu_si256((const __m256i*)(codes + v) + rows);
#if !defined(__AVXVNNI__)
                    const __m256i nibble = _mm256_set1_epi8(15);
                    const __m256i digit = TOP > 15 ? _mm256_and_si256(code, nibble) : code;
                    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code, 4), nibble);
#endif
                    for (int p = 0; p < P; p++) {
                        const __m256i four = _mm256_set1_epi32(four_at(x[m * stride].parts[p] + 4 * v));
#if defined(__AVXVNNI__)
                        low[p] = _mm256_dpbusd_avx_epi32(low[p], code, four);
#else
                        low[p] = _mm256_add_epi16(low[p], _mm256_maddubs_epi16(digit, four));
                        if (TOP > 15) high[p] = _mm256_add_epi16(high[p], _mm256_maddubs_epi16(upper, four));
#endif
                    }
                }
                for (int p = 0; p < P; p++) {
                    __m256i* sum = (__m256i*)&sums[h][m][p] + rows;
#if !defined(__AVXVNNI__)
                    low[p] = _mm256_madd_epi16(low[p], _mm256_set1_epi16(1));
                    if (TOP > 15) low[p] = _mm256_add_epi32(low[p], _mm256_madd_epi16(high[p], _mm256_set1_epi16(16)));
#endif
                    _mm256_storeu_si256(sum, _mm256_add_epi32(_mm256_loadu_si256(sum), low[p]));
                }
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
