// Vectors of 16 floats. GCC and Clang turn them into one AVX-512 register, two of AVX2, or four of NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

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
#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
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

// The floats of one register. GCC makes scalars of comparisons, selections and shuffles of longer vectors.
constexpr int NARROW = REGISTER / 4;
typedef float NarrowFloats __attribute__((vector_size(REGISTER)));
typedef int32_t NarrowInts __attribute__((vector_size(REGISTER)));

template <typename V = Floats>
inline V broadcast(float value) {
    return V{} + value;
}

// 16 floats as narrow vectors. Loops over 16 floats add to these: GCC keeps longer vectors in memory.
constexpr int NARROWS = LANES / NARROW;
inline Floats whole(const NarrowFloats (&parts)[NARROWS]) {
    Floats result;
    std::memcpy(&result, parts, sizeof result);
    return result;
}

// fn of vectors, register by register.
template <typename Fn, typename... V>
inline Floats in_registers(Fn&& fn, const V&... vectors) {
    Floats result;
    for (int i = 0; i < LANES; i += NARROW)
        store((float*)&result + i, fn(load<NarrowFloats>((const float*)&vectors + i)...));
    return result;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float Register __attribute__((vector_size(32), may_alias));
constexpr int REGISTERS = 2;  // of floats
#else
typedef Floats Register;
constexpr int REGISTERS = 1;
#endif

// 16 floats as registers. GCC copies a vector that is longer than a register in pieces of 8 and 16 bytes, and the next load
// of a register waits for all of them.
struct Rows {
    Register at[REGISTERS];

    Rows() = default;
    Rows(const Floats& values) {
        for (int i = 0; i < REGISTERS; i++) at[i] = ((const Register*)&values)[i];
    }
#if defined(__AVX2__) && !defined(__AVX512F__)
    Rows(__m256 low, __m256 high) : at{(Register)low, (Register)high} {}
#endif
    operator Floats() const {
        Floats values;
        for (int i = 0; i < REGISTERS; i++) ((Register*)&values)[i] = at[i];
        return values;
    }
};

inline Rows operator*(Rows a, const Rows& b) {
    for (int i = 0; i < REGISTERS; i++) a.at[i] *= b.at[i];
    return a;
}

inline Rows operator*(Rows a, float b) {
    for (int i = 0; i < REGISTERS; i++) a.at[i] *= b;
    return a;
}

inline Rows operator+(Rows a, const Rows& b) {
    for (int i = 0; i < REGISTERS; i++) a.at[i] += b.at[i];
    return a;
}

inline Rows operator-(Rows a) {
    for (int i = 0; i < REGISTERS; i++) a.at[i] = -a.at[i];
    return a;
}

inline void store(float* to, const Rows& rows) { std::memcpy(to, rows.at, sizeof rows.at); }

// to += a * b.
inline void add_product(Floats& to, const Rows& a, const Rows& b) {
    for (int i = 0; i < REGISTERS; i++) ((Register*)&to)[i] += a.at[i] * b.at[i];
}

inline void add_product(Floats& to, const Rows& a, float b) {
    for (int i = 0; i < REGISTERS; i++) ((Register*)&to)[i] += a.at[i] * b;
}

// GCC widens bytes of long vectors one by one.
inline Rows to_floats(Bytes values) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)values));
#elif defined(__AVX2__)
    const __m128i low = (__m128i)values, high = _mm_unpackhi_epi64(low, low);
    return Rows(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(high)));
#else
    return __builtin_convertvector(__builtin_convertvector(values, Ints), Floats);
#endif
}

inline Rows to_floats(SignedBytes values) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)values));
#elif defined(__AVX2__)
    const __m128i low = (__m128i)values, high = _mm_unpackhi_epi64(low, low);
    return Rows(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)));
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

// The lanes I of a and b; those of b follow a's.
template <int... I, typename V>
inline V lanes(const V& a, const V& b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, decltype(a < b){I...});
#endif
}

// Each lane plus the next one, of a and then of b.
inline NarrowFloats sums_of_neighbours(const NarrowFloats& a, const NarrowFloats& b) {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
        return lanes<2 * I...>(a, b) + lanes<2 * I + 1 ...>(a, b);
    }(std::make_integer_sequence<int, NARROW>{});
}

// The sums of four vectors.
inline void sums_of_four(const Floats* v, float* to) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    auto pairs = [](const Floats& a, const Floats& b) {  // lanes of a and b in turn, neighbours added
        return lanes<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(a, b) +
               lanes<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(a, b);
    };
    const Floats ab = pairs(v[0], v[1]), cd = pairs(v[2], v[3]);
    const Floats abcd = lanes<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(ab, cd) +
                        lanes<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(ab, cd);
