// Elementwise functions of vectors.
#pragma once

#include <cmath>

#include "simd.h"

namespace nanovllm {

// exp, to about 2 units in the last place; 0 below -87, infinity above 88.7. Coefficients: Cephes' expf.
// IS_NEGATIVE: no x is above 0.
template <bool IS_NEGATIVE = false>
inline Floats exponential(Floats x) {
    const Floats low = broadcast(-87.33654f), high = broadcast(88.72283f);
    Ints too_low = x < low, too_high = x > high;
    Floats clamped = too_low ? low : x;
    if (!IS_NEGATIVE) clamped = too_high ? high : clamped;
    // The nearest integer: adding 1.5 * 2^23 leaves no bits for a fraction.
    const Floats magic = broadcast(12582912.0f);
    Floats n = clamped * 1.44269504088896341f + magic;
    Ints exponent = (Ints)n - (Ints)magic;
    n -= magic;
    Floats r = clamped - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^exponent in two factors: 2^128 is not a float.
    Ints half = IS_NEGATIVE ? exponent : exponent >> 1;
    p *= (Floats)((half + 127) << 23);
    if (!IS_NEGATIVE) p *= (Floats)((exponent - half + 127) << 23);
    p = too_low ? Floats{} : p;
    if (!IS_NEGATIVE) p = too_high ? broadcast(INFINITY) : p;
    return x != x ? x : p;  // NaN
}

inline Floats silu(Floats x) { return x / (exponential(-x) + 1.0f); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float maximum(const Floats& values) {
    float found = values[0];
    for (int i = 1; i < LANES; i++) found = values[i] > found ? values[i] : found;
    return found;
}

}  // namespace nanovllm
