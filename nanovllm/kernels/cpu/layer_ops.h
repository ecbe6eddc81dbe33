// The ops of a decoder that runs op by op, each in one call. Tensors are plain floats of one format; strides are in elements.
#pragma once

#include "attention.h"
#include "rows.h"

namespace nanovllm {

constexpr int64_t WAKING = 1 << 16;  // numbers of all rows from which on waking threads is worth it: they take some 20 us

// fn(row) for rows of `size` numbers.
template <typename Fn>
inline void each_row(Threads& threads, int64_t rows, int64_t size, Fn&& fn) {
    if (rows * size >= WAKING) return each_token(threads, rows, fn);
    for (int64_t i = 0; i < rows; i++) fn(i);
}

// Where a row is computed: in its own memory, or in `room` if it has another format.
inline float* place(int32_t format, uint8_t* row, float* room) { return format == f32 ? (float*)row : room; }

// Rows of numbers of a format.
struct Table {
    int32_t format;
    uint8_t* data;
    int64_t stride;

    uint8_t* row(int64_t i) const { return data + i * stride * bytes_of(format); }
};

// The RMS norm of x, or of x + residual, which becomes `sum` then, rounded. residual.data: null, or as x.
inline void rms_norm_rows(Threads& threads, Table x, Table residual, const uint8_t* weight, int64_t rows, int64_t size,
                          float eps, Table sum, Table out) {
    const int32_t format = x.format;
    Buffer<float> weight_room(size);
    const float* factors = widened(format, weight, size, weight_room.data());
    each_row(threads, rows, size, [&](int64_t i) {
        Buffer<float> rooms(2 * size);
        float *room = rooms.data(), *other = room + size;
        const float* values = widened(format, x.row(i), size, room);
        if (residual.data) {
            const float* added = widened(format, residual.row(i), size, other);
            float* total = place(format, sum.row(i), room);
            for (int64_t j = 0; j < size; j++) total[j] = values[j] + added[j];
            round_to(format, total, size);
            narrow(format, total, size, sum.row(i));
            values = total;
        }
        float* result = place(format, out.row(i), other);
        rms_norm(values, factors, size, eps, result, format);
        narrow(format, result, size, out.row(i));
    });
}

// gate_up: [rows][2 * size].
inline void silu_and_mul_rows(Threads& threads, Table gate_up, int64_t rows, int64_t size, Table out) {
    const int32_t format = out.format;
    each_row(threads, rows, 4 * size, [&](int64_t i) {
        Buffer<float> room(2 * size);
        const float* gate = widened(format, gate_up.row(i), 2 * size, room.data());
        float* result = place(format, out.row(i), room.data());
        silu_and_mul(gate, gate + size, size, result, format);
        narrow(format, result, size, out.row(i));
    });
}

// [tokens][count][dim] of a format; the numbers of a head lie side by side.
struct TokenHeads {
    int32_t format;
    uint8_t* data;
    int64_t count, dim, token_stride, head_stride;

    uint8_t* head(int64_t token, int64_t h) const {
        return data + (token * token_stride + h * head_stride) * bytes_of(format);
    }
};

// The first of some numbers that is below 0 or not below `end`; -1: none.
inline int64_t first_outside(const int64_t* numbers, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= end) return i;
    return -1;
}

// Rotates heads by their tokens' positions, after a norm of each head if there is a weight [dim]. out: [tokens][count][dim].
// cos_sin: float32 [positions][cos_sin_stride].
inline void rotate_heads(Threads& threads, TokenHeads x, int64_t tokens, const int64_t* positions, const float* cos_sin,
                         int64_t cos_sin_stride, const uint8_t* weight, float eps, uint8_t* out) {
    const int64_t dim = x.dim;
    const int32_t format = x.format;
    Buffer<float> weight_room(dim);
    const float* factors = weight ? widened(format, weight, dim, weight_room.data()) : nullptr;
    each_row(threads, tokens, x.count * dim, [&](int64_t t) {
        Buffer<float> rooms(3 * dim);
        float *angles = rooms.data(), *room = angles + dim, *other = room + dim;
        std::copy_n(cos_sin + positions[t] * cos_sin_stride, dim, angles);
        round_to(format, angles, dim);
        for (int64_t h = 0; h < x.count; h++) {
            const float* head = widened(format, x.head(t, h), dim, room);
            if (factors) {
                rms_norm(head, factors, dim, eps, room, format);
                round_to(format, room, dim);
                head = room;
            }
            uint8_t* const to = out + (t * x.count + h) * dim * bytes_of(format);
            float* const rotated = place(format, to, other);
            rotate(head, angles, dim, rotated, format);
            narrow(format, rotated, dim, to);
        }
    });
}

