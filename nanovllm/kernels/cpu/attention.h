// Attention of new tokens over a paged KV cache, in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "buffers.h"
#include "maths.h"
#include "plain_floats.h"
#include "threads.h"

namespace nanovllm {

// One layer's keys or values: [blocks][block_size][kv_heads][head_dim], contiguous; f32, bf16 or f16.
struct Cache {
    uint8_t *k, *v;
    int64_t block_size, kv_heads, head_dim;
    int32_t format;

    int64_t token_size() const { return kv_heads * head_dim; }  // elements
};

// A sequence's new tokens: rows `first` to `first` + `count` of the batch, the last of a context of `context` tokens.
struct Run {
    int64_t first, count, context;
    const int32_t* blocks;

    // fn(position, count, element): `count` tokens from `position` on lie side by side, from `element` on.
    template <typename Fn>
    void each_block(const Cache& cache, int64_t begin, int64_t end, Fn&& fn) const {
        while (begin < end) {
            const int64_t block = begin / cache.block_size, within = begin % cache.block_size;
            const int64_t here = std::min(cache.block_size - within, end - begin);
            fn(begin, here, (blocks[block] * cache.block_size + within) * cache.token_size());
            begin += here;
        }
    }
};

// scores[0 to count - 1] become exponentials relative to the largest, which is returned; so is their sum. Whole vectors
// are written.
inline float exponentials(float* scores, int64_t count, float& total) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
    NarrowFloats most[NARROWS], sums[NARROWS] = {};
    for (NarrowFloats& part : most) part = broadcast<NarrowFloats>(-INFINITY);
    for (int64_t i = 0; i < padded; i += LANES)
        for (int p = 0; p < NARROWS; p++) most[p] = larger(most[p], load<NarrowFloats>(scores + i + p * NARROW));
    for (int p = 1; p < NARROWS; p++) most[0] = larger(most[0], most[p]);
    const float top = maximum(most[0]);
    for (int64_t i = 0; i < padded; i += LANES)
        for (int p = 0; p < NARROWS; p++) {
            float* const at = scores + i + p * NARROW;
            const NarrowFloats power = exponential<true>(load<NarrowFloats>(at) - top);
            store(at, power);
            sums[p] += power;
        }
    total = sum(whole(sums));
    return top;
}

// Scores s become cap * tanh(s / cap). Whole vectors are written.
inline void cap_scores(float* scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += NARROW) {
        const NarrowFloats powers = exponential(load<NarrowFloats>(scores + i) * (2.0f / cap));
        store(scores + i, cap - (2.0f * cap) / (powers + 1.0f));
    }
}

constexpr int64_t PIECE = 256;  // tokens of a context that one task attends to
constexpr int64_t AHEAD = 16;   // tokens: processors fetch little of one head's rows themselves, which lie apart

inline void prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// One head's result over a piece of the context: the weighted sum of values is `out` / `total`.
struct Partial {
    float top, total;  // the largest score, and the sum of exponentials relative to it
    float* out;        // [head_dim]
};

