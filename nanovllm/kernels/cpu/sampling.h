// One token a row: the op `sample`, whose definition and reasons are in nanovllm/kernels/ops/sample.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "maths.h"

namespace nanovllm {

constexpr int DRAW_BLOCK = 256;                 // columns that the first level of a draw takes together
constexpr uint64_t BLOCK_COUNTERS = 1ull << 31;  // from here on counters are of blocks
constexpr int BUCKETS = 2048;
constexpr int NEAR = 768;  // buckets: down to a weight of e^-10.5

struct Filters {
    float temperature;
    int64_t top_k;  // 0: off
    float top_p, min_p;
    uint64_t seed, position;
};

// Philox4x32-10: the four words under a 64-bit key and the counter (n, position, 0, 0).
inline void philox(uint64_t key, uint32_t n, uint32_t position, uint32_t* words) {
    uint32_t c[4] = {n, position, 0, 0}, low = (uint32_t)key, high = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ low;
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ high;
        c[3] = (uint32_t)a;
        low += 0x9E3779B9;
        high += 0xBB67AE85;
    }
    std::memcpy(words, c, sizeof c);
}

// The exponential variate of an index: of 1,024 indices there are 256 counters, whose first words are for the first 256.
inline float exponential_variate(const Filters& row, uint64_t index, uint64_t first_counter) {
    uint32_t words[4];
    const uint64_t counter = first_counter + index / (4 * DRAW_BLOCK) * DRAW_BLOCK + index % DRAW_BLOCK;
    philox(row.seed, (uint32_t)counter, (uint32_t)row.position, words);
    const float word = (float)words[index / DRAW_BLOCK % 4] + 0.5f;
    return -std::log1p(-std::min(word, 4294967040.0f) * 0x1p-32f);
}

inline int64_t largest_at(const float* x, int64_t size) {
    NarrowFloats most = broadcast<NarrowFloats>(-INFINITY);
    int64_t i = 0;
    for (; i + NARROW <= size; i += NARROW) most = larger(load<NarrowFloats>(x + i), most);
    float top = maximum(most);
    for (int64_t j = i; j < size; j++) top = std::max(top, x[j]);
    int64_t first = 0;
    while (first + NARROW <= size && !lanes_of(load<NarrowFloats>(x + first) == top)) first += NARROW;
    for (int64_t j = first; j < size; j++)
        if (x[j] == top) return j;
    return 0;  // all are NaN
}

// One row. Keeps its buffers from row to row.
class RowSampler {
   public:
    int64_t sample(const float* logits, int64_t size, const Filters& row) {
        const int64_t top = largest_at(logits, size);
        if (row.temperature == 0) return top;
        size_ = size;
        best_ = std::max(logits[top], -3.40282347e38f);
        // Whole vectors: what follows the last column has no weight.
        log_weights_.assign((size + DRAW_BLOCK - 1) / DRAW_BLOCK * DRAW_BLOCK, -INFINITY);
        std::memcpy(log_weights_.data(), logits, size * sizeof(float));
        for (size_t i = 0; i < log_weights_.size(); i += NARROW)
            store(&log_weights_[i], (load<NarrowFloats>(&log_weights_[i]) - best_) / row.temperature);
        if ((row.top_k > 0 && row.top_k < size) || row.top_p < 1) cut(row);
        if (row.min_p > 0)
            for (size_t i = 0; i < log_weights_.size(); i += NARROW) {
                const NarrowFloats x = load<NarrowFloats>(&log_weights_[i]);
                store(&log_weights_[i], exponential(x) < row.min_p ? broadcast<NarrowFloats>(-INFINITY) : x);
            }
        return draw(row);
    }

   private:
    // Weights in units of 2^-40 of the largest: integers, whose sum does not depend on their order.
    static int64_t weight(float log_weight) {
        return (int64_t)(exponential(broadcast<NarrowFloats>(log_weight))[0] * 0x1p40f);
    }

