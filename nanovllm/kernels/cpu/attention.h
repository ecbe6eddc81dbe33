// Attention of new tokens over a paged KV cache, in float32.
#pragma once

#include <cmath>
#include <vector>

#include "formats.h"
#include "maths.h"
#include "threads.h"

namespace nanovllm {

// One layer's keys or values: [blocks][block_size][kv_heads][head_dim], contiguous; f32, bf16 or f16.
struct Cache {
    uint8_t *k, *v;
    int64_t block_size, kv_heads, head_dim;
    int32_t format;

    int64_t token_size() const { return kv_heads * head_dim; }  // elements
};

template <typename Fn>
inline void with_plain(int32_t format, Fn&& fn) {
    if (format == f32) return fn(F32{});
    if (format == bf16) return fn(BF16{});
    return fn(F16{});
}

inline void store_as(F32, uint8_t* to, int64_t i, float value) { ((float*)to)[i] = value; }
inline void store_as(BF16, uint8_t* to, int64_t i, float value) { ((uint16_t*)to)[i] = bf16_of_float(value); }
inline void store_as(F16, uint8_t* to, int64_t i, float value) { ((uint16_t*)to)[i] = f16_of_float(value); }

template <typename F>
inline Floats sixteen(const uint8_t* from, int64_t i) {
    if constexpr (F::BYTES == 4) return load<Floats>((const float*)from + i);
    else if constexpr (std::is_same_v<F, BF16>) return floats_of_bf16((const uint16_t*)from + i);
    else return floats_of_f16((const uint16_t*)from + i);
}

// A sequence's new tokens: rows `first` to `first` + `count` of the batch, the last of a context of `context` tokens.
struct Run {
    int64_t first, count, context;
    const int32_t* blocks;

