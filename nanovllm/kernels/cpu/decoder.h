// The pre-norm decoder of Llama and Qwen3: all layers of a step in one call. Activations are float32.
#pragma once

#include "attention.h"
#include "products.h"

namespace nanovllm {

struct Layer {
    Weight q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm;                // [hidden]
    const float *q_norm, *k_norm;                       // [head_dim], or null
    const float *q_bias, *k_bias, *v_bias, *o_bias;     // or null
    const float *gate_bias, *up_bias, *down_bias;       // or null
};

struct Model {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate;
    float eps;
    const Layer* layers;
    const float* final_norm;
    const float* cos_sin;  // [positions][head_dim]: cosines, then sines
};

struct Batch {
    int64_t tokens, num_seqs, num_decodes, max_blocks, num_rows;
    const int64_t *positions, *slots;
    const int32_t *block_table, *context_lens, *cu_seqlens;  // cu_seqlens [num_seqs - num_decodes + 1], or null
    const int64_t* rows;  // [num_rows]; num_rows -1: all tokens
};

// Rows of floats, padded with zeros to whole super-blocks, with the sums of their groups.
class Buffer {
   public:
    Buffer(int64_t count, int64_t width) : stride_((width + 255) / 256 * 256) {
        values_.assign((size_t)count * stride_, 0.0f);
        sums_.resize((size_t)count * (stride_ / GROUP));
    }

    float* row(int64_t i) { return values_.data() + i * stride_; }
    int64_t stride() const { return stride_; }

    void sum_groups(int64_t i) {
        for (int64_t g = 0; g < stride_ / GROUP; g++)
            sums_[i * (stride_ / GROUP) + g] = sum(load<Floats>(row(i) + g * GROUP) + load<Floats>(row(i) + g * GROUP + LANES));
    }

    Tokens tokens(int64_t count) const { return {values_.data(), sums_.data(), count, stride_, stride_ / GROUP}; }

