// The kernel: weights of 8-bit floats go through shared memory to tensor cores of float16.
//
// The weight is the first operand of `mma.m16n8k16`, the tokens are the second: 16 rows, 8 tokens, 16 columns. Which columns
// those are does not matter, as long as both operands have the same. So a lane reads 16 bytes of a row at once, and an
// instruction makes two float16 of two of them, exactly. (`mma` of 8-bit floats does the same on Hopper, and would need x in 8
// bits.) x in bfloat16 becomes float16 by a power of two for each token and warp.
//
// A block takes tiles of 16 rows in turns. Its warps share the columns. A lane holds its columns of its token, or of its two
// tokens (OCTETS is 2), in registers for the whole of the kernel, TURNS chunks a warp. So shared memory is left to weights on
// their way: each warp has a ring of STAGES chunks of 16 rows x CHUNK columns, across tiles. Lanes read what others of their
// warp have copied, but warps do not wait for each other: sums of a tile lie in one of BUFFERS buffers until a warp, another
// one for each tile, has added them in order. The first weights are asked for before the kernel in front has ended.
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

// Grid [blocks, splits]. A block has as many warps as divide the columns of a split into TURNS chunks or fewer each. BLOCKS:
// scales are of 128 columns, else of whole rows. ROOM: threads for which a multiprocessor has registers, 128 each for ALL.
// With LEAN they have 96, so beside a block of MAX_WARPS warps there is room for one of the kernel that adds sums and norms.
static_assert(CHUNK == 256, "a warp copies two rows of a chunk at once");

constexpr int ALL = 32 * MAX_WARPS, LEAN = 32 * (MAX_WARPS + 4);
template <typename T, bool BLOCKS, int TURNS, int OCTETS, int ROOM>
__global__ void __launch_bounds__(ROOM) product_kernel(const __grid_constant__ Product p) {
  static_assert(TURNS * OCTETS <= 2, "x is in registers");
  constexpr int AT_ONCE = TURNS * OCTETS == 1 && ROOM == ALL ? 4 : 2;  // steps whose weights are in registers at a time
  constexpr int CHAINS = BLOCKS || OCTETS == 2 ? 1 : 2;  // sums of a token
  constexpr int STEPS = CHUNK / 64;      // of 64 columns: 16 bytes of each of the four lanes that share a row
  constexpr int STAGE = 16 * CHUNK;      // bytes
  constexpr int ROW_LANES = CHUNK / 16;  // lanes that copy a row
  constexpr int ROWS = 32 / ROW_LANES;   // that a warp copies at once
  constexpr int COPIES = 16 / ROWS;
  constexpr int GROUPS = CHUNK / 128;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int tokens = p.tokens, half = p.rows >> 1;
  const int first_column = blockIdx.y * p.split_chunks * CHUNK;
  const int end_column = min(p.columns, first_column + p.split_chunks * CHUNK);
  const int chunk = (warp + blockIdx.x) % warps;  // and `warps` further: so that blocks read different parts of x at a time
  const int warp_column = first_column + chunk * CHUNK;

  const uint32_t ring = shared_address(shared) + warp * (STAGES * STAGE), ring_end = ring + STAGES * STAGE;
  const uint32_t sums = shared_address(shared) + warps * (STAGES * STAGE);
  const uint32_t full = sums + BUFFERS * warps * OCTETS * WARP_SUMS, empty = full + BUFFERS * 8;

  // Weights: row r and 16 bytes c of it are at r * CHUNK + (c ^ 4 * (r & 1)) * 16, so that lanes read them from different banks.
  const uint32_t copy_to = (lane / ROW_LANES) * CHUNK + ((lane % ROW_LANES) ^ (4 * ((lane / ROW_LANES) & 1))) * 16;
  const int limit0 = (p.gated ? half : p.rows) - 1, limit1 = p.rows - 1;
  auto row_of = [&](int tile, int r) {  // r: 0 to 15
    return p.gated ? min(tile * 8 + (r & 7), limit0) + (r >> 3) * half : min(tile * 16 + r, limit1);
  };
  int next_tile = blockIdx.x, next_turn = 0;
  auto issue = [&](uint32_t slot) {
    if (next_tile < p.tiles) {
      const int column = warp_column + next_turn * warps * CHUNK + (lane % ROW_LANES) * 16;
      const uint32_t size = column < end_column ? 16 : 0;
      const uint8_t* from = p.weight + (size ? column : 0);
#pragma unroll
      for (int j = 0; j < COPIES; ++j) {
        const uint32_t row = row_of(next_tile, j * ROWS + lane / ROW_LANES);
        copy16(slot + copy_to + j * (ROWS * CHUNK), from + row * p.weight_stride, size);
      }
      if (++next_turn == TURNS) {
        next_turn = 0;
        next_tile += gridDim.x;
      }
    }
    commit();
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) issue(ring + s * STAGE);
  launch_dependents();
  if (threadIdx.x < BUFFERS) {
    barrier_init(full + threadIdx.x * 8, warps);
    barrier_init(empty + threadIdx.x * 8, 1);
  }
  __syncthreads();
  wait_for_dependencies();

  // Of tokens that do not exist any other's will do: their sums are not stored.
  uint32_t x[OCTETS][TURNS][STEPS][8];
#pragma unroll
  for (int o = 0; o < OCTETS; ++o) {
    const T* const of_token = static_cast<const T*>(p.x) + min(o * OCTET + g, tokens - 1) * p.x_stride;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int column = warp_column + turn * warps * CHUNK + s * 64 + t * 16;
        uint4 low{}, high{};
        if (column < end_column) low = load_global(of_token + column), high = load_global(of_token + column + 8);
        x[o][turn][s][0] = low.x, x[o][turn][s][1] = low.y, x[o][turn][s][2] = low.z, x[o][turn][s][3] = low.w;
        x[o][turn][s][4] = high.x, x[o][turn][s][5] = high.y, x[o][turn][s][6] = high.z, x[o][turn][s][7] = high.w;
      }
    }
  }
  // bfloat16 times a power of two, which brings a token's largest number of the warp into [2^14, 2^15), is a float16: another
  // exponent, and three bits more. What is less than 2^-29 of the largest becomes 0.
  float inverse[OCTETS][2];  // of the tokens of this lane's sums
