// The kernel: weights of 8-bit floats go through shared memory to tensor cores of float16.
//
// The weight is the first operand of `mma.m16n8k16`, the tokens are the second: 16 rows, 8 tokens, 16 columns. Which columns
// those are does not matter, as long as both operands have the same. So a lane reads 16 bytes of a row at once, and an
// instruction makes two float16 of two of them, exactly. (`mma` of 8-bit floats does the same on Hopper, and would need x in 8
// bits.) x in bfloat16 becomes float16 by a power of two for each token and warp.
//
// A block takes tiles of 16 rows in turns. Its warps share the columns, and each has a ring of STAGES chunks of 16 rows x CHUNK
// columns on their way to shared memory, across tiles. Lanes read what others of their warp have copied, but no warp waits for
// another before the end of a tile, where their sums are added in order. The first weights are asked for before the kernel in
// front has ended.
#pragma once

#include "instructions.cuh"
#include "interface.cuh"

namespace nanovllm::fp8 {

template <typename T>
struct Real;
template <>
struct Real<__half> {
  static __device__ __forceinline__ float widen(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half narrow(float v) { return __float2half_rn(v); }
};
template <>
struct Real<__nv_bfloat16> {
  static __device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
};
template <typename T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;

constexpr int SUMS_PITCH = 20;  // floats of 16 rows of a token, so that the lanes of a warp are in different banks

// Shared memory: x, the rings, and the warps' sums in two buffers. BLOCKS: scales are of 128 columns, else of whole rows.
static_assert(CHUNK == 256, "a warp copies two rows of a chunk, or a chunk of a token, at once");

template <typename T, bool BLOCKS>
__global__ void __launch_bounds__(256, 2) product_kernel(const __grid_constant__ Product p) {
  constexpr int STEPS = CHUNK / 64;      // of 64 columns: 16 bytes of each of the four lanes that share a row
  constexpr int STAGE = 16 * CHUNK;      // bytes
  constexpr int ROW_LANES = CHUNK / 16;  // lanes that copy a row
  constexpr int ROWS = 32 / ROW_LANES;   // that a warp copies at once
  constexpr int COPIES = 16 / ROWS;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int tokens = p.tokens, half = p.rows >> 1;
  const int first_chunk = blockIdx.y * p.split_chunks;
  const int first_column = first_chunk * CHUNK;
  const int columns = min(p.columns - first_column, p.split_chunks * CHUNK);  // of this split
  const int chunks = (columns + CHUNK - 1) / CHUNK;
  const int turns = (chunks - warp + warps - 1) / warps;  // of this warp: chunks warp, warp + warps, ...

  const uint32_t x_shared = shared_address(shared);
  const uint32_t x_pitch = chunks * (CHUNK * 2) + 16;  // bytes
  const uint32_t ring = x_shared + ((tokens * x_pitch + 127) & ~127u);
  float* const sums = reinterpret_cast<float*>(shared + (ring - x_shared) + warps * (STAGES * STAGE));

  // Weights: row r and 16 bytes c of it are at r * CHUNK + (c ^ 4 * (r & 1)) * 16, so that lanes read them from different banks.
  const uint32_t ring_first = ring + warp * (STAGES * STAGE), ring_end = ring_first + STAGES * STAGE;
  const uint32_t copy_to = (lane / ROW_LANES) * CHUNK + ((lane % ROW_LANES) ^ (4 * ((lane / ROW_LANES) & 1))) * 16;
  const int limit0 = (p.gated ? half : p.rows) - 1, limit1 = p.rows - 1;
  auto row_of = [&](int tile, int r) {  // r: 0 to 15
    return p.gated ? min(tile * 8 + (r & 7), limit0) + (r >> 3) * half : min(tile * 16 + r, limit1);
  };
  uint32_t row_at[COPIES];
  int next_tile = blockIdx.x, next_turn = 0;
  auto find_rows = [&]() {
#pragma unroll
    for (int j = 0; j < COPIES; ++j) row_at[j] = uint32_t(row_of(next_tile, j * ROWS + lane / ROW_LANES)) * p.weight_stride;
  };
  auto issue = [&](uint32_t slot) {
    if (next_tile < p.tiles && turns > 0) {
      const int column = first_column + (next_turn * warps + warp) * CHUNK + (lane % ROW_LANES) * 16;
      const uint32_t size = column < p.columns ? 16 : 0;
      const uint8_t* from = p.weight + (size ? column : 0);
#pragma unroll
      for (int j = 0; j < COPIES; ++j) copy16(slot + copy_to + j * (ROWS * CHUNK), from + row_at[j], size);
      if (++next_turn == turns) {
        next_turn = 0;
        next_tile += gridDim.x;
        if (next_tile < p.tiles) find_rows();
      }
    }
    commit();
  };
  find_rows();
#pragma unroll
  for (int s = 0; s < STAGES; ++s) issue(ring_first + s * STAGE);
  launch_dependents();
  wait_for_dependencies();

  // x of this warp's columns, as float16, in pieces of 16 bytes of each lane: a chunk of a token. bfloat16 times a power of two,
  // which brings a token's largest number of the warp into [2^14, 2^15), is a float16: another exponent, and three bits more.
  // What is less than 2^-29 of the largest becomes 0. Exponents are where the warp's sums will be.
  constexpr int BATCH = IS_HALF<T> ? 8 : 16;  // what eight tokens have in registers is read once
  const uint32_t exponents = shared_address(sums) + warp * (tokens * SUMS_PITCH * 4);
  const int pieces = tokens * turns;
  uint4 v[BATCH];
  auto each_piece = [&](int first, auto&& f) {  // f(index in the batch, token, column of the lane) for a batch of pieces
    // Blocks begin with different tokens, so that they read different parts of L2.
    int token = (first / turns + blockIdx.x) % tokens, turn = first % turns;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (first + i < pieces) f(i, token, (turn * warps + warp) * CHUNK + lane * 8);
      if (++turn == turns) {
        turn = 0;
        token = token + 1 == tokens ? 0 : token + 1;
      }
    }
  };
  auto load_piece = [&](int i, int token, int column) {
    v[i] = {};
    if (column < columns) v[i] = load_global(static_cast<const T*>(p.x) + token * p.x_stride + first_column + column);
  };
  if constexpr (!IS_HALF<T>) {
    if (lane < tokens) store_shared(exponents + lane * 4, 29);
    __syncwarp();
    for (int first = 0; first < pieces; first += BATCH) {
      uint32_t largest = 0, at = 0;  // of piece `lane`
      each_piece(first, load_piece);
      each_piece(first, [&](int i, int token, int) {
        auto absolute = [](uint32_t two) { return two & 0x7fff7fff; };
        const uint32_t low = max_halves(absolute(v[i].x), absolute(v[i].y)), high = max_halves(absolute(v[i].z), absolute(v[i].w));
        const uint32_t two = max_halves(low, high), one = max_of_warp(max(two >> 16, two & 0xffff));
        largest = lane == i ? one : largest;
        at = lane == i ? token : at;
      });
      if (lane < pieces - first && lane < BATCH) max_shared(exponents + at * 4, largest >> 7);
    }
    __syncwarp();
  }
  for (int first = 0; first < pieces; first += BATCH) {
    if (IS_HALF<T> || pieces > BATCH) each_piece(first, load_piece);
    each_piece(first, [&](int i, int token, int column) {
      const uint32_t to = x_shared + token * x_pitch + column * 2;
      if constexpr (IS_HALF<T>) {
        store_shared(to, v[i].x, v[i].y, v[i].z, v[i].w);
      } else {
        const uint32_t least = (load_shared32(exponents + token * 4) - 29) * 0x00800080u;  // in each half
        auto convert = [&](uint32_t two) { return (max_halves(two & 0x7fff7fff, least) - least) * 8 | (two & 0x80008000u); };
        store_shared(to, convert(v[i].x), convert(v[i].y), convert(v[i].z), convert(v[i].w));
      }
    });
  }
  float inverse[2];  // of the tokens of this lane's sums
  if constexpr (!IS_HALF<T>) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // infinity and NaN, which no power of two brings there, give NaN
      const uint32_t exponent = load_shared32(exponents + min(2 * t + e, tokens - 1) * 4);
      inverse[e] = __uint_as_float(exponent == 255 ? 0x7fffffff : (exponent - 14) << 23);
    }
  }
  __syncwarp();

  // Of tokens that do not exist any other's will do: their sums are not stored.
  const uint32_t x_lane = x_shared + min(g, tokens - 1) * x_pitch + warp * (CHUNK * 2) + t * 32;
  const uint32_t lane_at = g * CHUNK + t * 16 + (g & 1) * 64, odd_at = lane_at ^ 64;

  uint32_t slot = ring_first;
  float* buffer = sums;
  const int outputs = p.gated ? 8 : 16;  // of a tile
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    // What this thread stores at the end: output o of a token.
    const int o = threadIdx.x % outputs, o_token = threadIdx.x / outputs;
    float scale0 = 1, scale1 = 1;
    if constexpr (!BLOCKS) {
      if (o_token < tokens) {
        scale0 = load_constant(p.scale + uint32_t(row_of(tile, o) >> p.scale_shift) * p.scale_stride);
        if (p.gated) scale1 = load_constant(p.scale + uint32_t(row_of(tile, o + 8) >> p.scale_shift) * p.scale_stride);
      }
    }
    float acc[BLOCKS ? 1 : 2][4] = {};
    const float* scales0 = nullptr;
    const float* scales1 = nullptr;
    if constexpr (BLOCKS) {
      scales0 = p.scale + uint32_t(row_of(tile, g) >> p.scale_shift) * p.scale_stride;
      scales1 = p.scale + uint32_t(row_of(tile, g + 8) >> p.scale_shift) * p.scale_stride;
    }
    const int last_group = (p.columns - 1) >> 7;
    constexpr int GROUPS = CHUNK / 128;
    float now[GROUPS][2], then[GROUPS][2];
    auto load_scales = [&](float (&to)[GROUPS][2], int turn) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const int group = min((first_column + (turn * warps + warp) * CHUNK) / 128 + i, last_group);
        to[i][0] = load_constant(scales0 + group);
        to[i][1] = load_constant(scales1 + group);
      }
    };
    if constexpr (BLOCKS) load_scales(then, 0);
    for (int turn = 0; turn < turns; ++turn) {
      if constexpr (BLOCKS) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) now[i][0] = then[i][0], now[i][1] = then[i][1];
        if (turn + 1 < turns) load_scales(then, turn + 1);
      }
      wait_groups<STAGES - 1>();
      __syncwarp();
      uint4 words[STEPS][2];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const uint32_t at = slot + (s & 1 ? odd_at : lane_at) + (s >> 1) * 128;
        words[s][0] = load_shared(at);
        words[s][1] = load_shared(at + 8 * CHUNK);
      }
      __syncwarp();
      issue(slot);
      slot = slot + STAGE == ring_end ? ring_first : slot + STAGE;
      const uint32_t x_at = x_lane + turn * warps * (CHUNK * 2);
      float part[4];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        if constexpr (BLOCKS) {
          if ((s & 1) == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) part[i] = 0;
          }
        }
        uint32_t a[4][4];
        auto decode = [&](int i, uint32_t low_row, uint32_t high_row) {
          widen(low_row, a[i][0], a[i][2]);
          widen(high_row, a[i][1], a[i][3]);
        };
        decode(0, words[s][0].x, words[s][1].x);
        decode(1, words[s][0].y, words[s][1].y);
        decode(2, words[s][0].z, words[s][1].z);
        decode(3, words[s][0].w, words[s][1].w);
        const uint4 b0 = load_shared(x_at + s * 128), b1 = load_shared(x_at + s * 128 + 16);
        auto& even = BLOCKS ? part : acc[0];
        auto& odd = BLOCKS ? part : acc[BLOCKS ? 0 : 1];
        mma(even, a[0][0], a[0][1], a[0][2], a[0][3], b0.x, b0.y);
        mma(odd, a[1][0], a[1][1], a[1][2], a[1][3], b0.z, b0.w);
        mma(even, a[2][0], a[2][1], a[2][2], a[2][3], b1.x, b1.y);
        mma(odd, a[3][0], a[3][1], a[3][2], a[3][3], b1.z, b1.w);
        if constexpr (BLOCKS) {
          if (s & 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[0][i] = fmaf(part[i], now[s >> 1][i >> 1], acc[0][i]);
          }
        }
      }
    }

    // The warps' sums, in two buffers in turns: when all are here again, the other one has been read.
    float* to = buffer + warp * (tokens * SUMS_PITCH);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v = acc[0][i];
      if constexpr (!BLOCKS) v += acc[BLOCKS ? 0 : 1][i];
      const int token = 2 * t + (i & 1);
      if (token < tokens) to[token * SUMS_PITCH + g + (i >> 1) * 8] = IS_HALF<T> ? v : v * inverse[i & 1];
    }
    __syncthreads();
    for (int token = o_token; token < tokens; token += blockDim.x / outputs) {
      const float* from = buffer + token * SUMS_PITCH + o;
      float v0 = 0, v1 = 0;
      for (int w = 0; w < warps; ++w) {
        v0 += from[w * (tokens * SUMS_PITCH)];
        if (p.gated) v1 += from[w * (tokens * SUMS_PITCH) + 8];
      }
      v0 *= scale0;
      v1 *= scale1;
      const int row = tile * outputs + o;
      if (p.gated) {
        if (row >= half) continue;
        const float gate = Real<T>::widen(Real<T>::narrow(v0)), up = Real<T>::widen(Real<T>::narrow(v1));
        const float silu = Real<T>::widen(Real<T>::narrow(gate / (1.0f + __expf(-gate))));
        static_cast<T*>(p.y)[int64_t(token) * half + row] = Real<T>::narrow(silu * up);
      } else {
        if (row >= p.rows) continue;
        if (p.sums) {
          static_cast<float*>(p.y)[(int64_t(blockIdx.y) * tokens + token) * p.rows + row] = v0;
        } else {
          if (p.bias) v0 += Real<T>::widen(static_cast<const T*>(p.bias)[row]);
          static_cast<T*>(p.y)[int64_t(token) * p.rows + row] = Real<T>::narrow(v0);
        }
      }
    }
    buffer = buffer == sums ? sums + warps * (tokens * SUMS_PITCH) : sums;
  }
  wait_groups<0>();
}

inline cudaError_t launch(void (*kernel)(Product), const Product& p, const Launch& how, cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(how.blocks, how.splits, 1);
  config.blockDim = dim3(32 * how.warps);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace nanovllm::fp8
