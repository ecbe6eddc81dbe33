// Every format, odd shapes and steps of every kind, to be run with sanitizers: they abort at what is wrong.
#include <cstdlib>
#include <cstdio>

#include "library.cpp"
#include "products.cpp"

using namespace nanovllm;

static float random_float() { return (float)rand() / (float)RAND_MAX - 0.5f; }

static std::vector<float> floats(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = random_float();
    return values;
}

// Blocks of random bits: scales may be anything, NaN too.
static std::vector<uint8_t> packed(Threads* threads, int32_t format, int64_t rows, int64_t columns, bool zeros = false) {
    int64_t bytes = 0;
    with_tile(format, [&](auto tile) { bytes = rows * row_bytes<typename decltype(tile)::Source>(columns); });
    std::vector<uint8_t> from(bytes), to(nanovllm_packed_bytes(format, rows, columns));
    for (uint8_t& byte : from) byte = zeros ? 0 : rand();
    nanovllm_pack(threads, format, rows, columns, from.data(), to.data());
    return to;
}

// Threads share the work in the same way for every format: `step` 1 is all formats.
static void products(Threads* threads, int32_t step) {
    for (int32_t format = f32; format <= LAST_FORMAT; format += step)
        for (int32_t parts : {1, EXACT_PARTS})
            for (int64_t rows : {1, 16, 37})
                for (int64_t columns : {256, 768, 1024, 77}) {
                    const bool is_plain = format <= f16 || format == e4m3;
                    if (columns == 77 && !is_plain) continue;  // no whole blocks
                    const std::vector<uint8_t> data = packed(threads, format, rows, columns);
                    const Weight w{data.data(), rows, columns, format, is_plain ? 0 : parts, format == bf16 && parts == 1};
                    nanovllm_is_finite(threads, &w);
                    const std::vector<int64_t> ids = {rows - 1, 0};
                    std::vector<float> out(2 * columns);
                    nanovllm_rows(threads, &w, ids.data(), 2, out.data());
                    for (int64_t count : {1, 2, 3, 7, 8, 9, 15, 17, 53}) {
                        if (rows != 37 && (columns == 768 || (count > 3 && count < 53))) continue;
                        std::vector<float> result(count * rows);
                        std::vector<float> x = floats(count * columns);
                        if (count % 2) x[rand() % x.size()] = NAN, x[rand() % x.size()] = INFINITY;
                        nanovllm_product(threads, &w, x.data(), count, result.data());
                    }
                }
}

static void steps(Threads* threads, int32_t weights) {
    const int64_t hidden = 80, heads = 6, kv_heads = 2, dim = 32, inner = 150, block_size = 16, blocks = 64;
    std::vector<std::vector<uint8_t>> kept;
    auto weight = [&](int64_t rows, int64_t columns) {
        kept.push_back(packed(threads, weights, rows, columns, true));
        return Weight{kept.back().data(), rows, columns, weights, 0, weights == bf16};
    };
    const std::vector<float> ones(4096, 1.0f);
    Layer layer{};
    layer.q = weight(heads * dim, hidden), layer.k = weight(kv_heads * dim, hidden), layer.v = weight(kv_heads * dim, hidden);
    layer.o = weight(hidden, heads * dim), layer.gate = weight(inner, hidden), layer.up = weight(inner, hidden);
    layer.down = weight(hidden, inner);
    layer.input_norm = layer.post_norm = layer.q_norm = layer.k_norm = ones.data();
    layer.q_bias = layer.o_bias = layer.down_bias = ones.data();
    const std::vector<float> angles(1024 * dim, 0.5f);
    const Model model{1, hidden, heads, kv_heads, dim, inner, 1e-6f, 0, weights == bf16, &layer, ones.data(), angles.data()};
    for (int32_t format : {f32, bf16, f16}) {
        std::vector<uint8_t> k(blocks * block_size * kv_heads * dim * 4), v(k.size());
        uint8_t *ks = k.data(), *vs = v.data();
        // Two decodes, a short run and a long one; contexts of several blocks and pieces.
        const std::vector<int32_t> contexts = {1, 300, 9, 61}, starts = {0, 5, 36};
        std::vector<int64_t> positions(38), slots(38);
        for (int64_t i = 0; i < 38; i++) positions[i] = i, slots[i] = i;
        std::vector<int32_t> table(4 * 20);
        for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)(i % blocks);
        const std::vector<int64_t> rows(50, 37);
        for (int64_t num_rows : {-1, 0, 2, 50}) {
            layer.window = num_rows == 2 ? 19 : 0;
            const Batch batch{38, 4, 2, 20, num_rows, positions.data(), slots.data(), table.data(), contexts.data(), starts.data(), rows.data()};
            std::vector<float> x = floats(38 * hidden), out((num_rows < 0 ? 38 : num_rows) * hidden);
            nanovllm_decoder_step(threads, &model, 1, &batch, &ks, &vs, block_size, format, x.data(), out.data());
        }
    }
}