#pragma unroll
  for (int o = 0; o < OCTETS; ++o) {
    inverse[o][0] = inverse[o][1] = 1;
    if constexpr (!IS_HALF<T>) {
      uint32_t two = 0;
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int i = 0; i < 8; ++i) two = max_halves(two, x[o][turn][s][i] & 0x7fff7fff);
      uint32_t exponent = max(29u, max(two >> 16, two & 0xffff) >> 7);
      exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 1));
      exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 2));
      const uint32_t least = (exponent - 29) * 0x00800080u;  // in each half
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const uint32_t v = x[o][turn][s][i];
            x[o][turn][s][i] = (max_halves(v & 0x7fff7fff, least) * 8 - least * 8) | (v & 0x80008000u);
          }
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // infinity and NaN, which no power of two brings there, give NaN
        const uint32_t of_sum = __shfl_sync(0xffffffffu, exponent, (2 * t + e) * 4);
        inverse[o][e] = __uint_as_float(of_sum == 255 ? 0x7fffffff : (of_sum - 14) << 23);
      }
    }
  }

  const uint32_t lane_at = g * CHUNK + t * 16 + (g & 1) * 64, odd_at = lane_at ^ 64;
  const int last_group = (p.columns - 1) >> 7;
  const int count = (p.tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);  // of tiles, at least one
  uint32_t slot = ring;
  int next_added = warp;  // the next of the tiles whose sums this warp adds

  // Scales of blocks, a chunk ahead.
  float now[GROUPS][2], then[GROUPS][2];
  auto load_scales = [&](int tile, int turn) {
    if constexpr (BLOCKS) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const of_row = p.scale + uint32_t(row_of(tile, g + 8 * r) >> p.scale_shift) * p.scale_stride;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
          then[i][r] = load_constant(of_row + min((warp_column + turn * warps * CHUNK) / 128 + i, last_group));
      }
    }
  };
  load_scales(blockIdx.x, 0);

  // In turn n a warp multiplies tile n of the block, and adds the sums of tile n - 1 if it is the one to do so.
  for (int n = 0; n <= count; ++n) {
    const int tile = blockIdx.x + n * gridDim.x;
    const int added = tile - int(gridDim.x);
    const bool adds = n == next_added + 1;
    float scale0 = 1, scale1 = 1;
    if constexpr (!BLOCKS) {
      if (adds) {
        scale0 = load_constant(p.scale + uint32_t(row_of(added, g) >> p.scale_shift) * p.scale_stride);
        scale1 = load_constant(p.scale + uint32_t(row_of(added, g + 8) >> p.scale_shift) * p.scale_stride);
      }
    }
    if (n < count) {
      float acc[OCTETS][CHAINS][4] = {};
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        if constexpr (BLOCKS) {
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) now[i][0] = then[i][0], now[i][1] = then[i][1];
          if (turn + 1 < TURNS || n + 1 < count) load_scales(turn + 1 < TURNS ? tile : tile + gridDim.x, (turn + 1) % TURNS);
        }
        wait_groups<STAGES - 1>();
        __syncwarp();
        float part[OCTETS][4];
#pragma unroll
        for (int first = 0; first < STEPS; first += AT_ONCE) {
          uint4 words[AT_ONCE][2];
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            const int s = first + i;
            const uint32_t at = slot + (s & 1 ? odd_at : lane_at) + (s >> 1) * 128;
            words[i][0] = load_shared(at);
            words[i][1] = load_shared(at + 8 * CHUNK);
          }
          if (first + AT_ONCE == STEPS) {
            __syncwarp();
            issue(slot);
            slot = slot + STAGE == ring_end ? ring : slot + STAGE;
          }
#pragma unroll
          for (int of_word = 0; of_word < AT_ONCE; ++of_word) {
            const int s = first + of_word;
            if constexpr (BLOCKS) {
              if ((s & 1) == 0) {
#pragma unroll
                for (int i = 0; i < 4 * OCTETS; ++i) part[i >> 2][i & 3] = 0;
              }
            }
            const uint4 low = words[of_word][0], high = words[of_word][1];
            const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t a[4];
              widen(lows[i], a[0], a[2]);
              widen(highs[i], a[1], a[3]);
#pragma unroll
              for (int o = 0; o < OCTETS; ++o) {
                auto& sum = BLOCKS ? part[o] : acc[o][i % CHAINS];
                mma(sum, a[0], a[1], a[2], a[3], x[o][turn][s][2 * i], x[o][turn][s][2 * i + 1]);
              }
            }
            if constexpr (BLOCKS) {
              if (s & 1) {
#pragma unroll
                for (int i = 0; i < 4 * OCTETS; ++i) {
                  float& sum = acc[i >> 2][0][i & 3];
                  sum = fmaf(part[i >> 2][i & 3], now[s >> 1][(i & 3) >> 1], sum);
                }
              }
            }
          }
        }
      }
      const int buffer = n % BUFFERS;
      if (n >= BUFFERS) barrier_wait(empty + buffer * 8, (n / BUFFERS - 1) & 1);
