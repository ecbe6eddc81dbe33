// Floats of 16 and 8 bits.
#pragma once

#include "simd.h"

namespace nanovllm {

// ---- 16-bit floats

inline float float_of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t bf16_of_float(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__x86_64__) && !defined(__F16C__)
typedef _Float16 StoredHalf;  // GCC 12, Clang 15
#elif !defined(__F16C__)
typedef __fp16 StoredHalf;
#endif

inline float float_of_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    StoredHalf value;
    std::memcpy(&value, &bits, 2);
    return (float)value;
#endif
}

inline uint16_t f16_of_float(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    StoredHalf half = (StoredHalf)value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
#endif
}

inline Rows floats_of_bf16(const uint16_t* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return (Floats)_mm512_slli_epi32(wide, 16);  // GCC widens each half by itself
#elif defined(__AVX2__)
    auto eight = [](const uint16_t* halves) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)halves));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    };
    return Rows(eight(from), eight(from + 8));
#else
    typedef uint32_t Wide __attribute__((vector_size(64)));
    return (Floats)(__builtin_convertvector(load<Halves>(from), Wide) << 16);
#endif
}

inline Rows floats_of_f16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)));
#if defined(__AVX2__)
    return Rows(low, high);
#else
    Floats values;
    std::memcpy(&values, &low, 32);
    std::memcpy((char*)&values + 32, &high, 32);
    return values;
#endif
#else
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = float_of_f16(from[i]);
    return values;
#endif
}

// ---- 8-bit floats

// Sign, 4 bits of exponent and 3 of fraction, divided by 256: as 16-bit floats their exponents are smaller by 8. What is
// NaN as an 8-bit float becomes a number.
inline Rows floats_of_e4m3(const uint8_t* from) {
    // The sign moves to the top, its copy goes.
#if defined(__AVX2__)
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(wide, 8), 1), _mm256_set1_epi16((short)0xbf80));
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(halves);
#else
    return Rows(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
#endif
#else
    typedef int16_t Signed __attribute__((vector_size(32)));
    const Signed wide = (Signed)(__builtin_convertvector(load<Bytes>(from), Halves) << 8);
    const Halves halves = (Halves)(wide >> 1) & 0xbf80;
    return floats_of_f16((const uint16_t*)&halves);
#endif
}

}  // namespace nanovllm
