// Products of weights that stdin has, for the processors of an emulator, which would take minutes to import PyTorch.
#include <cstdio>

#include "library.cpp"
#include "products.cpp"

using namespace nanovllm;

// Whether `to` could be filled.
template <typename Element>
static bool take(std::vector<Element>& to) {
    return std::fread(to.data(), sizeof(Element), to.size(), stdin) == to.size();
}

int main() {
    Threads* threads = nanovllm_threads(2);
    // Of each: its format, parts of activations, rows, columns, tokens, bytes; the bytes; activations [tokens][columns].
    for (std::vector<int64_t> head(6); take(head);) {
        const auto [format, parts, rows, columns, tokens] = std::array{head[0], head[1], head[2], head[3], head[4]};
        std::vector<uint8_t> from(head[5]), tiles(nanovllm_packed_bytes((int32_t)format, rows, columns));
        std::vector<float> x(tokens * columns), out(tokens * rows);
        if (!take(from) || !take(x)) return 1;
        nanovllm_pack(threads, (int32_t)format, rows, columns, from.data(), tiles.data());
        const Weight weight{tiles.data(), rows, columns, (int32_t)format, (int32_t)parts, 0};
        if (nanovllm_product(threads, &weight, x.data(), tokens, out.data())) return 2;
        std::fwrite(out.data(), sizeof(float), out.size(), stdout);
    }
    nanovllm_end_threads(threads);
}
