// What products read: the activations of some tokens, as floats and as integers.
//
// Quantised weights are integers, and so are their products with activations that are integers, too. Each 32
// activations become integers of 24 bits with a step of their own: as exact as float32, whose sums are rounded at
// every addition. An integer is three parts of 8 bits, since processors multiply bytes fastest. With one part the step
// is 2^16 times as large: that is "int8 activations". AMX takes bfloat16 instead (amx_products.h).
#pragma once

#include "all_tiles.h"
#include "amx.h"
#include "buffers.h"
#include "maths.h"

namespace nanovllm {

constexpr int EXACT_PARTS = 3;
constexpr int AMX_TOKENS = 32;  // from which on AMX is faster: weights take a while to become what it reads
constexpr int ROUNDED_TOKENS = 5;  // from which on bfloat16 weights that round are multiplied with pairs of activations
// Tokens from which on weights that are floats become panels (products.cpp). Fewer read the weights once or twice as they are.
constexpr int PANEL_FROM = 17;
// Whether codes become panels of floats as well. Without VNNI a product of three bytes and its sums take as many
// instructions as four products of floats.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool PANELS_OF_CODES = true;
#else
constexpr bool PANELS_OF_CODES = false;
#endif
#if defined(__AVX512BF16__)
constexpr bool CAN_ROUND = true;  // the processor multiplies pairs of bfloat16
#else
constexpr bool CAN_ROUND = false;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool ONLY_AVX2 = true;
#else
constexpr bool ONLY_AVX2 = false;
#endif
// A group's products with parts 1 and 2 can be one sum, in units of 256: the upper two fit in 32 bits.
template <int P>
constexpr int DIGITS = P == 1 ? 1 : 2;
// Activations as pairs of words of 16 bits [digit][odd][v]: columns 4 v and 4 v + 2, or those after them.
template <int P>
using Words = int32_t[DIGITS<P>][2][GROUP / 4];
// Whether they are kept, since making them for each tile takes a tenth of its time.
template <int P>
constexpr bool KEEPS_WORDS = ONLY_AVX2 && P == EXACT_PARTS;

// 32 activations of a token as integers of P parts: x = step * (parts[0] + 256 parts[1] + 65536 parts[2]).
template <int P>
struct alignas(64) Integers {
    int8_t parts[P][GROUP];
    int32_t sums[2][P];  // of each 16 elements of a part
    float step, sum;     // sum: of the activations
    Words<P> words[KEEPS_WORDS<P> ? 1 : 0];
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Digit 0 is part 0, and digit 1 is 256 times part 2 plus part 1, which is below 2^15 as part 2 is 127 at most.
template <int P>
inline void to_words(const Integers<P>& x, Words<P>& to) {
    auto words_of = [&](int p, int odd) {
        const __m256i part = _mm256_load_si256((const __m256i*)x.parts[p]);
        return _mm256_srai_epi16(odd ? part : _mm256_slli_epi16(part, 8), 8);
    };
    for (int odd = 0; odd < 2; odd++) {
        _mm256_storeu_si256((__m256i*)to[0][odd], words_of(0, odd));
        if constexpr (P > 1) {
            const __m256i part = _mm256_load_si256((const __m256i*)x.parts[2]);
            const __m256i upper = odd ? _mm256_andnot_si256(_mm256_set1_epi16(255), part) : _mm256_slli_epi16(part, 8);
            _mm256_storeu_si256((__m256i*)to[1][odd], _mm256_add_epi16(words_of(1, odd), upper));
        }
    }
}
#endif

// What a register of AMX loads: 32 activations of 16 tokens as bfloat16, one after the other.
struct alignas(64) Split {
    static constexpr int TOKENS = 16;
    uint16_t values[TOKENS][GROUP];
};

// Activations of `count` tokens, padded with zeros to whole super-blocks of 256 columns.
struct Tokens {
    int64_t count, stride;  // elements of a row
    const float* values;    // [count][stride]
    const void* integers;   // Integers<P> [count][groups], if quantised weights are multiplied with them; else null
    const Split* splits;    // [ceil(count / 16)][EXACT_PARTS][groups], parts add up to the floats; null: not by AMX
    const Floats* sums;     // [ceil(count / 16)][groups] of 16 tokens, of each one's 32 activations; if by AMX
    const uint32_t* pairs;  // [count][stride / 2] of bfloat16, the earlier column in the lower half; or null

