// What a decoder does to rows of tokens between its products: norms, SiLU and rotations.
//
// Arithmetic is float32. Functions that take a format round to it where the references of the ops do.
#pragma once

#include <cmath>

#include "maths.h"
#include "plain_floats.h"
#include "threads.h"

namespace nanovllm {

// fn(token) for every token: by all threads if that is worth waking them.
template <typename Fn>
inline void each_token(Threads& threads, int64_t count, Fn&& fn) {
    if (count < 4) {
        for (int64_t i = 0; i < count; i++) fn(i);
        return;
    }
    const int64_t chunk = std::max<int64_t>(1, count / (4 * threads.count()));
    threads.run((count + chunk - 1) / chunk, [&](int64_t task) {
        for (int64_t i = task * chunk; i < std::min(count, (task + 1) * chunk); i++) fn(i);
    });
}

inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out, int32_t format = f32) {
    float squares = 0;
    NarrowFloats total[NARROWS] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int p = 0; p < NARROWS; p++) {
            const NarrowFloats values = load<NarrowFloats>(x + i + p * NARROW);
            total[p] += values * values;
        }
    for (int64_t j = i; j < size; j++) squares += x[j] * x[j];
    const float factor = 1.0f / std::sqrt((sum(whole(total)) + squares) / (float)size + eps);
    if (format == f32) {
        for (i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
    } else {
        for (i = 0; i < size; i++) out[i] = x[i] * factor;
        round_to(format, out, size);
        for (i = 0; i < size; i++) out[i] *= weight[i];
    }
}

// x: a head. cos_sin: cosines, then sines. out may be x.
inline void rotate(const float* x, const float* cos_sin, int64_t dim, float* out, int32_t format = f32) {
    const int64_t half = dim / 2;
    if (format == f32) {
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[half + i];
            out[i] = a * c - b * s;
            out[i + half] = b * c + a * s;
        }
        return;
    }
    constexpr int64_t PART = 32;
    for (int64_t first = 0; first < half; first += PART) {
        const int64_t count = std::min(PART, half - first);
        const float *a = x + first, *b = a + half, *c = cos_sin + first, *s = c + half;
        float products[4 * PART];  // rounded before they are added
        for (int64_t i = 0; i < count; i++) {
            products[i] = a[i] * c[i], products[count + i] = b[i] * s[i];
            products[2 * count + i] = b[i] * c[i], products[3 * count + i] = a[i] * s[i];
        }
        round_to(format, products, 4 * count);
        for (int64_t i = 0; i < count; i++) {
            out[first + i] = products[i] - products[count + i];
            out[first + half + i] = products[2 * count + i] + products[3 * count + i];
        }
    }
}

// SiLU of the gate times `factor`. out may be the gate.
inline void silu_and_mul(const float* gate, const float* factor, int64_t size, float* out, int32_t format = f32) {
    const bool rounds = format != f32;
    int64_t i = 0;
    for (; i + NARROW <= size; i += NARROW) {
        const NarrowFloats active = silu(load<NarrowFloats>(gate + i));
        store(out + i, rounds ? active : active * load<NarrowFloats>(factor + i));
    }
    for (; i < size; i++) out[i] = silu(broadcast<NarrowFloats>(gate[i]))[0] * (rounds ? 1.0f : factor[i]);
    if (!rounds) return;
    round_to(format, out, size);
    for (i = 0; i < size; i++) out[i] *= factor[i];
}

}  // namespace nanovllm