    // Top-k, then top-p. Tokens are put into buckets by falling weight: only one bucket must be sorted. The first buckets
    // are counted at first, since few columns hold most of the mass. Often that is enough.
    void cut(const Filters& row) {
        counts_.assign(BUCKETS, 0);
        masses_.assign(BUCKETS, 0);
        int64_t total = to_buckets();
        count(0, NEAR);
        const bool cuts_k = row.top_k > 0 && row.top_k < size_;
        if (cuts_k ? sum_of(counts_) < row.top_k : (double)sum_of(masses_) < (double)row.top_p * (double)total)
            count(NEAR, BUCKETS - 1);
        if (cuts_k) {
            keep_top_k(row.top_k);
            total = sum_of(masses_);
        }
        if (row.top_p < 1) keep_top_p(row.top_p, total);
    }

    static int64_t sum_of(const std::vector<int64_t>& values) {
        int64_t total = 0;
        for (int64_t value : values) total += value;
        return total;
    }

    // Each column's bucket; the sum of all weights.
    int64_t to_buckets() {
        buckets_.resize(log_weights_.size());
        weights_.resize(log_weights_.size());
        constexpr float range = 28.0f;  // beyond, the weight is 0: e^-28 < 2^-40
        int64_t total = 0;
        for (size_t begin = 0; begin < log_weights_.size(); begin += 1024 * NARROW) {
            NarrowInts upper{}, lower{};  // sums of the upper and lower 20 bits: of 1,024 vectors they fit
            for (size_t i = begin; i < std::min(begin + 1024 * NARROW, log_weights_.size()); i += NARROW) {
                const NarrowFloats x = load<NarrowFloats>(&log_weights_[i]);
                const NarrowFloats place = x * (-(BUCKETS - 1) / range), last = broadcast<NarrowFloats>(BUCKETS - 1);
                store(&buckets_[i], __builtin_convertvector(place < last ? place : last, NarrowInts));
                const NarrowFloats weights = exponential(x);
                store(&weights_[i], weights);
                const NarrowFloats scaled = weights * 0x1p20f;
                const NarrowInts whole = __builtin_convertvector(scaled, NarrowInts);
                upper += whole;
                lower += __builtin_convertvector((scaled - __builtin_convertvector(whole, NarrowFloats)) * 0x1p20f, NarrowInts);
            }
            total += ((int64_t)sum_wide(upper) << 20) + sum_wide(lower);
        }
        return total;
    }

    static int64_t sum_wide(const NarrowInts& values) {
        int64_t total = 0;
        for (int i = 0; i < NARROW; i++) total += values[i];
        return total;
    }

    // The columns and their weights in the buckets from `begin` to `end` - 1.
    void count(int begin, int end) {
        for (size_t i = 0; i < buckets_.size(); i += NARROW) {
            const NarrowInts bucket = load<NarrowInts>(&buckets_[i]);
            for (uint32_t lanes = lanes_of((bucket >= begin) & (bucket < end)); lanes; lanes &= lanes - 1) {
                const size_t column = i + __builtin_ctz(lanes);
                counts_[buckets_[column]]++;
                masses_[buckets_[column]] += (int64_t)(weights_[column] * 0x1p40f);
            }
        }
    }

    // The columns of a bucket, by falling weight and rising column.
    const std::vector<int32_t>& members(int bucket) {
        members_.clear();
        for (int64_t i = 0; i < size_; i += NARROW) {
            for (uint32_t lanes = lanes_of(load<NarrowInts>(&buckets_[i]) == bucket); lanes; lanes &= lanes - 1) {
                const int64_t column = i + __builtin_ctz(lanes);
                if (log_weights_[column] > -INFINITY) members_.push_back((int32_t)column);  // so it is before `size_`
            }
        }
        std::stable_sort(members_.begin(), members_.end(),
                         [&](int32_t a, int32_t b) { return log_weights_[a] > log_weights_[b]; });
        return members_;
    }

    void drop(int64_t column) { log_weights_[column] = -INFINITY; }