    int64_t groups() const { return stride / GROUP; }
    template <int P>
    const Integers<P>* group(int64_t token, int64_t g) const {
        return (const Integers<P>*)integers + token * groups() + g;
    }
};

// Rows of activations. Choose their width, fill a row, then `finish` it. Rows of another width take the same memory.
class Activations {
   public:
    // width: the largest. parts: of the integers that quantised weights are multiplied with; 0: there are none. rounds:
    // whether a weight does.
    Activations(int64_t count, int64_t width, int parts, bool rounds = false)
        : count_(count), width_(width), stride_(padded(width)), parts_(parts) {
        const size_t groups = stride_ / GROUP;
        values_.resize((size_t)count * stride_);
        if (count >= AMX_TOKENS && has_amx()) {
            sums_.resize((count + Split::TOKENS - 1) / Split::TOKENS * groups);
            splits_.resize(EXACT_PARTS * sums_.size());
        } else if (parts == 1) {
            one_.resize(count * groups);
        } else if (parts == EXACT_PARTS && (!PANELS_OF_CODES || count < PANEL_FROM)) {
            exact_.resize(count * groups);
        }
        if (CAN_ROUND && rounds && splits_.empty() && count >= ROUNDED_TOKENS) pairs_.resize((size_t)count * stride_ / 2);
        for (int64_t i = 0; i < count; i++) pad(i);
    }

    // At most the constructor's. The rows lose their values.
    void set_width(int64_t width) {
        width_ = width;
        stride_ = padded(width);
        shared_ = true;
    }

    float* row(int64_t i) { return values_.data() + i * stride_; }
    int64_t stride() const { return stride_; }

    void finish(int64_t i) {
        const int64_t groups = stride_ / GROUP;
        if (shared_) pad(i);
        for (int64_t g = 0; g < filled_groups(); g++) {
            const int64_t at = i * groups + g;
            if (!splits_.empty()) split(i, g);
            if (!one_.empty()) to_integers(row(i) + g * GROUP, one_[at]);
            if (!exact_.empty()) to_integers(row(i) + g * GROUP, exact_[at]);
        }
        if (!pairs_.empty()) to_pairs(i);
    }

    Tokens tokens(int64_t count) const {
        return {count, stride_, values_.data(), parts_ == 1 ? (const void*)one_.data() : exact_.data(),
                splits_.empty() ? nullptr : splits_.data(), sums_.data(), pairs_.empty() ? nullptr : pairs_.data()};
    }

   private:
    // Whole super-blocks. Rows a multiple of 4 KiB apart would share some sets of the first-level cache.
    static int64_t padded(int64_t width) {
        const int64_t whole = (width + 255) / 256 * 256;
        return whole % 1024 ? whole : whole + 64;
    }
    int64_t filled_groups() const { return (width_ + GROUP - 1) / GROUP; }