   private:
    int64_t stride_;
    std::vector<float> values_, sums_;
};

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

inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    float squares = 0;
    Floats total{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats values = load<Floats>(x + i);
        total += values * values;
    }
    for (int64_t j = i; j < size; j++) squares += x[j] * x[j];
    const float factor = 1.0f / std::sqrt((sum(total) + squares) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

inline void rotate(float* x, const float* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = a * c - b * s;
        x[i + half] = b * c + a * s;
    }
}

inline std::vector<Run> runs_of(const Batch& b) {
    std::vector<Run> runs;
    for (int64_t i = 0; i < b.num_seqs; i++) {
        const int32_t* blocks = b.block_table + i * b.max_blocks;
        const int64_t run = i - b.num_decodes;
        if (run < 0) runs.push_back({i, 1, b.context_lens[i], blocks});
        else if (b.cu_seqlens[run + 1] > b.cu_seqlens[run])
            runs.push_back({b.num_decodes + b.cu_seqlens[run], b.cu_seqlens[run + 1] - b.cu_seqlens[run],
                            b.context_lens[i], blocks});
    }
    return runs;
}

// x: the embeddings [tokens][hidden], which the call changes. out: [num_rows][hidden], after the final norm.
// k_caches, v_caches: one for each of `num_layers`, which may be fewer than the model has.
inline void decoder_step(Threads& threads, const Model& model, int64_t num_layers, const Batch& b, uint8_t* const* k_caches,
                         uint8_t* const* v_caches, int64_t block_size, int32_t cache_format, float* x, float* out) {
    const int64_t hidden = model.hidden, dim = model.head_dim, q_size = model.heads * dim, kv_size = model.kv_heads * dim;
    const std::vector<Run> runs = runs_of(b);
    const float scale = 1.0f / std::sqrt((float)dim);
    int64_t count = b.tokens;
    Buffer normed(count, hidden), attended(count, q_size), inner(count, model.intermediate);
    std::vector<float> q((size_t)count * q_size), k((size_t)count * kv_size), v((size_t)count * kv_size);
    std::vector<float> up((size_t)count * model.intermediate), chosen;
    auto norm = [&](const float* weight) {
        each_token(threads, count, [&](int64_t t) {
            rms_norm(x + t * hidden, weight, hidden, model.eps, normed.row(t));
            normed.sum_groups(t);
        });
    };
    for (int64_t l = 0; l < num_layers; l++) {
        const Layer& layer = model.layers[l];
        const Cache cache{k_caches[l], v_caches[l], block_size, model.kv_heads, dim, cache_format};
        norm(layer.input_norm);
        struct { const Weight& w; const float* bias; float* to; int64_t stride; } const parts[] = {
            {layer.q, layer.q_bias, q.data(), q_size}, {layer.k, layer.k_bias, k.data(), kv_size},
            {layer.v, layer.v_bias, v.data(), kv_size}};
        for (const auto& part : parts)
            product(threads, part.w, normed.tokens(count), {part.to, part.stride, part.w.rows, part.bias, false});
        each_token(threads, count, [&](int64_t t) {
            const float* angles = model.cos_sin + b.positions[t] * dim;
            for (int64_t h = 0; h < model.heads; h++) {
                float* head = q.data() + t * q_size + h * dim;
                if (layer.q_norm) rms_norm(head, layer.q_norm, dim, model.eps, head);
                rotate(head, angles, dim);
            }
            for (int64_t h = 0; h < model.kv_heads; h++) {
                float* head = k.data() + t * kv_size + h * dim;
                if (layer.k_norm) rms_norm(head, layer.k_norm, dim, model.eps, head);
                rotate(head, angles, dim);
            }
            with_plain(cache.format, [&](auto format) {
                const int64_t at = b.slots[t] * kv_size;
                for (int64_t i = 0; i < kv_size; i++) {
                    store_as(format, cache.k, at + i, k[t * kv_size + i]);
                    store_as(format, cache.v, at + i, v[t * kv_size + i]);
                }
            });
        });
        attention(threads, cache, runs, model.heads, q.data(), q_size, scale, attended.row(0),
                  attended.stride());
        if (l == num_layers - 1 && b.num_rows >= 0) {
            // Of the last layer the other tokens need keys and values alone.
            Buffer some(b.num_rows, q_size);
            chosen.resize((size_t)b.num_rows * hidden);
            for (int64_t i = 0; i < b.num_rows; i++) {
                std::memcpy(some.row(i), attended.row(b.rows[i]), q_size * sizeof(float));
                std::memcpy(chosen.data() + i * hidden, x + b.rows[i] * hidden, hidden * sizeof(float));
            }
            attended = std::move(some);
            x = chosen.data();
            count = b.num_rows;
            // Rows may repeat, and be more than the tokens.
            if (count > b.tokens) {
                normed = Buffer(count, hidden);
                inner = Buffer(count, model.intermediate);
                up.resize((size_t)count * model.intermediate);
            }
        }
        each_token(threads, count, [&](int64_t t) { attended.sum_groups(t); });
        product(threads, layer.o, attended.tokens(count), {x, hidden, layer.o.rows, layer.o_bias, true});
        norm(layer.post_norm);
        product(threads, layer.gate, normed.tokens(count), {inner.row(0), inner.stride(), layer.gate.rows, layer.gate_bias, false});
        product(threads, layer.up, normed.tokens(count), {up.data(), model.intermediate, layer.up.rows, layer.up_bias, false});
        each_token(threads, count, [&](int64_t t) {
            float* gate = inner.row(t);
            const float* factor = up.data() + t * model.intermediate;
            int64_t i = 0;
            for (; i + LANES <= model.intermediate; i += LANES)
                store(gate + i, silu(load<Floats>(gate + i)) * load<Floats>(factor + i));
            for (; i < model.intermediate; i++) gate[i] = silu(broadcast(gate[i]))[0] * factor[i];
            inner.sum_groups(t);
        });
        product(threads, layer.down, inner.tokens(count), {x, hidden, layer.down.rows, layer.down_bias, true});
    }
    each_token(threads, count, [&](int64_t t) {
        rms_norm(x + t * hidden, model.final_norm, hidden, model.eps, out + t * hidden);
    });
}

}  // namespace nanovllm
