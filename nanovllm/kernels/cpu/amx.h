// AMX: eight registers, each a matrix of 16 rows of 64 bytes, and products of two of them. Intel calls them tiles.
// Source: Intel's "Architecture Instruction Set Extensions Programming Reference", chapter 3.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define NANOVLLM_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanovllm {

#if defined(NANOVLLM_AMX)
// Whether this process may use the matrices: Linux lets those that ask.
inline bool has_amx() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

// While this lives, registers are whole: 16 rows of 64 bytes.
class MatrixShapes {
   public:
    MatrixShapes() {
        struct {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config{.palette = 1};
        for (int i = 0; i < 8; i++) {
            config.bytes[i] = 64;
            config.rows[i] = 16;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~MatrixShapes() { asm volatile("tilerelease"); }
    MatrixShapes(const MatrixShapes&) = delete;
};

// Register I. GCC's own functions do not say that they read memory.
template <int I>
struct Matrix {
    static void load(const void* from, int64_t stride) {  // bytes from row to row
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(I), "r"(from), "r"(stride) : "memory");
    }
    static void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(I), "r"(to), "r"(stride) : "memory");
    }
    static void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(I)); }
    // += A times B, in float32: 16-bit floats, in B pairs of a column.
    template <int A, int B>
    static void add_product() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(I), "i"(A), "i"(B));
    }
};
#else
inline bool has_amx() { return false; }
#endif

}  // namespace nanovllm