// QUERIES heads of one token that share a key head, over positions begin to end: keys are read once for all of them.
template <typename F, int QUERIES>
inline void attend_piece(const Cache& cache, const Run& run, int64_t begin, int64_t end, int64_t kv_head, const float* q,
                         float scale, float soft_cap, Partial* results) {
    const int64_t dim = cache.head_dim, size = cache.token_size();
    const auto fetch = [&](const uint8_t* rows, int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) prefetch(rows + t * size * F::BYTES, dim * F::BYTES);
    };
    alignas(64) float scores[QUERIES][PIECE];
    run.each_block(cache, begin, end, [&](int64_t position, int64_t count, int64_t element) {
        const int64_t at = (element + kv_head * dim) * F::BYTES;
        const uint8_t *keys = cache.k + at, *values = cache.v + at;
        float* to = &scores[0][position - begin];
        fetch(keys, 0, std::min(AHEAD, count));
        for (int64_t t = 0; t < count; t += 4) {  // four tokens at once; at the end the last one again
            fetch(keys, t + AHEAD, std::min(t + AHEAD + 4, count));
            const int64_t next = std::max<int64_t>(t + AHEAD - count, 0);  // the values are read next
            fetch(values, next, std::min(t + AHEAD - count + 4, count));
            Floats dot[QUERIES][4] = {};
            for (int64_t i = 0; i < dim; i += LANES)
                for (int n = 0; n < 4; n++) {
                    const Floats key = sixteen<F>(keys, std::min(t + n, count - 1) * size + i);
                    for (int h = 0; h < QUERIES; h++) add_product(dot[h][n], key, load<Floats>(q + h * dim + i));
                }
            for (int h = 0; h < QUERIES; h++) {
                float four[4];
                sums_of_four(dot[h], four);
                for (int n = 0; n < std::min<int64_t>(4, count - t); n++) to[h * PIECE + t + n] = four[n] * scale;
            }
        }
    });
    if (soft_cap)
        for (int h = 0; h < QUERIES; h++) cap_scores(scores[h], end - begin, soft_cap);
    for (int h = 0; h < QUERIES; h++) results[h].top = exponentials(scores[h], end - begin, results[h].total);
    constexpr int WIDTH = 4;  // vectors of a head at once: they and the queries' sums fit in registers
    for (int64_t first = 0; first < dim; first += WIDTH * LANES) {
        const int width = (int)std::min<int64_t>(WIDTH, (dim - first) / LANES);
        Floats acc[QUERIES][WIDTH] = {};
        auto add = [&](auto width) {
            run.each_block(cache, begin, end, [&](int64_t position, int64_t count, int64_t element) {
                const uint8_t* values = cache.v + (element + kv_head * dim + first) * F::BYTES;
                for (int64_t t = 0; t < count; t++) {
                    if (t + AHEAD < count) prefetch(values + (t + AHEAD) * size * F::BYTES, width * LANES * F::BYTES);
                    for (int i = 0; i < width; i++) {
                        const Floats value = sixteen<F>(values, t * size + i * LANES);
                        for (int h = 0; h < QUERIES; h++) add_product(acc[h][i], value, scores[h][position - begin + t]);
                    }
                }
            });
        };
        if (width == WIDTH) add(std::integral_constant<int, WIDTH>{});
        else add(width);
        for (int h = 0; h < QUERIES; h++)
            for (int i = 0; i < width; i++) store(results[h].out + first + i * LANES, acc[h][i]);
    }
}

template <typename F>
inline void attend_heads(const Cache& cache, const Run& run, int64_t begin, int64_t end, int64_t kv_head, int64_t queries,
                         const float* q, float scale, float soft_cap, Partial* results) {
    const int64_t dim = cache.head_dim;
    for (; queries >= 4; queries -= 4, q += 4 * dim, results += 4)
        attend_piece<F, 4>(cache, run, begin, end, kv_head, q, scale, soft_cap, results);
    if (queries == 3) attend_piece<F, 3>(cache, run, begin, end, kv_head, q, scale, soft_cap, results);
    if (queries == 2) attend_piece<F, 2>(cache, run, begin, end, kv_head, q, scale, soft_cap, results);
    if (queries == 1) attend_piece<F, 1>(cache, run, begin, end, kv_head, q, scale, soft_cap, results);
}

// The pieces of one head to its result.
inline void join(const Partial* pieces, int64_t count, int64_t step, int64_t dim, float* out) {
    float top = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++) top = std::max(top, pieces[i * step].top);
    for (int64_t i = 0; i < count; i++) total += pieces[i * step].total * std::exp(pieces[i * step].top - top);
    for (int64_t d = 0; d < dim; d += LANES) {
        Floats sum{};
        for (int64_t i = 0; i < count; i++)
            sum += load<Floats>(pieces[i * step].out + d) * (std::exp(pieces[i * step].top - top) / total);
        store(out + d, sum);
    }
}