    template <int P>
    static void to_integers(const float* from, Integers<P>& to) {
        constexpr float limit = P == 1 ? 127.0f : 127.0f * 65536;
        const Floats x[2] = {load<Floats>(from), load<Floats>(from + LANES)};
        // Largest magnitude, compared as integers, so that NaN is largest and reaches the step.
        const Ints a = (Ints)x[0] & 0x7fffffff, b = (Ints)x[1] & 0x7fffffff;
        const float most = float_of_bits(maximum(a > b ? a : b));
        const float factor = most > 1e-30f ? limit / most : 0.0f;  // no overflow; NaN: 0
        const Ints whole[2] = {rounded(x[0] * factor), rounded(x[1] * factor)};
        Ints low = whole[0], high = whole[1];
        for (int p = 0; p < P; p++) {
            const SignedBytes first = to_bytes(low), second = to_bytes(high);  // the remainders from -128 to 127
            store(to.parts[p], first), store(to.parts[p] + LANES, second);
            sums_of_halves(first, second, to.sums[0][p], to.sums[1][p]);  // stored bytes could not be read at once
            low = (low + 128) >> 8, high = (high + 128) >> 8;
        }
        const int32_t total = factor > 0 ? sum(whole[0] + whole[1]) : 0;  // NaN and infinity are -2^31: no sum fits
        to.step = most / limit;
        to.sum = to.step * (float)total;
        if constexpr (KEEPS_WORDS<P>) to_words(to, to.words[0]);
    }

    // Rounds to the nearest, ties to even. Subnormals become zeros, here and in products of pairs.
    void to_pairs(int64_t i) {
#if defined(__AVX512BF16__)
        for (int64_t k = 0; k < stride_; k += 2 * LANES) {
            const __m512 low = _mm512_loadu_ps(row(i) + k), high = _mm512_loadu_ps(row(i) + k + LANES);
            store(pairs_.data() + (i * stride_ + k) / 2, (Ints)_mm512_cvtne2ps_pbh(high, low));
        }
#endif
    }

    // Group g of a token as three bfloat16, of 8 bits each.
    void split(int64_t token, int64_t g) {
#if defined(NANOVLLM_AMX)
        const int64_t groups = stride_ / GROUP, block = token / Split::TOKENS, lane = token % Split::TOKENS;
        Floats total{};
        for (int i = 0; i < GROUP; i += LANES) {
            __m512 rest = _mm512_loadu_ps(row(token) + g * GROUP + i);
            total += (Floats)rest;
            for (int p = 0; p < EXACT_PARTS; p++) {
                const __m256i part = (__m256i)_mm512_cvtneps_pbh(rest);
                store(splits_[(block * EXACT_PARTS + p) * groups + g].values[lane] + i, part);
                rest = _mm512_sub_ps(rest, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
            }
        }
        ((float*)&sums_[block * groups + g])[lane] = sum(total);
#endif
    }

    // Zeros after a row, and after the last one for tokens that its block lacks.
    void pad(int64_t i) {
        const int64_t groups = stride_ / GROUP, filled = filled_groups();
        std::fill(row(i) + width_, row(i) + stride_, 0.0f);
        for (int64_t g = filled; g < groups; g++) {
            const int64_t at = i * groups + g;
            if (!splits_.empty()) clear(i, g);
            if (!one_.empty()) std::memset((void*)&one_[at], 0, sizeof one_[at]);
            if (!exact_.empty()) std::memset((void*)&exact_[at], 0, sizeof exact_[at]);
        }
        if (!splits_.empty() && i == count_ - 1)
            for (int64_t missing = count_; missing % Split::TOKENS; missing++)
                for (int64_t g = 0; g < groups; g++) clear(missing, g);
    }

    void clear(int64_t token, int64_t g) {
        const int64_t groups = stride_ / GROUP, block = token / Split::TOKENS, lane = token % Split::TOKENS;
        for (int p = 0; p < EXACT_PARTS; p++)
            std::fill_n(splits_[(block * EXACT_PARTS + p) * groups + g].values[lane], GROUP, 0);
        ((float*)&sums_[block * groups + g])[lane] = 0.0f;
    }

    int64_t count_, width_, stride_;
    int parts_;
    bool shared_ = false;  // rows of several widths: padding is written anew with each row
    Buffer<float> values_;
    Buffer<Integers<1>> one_;
    Buffer<Integers<EXACT_PARTS>> exact_;
    Buffer<Split> splits_;
    Buffer<Floats> sums_;
    Buffer<uint32_t> pairs_;
};

}  // namespace nanovllm
