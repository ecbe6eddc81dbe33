// y = x W^T for weights of any tile format.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "activations.h"
#include "threads.h"

namespace nanovllm {

// A weight [rows, columns] in tiles.
struct Weight {
    const uint8_t* data;
    int64_t rows, columns;
    int32_t format;
    int32_t parts;  // of activations that a quantised weight is multiplied with: 1, or EXACT_PARTS; else 0
    int32_t rounds;  // 1: of bfloat16, and multiplied with activations of many tokens that are rounded to bfloat16; else 0
};

// Where a product's results go: [tokens][stride] of float32, with a bias [rows] or null; added to what is there or not.
struct Output {
    float* values;
    int64_t stride, rows;
    const float* bias;
    bool add;

    // The results of 16 rows.
    void put(int64_t token, int64_t tile, const Floats& results) const { put(token, tile, (const float*)&results); }
    void put(int64_t token, int64_t tile, const float* results) const {
        const int64_t first = tile * TILE, count = std::min<int64_t>(TILE, rows - first);
        float* to = values + token * stride + first;
        if (count == TILE) {
            constexpr int LENGTH = LANES / REGISTERS;
            for (int i = 0; i < LANES; i += LENGTH) {
                Register value = load<Register>(results + i);
                if (bias) value += load<Register>(bias + first + i);
                if (add) value += load<Register>(to + i);
                store(to + i, value);
            }
            return;
        }
        for (int64_t i = 0; i < count; i++) {
            const float value = bias ? results[i] + bias[first + i] : results[i];
            to[i] = add ? to[i] + value : value;
        }
    }
};

struct Product {
    const Weight& weight;
    Output out;
};

// out = x W^T, or out += x W^T, for weights that are multiplied with the same x.
void products(Threads& threads, std::initializer_list<Product> all, const Tokens& x);

}  // namespace nanovllm