// The keys and values of one key head of a run's context: keys as [context / 16][head_dim][16], values as
// [context][head_dim], so that the scores of 16 keys are one vector.
struct Gathered {
    Buffer<float> keys, values;

    Gathered(const Run& run, int64_t dim)
        : keys((size_t)((run.context + LANES - 1) / LANES * dim * LANES)), values((size_t)(run.context * dim)) {}
};

template <typename F>
inline void gather(const Cache& cache, const Run& run, int64_t kv_head, Gathered& to) {
    const int64_t dim = cache.head_dim, tile = dim * LANES;
    if (run.context % LANES) std::fill(to.keys.data() + to.keys.size() - tile, to.keys.data() + to.keys.size(), 0.0f);
    run.each_block(cache, 0, run.context, [&](int64_t first, int64_t count, int64_t element) {
        for (int64_t position = first; position < first + count; position++) {
            const int64_t at = element + (position - first) * cache.token_size() + kv_head * dim;
            float* keys = to.keys.data() + position / LANES * dim * LANES + position % LANES;
            for (int64_t i = 0; i < dim; i += LANES) {
                const Floats key = sixteen<F>(cache.k, at + i);
                for (int lane = 0; lane < LANES; lane++) keys[(i + lane) * LANES] = key[lane];
                store(to.values.data() + position * dim + i, sixteen<F>(cache.v, at + i));
            }
        }
    });
}

// The first token that one with `context` tokens up to itself attends to.
inline int64_t first_seen(int64_t context, int64_t window) { return window ? std::max<int64_t>(context - window, 0) : 0; }

constexpr size_t GATHERED_BYTES = 64 << 20;  // about as much of a context is in memory as float32 at a time
constexpr int64_t GATHER_FROM = 8;  // new tokens of a run from which on its keys are gathered first
// Tokens that are attended for at once, and whether by two vectors of keys or of a value: a sum takes four cycles before
// the next product can be added to it, so there are as many sums as registers hold.
#if defined(__AVX512F__)
constexpr int64_t QUERY_TOKENS = 8;
constexpr bool TWO_VECTORS = true;
#elif defined(__AVX2__)
constexpr int64_t QUERY_TOKENS = 6;
constexpr bool TWO_VECTORS = false;
#else
constexpr int64_t QUERY_TOKENS = 4;
constexpr bool TWO_VECTORS = false;
#endif

// out[m] = scales[m] times the sum over k < count of vector k, at vectors + k * step, times weights[m][k]; for TOKENS m, and
// if TWO also for the vectors that lie `next` elements further. A function of its own, for which GCC keeps all in registers.
template <int TOKENS, bool TWO>
__attribute__((noinline)) void weighted_sums(const float* vectors, int64_t step, int64_t next, int64_t count,
                                             const float* weights, int64_t stride, const float* scales, float* out,
                                             int64_t out_stride) {
    Floats low[TOKENS] = {}, high[TOKENS] = {};
    for (int64_t k = 0; k < count; k++) {
        const Floats a = load<Floats>(vectors + k * step), b = load<Floats>(vectors + k * step + (TWO ? next : 0));
        for (int m = 0; m < TOKENS; m++) {
            add_product(low[m], a, weights[m * stride + k]);
            if (TWO) add_product(high[m], b, weights[m * stride + k]);
        }
    }
    for (int m = 0; m < TOKENS; m++) {
        store(out + m * out_stride, low[m] * scales[m]);
        if (TWO) store(out + m * out_stride + LANES, high[m] * scales[m]);
    }
}