static void samples(Threads* threads) {
    for (int64_t columns : {1, 255, 256, 1000}) {
        std::vector<float> logits = floats(3 * columns);
        logits[0] = NAN, logits[columns / 2] = INFINITY, logits[columns - 1] = -INFINITY;
        const std::vector<float> temperature = {0, 0.7f, 1e-3f}, share = {0.5f, 0, 1};
        const std::vector<int32_t> top_k = {0, 5, 2000};
        const std::vector<int64_t> seeds = {-1, 2, 3};
        std::vector<int64_t> out(3);
        nanovllm_sample(threads, logits.data(), 3, columns, columns, temperature.data(), top_k.data(), share.data(),
                        share.data(), seeds.data(), seeds.data(), out.data());
        nanovllm_sample(threads, logits.data(), 3, columns, columns, temperature.data(), nullptr, nullptr, nullptr,
                        seeds.data(), seeds.data(), out.data());
    }
}

// Each op of a layer in every format, with odd sizes and strides, and what it is to refuse.
static void layer_ops(Threads* threads) {
    auto bytes_of_floats = [](int64_t count) {  // which are numbers in each format
        std::vector<uint8_t> bytes(4 * count);
        for (size_t i = 0; i < bytes.size(); i++) bytes[i] = i % 2 ? 0x3c : rand();
        return bytes;
    };
    auto expect = [](int32_t status, int32_t expected) {
        if (status != expected) std::abort();
    };
    for (int32_t format : {f32, bf16, f16}) {
        for (int64_t size : {1, 33, 576})
            for (int64_t rows : {1, 5, 150}) {
                const int64_t stride = 2 * size + 3;
                std::vector<uint8_t> x = bytes_of_floats(rows * stride), y = bytes_of_floats(rows * stride);
                const std::vector<uint8_t> weight = bytes_of_floats(size);
                std::vector<uint8_t> sum(4 * rows * size), out(sum.size());
                expect(nanovllm_rms_norm(threads, format, x.data(), stride, nullptr, 0, weight.data(), rows, size, 1e-6f, nullptr, out.data()), 0);
                expect(nanovllm_rms_norm(threads, format, x.data(), stride, y.data(), stride, weight.data(), rows, size, 1e-6f, sum.data(), out.data()), 0);
                expect(nanovllm_silu_and_mul(threads, format, x.data(), stride, rows, size, out.data()), 0);
            }
        for (int64_t dim : {2, 48, 64})
            for (int64_t tokens : {1, 7, 400}) {
                const int64_t heads = 3, head_stride = dim + 1, token_stride = heads * head_stride + 5, num_positions = 9;
                std::vector<uint8_t> x = bytes_of_floats(tokens * token_stride), out(4 * tokens * heads * dim);
                const std::vector<uint8_t> weight = bytes_of_floats(dim);
                const std::vector<float> angles = floats(num_positions * dim);
                std::vector<int64_t> positions(tokens), slots(tokens);
                for (int64_t i = 0; i < tokens; i++) positions[i] = i % num_positions, slots[i] = tokens - 1 - i;
                for (const uint8_t* norm : {weight.data(), (const uint8_t*)nullptr})
                    for (int64_t end : {num_positions, positions.back()})
                        expect(nanovllm_rotate(threads, format, x.data(), tokens, heads, dim, token_stride, head_stride,
                                               positions.data(), angles.data(), dim, end, norm, 1e-6f, out.data()),
                               end != num_positions);
                for (int32_t cache_format : {f32, bf16, f16})
                    for (int64_t end : {tokens, tokens - 1}) {
                        std::vector<uint8_t> k(4 * tokens * heads * dim), v(k.size());
                        expect(nanovllm_store(threads, format, tokens, heads, dim, x.data(), token_stride, head_stride, x.data(),
                                              token_stride, head_stride, slots.data(), end, cache_format, k.data(), v.data()),
                               end != tokens);
                    }
            }
        for (int32_t cache_format : {f32, bf16, f16}) {
            const int64_t heads = 6, kv_heads = 2, dim = 48, block_size = 16, blocks = 25, columns = 25;
            std::vector<uint8_t> k = bytes_of_floats(blocks * block_size * kv_heads * dim), v = k;
            std::vector<int32_t> table(4 * columns), starts = {0, 20, 20, 21, 30};
            for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)((i * 7) % blocks);
            const std::vector<int32_t> lens = {390, 0, 3, 9};
            auto attend = [&](int64_t tokens, const int32_t* runs, int64_t queries, int64_t num_blocks, int64_t window, float cap) {
                const int64_t head_stride = dim + (format == bf16), token_stride = heads * head_stride + 2;
                std::vector<uint8_t> q = bytes_of_floats(tokens * token_stride), out(4 * tokens * heads * dim);
                return nanovllm_attention(threads, format, q.data(), tokens, heads, dim, token_stride, head_stride, cache_format,
                                          k.data(), v.data(), num_blocks, block_size, kv_heads, 4, table.data(), columns, columns,
                                          lens.data(), 390, runs, queries, 0.1f, window, cap, out.data());
            };
            for (int64_t window : {0, 7})
                for (float cap : {0.0f, 5.0f}) {
                    for (int64_t queries : {1, 5, 11}) expect(attend(4 * queries, nullptr, queries, blocks, window, cap), 0);
                    expect(attend(30, starts.data(), 20, blocks, window, cap), 0);
                }
            expect(attend(4, nullptr, 1, blocks - 1, 0, 0), 1);
            expect(attend(5, nullptr, 1, blocks, 0, 0), 1);
            expect(attend(30, starts.data(), 19, blocks, 0, 0), 1);
        }
    }
}

