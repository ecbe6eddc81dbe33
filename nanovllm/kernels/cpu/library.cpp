// The C interface of the library. Sizes are in elements unless a name says bytes. No function throws.
#include <utility>

#include "decoder.h"

namespace nanovllm {

template <int PART>
void product_part(Threads& threads, const Weight& w, const Tokens& x, const Output& out);  // in products.cpp

void product(Threads& threads, const Weight& w, const Tokens& x, const Output& out) {
    [&]<int... PART>(std::integer_sequence<int, PART...>) {
        ((w.format % NANOVLLM_PARTS == PART ? product_part<PART>(threads, w, x, out) : (void)0), ...);
    }(std::make_integer_sequence<int, NANOVLLM_PARTS>{});
}

}  // namespace nanovllm

using namespace nanovllm;

extern "C" {

Threads* nanovllm_threads(int32_t count) { return new Threads(count); }
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

// Whether every weight is finite: 1 or 0.
int32_t nanovllm_is_finite(Threads* threads, const Weight* w) {
    std::atomic<int32_t> finite{1};
    with_tile(w->format, [&](auto tile) {
        using T = decltype(tile);
        threads->run(tiles_of(w->rows), [&](int64_t i) {
            const uint8_t* from = w->data + i * tile_bytes<T>(w->columns);
            Floats zeros{};  // times zero: NaN for what is not finite
            for (int64_t b = 0; b < blocks_of<T>(w->columns); b++) {
                for (int j = 0; j < T::GROUPS; j++) {
                    const uint8_t* block = from + b * T::BYTES;
                    zeros += (T::scale(block, j, 0) + T::scale(block, j, 1) + T::offset(block, j)) * 0.0f;
                    if (T::SCALED) continue;
                    for (int c = 0; c < LANES; c++) {
                        Floats low, high;
                        T::pair(block, j, c, low, high);
                        zeros += low * 0.0f + high * 0.0f;
                    }
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
                const uint8_t* block = from + g / T::GROUPS * T::BYTES;
                const int j = (int)(g % T::GROUPS);
                const float offset = T::offset(block, j)[lane];
                const float scales[2] = {T::scale(block, j, 0)[lane], T::scale(block, j, 1)[lane]};
                for (int c = 0; c < LANES; c++) {
                    Floats pair[2];
                    T::pair(block, j, c, pair[0], pair[1]);
                    for (int h = 0; h < 2; h++) {
                        const int64_t column = g * GROUP + h * LANES + c;
                        if (column < w->columns) out[i * w->columns + column] = scales[h] * pair[h][lane] + offset;
                    }
                }
            }
        });
    });
}

// out [count][rows] = x [count][columns] times the weight's transpose.
void nanovllm_product(Threads* threads, const Weight* w, const float* x, int64_t count, float* out) {
    Buffer padded(count, w->columns);
    each_token(*threads, count, [&](int64_t t) {
        std::memcpy(padded.row(t), x + t * w->columns, w->columns * sizeof(float));
        padded.sum_groups(t);
    });
    product(*threads, *w, padded.tokens(count), {out, w->rows, w->rows, nullptr, false});
}

void nanovllm_decoder_step(Threads* threads, const Model* model, int64_t num_layers, const Batch* batch,
                           uint8_t* const* k_caches, uint8_t* const* v_caches, int64_t block_size, int32_t cache_format,
                           float* x, float* out) {
    decoder_step(*threads, *model, num_layers, *batch, k_caches, v_caches, block_size, cache_format, x, out);
}

}  // extern "C"