// TOKENS tokens of one query head over gathered keys and values. The first attends to tokens up to `first_last`.
template <int TOKENS>
inline void attend_gathered(const Gathered& from, int64_t dim, int64_t first_last, const float* q, int64_t q_stride,
                            float scale, int64_t window, float soft_cap, float* out, int64_t out_stride) {
    const int64_t begin = first_seen(first_last + 1, window);
    const int64_t tiles = (first_last + TOKENS - 1) / LANES + 1, padded = tiles * LANES;
    thread_local std::vector<float> scores, queries;
    scores.resize((size_t)padded * TOKENS);
    // Side by side: rows of several heads lie a power of two apart, in few sets of the first-level cache.
    queries.resize((size_t)dim * TOKENS);
    for (int m = 0; m < TOKENS; m++) std::copy_n(q + m * q_stride, dim, queries.data() + m * dim);
    float scales[TOKENS];
    std::fill(scales, scales + TOKENS, scale);
    auto score = [&](int64_t t, auto two) {
        weighted_sums<TOKENS, two>(from.keys.data() + t * dim * LANES, LANES, dim * LANES, dim, queries.data(), dim, scales,
                                   scores.data() + t * LANES, padded);
    };
    int64_t t = begin / LANES;
    if (TWO_VECTORS)
        for (; t + 2 <= tiles; t += 2) score(t, std::true_type{});
    for (; t < tiles; t++) score(t, std::false_type{});
    float inverse[TOKENS];
    for (int m = 0; m < TOKENS; m++) {
        const int64_t count = first_last + m + 1, tile = begin / LANES * LANES;
        if (soft_cap) cap_scores(scores.data() + m * padded + tile, count - tile, soft_cap);
        for (int64_t i = 0; i < first_seen(count, window); i++) scores[m * padded + i] = -INFINITY;
        float total;
        exponentials(scores.data() + m * padded, count, total);
        inverse[m] = 1.0f / total;
        for (int64_t i = (count + LANES - 1) / LANES * LANES; i < padded; i++) scores[m * padded + i] = 0.0f;
    }
    auto add = [&](int64_t first, auto two) {
        weighted_sums<TOKENS, two>(from.values.data() + begin * dim + first, dim, LANES, first_last + TOKENS - begin,
                                   scores.data() + begin, padded, inverse, out + first, out_stride);
    };
    int64_t i = 0;
    if (TWO_VECTORS)
        for (; i + 2 * LANES <= dim; i += 2 * LANES) add(i, std::true_type{});
    for (; i < dim; i += LANES) add(i, std::false_type{});
}


// q: [tokens][q_stride]; out: [tokens][out_stride]; the query heads of a token side by side.
struct Heads {
    int64_t count;
    float scale;
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    int64_t window = 0;  // tokens that a token attends to, itself among them; 0: all
    float soft_cap = 0;  // if not 0, scores s become soft_cap * tanh(s / soft_cap)
};

// Runs of few tokens: a task for each token, key head and piece of the context.
template <typename F>
inline void attend_short_runs(Threads& threads, const Cache& cache, const std::vector<const Run*>& runs, const Heads& heads) {
    const int64_t dim = cache.head_dim, per_kv = heads.count / cache.kv_heads;
    struct Token {
        const Run* run;
        int64_t row, begin, context, pieces, first_piece;
    };
    std::vector<Token> tokens;
    std::vector<std::pair<int64_t, int64_t>> pieces;  // (token, piece)
    for (const Run* run : runs)
        for (int64_t i = 0; i < run->count; i++) {
            const int64_t context = run->context - run->count + i + 1, begin = first_seen(context, heads.window);
            const int64_t count = (context - begin + PIECE - 1) / PIECE;
            for (int64_t piece = 0; piece < count; piece++) pieces.push_back({(int64_t)tokens.size(), piece});
            tokens.push_back({run, run->first + i, begin, context, count, (int64_t)pieces.size() - count});
        }
    std::vector<Partial> partials(pieces.size() * heads.count);
    Buffer<float> outs(partials.size() * dim);
    for (size_t i = 0; i < partials.size(); i++) partials[i].out = outs.data() + i * dim;
    threads.run((int64_t)pieces.size() * cache.kv_heads, [&](int64_t task) {
        const int64_t kv_head = task % cache.kv_heads;
        const auto [index, piece] = pieces[task / cache.kv_heads];
        const Token& token = tokens[index];
        const float* q = heads.q + token.row * heads.q_stride + kv_head * per_kv * dim;
        Partial* results = partials.data() + task / cache.kv_heads * heads.count + kv_head * per_kv;
        const int64_t begin = token.begin + piece * PIECE;
        attend_heads<F>(cache, *token.run, begin, std::min(token.context, begin + PIECE), kv_head, per_kv, q, heads.scale,
                        heads.soft_cap, results);
    });
    for (const Token& token : tokens)
        for (int64_t h = 0; h < heads.count; h++)
            join(partials.data() + token.first_piece * heads.count + h, token.pieces, heads.count, dim,
                 heads.out + token.row * heads.out_stride + h * dim);
}