    // The element at which token `position` begins.
    int64_t at(const Cache& cache, int64_t position) const {
        return ((int64_t)blocks[position / cache.block_size] * cache.block_size + position % cache.block_size) *
               cache.token_size();
    }
};

// scores[0 to last] become probabilities, up to a factor whose inverse is returned. Whole vectors are written.
inline float softmax(float* scores, int64_t last) {
    const int64_t padded = last / LANES * LANES + LANES;
    for (int64_t i = last + 1; i < padded; i++) scores[i] = -INFINITY;
    Floats most = broadcast(-INFINITY);
    for (int64_t i = 0; i < padded; i += LANES) most = larger(most, load<Floats>(scores + i));
    const float top = maximum(most);
    Floats total{};
    for (int64_t i = 0; i < padded; i += LANES) {
        Floats p = exponential(load<Floats>(scores + i) - top);
        store(scores + i, p);
        total += p;
    }
    return 1.0f / sum(total);
}

// QUERIES heads of one token that share a key head, over the whole context: keys are read once for all of them.
template <typename F, int QUERIES>
inline void attend_token(const Cache& cache, const Run& run, int64_t last, int64_t kv_head, const float* q, float scale,
                         float* out) {
    const int64_t dim = cache.head_dim, vectors = dim / LANES;
    const int64_t padded = last / LANES * LANES + LANES;
    thread_local std::vector<float> scores;
    scores.resize((size_t)padded * QUERIES);
    for (int64_t position = 0; position <= last; position++) {
        const int64_t at = run.at(cache, position) + kv_head * dim;
        Floats dot[QUERIES] = {};
        for (int64_t i = 0; i < vectors; i++) {
            const Floats key = sixteen<F>(cache.k, at + i * LANES);
            for (int h = 0; h < QUERIES; h++) dot[h] += key * load<Floats>(q + h * dim + i * LANES);
        }
        for (int h = 0; h < QUERIES; h++) scores[h * padded + position] = scale * sum(dot[h]);
    }
    float inverse[QUERIES];
    for (int h = 0; h < QUERIES; h++) inverse[h] = softmax(scores.data() + h * padded, last);
    for (int64_t i = 0; i < vectors; i++) {
        Floats acc[QUERIES] = {};
        for (int64_t position = 0; position <= last; position++) {
            const Floats value = sixteen<F>(cache.v, run.at(cache, position) + kv_head * dim + i * LANES);
            for (int h = 0; h < QUERIES; h++) acc[h] += value * scores[h * padded + position];
        }
        for (int h = 0; h < QUERIES; h++) store(out + h * dim + i * LANES, acc[h] * inverse[h]);
    }
}

template <typename F>
inline void attend_heads(const Cache& cache, const Run& run, int64_t last, int64_t kv_head, int64_t queries,
                         const float* q, float scale, float* out) {
    const int64_t dim = cache.head_dim;
    for (; queries >= 4; queries -= 4, q += 4 * dim, out += 4 * dim)
        attend_token<F, 4>(cache, run, last, kv_head, q, scale, out);
    if (queries == 3) attend_token<F, 3>(cache, run, last, kv_head, q, scale, out);
    if (queries == 2) attend_token<F, 2>(cache, run, last, kv_head, q, scale, out);
    if (queries == 1) attend_token<F, 1>(cache, run, last, kv_head, q, scale, out);
}

// The keys and values of one key head of a run's context: keys as [context / 16][head_dim][16], values as
// [context][head_dim], so that the scores of 16 keys are one vector.
struct Gathered {
    std::vector<float> keys, values;
};

template <typename F>
inline void gather(const Cache& cache, const Run& run, int64_t kv_head, Gathered& to) {
    const int64_t dim = cache.head_dim, tiles = (run.context + LANES - 1) / LANES;
    to.keys.assign((size_t)tiles * dim * LANES, 0.0f);
    to.values.resize((size_t)run.context * dim);
    for (int64_t position = 0; position < run.context; position++) {
        const int64_t at = run.at(cache, position) + kv_head * dim;
        float* keys = to.keys.data() + position / LANES * dim * LANES + position % LANES;
        for (int64_t i = 0; i < dim; i += LANES) {
            const Floats key = sixteen<F>(cache.k, at + i);
            for (int lane = 0; lane < LANES; lane++) keys[(i + lane) * LANES] = key[lane];
            store(to.values.data() + position * dim + i, sixteen<F>(cache.v, at + i));
        }
    }
}

// TOKENS tokens of one query head over gathered keys and values. The first attends to tokens 0 to `first_last`.
template <int TOKENS>
inline void attend_gathered(const Gathered& from, int64_t dim, int64_t first_last, const float* q, int64_t q_stride,
                            float scale, float* out, int64_t out_stride) {
    const int64_t tiles = (first_last + TOKENS - 1) / LANES + 1, padded = tiles * LANES;
    thread_local std::vector<float> scores;
    scores.resize((size_t)padded * TOKENS);
    for (int64_t t = 0; t < tiles; t++) {
        const float* keys = from.keys.data() + t * dim * LANES;
        Floats dot[TOKENS] = {};
        for (int64_t d = 0; d < dim; d++) {
            const Floats key = load<Floats>(keys + d * LANES);
            for (int m = 0; m < TOKENS; m++) dot[m] += key * q[m * q_stride + d];
        }
        for (int m = 0; m < TOKENS; m++) store(scores.data() + m * padded + t * LANES, dot[m] * scale);
    }
    float inverse[TOKENS];
    for (int m = 0; m < TOKENS; m++) {
        const int64_t last = first_last + m;
        inverse[m] = softmax(scores.data() + m * padded, last);
        for (int64_t i = last / LANES * LANES + LANES; i < padded; i++) scores[m * padded + i] = 0.0f;
    }
    for (int64_t i = 0; i < dim; i += LANES) {
        Floats acc[TOKENS] = {};
        for (int64_t position = 0; position < first_last + TOKENS; position++) {
            const Floats value = load<Floats>(from.values.data() + position * dim + i);
            for (int m = 0; m < TOKENS; m++) acc[m] += value * scores[m * padded + position];
        }
        for (int m = 0; m < TOKENS; m++) store(out + m * out_stride + i, acc[m] * inverse[m]);
    }
}

constexpr int64_t GATHER_FROM = 8;  // new tokens of a run from which on its keys are gathered first
constexpr int64_t QUERY_TOKENS = 4;

// q: [tokens][q_stride]; out: [tokens][out_stride]; the query heads of a token side by side.
inline void attention(Threads& threads, const Cache& cache, const std::vector<Run>& runs, int64_t heads, const float* q,
                      int64_t q_stride, float scale, float* out, int64_t out_stride) {
    const int64_t dim = cache.head_dim, per_kv = heads / cache.kv_heads;
    with_plain(cache.format, [&](auto format) {
        using F = decltype(format);
        struct Task {
            const Run* run;
            int64_t token, count, head, queries;
            const Gathered* from;
        };
        std::vector<Task> tasks;
        int64_t long_runs = 0;
        for (const Run& run : runs) long_runs += run.count >= GATHER_FROM;
        std::vector<Gathered> gathered((size_t)long_runs * cache.kv_heads);
        std::vector<const Run*> to_gather;
        for (const Run& run : runs) {
            if (run.count < GATHER_FROM) {
                // A few tokens: heads are split further only where there are fewer tasks than threads.
                const int64_t parts = (int64_t)runs.size() * cache.kv_heads < 2 * threads.count() ? per_kv : 1;
                for (int64_t token = 0; token < run.count; token++)
                    for (int64_t head = 0; head < heads; head += per_kv / parts)
                        tasks.push_back({&run, token, 1, head, per_kv / parts, nullptr});
                continue;
            }
            const Gathered* from = gathered.data() + to_gather.size() * cache.kv_heads;
            to_gather.push_back(&run);
            for (int64_t token = 0; token < run.count; token += QUERY_TOKENS)
                for (int64_t head = 0; head < heads; head++)
                    tasks.push_back({&run, token, std::min(QUERY_TOKENS, run.count - token), head, 1, from + head / per_kv});
        }
        threads.run((int64_t)gathered.size(), [&](int64_t i) {
            gather<F>(cache, *to_gather[i / cache.kv_heads], i % cache.kv_heads, gathered[i]);
        });
        // The last tasks of a run have the longest contexts: they begin first.
        threads.run((int64_t)tasks.size(), [&](int64_t i) {
            const Task& task = tasks[tasks.size() - 1 - i];
            const Run& run = *task.run;
            const int64_t token = run.first + task.token, last = run.context - run.count + task.token;
            const float* from = q + token * q_stride + task.head * dim;
            float* to = out + token * out_stride + task.head * dim;
            if (task.from == nullptr)
                return attend_heads<F>(cache, run, last, task.head / per_kv, task.queries, from, scale, to);
            if (task.count == QUERY_TOKENS)
                return attend_gathered<QUERY_TOKENS>(*task.from, dim, last, from, q_stride, scale, to, out_stride);
            for (int64_t m = 0; m < task.count; m++)
                attend_gathered<1>(*task.from, dim, last + m, from + m * q_stride, q_stride, scale, to + m * out_stride, out_stride);
        });
    });
}

}  // namespace nanovllm
