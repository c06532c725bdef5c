// What kernels.inc.h asks for, on AVX-512 with VNNI; shared by the VNNI path and the AMX path.
#pragma once

#include <immintrin.h>

#include "vectors.inc.h"

#define NDP_UNROLL(n) _Pragma(NDP_TEXT(GCC unroll n))
#define NDP_TEXT(words) #words

namespace {

using Words = u16x32;
constexpr int kOwnRows = 0;
constexpr int kGemmRows = 12;          // 12 rows x 2 blocks of sums: 24 of 32 registers

NDP_INLINE Words look_up(const uint8_t* table, Words codes) {
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
}

NDP_INLINE Words dot_bytes(Words factors, Words numbers) { return (Words)_mm512_maddubs_epi16((__m512i)factors, (__m512i)numbers); }

NDP_INLINE int32_t fp4_zero(const int8_t* codes, int columns) { return zero_of_levels(codes, columns); }

using PackWord = u32x16;
constexpr int kPackRows = 16;

NDP_INLINE PackWord pick(uint32_t mask, PackWord a, PackWord b) {
    return (PackWord)_mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), (__m512i)a, (__m512i)b, 0xca);
}

NDP_INLINE void store_rows(PackWord (&row)[16], uint8_t* out, ptrdiff_t stride) {
    __m512i* r = reinterpret_cast<__m512i*>(row);
    NDP_UNROLL(4)
    for (int i = 0; i < 16; i += 4) {  // four rows: lane l of every 128-bit quarter becomes one of r[i + l]
        const __m512i a = _mm512_unpacklo_epi32(r[i], r[i + 1]), b = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        r[i] = _mm512_unpacklo_epi64(a, c);
        r[i + 1] = _mm512_unpackhi_epi64(a, c);
        r[i + 2] = _mm512_unpacklo_epi64(b, d);
        r[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    NDP_UNROLL(4)
    for (int lane = 0; lane < 4; ++lane) {  // quarter q of r[lane], r[lane + 4], ... side by side
        const __m512i a = _mm512_shuffle_i32x4(r[lane], r[lane + 4], 0x44);       // 0 1 of the first, 0 1 of the next
        const __m512i b = _mm512_shuffle_i32x4(r[lane], r[lane + 4], 0xee);       // 2 3, 2 3
        const __m512i c = _mm512_shuffle_i32x4(r[lane + 8], r[lane + 12], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(r[lane + 8], r[lane + 12], 0xee);
        const __m512i quarter[] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                                   _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)};
        NDP_UNROLL(4)
        for (int q = 0; q < 4; ++q)
            store(out + (4 * q + lane) * stride, quarter[q]);
    }
}

NDP_INLINE i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)steps);
}

NDP_INLINE f32x16 half_to_float(const uint16_t* p) { return (f32x16)_mm512_cvtph_ps(load<__m256i>(p)); }

using Floats = f32x16;
constexpr int kFullRows = 4, kFullTokens = 6;  // 24 of 32 registers

NDP_INLINE Floats halves_to_floats(const uint16_t* p) { return half_to_float(p); }

NDP_INLINE void float8_to_floats(const uint8_t* p, Floats (&w)[2]) {
    const __m256i pairs = load<__m256i>(p), bits = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), odd = _mm256_srai_epi16(pairs, 1);
    w[0] = (Floats)_mm512_cvtph_ps(_mm256_and_si256(even, bits));
    w[1] = (Floats)_mm512_cvtph_ps(_mm256_and_si256(odd, bits));
}

}  // namespace