// Heads of tokens to slots of a cache [slots][count][dim] of a format.
inline void store_heads(Threads& threads, TokenHeads x, int64_t tokens, const int64_t* slots, int32_t cache_format,
                        uint8_t* cache) {
    each_row(threads, tokens, x.count * x.dim, [&](int64_t t) {
        Buffer<float> room(x.dim);
        for (int64_t h = 0; h < x.count; h++)
            narrow(cache_format, widened(x.format, x.head(t, h), x.dim, room.data()), x.dim,
                   cache + (slots[t] * x.count + h) * x.dim * bytes_of(cache_format));
    });
}

// What sequences have in the cache, and which of their tokens attend to it.
struct Sequences {
    int64_t count;
    const int32_t* block_table;  // [count][table_stride], of which `max_blocks` are a sequence's
    int64_t table_stride, max_blocks, num_blocks;
    const int32_t* context_lens;  // [count]
    int64_t max_context_len;
    const int32_t* starts;  // [count + 1]: where each one's queries begin; null: all have `queries`
    int64_t queries;        // at most

    int64_t first_query(int64_t i) const { return starts ? starts[i] : i * queries; }

    // Whether all that is read of the cache lies in it, and all queries are of `tokens`.
    bool are_valid(int64_t block_size, int64_t tokens) const {
        if (first_query(0) != 0 || first_query(count) != tokens) return false;
        for (int64_t i = 0; i < count; i++) {
            const int64_t length = context_lens[i], own = first_query(i + 1) - first_query(i);
            if (own < 0 || own > queries || (starts && length > 0 && length < own)) return false;
            if (length < 0 || length > std::min(max_context_len, max_blocks * block_size)) return false;
            for (int64_t b = 0; b * block_size < length; b++)
                if (const int32_t block = block_table[i * table_stride + b]; block < 0 || block >= num_blocks) return false;
        }
        return true;
    }
};

// out: [tokens][heads][dim], zeros for queries before their sequence's first token.
inline void attend(Threads& threads, TokenHeads q, int64_t tokens, const Cache& cache, const Sequences& sequences,
                   float scale, int64_t window, float soft_cap, uint8_t* out) {
    const int64_t width = q.count * q.dim;
    const bool in_place = q.format == f32 && q.head_stride == q.dim;
    Buffer<float> queries(in_place ? 0 : tokens * width), results(q.format == f32 ? 0 : tokens * width);
    if (!in_place)
        each_row(threads, tokens, width, [&](int64_t t) {
            for (int64_t h = 0; h < q.count; h++) {
                float* const to = queries.data() + t * width + h * q.dim;
                narrow(f32, widened(q.format, q.head(t, h), q.dim, to), q.dim, (uint8_t*)to);
            }
        });
    float* const result = place(q.format, out, results.data());
    std::vector<Run> runs;
    for (int64_t i = 0; i < sequences.count; i++) {
        const int64_t length = sequences.context_lens[i], first = sequences.first_query(i);
        const int64_t own = sequences.first_query(i + 1) - first, seeing = std::min(own, length);
        std::fill_n(result + first * width, (own - seeing) * width, 0.0f);
        if (seeing) runs.push_back({first + own - seeing, seeing, length, sequences.block_table + i * sequences.table_stride});
    }
    attention(threads, cache, runs, {q.count, scale, in_place ? (const float*)q.data : queries.data(),
                                     in_place ? q.token_stride : width, result, width, window, soft_cap});
    if (q.format != f32)
        each_row(threads, tokens, width, [&](int64_t t) {
            narrow(q.format, result + t * width, width, out + t * width * bytes_of(q.format));
        });
}

}  // namespace nanovllm
