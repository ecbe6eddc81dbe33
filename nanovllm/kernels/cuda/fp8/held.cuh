// The kernel that holds x in registers: a lane has its columns of its token for the whole of the kernel, as the second operand of
// `mma`. So shared memory is left to weights on their way: TURNS chunks a warp, and as many as there are warps, are all columns
// of a split. Warps do not wait for each other: sums of a tile lie in one of BUFFERS buffers until a warp, another one for each
// tile, has added them. The formats, and how weights become float16, are those of product.cuh.
#pragma once

#include "product.cuh"

namespace nanovllm::fp8 {

constexpr int BUFFERS = 4;        // tiles whose sums are not added yet
constexpr int HELD_STAGES = 3;    // chunks of a warp that are on their way
constexpr int WARP_SUMS = 512;    // bytes: four floats of each lane

__device__ __forceinline__ void store_shared(uint32_t at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float4 load_shared_floats(uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void init_barrier(uint32_t at, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t at) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
__device__ __forceinline__ void wait_for(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra.uni over;\n bra.uni again;\n over:\n}"
      ::"r"(at), "r"(parity) : "memory");
}

// Grid [blocks, splits]. A block has as many warps as divide the columns of a split into TURNS chunks or fewer each.
// AT_ONCE: steps whose weights are in registers at a time.
template <typename T, bool BLOCKS, int TURNS, int STAGES, int AT_ONCE = TURNS == 1 ? 4 : 2>
__global__ void __launch_bounds__(TURNS == 1 ? (AT_ONCE == 4 ? 512 : 640) : 256, TURNS == 1 ? 1 : 2) held_kernel(const __grid_constant__ Product p) {
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
  const uint32_t full = sums + BUFFERS * warps * WARP_SUMS, empty = full + BUFFERS * 8;

  // Weights lie in a stage as in product.cuh.
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
    init_barrier(full + threadIdx.x * 8, warps);
    init_barrier(empty + threadIdx.x * 8, 1);
  }
  __syncthreads();
  wait_for_dependencies();

  // Of tokens that do not exist any other's will do: their sums are not stored.
  uint32_t x[TURNS][STEPS][8];
  const T* const of_token = static_cast<const T*>(p.x) + min(g, tokens - 1) * p.x_stride;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int column = warp_column + turn * warps * CHUNK + s * 64 + t * 16;
      uint4 low{}, high{};
      if (column < end_column) low = load_global(of_token + column), high = load_global(of_token + column + 8);
      x[turn][s][0] = low.x, x[turn][s][1] = low.y, x[turn][s][2] = low.z, x[turn][s][3] = low.w;
      x[turn][s][4] = high.x, x[turn][s][5] = high.y, x[turn][s][6] = high.z, x[turn][s][7] = high.w;
    }
  }
  // bfloat16 becomes float16 as in product.cuh, by a power of two for each token and warp.
  float inverse[2] = {1, 1};  // of the tokens of this lane's sums
  if constexpr (!IS_HALF<T>) {
    uint32_t two = 0;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int i = 0; i < 8; ++i) two = max_halves(two, x[turn][s][i] & 0x7fff7fff);
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
          const uint32_t v = x[turn][s][i];
          x[turn][s][i] = (max_halves(v & 0x7fff7fff, least) * 8 - least * 8) | (v & 0x80008000u);
        }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // infinity and NaN, which no power of two brings there, give NaN
      const uint32_t of_sum = __shfl_sync(0xffffffffu, exponent, (2 * t + e) * 4);
      inverse[e] = __uint_as_float(of_sum == 255 ? 0x7fffffff : (of_sum - 14) << 23);
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
      float acc[BLOCKS ? 1 : 2][4] = {};
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        if constexpr (BLOCKS) {
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) now[i][0] = then[i][0], now[i][1] = then[i][1];
          if (turn + 1 < TURNS || n + 1 < count) load_scales(turn + 1 < TURNS ? tile : tile + gridDim.x, (turn + 1) % TURNS);
        }
        wait_groups<STAGES - 1>();
        __syncwarp();
        float part[4];
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
                for (int i = 0; i < 4; ++i) part[i] = 0;
              }
            }
            const uint4 low = words[of_word][0], high = words[of_word][1];
            const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t a[4];
              widen(lows[i], a[0], a[2]);
              widen(highs[i], a[1], a[3]);
              auto& sum = BLOCKS ? part : acc[BLOCKS ? 0 : i & 1];
              mma(sum, a[0], a[1], a[2], a[3], x[turn][s][2 * i], x[turn][s][2 * i + 1]);
            }
            if constexpr (BLOCKS) {
              if (s & 1) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[0][i] = fmaf(part[i], now[s >> 1][i >> 1], acc[0][i]);
              }
            }
          }
        }
      }
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = (acc[0][i] + (BLOCKS ? 0.0f : acc[BLOCKS ? 0 : 1][i])) * inverse[i & 1];
      const int buffer = n % BUFFERS;
      if (n >= BUFFERS) wait_for(empty + buffer * 8, (n / BUFFERS - 1) & 1);
      store_shared(sums + (buffer * warps + chunk) * WARP_SUMS + lane * 16, v[0], v[1], v[2], v[3]);
      __syncwarp();
      if (lane == 0) arrive(full + buffer * 8);
    }
    if (adds) {
      next_added += warps;
      const int buffer = (n - 1) % BUFFERS;
      wait_for(full + buffer * 8, (n - 1) / BUFFERS & 1);
      const uint32_t from = sums + buffer * warps * WARP_SUMS + lane * 16;
      float v[4] = {};  // of tokens 2t and 2t + 1: row g, row g; row g + 8, row g + 8
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        const float4 more = load_shared_floats(from + w * WARP_SUMS);
        v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
      }
      __syncwarp();
      if (lane == 0) arrive(empty + buffer * 8);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 2 * t + e;
        if (token >= tokens) continue;
        float v0 = v[e] * scale0, v1 = v[2 + e] * scale1;
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

// The kernel of a launch.
template <typename T, bool BLOCKS>
auto kernel(const Launch& how) -> void (*)(Product) {
  if (how.turns == 1) return held_kernel<T, BLOCKS, 1, HELD_STAGES>;
  return product_kernel<T, BLOCKS>;
}

}  // namespace nanovllm::fp8
