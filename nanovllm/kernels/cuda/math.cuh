// Activations of one float32 number, and conversion between float32 and the dtype in memory.
//
// Arithmetic is always float32. `T` is the dtype that the result will be rounded to; it decides how exact that must be.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.cuh"

namespace nanovllm {

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// To nearest, ties to even: what PyTorch does.
template <typename T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) { return x; }
template <>
__device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Two 16-bit results with one instruction.
template <typename T>
__device__ void narrow2(float a, float b, T* to) {
  to[0] = narrow<T>(a);
  to[1] = narrow<T>(b);
}
template <>
__device__ inline void narrow2<__half>(float a, float b, __half* to) {
  const __half2 pair = __floats2half2_rn(a, b);
  to[0] = pair.x;
  to[1] = pair.y;
}
template <>
__device__ inline void narrow2<__nv_bfloat16>(float a, float b, __nv_bfloat16* to) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  to[0] = pair.x;
  to[1] = pair.y;
}

// x with the precision of T: what storing it and loading it again gives.
template <typename T>
__device__ float rounded(float x) { return widen(narrow<T>(x)); }

// The hardware's reciprocal and power of two, one instruction each, relative error about 2^-23. ".ftz": a result below 2^-126
// becomes 0. Without it the compiler adds instructions that scale such numbers, which do not matter here.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// e^x. Where T has 16 bits, a relative error of about 2^-23 |x| is far finer than the rounding of the result.
template <typename T>
__device__ float exponential(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);  // within an ulp or two, nine instructions
  } else {
    return power_of_2(1.4426950408889634f * x);
  }
}

// x / (1 + e^-z): a logistic function without overflow, since x times 1 / infinity is 0, its limit. An IEEE division would
// take more instructions than all the rest, for the last bit.
template <typename T>
__device__ float sigmoid_product(float x, float z) { return x * reciprocal(1.0f + exponential<T>(-z)); }

// x / 2 * (1 + erf(x / sqrt(2))), written with the tail of the normal distribution: max(x, 0) - |x| Phi(-|x|).
//
// 1 + erf(x / sqrt(2)) cancels for negative x: at -5 a float32 erff leaves one digit. So the tail is computed by itself:
// Phi(-a) = e^(-a^2 / 2) t P(t) with t = 1 / (1 + 0.305 a), the form of Abramowitz and Stegun 7.1.26. P is a minimax fit
// of the *relative* error, 1.1e-7 at most up to 15, where the tail is 0 in float32. It takes fewer instructions than erff.
template <typename T>
__device__ float gelu(float x) {
  const float a = fminf(fabsf(x), 15.0f);
  const float t = reciprocal(fmaf(0.305f, a, 1.0f));
  float p = 0.0364271680f;
  p = fmaf(p, t, -0.151895863f);
  p = fmaf(p, t, 0.183904540f);
  p = fmaf(p, t, -0.0363726116f);
  p = fmaf(p, t, 0.120206492f);
  p = fmaf(p, t, 0.103657817f);
  p = fmaf(p, t, 0.122430453f);
  p = fmaf(p, t, 0.121642001f);
  const float tail = exponential<T>(-0.5f * a * a) * (t * p);
  return x != x ? x : fmaf(-a, tail, fmaxf(x, 0.0f));  // fminf and fmaxf lose a NaN
}

template <typename T, Activation kind>
__device__ float activate(float x) {
  if constexpr (kind == Activation::gelu) {
    return gelu<T>(x);
  } else if constexpr (kind == Activation::gelu_tanh) {
    // (1 + tanh(z / 2)) / 2 is the logistic function of z, which needs no tanh and does not cancel for negative z.
    // For huge x the square is infinite and z an infinity of the right sign.
    return sigmoid_product<T>(x, 1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f));
  } else if constexpr (kind == Activation::silu) {
    return sigmoid_product<T>(x, x);
  } else if constexpr (kind == Activation::mish) {
    // tanh(log(1 + n)) = n (n + 2) / (n (n + 2) + 2) with n = e^x; from x = 20 on it is 1 in float32.
    const float n = exponential<T>(x < 20.0f ? x : 20.0f);
    const float u = n * (n + 2.0f);
    return x * (u * reciprocal(u + 2.0f));
  } else {
    return x <= 0.0f ? 0.0f : x;  // keeps NaN, as torch.relu does
  }
}

}  // namespace nanovllm
