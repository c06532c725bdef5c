// AMX tiles: int8 for several tokens of quantized weights (AVX-512 VNNI for one), bfloat16 for full precision. The tile instructions are written out with a memory clobber:
// g++ 12's intrinsics have none, and the stores that they read were dropped.
#include "vectors.inc.h"

namespace {

struct TileConfig;

struct Tiles {
    static void configure(const TileConfig& config) {
        asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
    }
    static void release() { asm volatile("tilerelease" ::: "memory"); }

    static NDP_INLINE void zero() {
        asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    }
    template <int TILE>
    static NDP_INLINE void load(const void* base, ptrdiff_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(TILE) : "memory");
    }
    template <bool SIGNED, int SUM, int ACTIVATIONS, int CODES>
    static NDP_INLINE void multiply() {  // signed activations, codes signed or not
        if constexpr (SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ACTIVATIONS), "i"(CODES));
        else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(ACTIVATIONS), "i"(CODES));
    }
    template <int SUM, int A, int B>
    static NDP_INLINE void multiply_bfloats() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
    }
    template <int TILE>
    static NDP_INLINE void save(void* base, ptrdiff_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(TILE) : "memory");
    }
};

}  // namespace

#include "amx.inc.h"

namespace {
constexpr KernelTable kTable = make_tile_table("amx");
}

const ndp::KernelTable& ndp::amx_kernels() { return kTable; }
