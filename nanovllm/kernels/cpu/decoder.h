// The pre-norm decoder of Llama and Qwen3: all layers of a step in one call. Activations are float32.
#pragma once

#include "attention.h"
#include "products.h"
#include "rows.h"

namespace nanovllm {

struct Layer {
    Weight q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm;                // [hidden]
    const float *q_norm, *k_norm;                       // [head_dim], or null
    const float *q_bias, *k_bias, *v_bias, *o_bias;     // or null
    const float *gate_bias, *up_bias, *down_bias;       // or null
    int64_t window;      // tokens that a token attends to, itself among them; 0: all
    int64_t unrotated;   // 1: queries and keys are not rotated
};

struct Model {
    int64_t num_layers, hidden, heads, kv_heads, head_dim, intermediate;
    float eps;
    int32_t parts;   // of every quantised weight; 0: all are plain
    int32_t rounds;  // 1: some weight's is
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

// What a step keeps between the parts of a layer. `count` tokens are computed, in the last layer those wanted alone. The MLP
// has the memory of attention, which has ended by then: `wide_` is what attention attends to, then the gate times up, and
// `results_` are queries, keys and values, then up.
class Step {
   public:
    // x: the embeddings [tokens][hidden], which the step changes.
    Step(Threads& threads, const Model& model, const Batch& batch, float* x)
        : threads_(threads), model_(model), batch_(batch), runs_(runs_of(batch)), x_(x) {
        q_size_ = model.heads * model.head_dim;
        kv_size_ = model.kv_heads * model.head_dim;
        set_count(batch.tokens);
    }

    void run(const Layer& layer, const Cache& cache, bool is_last) {
        norm(layer.input_norm);
        float *q = results_.data(), *k = q + count_ * q_size_, *v = k + count_ * kv_size_;
        products(threads_, {{layer.q, {q, q_size_, q_size_, layer.q_bias, false}},
                            {layer.k, {k, kv_size_, kv_size_, layer.k_bias, false}},
                            {layer.v, {v, kv_size_, kv_size_, layer.v_bias, false}}}, normed_->tokens(count_));
        each_token(threads_, count_, [&](int64_t t) {
            rotate_and_store(layer, cache, t, q + t * q_size_, k + t * kv_size_, v + t * kv_size_);
        });
        const float scale = 1.0f / std::sqrt((float)model_.head_dim);
        wide_->set_width(q_size_);
        attention(threads_, cache, runs_, {model_.heads, scale, q, q_size_, wide_->row(0), wide_->stride(), layer.window});
        if (is_last && batch_.num_rows >= 0) keep_wanted();
        each_token(threads_, count_, [&](int64_t t) { wide_->finish(t); });
        products(threads_, {{layer.o, {x_, model_.hidden, layer.o.rows, layer.o_bias, true}}}, wide_->tokens(count_));
        norm(layer.post_norm);
        wide_->set_width(model_.intermediate);
        float* up = results_.data();
        products(threads_, {{layer.gate, {wide_->row(0), wide_->stride(), layer.gate.rows, layer.gate_bias, false}},
                            {layer.up, {up, model_.intermediate, layer.up.rows, layer.up_bias, false}}},
                 normed_->tokens(count_));
        each_token(threads_, count_, [&](int64_t t) { activate(t, up + t * model_.intermediate); });
        products(threads_, {{layer.down, {x_, model_.hidden, layer.down.rows, layer.down_bias, true}}}, wide_->tokens(count_));
    }

    // out: [count][hidden].
    void finish(float* out) {
        each_token(threads_, count_, [&](int64_t t) {
            rms_norm(x_ + t * model_.hidden, model_.final_norm, model_.hidden, model_.eps, out + t * model_.hidden);
        });
    }

   private:
    void set_count(int64_t count) {
        count_ = count;
        for (auto [to, width] : {std::pair{&normed_, model_.hidden}, {&wide_, std::max(q_size_, model_.intermediate)}})
            *to = std::make_unique<Activations>(count, width, model_.parts, model_.rounds);
        results_.resize((size_t)count * std::max(q_size_ + 2 * kv_size_, model_.intermediate));
    }

    void norm(const float* weight) {
        each_token(threads_, count_, [&](int64_t t) {
            rms_norm(x_ + t * model_.hidden, weight, model_.hidden, model_.eps, normed_->row(t));
            normed_->finish(t);
        });
    }

    // q, k, v: of the token.
    void rotate_and_store(const Layer& layer, const Cache& cache, int64_t t, float* q, float* k, const float* v) {
        const int64_t dim = model_.head_dim;
        const float* angles = model_.cos_sin + batch_.positions[t] * dim;
        auto rotate_all = [&](float* heads, int64_t count, const float* weight) {
            for (float* head = heads; head < heads + count * dim; head += dim) {
                if (weight) rms_norm(head, weight, dim, model_.eps, head);
                if (!layer.unrotated) rotate(head, angles, dim, head);
            }
        };
        rotate_all(q, model_.heads, layer.q_norm);
        rotate_all(k, model_.kv_heads, layer.k_norm);
        const int64_t at = batch_.slots[t] * kv_size_ * bytes_of(cache.format);
        narrow(cache.format, k, kv_size_, cache.k + at);
        narrow(cache.format, v, kv_size_, cache.v + at);
    }

    // Of the last layer the other tokens need keys and values alone. Rows may repeat, and be more than the tokens.
    void keep_wanted() {
        const auto all = std::move(wide_);
        const int64_t hidden = model_.hidden;
        chosen_.resize((size_t)batch_.num_rows * hidden);
        set_count(batch_.num_rows);
        wide_->set_width(q_size_);
        for (int64_t i = 0; i < count_; i++) {
            std::memcpy(wide_->row(i), all->row(batch_.rows[i]), q_size_ * sizeof(float));
            std::memcpy(chosen_.data() + i * hidden, x_ + batch_.rows[i] * hidden, hidden * sizeof(float));
        }
        x_ = chosen_.data();
    }

    // SiLU of the gate times `factor` [intermediate].
    void activate(int64_t t, const float* factor) {
        silu_and_mul(wide_->row(t), factor, model_.intermediate, wide_->row(t));
        wide_->finish(t);
    }

    Threads& threads_;
    const Model& model_;
    const Batch& batch_;
    const std::vector<Run> runs_;
    float* x_;
    int64_t q_size_, kv_size_, count_;
    Buffer<float> results_, chosen_;
    std::unique_ptr<Activations> normed_, wide_;
};

// out: [num_rows][hidden], after the final norm. k_caches, v_caches: one for each of `num_layers`, which may be fewer than
// the model has.
inline void decoder_step(Threads& threads, const Model& model, int64_t num_layers, const Batch& batch,
                         uint8_t* const* k_caches, uint8_t* const* v_caches, int64_t block_size, int32_t cache_format,
                         float* x, float* out) {
    Step step(threads, model, batch, x);
    for (int64_t l = 0; l < num_layers; l++) {
        const Cache cache{k_caches[l], v_caches[l], block_size, model.kv_heads, model.head_dim, cache_format};
        step.run(model.layers[l], cache, l == num_layers - 1);
    }
    step.finish(out);
}

}  // namespace nanovllm
