// y = x W^T for weights of any tile format; sums in float32.
#pragma once

#include <algorithm>

#include "threads.h"
#include "tiles.h"

namespace nanovllm {

// A weight [rows, columns] in tiles.
struct Weight {
    const uint8_t* data;
    int64_t rows, columns;
    int32_t format;
};

// What products read: tokens [count][stride] of float32, padded with zeros to whole super-blocks of 256 columns, and
// the sum of each group of 32 [count][sum_stride].
struct Tokens {
    const float *values, *sums;
    int64_t count, stride, sum_stride;
};

// Where a product's results go: [tokens][stride] of float32, with a bias [rows] or null; added to what is there or not.
struct Output {
    float* values;
    int64_t stride, rows;
    const float* bias;
    bool add;

    // The results of 16 rows.
    void put(int64_t token, int64_t tile, const Floats& results) const {
        const int64_t first = tile * TILE, count = std::min<int64_t>(TILE, rows - first);
        float* to = values + token * stride + first;
        for (int64_t i = 0; i < count; i++) {
            const float value = bias ? results[i] + bias[first + i] : results[i];
            to[i] = add ? to[i] + value : value;
        }
    }
};

// out = x W^T, or out += x W^T.
void product(Threads& threads, const Weight& w, const Tokens& x, const Output& out);

}  // namespace nanovllm