// Runs of many tokens: their keys are gathered first, then there is a task for each head and some tokens.
template <typename F>
inline void attend_long_runs(Threads& threads, const Cache& cache, const std::vector<const Run*>& runs, const Heads& heads) {
    const int64_t dim = cache.head_dim, per_kv = heads.count / cache.kv_heads;
    const int64_t sides = (int64_t)runs.size() * cache.kv_heads;  // key heads of runs
    for (int64_t begin = 0, end = 0; begin < sides; begin = end) {
        std::vector<Gathered> gathered;
        for (size_t bytes = 0; end < sides && bytes < GATHERED_BYTES; end++) {
            gathered.emplace_back(*runs[end / cache.kv_heads], dim);
            bytes += (gathered.back().keys.size() + gathered.back().values.size()) * sizeof(float);
        }
        threads.run(end - begin, [&](int64_t i) {
            const int64_t side = begin + i;
            gather<F>(cache, *runs[side / cache.kv_heads], side % cache.kv_heads, gathered[i]);
        });
        struct Task {
            int64_t run, token, count, head;
        };
        std::vector<Task> tasks;
        for (int64_t r = begin / cache.kv_heads; r * cache.kv_heads < end; r++) {
            const int64_t before = r * cache.kv_heads;
            const int64_t first = std::max<int64_t>(begin - before, 0), last = std::min(end - before, cache.kv_heads);
            for (int64_t token = 0; token < runs[r]->count; token += QUERY_TOKENS)
                for (int64_t head = first * per_kv; head < last * per_kv; head++)
                    tasks.push_back({r, token, std::min(QUERY_TOKENS, runs[r]->count - token), head});
        }
        // The last tasks of a run have the longest contexts: they begin first.
        threads.run((int64_t)tasks.size(), [&](int64_t i) {
            const Task& task = tasks[tasks.size() - 1 - i];
            const Run& run = *runs[task.run];
            const Gathered& from = gathered[task.run * cache.kv_heads + task.head / per_kv - begin];
            const int64_t token = run.first + task.token, last = run.context - run.count + task.token;
            const float* q = heads.q + token * heads.q_stride + task.head * dim;
            float* to = heads.out + token * heads.out_stride + task.head * dim;
            const auto attend = [&](auto tokens, int64_t m) {
                attend_gathered<tokens>(from, dim, last + m, q + m * heads.q_stride, heads.q_stride, heads.scale, heads.window,
                                        heads.soft_cap, to + m * heads.out_stride, heads.out_stride);
            };
            if (task.count == QUERY_TOKENS) return attend(std::integral_constant<int, QUERY_TOKENS>{}, 0);
            int64_t m = 0;
            for (; m + 2 <= task.count; m += 2) attend(std::integral_constant<int, 2>{}, m);
            if (m < task.count) attend(std::integral_constant<int, 1>{}, m);
        });
    }
}

// Not inlined: it is large, and there are several callers.
__attribute__((noinline)) inline void attention(Threads& threads, const Cache& cache, const std::vector<Run>& runs,
                                                const Heads& heads) {
    std::vector<const Run*> few, many;
    for (const Run& run : runs) (run.count < GATHER_FROM ? few : many).push_back(&run);
    with_plain(cache.format, [&](auto format) {
        using F = decltype(format);
        if (!few.empty()) attend_short_runs<F>(threads, cache, few, heads);
        if (!many.empty()) attend_long_runs<F>(threads, cache, many, heads);
    });
}

}  // namespace nanovllm
