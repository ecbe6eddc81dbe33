// Vectors of 16 floats. GCC and Clang turn them into one AVX-512 register, two of AVX2, or four of NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanovllm {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <typename Vector, typename Element>
inline void store(Element* to, const Vector& vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline Floats broadcast(float value) { return Floats{} + value; }

inline Floats to_floats(Bytes values) { return __builtin_convertvector(__builtin_convertvector(values, Ints), Floats); }
inline Floats to_floats(SignedBytes values) {
#if defined(__AVX512F__)  // GCC widens signed bytes one by one
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)values));
#else
    return __builtin_convertvector(__builtin_convertvector(values, Ints), Floats);
#endif
}

inline float sum(const Floats& values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight low, high;
    std::memcpy(&low, &values, 32);
    std::memcpy(&high, (const char*)&values + 32, 32);
    low += high;
    Four a, b;
    std::memcpy(&a, &low, 16);
    std::memcpy(&b, (const char*)&low + 16, 16);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
#endif
}

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

inline float float_of_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    __fp16 value;
    std::memcpy(&value, &bits, 2);
    return (float)value;
#endif
}

inline uint16_t f16_of_float(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    __fp16 half = (__fp16)value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
#endif
}

inline Floats floats_of_bf16(const uint16_t* from) {
    typedef uint32_t Wide __attribute__((vector_size(64)));
    return (Floats)(__builtin_convertvector(load<Halves>(from), Wide) << 16);
}

inline Floats floats_of_f16(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)));
    Floats values;
    std::memcpy(&values, &low, 32);
    std::memcpy((char*)&values + 32, &high, 32);
    return values;
#else
    Floats values;
    for (int i = 0; i < LANES; i++) values[i] = float_of_f16(from[i]);
    return values;
#endif
}

}  // namespace nanovllm
