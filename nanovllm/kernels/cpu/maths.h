// Elementwise functions of vectors.
#pragma once

#include <cmath>

#include "simd.h"

namespace nanovllm {

// exp, to about 2 units in the last place; 0 below -87, infinity above 88.7. Coefficients: Cephes' expf.
// IS_NEGATIVE: no x is above 0.
template <bool IS_NEGATIVE = false, typename V>
inline V exponential(const V& x) {
    if constexpr (sizeof(V) > REGISTER) {
        return in_registers([](const NarrowFloats& part) { return exponential<IS_NEGATIVE>(part); }, x);
    } else {
        const V low = broadcast<V>(-87.33654f), high = broadcast<V>(88.72283f);
        const auto too_low = x < low, too_high = x > high;
        V clamped = too_low ? low : x;
        if (!IS_NEGATIVE) clamped = too_high ? high : clamped;
        // The nearest integer: adding 1.5 * 2^23 leaves no bits for a fraction.
        const V magic = broadcast<V>(12582912.0f);
        V n = clamped * 1.44269504088896341f + magic;
        const NarrowInts exponent = (NarrowInts)n - (NarrowInts)magic;
        n -= magic;
        V r = clamped - n * 0.693359375f;
        r -= n * -2.12194440e-4f;
        V p = broadcast<V>(1.9875691500e-4f);
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = p * r * r + r + 1.0f;
        // 2^exponent in two factors: 2^128 is not a float.
        const NarrowInts half = IS_NEGATIVE ? exponent : exponent >> 1;
        p *= (V)((half + 127) << 23);
        if (!IS_NEGATIVE) p *= (V)((exponent - half + 127) << 23);
        p = too_low ? V{} : p;
        if (!IS_NEGATIVE) p = too_high ? broadcast<V>(INFINITY) : p;
        return x != x ? x : p;  // NaN
    }
}

template <typename V>
inline V silu(const V& x) {
    return x / (exponential(-x) + 1.0f);
}

template <typename V>
inline V larger(const V& a, const V& b) {
    if constexpr (sizeof(V) > REGISTER)
        return in_registers(larger<NarrowFloats>, a, b);
    else
        return a > b ? a : b;
}

template <typename V>
inline float maximum(const V& values) {
    float found = values[0];
    for (int i = 1; i < (int)(sizeof values / sizeof found); i++) found = values[i] > found ? values[i] : found;
    return found;
}

}  // namespace nanovllm
