// AVX2 with FMA and F16C. Compiled with those flags, so reached only through its table (see cpu.cpp).
#include <immintrin.h>

#include "vectors.inc.h"

#define NDP_UNROLL(n) _Pragma(NDP_TEXT(GCC unroll n))
#define NDP_TEXT(words) #words

namespace {

constexpr bool kInPlaceFields = false;  // vpmaddubsw saturates: codes must stay below 128
constexpr int kGemmRows = 2;            // 2 rows x 2 blocks x 2 halves = 8 of 16 registers

NDP_INLINE __m256i dot4_half(__m256i acc, __m256i codes, __m256i steps) {
    __m256i pairs = _mm256_maddubs_epi16(codes, steps);  // at most 2 * 15 * 127: exact
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

NDP_INLINE i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps) {
    __m256i a[2], c[2], s[2];
    std::memcpy(a, &acc, 64);
    std::memcpy(c, &codes, 64);
    std::memcpy(s, &steps, 64);
    for (int i = 0; i < 2; ++i) a[i] = dot4_half(a[i], c[i], s[i]);
    std::memcpy(&acc, a, 64);
    return acc;
}

NDP_INLINE f32x16 half_to_float(const uint16_t* p) {
    __m256 v[2] = {_mm256_cvtph_ps(load<__m128i>(p)), _mm256_cvtph_ps(load<__m128i>(p + 8))};
    return load<f32x16>(v);
}

template <int LIMBS>
NDP_INLINE bool tile_products(const Panel&, const Activations&, int, float*, ptrdiff_t) {
    return false;
}

}  // namespace

#include "kernels.inc.h"

namespace {
constexpr KernelTable kTable = make_table("avx2");
}

const ndp::KernelTable& ndp::avx2_kernels() { return kTable; }
