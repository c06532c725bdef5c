// AMX int8 tiles for several tokens, AVX-512 VNNI for one. The tile instructions are written out with a memory clobber:
// g++ 12's intrinsics have none, and the stores that they read were dropped.
#include "vectors.inc.h"

namespace {

template <int N>
struct Index {
    static constexpr int value = N;
};

struct TileConfig;

struct Tiles {
    static void configure(const TileConfig& config) {
        asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
    }
    static void release() { asm volatile("tilerelease" ::: "memory"); }

    template <int BLOCKS>
    static NDP_INLINE void zero() {
        asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1" ::);
        if constexpr (BLOCKS == 4) asm volatile("tilezero %%tmm2\n\ttilezero %%tmm3" ::);
    }
    template <int TILE>
    static NDP_INLINE void load(const void* base, ptrdiff_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    static NDP_INLINE void multiply() {  // tile += activations (signed) x codes (unsigned)
        asm volatile("tdpbsud %%tmm5, %%tmm4, %%tmm%c0" ::"i"(TILE));
    }
    template <int BLOCKS>
    static NDP_INLINE void save(void* base, ptrdiff_t stride) {
        char* p = static_cast<char*>(base);
        asm volatile("tilestored %%tmm0, (%0,%1,1)" ::"r"(p), "r"(stride) : "memory");
        asm volatile("tilestored %%tmm1, (%0,%1,1)" ::"r"(p + 64), "r"(stride) : "memory");
        if constexpr (BLOCKS == 4) {
            asm volatile("tilestored %%tmm2, (%0,%1,1)" ::"r"(p + 128), "r"(stride) : "memory");
            asm volatile("tilestored %%tmm3, (%0,%1,1)" ::"r"(p + 192), "r"(stride) : "memory");
        }
    }
};

}  // namespace

#include "amx.inc.h"

namespace {
constexpr KernelTable kTable = make_tile_table("amx");
}

const ndp::KernelTable& ndp::amx_kernels() { return kTable; }
