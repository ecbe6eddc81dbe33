// Vectors of 16 floats. GCC and Clang turn them into one AVX-512 register, two of AVX2, or four of NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanovllm {

constexpr int LANES = 16;
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_CODES = true;  // the processor multiplies signed bytes by signed bytes
#else
constexpr bool SIGNED_CODES = false;  // unsigned by signed bytes
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Codes __attribute__((vector_size(64)));  // of weights: four in each lane
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

inline Floats sums_of_neighbours(const Floats& a, const Floats& b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// The sums of four vectors.
inline void sums_of_four(const Floats* v, float* to) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    auto pairs = [](const Floats& a, const Floats& b) {  // lanes of a and b in turn, neighbours added
        return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    };
    const Floats ab = pairs(v[0], v[1]), cd = pairs(v[2], v[3]);
    const Floats abcd = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                        __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const Eight halves = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) +
                         __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four total = __builtin_shufflevector(halves, halves, 0, 1, 2, 3) + __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
    store(to, total);
}

inline int32_t sum(const Ints& values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)values);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += values[i];
    return total;
#endif
}

inline int32_t maximum(const Ints& values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)values);
#else
    int32_t found = values[0];
    for (int i = 1; i < LANES; i++) found = values[i] > found ? values[i] : found;
    return found;
#endif
}

inline int32_t minimum(const Ints& values) { return -maximum(-values); }

inline Floats to_floats(const Ints& values) { return __builtin_convertvector(values, Floats); }

// The lowest byte of each.
inline SignedBytes to_bytes(const Ints& values) {
#if defined(__AVX512F__)
    return (SignedBytes)_mm512_cvtepi32_epi8((__m512i)values);
#else
    return __builtin_convertvector(values, SignedBytes);
#endif
}

// To the nearest integer, for magnitudes below 2^23.
inline Ints rounded(const Floats& values) {
    return __builtin_convertvector(values + (values < 0.0f ? broadcast(-0.5f) : broadcast(0.5f)), Ints);
}

inline float float_of_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// ---- Codes

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
typedef uint16_t CodePairs __attribute__((vector_size(REGISTER)));

// fn of the codes in each register, two to an element: GCC makes scalars of integer vectors that are longer than a
// register. A shift moves bits across to the neighbouring code: mask them before or after.
template <typename Fn>
inline Codes by_register(const Codes& codes, Fn&& fn) {
    Codes result;
    for (int i = 0; i < (int)sizeof(Codes); i += REGISTER) {
        CodePairs pairs;
        std::memcpy(&pairs, (const uint8_t*)&codes + i, REGISTER);
        pairs = fn(pairs);
        std::memcpy((uint8_t*)&result + i, &pairs, REGISTER);
    }
    return result;
}

inline Codes either(const Codes& a, const Codes& b) {
    Codes result;
    for (int i = 0; i < (int)sizeof(Codes); i += REGISTER) {
        CodePairs x, y;
        std::memcpy(&x, (const uint8_t*)&a + i, REGISTER);
        std::memcpy(&y, (const uint8_t*)&b + i, REGISTER);
        x |= y;
        std::memcpy((uint8_t*)&result + i, &x, REGISTER);
    }
    return result;
}

// Adds 16 to the codes whose bit is set.
inline Codes with_fifth_bits(const Codes& codes, uint64_t bits) {
#if defined(__AVX512BW__)
    const __m512i values = (__m512i)codes;
    return (Codes)_mm512_mask_add_epi8(values, bits, values, _mm512_set1_epi8(16));
#else
    const Bytes mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    Codes result;
    for (int i = 0; i < 4; i++, bits >>= 16) {
        const uint8_t a = (uint8_t)bits, b = (uint8_t)(bits >> 8);
        const Bytes spread = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        const Bytes sixteen = (Bytes)((spread & mask) == mask) & 16;
        std::memcpy((uint8_t*)&result + 16 * i, &sixteen, 16);
    }
    return either(result, codes);
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

// ---- 8-bit floats

// Sign, 4 bits of exponent and 3 of fraction, divided by 256: as 16-bit floats their exponents are smaller by 8. What is
// NaN as an 8-bit float becomes a number.
inline Floats floats_of_e4m3(const uint8_t* from) {
    typedef int16_t Signed __attribute__((vector_size(32)));
    const Signed wide = (Signed)(__builtin_convertvector(load<Bytes>(from), Halves) << 8);
    const Halves halves = (Halves)(wide >> 1) & 0xbf80;  // the sign stays, and its copy goes
    return floats_of_f16((const uint16_t*)&halves);
}

}  // namespace nanovllm