// Calls by several threads, as of two engines.
static void calls_at_the_same_time(Threads* threads) {
    const std::vector<uint8_t> data = packed(threads, f32, 160, 64, true);
    const Weight w{data.data(), 160, 64, f32, 0};
    auto call = [&] {
        const std::vector<float> x = floats(5 * 64);
        std::vector<float> out(5 * 160);
        for (int i = 0; i < 200; i++) {
            nanovllm_product(threads, &w, x.data(), 5, out.data());
            std::atomic<int64_t> done{0};
            threads->run(100, [&](int64_t) { done++; }, i % 2 != 0);  // long ones by turns
            if (done != 100) std::abort();
        }
    };
    std::thread other(call);
    call();
    other.join();
}

// The caller hears of it when all tasks have ended, and the threads do the next job.
static void tasks_without_memory(Threads* threads) {
    for (int64_t without : {0, 37, 99})
        for (bool in_ranges : {false, true}) {
            std::atomic<int64_t> done{0};
            auto task = [&](int64_t i) {
                if (i == without) throw std::bad_alloc();
                done++;
            };
            bool caught = false;
            try {
                in_ranges ? threads->run_ranges(100, task) : threads->run(100, task);
            } catch (const std::bad_alloc&) {
                caught = true;
            }
            if (!caught || (!in_ranges && done != 99)) std::abort();
            threads->run(100, [&](int64_t) { done++; });
        }
}

int main(int argc, char** argv) {
    Threads* threads = nanovllm_threads(3);
    products(threads, argc > 1 ? std::atoi(argv[1]) : 1);
    for (int32_t weights : {f32, bf16}) steps(threads, weights);
    samples(threads);
    layer_ops(threads);
    calls_at_the_same_time(threads);
    tasks_without_memory(threads);
    nanovllm_end_threads(threads);
    std::puts("nothing found");
}
