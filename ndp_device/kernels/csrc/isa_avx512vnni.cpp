// AVX-512 with VNNI. Compiled with those flags, so reached only through its table (see cpu.cpp).
#include "avx512vnni.inc.h"

namespace {
constexpr int kFp4TileRows = 0;
constexpr int kFewRows = 8;  // x 2 blocks of sums: 16 of 32 registers

template <int LIMBS>
NDP_INLINE bool own_products(const Panel&, const Activations&, int, float*, ptrdiff_t) {
    return false;
}
}  // namespace

#include "kernels.inc.h"

namespace {
constexpr KernelTable kTable = make_table("avx512vnni");
}

const ndp::KernelTable& ndp::avx512vnni_kernels() { return kTable; }