#pragma unroll
      for (int o = 0; o < OCTETS; ++o) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = (acc[o][0][i] + (CHAINS == 1 ? 0.0f : acc[o][CHAINS - 1][i])) * inverse[o][i & 1];
        store_shared(sums + ((buffer * warps + chunk) * OCTETS + o) * WARP_SUMS + lane * 16, v[0], v[1], v[2], v[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(full + buffer * 8);
    }
    if (adds) {
      next_added += warps;
      const int buffer = (n - 1) % BUFFERS;
      barrier_wait(full + buffer * 8, (n - 1) / BUFFERS & 1);
      const uint32_t from = sums + buffer * warps * OCTETS * WARP_SUMS + lane * 16;
      float v[OCTETS][4] = {};  // of tokens 2t and 2t + 1: row g, row g; row g + 8, row g + 8
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
          const float4 more = load_shared_floats(from + (w * OCTETS + o) * WARP_SUMS);
          v[o][0] += more.x, v[o][1] += more.y, v[o][2] += more.z, v[o][3] += more.w;
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + buffer * 8);
#pragma unroll
      for (int i = 0; i < 2 * OCTETS; ++i) {
        const int e = i & 1, token = (i >> 1) * OCTET + 2 * t + e;
        if (token >= tokens) continue;
        float v0 = v[i >> 1][e] * scale0, v1 = v[i >> 1][2 + e] * scale1;
        if (p.gated) {
          const int row = added * 8 + g;
          if (row >= half) continue;
          const float gate = Real<T>::widen(Real<T>::narrow(v0)), up = Real<T>::widen(Real<T>::narrow(v1));
          const float silu = Real<T>::widen(Real<T>::narrow(gate / (1.0f + __expf(-gate))));
          static_cast<T*>(p.y)[int64_t(token) * half + row] = Real<T>::narrow(silu * up);
        } else {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = added * 16 + g + 8 * r;
            float sum = r ? v1 : v0;
            if (row >= p.rows) continue;
            if (p.sums) {
              static_cast<float*>(p.y)[(int64_t(blockIdx.y) * tokens + token) * p.rows + row] = sum;
            } else {
              if (p.bias) sum += Real<T>::widen(static_cast<const T*>(p.bias)[row]);
              static_cast<T*>(p.y)[int64_t(token) * p.rows + row] = Real<T>::narrow(sum);
            }
          }
        }
      }
    }
  }
  wait_groups<0>();
}

template <typename T>
cudaError_t launch(const Product& p, const Launch& how, bool columns, cudaStream_t stream) {
  void (*const kernel)(Product) =
      p.tokens > OCTET ? (columns ? product_kernel<T, true, 1, 2, ALL> : product_kernel<T, false, 1, 2, ALL>)
      : how.turns == 2 ? (columns ? product_kernel<T, true, 2, 1, ALL> : product_kernel<T, false, 2, 1, ALL>)
      : p.sums         ? (columns ? product_kernel<T, true, 1, 1, LEAN> : product_kernel<T, false, 1, 1, LEAN>)
                       : (columns ? product_kernel<T, true, 1, 1, ALL> : product_kernel<T, false, 1, 1, ALL>);
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
