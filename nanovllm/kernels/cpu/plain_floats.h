// Rows of plain floats, as float32 and in their format: f32, bf16 or f16.
#pragma once

#include <type_traits>

#include "formats.h"

namespace nanovllm {

template <typename Fn>
inline auto with_plain(int32_t format, Fn&& fn) {
    if (format == f32) return fn(F32{});
    if (format == bf16) return fn(BF16{});
    return fn(F16{});
}

inline float load_as(F32, const uint8_t* from, int64_t i) { return ((const float*)from)[i]; }
inline float load_as(BF16, const uint8_t* from, int64_t i) { return float_of_bf16(((const uint16_t*)from)[i]); }
inline float load_as(F16, const uint8_t* from, int64_t i) { return float_of_f16(((const uint16_t*)from)[i]); }

inline void store_as(F32, uint8_t* to, int64_t i, float value) { ((float*)to)[i] = value; }
inline void store_as(BF16, uint8_t* to, int64_t i, float value) { ((uint16_t*)to)[i] = bf16_of_float(value); }
inline void store_as(F16, uint8_t* to, int64_t i, float value) { ((uint16_t*)to)[i] = f16_of_float(value); }

template <typename F>
inline Floats sixteen(const uint8_t* from, int64_t i) {
    if constexpr (F::BYTES == 4) return load<Floats>((const float*)from + i);
    else if constexpr (std::is_same_v<F, BF16>) return floats_of_bf16((const uint16_t*)from + i);
    else return floats_of_f16((const uint16_t*)from + i);
}

inline int64_t bytes_of(int32_t format) { return format == f32 ? 4 : 2; }

// A row as float32: itself, or converted to `room`.
__attribute__((noinline)) inline const float* widened(int32_t format, const uint8_t* row, int64_t count, float* room) {
    if (format == f32) return (const float*)row;
    with_plain(format, [&](auto f) {
        using F = decltype(f);
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) store(room + i, sixteen<F>(row, i));
        for (; i < count; i++) room[i] = load_as(f, row, i);
    });
    return room;
}

// Float32 to a row, rounded to nearest. A row that is its own source stays as it is.
__attribute__((noinline)) inline void narrow(int32_t format, const float* from, int64_t count, uint8_t* row) {
    if ((const uint8_t*)from == row) return;
    with_plain(format, [&](auto f) {
        for (int64_t i = 0; i < count; i++) store_as(f, row, i, from[i]);
    });
}

// Rounds numbers to the nearest ones of a format.
__attribute__((noinline)) inline void round_to(int32_t format, float* row, int64_t count) {
    if (format == bf16)
        for (int64_t i = 0; i < count; i++) row[i] = float_of_bf16(bf16_of_float(row[i]));
    if (format == f16)
        for (int64_t i = 0; i < count; i++) row[i] = float_of_f16(f16_of_float(row[i]));
}

}  // namespace nanovllm