    // Drop what comes after the buckets up to `bucket`.
    void drop_after(int bucket) {
        for (size_t i = 0; i < log_weights_.size(); i += NARROW) {
            const NarrowInts later = load<NarrowInts>(&buckets_[i]) > bucket;
            store(&log_weights_[i], later ? broadcast<NarrowFloats>(-INFINITY) : load<NarrowFloats>(&log_weights_[i]));
        }
    }

    // Keep what ties with the k-th, too.
    void keep_top_k(int64_t k) {
        int bucket = 0;
        int64_t before = 0;
        while (bucket < BUCKETS - 1 && before + counts_[bucket] < k) before += counts_[bucket++];
        const auto& columns = members(bucket);
        if (before + (int64_t)columns.size() < k) return;  // fewer than k tokens are possible
        const float last = log_weights_[columns[k - before - 1]];
        for (int32_t column : columns) {
            if (log_weights_[column] >= last) continue;
            masses_[bucket] -= weight(log_weights_[column]);
            drop(column);
        }
        drop_after(bucket);
        std::fill(masses_.begin() + bucket + 1, masses_.end(), 0);
    }

    // A token stays if those before it hold less than p of the mass.
    void keep_top_p(float p, int64_t total) {
        int64_t before = 0;
        const double wanted = (double)p * (double)total;
        int bucket = 0;
        while (bucket < BUCKETS - 1 && (double)(before + masses_[bucket]) < wanted) before += masses_[bucket++];
        while (bucket < BUCKETS - 1 && counts_[bucket] == 0) bucket++;
        bool first = before == 0;  // one token always stays
        for (int32_t column : members(bucket)) {
            const int64_t mass = weight(log_weights_[column]);
            if (!first && (double)before >= wanted) drop(column);
            first = false;
            before += mass;
        }
        drop_after(bucket);
    }

    // The sum of a block's exponentials relative to `top`. That neighbours are added first is part of the definition.
    static float sum_in_pairs(const float* x, float top) {
        NarrowFloats v[DRAW_BLOCK / NARROW];
        for (int i = 0; i < DRAW_BLOCK / NARROW; i++) v[i] = exponential(load<NarrowFloats>(x + i * NARROW) - top);
        for (int n = DRAW_BLOCK / NARROW / 2; n > 0; n /= 2)
            for (int i = 0; i < n; i++) v[i] = sums_of_neighbours(v[2 * i], v[2 * i + 1]);
        float last[NARROW];
        store(last, v[0]);
        for (int n = NARROW / 2; n > 0; n /= 2)
            for (int i = 0; i < n; i++) last[i] = last[2 * i] + last[2 * i + 1];
        return last[0];
    }

    // A block, then a token of it, each by the Gumbel-max trick.
    int64_t draw(const Filters& row) const {
        int64_t block = 0;
        float best = -INFINITY;
        const int64_t blocks = (int64_t)log_weights_.size() / DRAW_BLOCK;
        for (int64_t b = 0; b < blocks; b++) {
            const float* x = log_weights_.data() + b * DRAW_BLOCK;
            NarrowFloats most = broadcast<NarrowFloats>(-INFINITY);
            for (int i = 0; i < DRAW_BLOCK; i += NARROW) most = larger(load<NarrowFloats>(x + i), most);
            const float top = maximum(most);
            if (!(top > -INFINITY)) continue;
            const float score = top + std::log(sum_in_pairs(x, top) / exponential_variate(row, b, BLOCK_COUNTERS));
            if (score > best) best = score, block = b;
        }
        int64_t token = block * DRAW_BLOCK;
        best = -INFINITY;
        for (int64_t i = block * DRAW_BLOCK; i < std::min(size_, (block + 1) * DRAW_BLOCK); i++) {
            if (!(log_weights_[i] > -INFINITY)) continue;
            const float score = log_weights_[i] - std::log(exponential_variate(row, i, 0));
            if (score > best) best = score, token = i;
        }
        return token;
    }

    int64_t size_ = 0;
    float best_ = 0;
    std::vector<float> log_weights_, weights_;
    std::vector<int32_t> buckets_, members_;
    std::vector<int64_t> counts_, masses_;
};

}  // namespace nanovllm