#if defined(__clang__) || __GNUC__ >= 12
    const Eight halves = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) +
                         __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
    const Four total = __builtin_shufflevector(halves, halves, 0, 1, 2, 3) + __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
#else
    Eight eights[2];
    std::memcpy(eights, &abcd, sizeof abcd);
    const Eight halves = eights[0] + eights[1];
    Four fours[2];
    std::memcpy(fours, &halves, sizeof halves);
    const Four total = fours[0] + fours[1];
#endif
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

// A bit for each lane in which a comparison holds, whose lanes are 0 or -1.
inline uint32_t lanes_of(const NarrowInts& comparison) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)comparison, (__m512i)comparison);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)comparison);
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)comparison);
#else
    uint32_t bits = 0;
    for (int i = 0; i < NARROW; i++) bits |= (comparison[i] & 1u) << i;
    return bits;
#endif
}

inline void fill(Ints& to, int32_t value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    for (int i = 0; i < 2; i++) _mm256_storeu_si256((__m256i*)&to + i, _mm256_set1_epi32(value));
#else
    to = Ints{} + value;
#endif
}

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

// The sums of each half's 16 bytes.
inline void sums_of_halves(SignedBytes first, SignedBytes second, int32_t& low, int32_t& high) {
#if defined(__AVX2__)
    // Sums of eight unsigned bytes: 128 more each.
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)first), (__m128i)second, 1);
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m256i sixteens = _mm256_add_epi64(eights, _mm256_unpackhi_epi64(eights, eights));
    low = _mm256_cvtsi256_si32(sixteens) - 16 * 128;
    high = _mm_cvtsi128_si32(_mm256_extracti128_si256(sixteens, 1)) - 16 * 128;
#else
    low = high = 0;
    for (int i = 0; i < 16; i++) low += first[i], high += second[i];
#endif
}

inline float float_of_bits(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// ---- Codes

typedef uint16_t CodePairs __attribute__((vector_size(REGISTER)));

// Byte i of each lane.
inline Rows column_of(const Codes& codes, int i) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    auto eight = [&](int rows) {
        const __m256i lanes = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i*)&codes + rows), 8 * i);
        return _mm256_cvtepi32_ps(_mm256_and_si256(lanes, _mm256_set1_epi32(255)));
    };
    return Rows(eight(0), eight(1));
#else
    return to_floats((((Ints)codes >> 8 * i) & 255));
#endif
}

// to = fn of the codes at `from`, register by register, with two codes to an element. GCC makes scalars of integer vectors
// that are longer than a register, and copies them in pieces. A shift moves bits across to the neighbouring code: mask
// them before or after.
template <typename Fn>
inline void by_register(const void* from, Codes& to, Fn&& fn) {
    for (int i = 0; i < (int)sizeof(Codes); i += REGISTER) {
        CodePairs pairs;
        std::memcpy(&pairs, (const uint8_t*)from + i, REGISTER);
        pairs = fn(pairs);
        std::memcpy((uint8_t*)&to + i, &pairs, REGISTER);
    }
}

// to |= fn of the codes at `from`.
template <typename Fn>
inline void add_by_register(const void* from, Codes& to, Fn&& fn) {
    for (int i = 0; i < (int)sizeof(Codes); i += REGISTER) {
        CodePairs pairs, sum;
        std::memcpy(&pairs, (const uint8_t*)from + i, REGISTER);
        std::memcpy(&sum, (const uint8_t*)&to + i, REGISTER);
        sum |= fn(pairs);
        std::memcpy((uint8_t*)&to + i, &sum, REGISTER);
    }
}

// Adds 16 to the codes, below 16, whose bit is set.
inline void add_fifth_bits(Codes& codes, uint64_t bits) {
#if defined(__AVX512BW__)
    const __m512i values = (__m512i)codes;
    codes = (Codes)_mm512_mask_add_epi8(values, bits, values, _mm512_set1_epi8(16));
#elif defined(__AVX2__)
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i mask = _mm256_set1_epi64x((long long)0x8040201008040201), sixteen = _mm256_set1_epi8(16);
    for (int i = 0; i < 2; i++) {
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)(bits >> 32 * i)), spread);
        const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mask), mask);
        __m256i* values = (__m256i*)&codes + i;
        _mm256_storeu_si256(values, _mm256_or_si256(_mm256_loadu_si256(values), _mm256_and_si256(is_set, sixteen)));
    }
#else
    const Bytes mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = 0; i < 4; i++, bits >>= 16) {
        const uint8_t a = (uint8_t)bits, b = (uint8_t)(bits >> 8);
        const Bytes spread = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        Bytes values;
        std::memcpy(&values, (const uint8_t*)&codes + 16 * i, 16);
        values |= (Bytes)((spread & mask) == mask) & 16;
        std::memcpy((uint8_t*)&codes + 16 * i, &values, 16);
    }
#endif
}

}  // namespace nanovllm
