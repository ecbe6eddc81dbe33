// The C interface of the library. Sizes are in elements unless a name says bytes. No function throws.
#include <exception>
#include <new>
#include <utility>

#include "decoder.h"
#include "layer_ops.h"
#include "sampling.h"

namespace nanovllm {

template <int PART>
void tiles_part(const Product& product, int64_t begin, int64_t end, const Tokens& x);  // in products.cpp

constexpr int64_t MANY = 64;  // tokens from which on all products of a step may be long
constexpr int64_t LONG = 1 << 27;  // products of numbers: 1 to 5 ms of a thread; AMX is some eight times as fast

void products(Threads& threads, std::initializer_list<Product> all, const Tokens& x) {
    if (!x.count) return;  // the LM head, in a step that ends no prompt
    // Tasks of few tokens are small, so that threads end at the same time. A task reads all tokens, and many are more than a
    // cache holds. Then tasks are larger: about eight for each thread, of four tiles at least.
    int64_t tiles = 0, chunk = 4, columns = 0;
    for (const Product& one : all) tiles += tiles_of(one.weight.rows), columns = one.weight.columns;
    if (x.count > 8) chunk = std::max<int64_t>(1, (tiles / (8 * threads.count()) + 3) / 4) * 4;
    if (x.splits) chunk = std::clamp<int64_t>(tiles / (2 * threads.count()) / 4 * 4, 4, 16);
    threads.run_ranges((tiles + chunk - 1) / chunk, [&](int64_t task) {
        int64_t begin = task * chunk, end = begin + chunk;
        for (const Product& one : all) {  // whose tiles follow those of the product before
            const int64_t own = tiles_of(one.weight.rows), stop = std::min(end, own);
            if (begin < stop)
                [&]<int... PART>(std::integer_sequence<int, PART...>) {
                    ((one.weight.format % NANOVLLM_PARTS == PART ? tiles_part<PART>(one, begin, stop, x) : (void)0), ...);
                }(std::make_integer_sequence<int, NANOVLLM_PARTS>{});
            begin = std::max<int64_t>(0, begin - own);
            end -= own;
        }
    }, x.count >= MANY && tiles * TILE * columns * x.count >= LONG * (x.splits ? 8 : 1) * threads.count());
}

// Group g of a tile as floats [32][16 rows].
template <typename T>
inline void expand(const uint8_t* tile, int64_t g, Floats* to) {
    const uint8_t* block = tile + g / T::GROUPS * T::BYTES;
    const int j = (int)(g % T::GROUPS);
    if constexpr (T::IS_FLOATS) {
        for (int k = 0; k < GROUP; k++) to[k] = T::column(block, j, k);
    } else {
        Codes codes[VECTORS];
        T::codes(block, j, codes);
        for (int k = 0; k < GROUP; k++) {
            const Floats scale = T::scale(block, j, k * T::SCALES / GROUP), minimum = T::minimum(block, j);
            const bool is_signed = T::TOP == 255 && SIGNED_CODES;
            for (int r = 0; r < TILE; r++) {
                const uint8_t code = codes[k / 4][4 * r + k % 4];
                to[k][r] = scale[r] * (float)((is_signed ? (int8_t)code : code) - T::CENTRE) + minimum[r];
            }
        }
    }
}

constexpr int32_t NO_MEMORY = -2;

// What a function returns: 0, or that there was no memory for what it keeps beside its arguments.
template <typename Fn>
inline int32_t status_of(Fn&& fn) {
    try {
        fn();
        return 0;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

}  // namespace nanovllm

using namespace nanovllm;

extern "C" {

// Null: the system does not start so many threads.
Threads* nanovllm_threads(int32_t count) {
    try {
        return new Threads(count);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void nanovllm_end_threads(Threads* threads) { delete threads; }

// Bytes of a weight [rows, columns] in tiles.
int64_t nanovllm_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
    int64_t bytes = 0;
    with_tile(format, [&](auto tile) { bytes = tiles_of(rows) * tile_bytes<decltype(tile)>(columns); });
    return bytes;
}

// The rows of a weight, contiguous as a file has them, to tiles.
void nanovllm_pack(Threads* threads, int32_t format, int64_t rows, int64_t columns, const uint8_t* from, uint8_t* to) {
    with_tile(format, [&](auto tile) {
        using T = decltype(tile);
        threads->run(tiles_of(rows), [&](int64_t i) {
            pack_tile<T>(from, i * TILE, rows, columns, to + i * tile_bytes<T>(columns));
        });
    });
}

// Whether every weight is finite: 1 or 0. Of quantised ones, whether the scales are.
int32_t nanovllm_is_finite(Threads* threads, const Weight* w) {
    std::atomic<int32_t> finite{1};
    with_tile(w->format, [&](auto tile) {
        using T = decltype(tile);
        threads->run(tiles_of(w->rows), [&](int64_t i) {
            const uint8_t* block = w->data + i * tile_bytes<T>(w->columns);
            Floats zeros{};  // times zero: NaN for what is not finite
            for (int64_t b = 0; b < blocks_of<T>(w->columns); b++, block += T::BYTES) {
                for (int j = 0; j < T::GROUPS; j++) {
                    if constexpr (T::IS_FLOATS)
                        for (int k = 0; k < GROUP; k++) zeros += (Floats)T::column(block, j, k) * 0.0f;
                    else
                        for (const Floats values : {T::scale(block, j, 0), T::scale(block, j, T::SCALES - 1), T::minimum(block, j)})
                            zeros += values * 0.0f;
                }
            }
            const float total = sum(zeros);
            if (total != total) finite.store(0, std::memory_order_relaxed);
        });
    });
    return finite.load();
}

// Some rows of a weight as float32 [count][columns].
void nanovllm_rows(Threads* threads, const Weight* w, const int64_t* ids, int64_t count, float* out) {
    with_tile(w->format, [&](auto tile) {
        using T = decltype(tile);
        each_token(*threads, count, [&](int64_t i) {
            const uint8_t* from = w->data + ids[i] / TILE * tile_bytes<T>(w->columns);
            const int lane = (int)(ids[i] % TILE);
            for (int64_t g = 0; g < blocks_of<T>(w->columns) * T::GROUPS; g++) {
                Floats columns[GROUP];
                expand<T>(from, g, columns);
                const int64_t here = std::min<int64_t>(GROUP, w->columns - g * GROUP);
                for (int64_t k = 0; k < here; k++) out[i * w->columns + g * GROUP + k] = columns[k][lane];
            }
        });
    });
}

// out [count][rows] = x [count][columns] times the weight's transpose. 0 or NO_MEMORY.
int32_t nanovllm_product(Threads* threads, const Weight* w, const float* x, int64_t count, float* out) {
    return status_of([&] {
        Activations activations(count, w->columns, w->parts, w->rounds);
        each_token(*threads, count, [&](int64_t t) {
            std::memcpy(activations.row(t), x + t * w->columns, w->columns * sizeof(float));
            activations.finish(t);
        });
        products(*threads, {{*w, {out, w->rows, w->rows, nullptr, false}}}, activations.tokens(count));
    });
}

// Whether weights may round activations: 1 or 0.
int32_t nanovllm_can_round() { return CAN_ROUND; }

// 0 or NO_MEMORY.
int32_t nanovllm_decoder_step(Threads* threads, const Model* model, int64_t num_layers, const Batch* batch,
                              uint8_t* const* k_caches, uint8_t* const* v_caches, int64_t block_size,
                              int32_t cache_format, float* x, float* out) {
    return status_of([&] {
        decoder_step(*threads, *model, num_layers, *batch, k_caches, v_caches, block_size, cache_format, x, out);
    });
}

// A token for each row of logits [rows][stride]. top_k, top_p and min_p may be null: off. Returns the first row with a
// wrong parameter, -1, or NO_MEMORY.
int64_t nanovllm_sample(Threads* threads, const float* logits, int64_t rows, int64_t columns, int64_t stride,
                        const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                        const int64_t* seeds, const int64_t* positions, int64_t* out) {
    auto is_share = [](const float* values, int64_t row) { return !values || (values[row] >= 0 && values[row] <= 1); };
    for (int64_t r = 0; r < rows; r++)
        if (!(temperature[r] >= 0) || !is_share(top_p, r) || !is_share(min_p, r)) return r;
    const int32_t status = status_of([&] {
        threads->run(rows, [&](int64_t r) {
            thread_local RowSampler sampler;
            out[r] = sampler.sample(logits + r * stride, columns,
                                    {temperature[r], top_k ? std::max<int64_t>(0, top_k[r]) : 0, top_p ? top_p[r] : 1,
                                     min_p ? min_p[r] : 0, (uint64_t)seeds[r], (uint64_t)positions[r]});
        });
    });
    return status ? status : -1;
}

// The functions below return 0 or NO_MEMORY; if a tensor of numbers points outside of what it indexes, 1, and write nothing.
// Formats: f32, bf16 or f16. Strides: elements.

// out [rows][size]: the norm of x, or with a residual of x + residual, which goes to sum [rows][size].
int32_t nanovllm_rms_norm(Threads* threads, int32_t format, uint8_t* x, int64_t stride, uint8_t* residual,
                          int64_t residual_stride, const uint8_t* weight, int64_t rows, int64_t size, float eps,
                          uint8_t* sum, uint8_t* out) {
    return status_of([&] {
        rms_norm_rows(*threads, {format, x, stride}, {format, residual, residual_stride}, weight, rows, size, eps,
                      {format, sum, size}, {format, out, size});
    });
}

// gate_up: rows of 2 * size; out: [rows][size].
int32_t nanovllm_silu_and_mul(Threads* threads, int32_t format, uint8_t* gate_up, int64_t stride, int64_t rows,
                              int64_t size, uint8_t* out) {
    return status_of([&] { silu_and_mul_rows(*threads, {format, gate_up, stride}, rows, size, {format, out, size}); });
}

// x: [tokens][heads][dim]; weight [dim]: of a norm before, or null; out: [tokens][heads][dim].
int32_t nanovllm_rotate(Threads* threads, int32_t format, uint8_t* x, int64_t tokens, int64_t heads, int64_t dim,
                        int64_t token_stride, int64_t head_stride, const int64_t* positions, const float* cos_sin,
                        int64_t cos_sin_stride, int64_t num_positions, const uint8_t* weight, float eps, uint8_t* out) {
    if (first_outside(positions, tokens, num_positions) >= 0) return 1;
    return status_of([&] {
        rotate_heads(*threads, {format, x, heads, dim, token_stride, head_stride}, tokens, positions, cos_sin, cos_sin_stride,
                     weight, eps, out);
    });
}

// k, v: [tokens][heads][dim], with strides of tokens and heads; caches: [num_slots][heads][dim].
int32_t nanovllm_store(Threads* threads, int32_t format, int64_t tokens, int64_t heads, int64_t dim, uint8_t* k,
                       int64_t k_token, int64_t k_head, uint8_t* v, int64_t v_token, int64_t v_head, const int64_t* slots,
                       int64_t num_slots, int32_t cache_format, uint8_t* k_cache, uint8_t* v_cache) {
    if (first_outside(slots, tokens, num_slots) >= 0) return 1;
    return status_of([&] {
        store_heads(*threads, {format, k, heads, dim, k_token, k_head}, tokens, slots, cache_format, k_cache);
        store_heads(*threads, {format, v, heads, dim, v_token, v_head}, tokens, slots, cache_format, v_cache);
    });
}

// q: [tokens][heads][dim]; caches: [num_blocks][block_size][kv_heads][dim], dim a multiple of 16. starts may be null: each
// sequence has `queries` then, else at most as many. window, soft_cap: 0 is none.
int32_t nanovllm_attention(Threads* threads, int32_t format, uint8_t* q, int64_t tokens, int64_t heads, int64_t dim,
                           int64_t token_stride, int64_t head_stride, int32_t cache_format, uint8_t* k_cache,
                           uint8_t* v_cache, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t num_seqs,
                           const int32_t* block_table, int64_t table_stride, int64_t max_blocks,
                           const int32_t* context_lens, int64_t max_context_len, const int32_t* starts, int64_t queries,
                           float scale, int64_t window, float soft_cap, uint8_t* out) {
    const Sequences sequences{num_seqs, block_table, table_stride, max_blocks, num_blocks, context_lens,
                              max_context_len, starts, queries};
    if (!sequences.are_valid(block_size, tokens)) return 1;
    return status_of([&] {
        attend(*threads, {format, q, heads, dim, token_stride, head_stride}, tokens,
               {k_cache, v_cache, block_size, kv_heads, dim, cache_format}, sequences, scale, window, soft_cap, out);
    });
}

}  // extern "C"
