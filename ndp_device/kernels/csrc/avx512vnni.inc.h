// What kernels.inc.h asks for, on AVX-512 with VNNI; shared by the VNNI path and the AMX path.
#pragma once

#include <immintrin.h>

#include "vectors.inc.h"

#define NDP_UNROLL(n) _Pragma(NDP_TEXT(GCC unroll n))
#define NDP_TEXT(words) #words

namespace {

using Words = u16x32;
constexpr bool kInPlaceFields = true;  // vpdpbusd does not saturate
constexpr int kGemmRows = 12;          // 12 rows x 2 blocks of sums: 24 of 32 registers

NDP_INLINE i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)steps);
}

NDP_INLINE f32x16 half_to_float(const uint16_t* p) { return (f32x16)_mm512_cvtph_ps(load<__m256i>(p)); }

}  // namespace
