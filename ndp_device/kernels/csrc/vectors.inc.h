// 64-byte vectors by compiler extension, lowered to whatever the including file is compiled for. No STL, everything
// in an unnamed namespace. Included by the isa_*.cpp files only.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernel_table.h"

#define NDP_INLINE inline __attribute__((always_inline))

namespace {

using namespace ndp;

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

template <class V>
NDP_INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
NDP_INLINE void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

NDP_INLINE f32x16 broadcast(float v) { return v - f32x16{}; }

// A byte, repeated.
template <class Words>
NDP_INLINE Words repeat(int byte) {
    const uint16_t twice = static_cast<uint16_t>(byte * 0x101);
    return twice - Words{};
}

NDP_INLINE i32x16 broadcast_step(const int8_t* four) {
    int32_t v;
    std::memcpy(&v, four, 4);
    return v - i32x16{};
}

NDP_INLINE i32x16 bytes_to_ints(const uint8_t* p) {
#if defined(__AVX512F__)  // g++ converts bytes one by one, as it does on AVX2
    return (i32x16)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__)
    const __m128i bytes = load<__m128i>(p);
    const __m256i halves[2] = {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
    return load<i32x16>(halves);
#else
    i32x16 v;
    for (int i = 0; i < 16; ++i) v[i] = p[i];
    return v;
#endif
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

NDP_INLINE i8x16 ints_to_bytes(i32x16 v) {  // of -128 to 127
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i halves[2];
    store(halves, v);
    const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(halves[0], halves[1]), 0xd8);
    return (i8x16)_mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
#else
    return __builtin_convertvector(v, i8x16);
#endif
}

typedef int16_t i16x16 __attribute__((vector_size(32)));

NDP_INLINE i16x16 ints_to_words(i32x16 v) {  // of every four in the order 0 2 1 3
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    __m256i halves[2];
    store(halves, v);
    return (i16x16)_mm256_shuffle_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi32(halves[0], halves[1]), 0xd8), order);
#else
    const i16x16 words = __builtin_convertvector(v, i16x16);
    return __builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#endif
}

// acc[r] += products of two columns, words of 16 bits.
NDP_INLINE i32x16 dot2(i32x16 acc, i32x16 codes, i32x16 x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#else
    return acc + (codes << 16 >> 16) * (x << 16 >> 16) + (codes >> 16) * (x >> 16);
#endif
}

NDP_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

// Reference conversion by integer arithmetic: exact for subnormals, infinities and NaN.
NDP_INLINE f32x16 half_to_float_by_bits(const uint16_t* p) {
    u32x16 h = __builtin_convertvector(load<u16x16>(p), u32x16);
    u32x16 sign = (h & 0x8000u) << 16;
    u32x16 rest = h & 0x7fffu;
    f32x16 value = (f32x16)(rest << 13) * 0x1p112f;  // rebias 15 -> 127; subnormals come out right as well
    u32x16 bits = rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : (u32x16)value;
    return (f32x16)(bits | sign);
}

// See Activations: of the codes of the columns under one scale.
NDP_INLINE int32_t zero_of_levels(const int8_t* codes, int columns) {
    int32_t sum = 0;
    for (int i = 0; i < columns; ++i) sum += codes[i];
    return -kFp4Zero * sum;
}

// The bits of `mask` (one byte, repeated) from a, the others from b.
template <class Words>
NDP_INLINE Words choose(int mask, Words a, Words b) {
    const Words m = repeat<Words>(mask);
#if defined(__AVX512F__)
    return (Words)_mm512_ternarylogic_epi32((__m512i)m, (__m512i)a, (__m512i)b, 0xca);
#else
    return (a & m) | (b & ~m);
#endif
}

typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

// One lane of all: the upper half joins the lower one, until one is left.
template <class Join>
NDP_INLINE float join_lanes(f32x4 v, const Join& join) {
    const f32x4 two = join(v, (f32x4)__builtin_shufflevector(v, v, 2, 3, 2, 3));
    return join(two, (f32x4)__builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}

template <class Join>
NDP_INLINE float join_lanes(f32x8 v, const Join& join) {
    return join_lanes(join(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)), join);
}

template <class Join>
NDP_INLINE float join_lanes(f32x16 v, const Join& join) {
    return join_lanes(join(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)), join);
}

template <class V>
NDP_INLINE float sum_lanes(V v) {
    return join_lanes(v, [](auto a, auto b) { return a + b; });
}

NDP_INLINE float max_lanes(f32x16 v) {
    return join_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Nearest integer, ties to even, for |v| < 2^22: the sum's low mantissa bits are the integer.
NDP_INLINE i32x16 round_to_int(f32x16 v) { return (i32x16)(v + 0x1.8p23f) - 0x4b400000; }

// exp(v), relative error below 2e-7 on [-87, 88]; clamped outside.
NDP_INLINE f32x16 exp_lanes(f32x16 v) {
    v = v < -87.0f ? broadcast(-87.0f) : v;
    v = v > 88.0f ? broadcast(88.0f) : v;
    i32x16 n = round_to_int(v * 0x1.715476p0f);
    f32x16 nf = to_float(n);
    f32x16 r = v - nf * 0x1.62e4p-1f;  // ln 2 in two parts; the high one ends in zeros, so n * high is exact
    r = r - nf * 0x1.7f7d1cp-20f;
    f32x16 p = broadcast(1.0f / 5040);  // Taylor: |r| <= 0.35, the next term is 6e-9
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (f32x16)((n + 127) << 23);
}

// Some consecutive groups of one unit, ready for products with any number of rows.
struct Panel {
    int groups;
    int steps;             // per group
    int chunks_in_16;      // chunks of 8 steps whose products with int8 add up in int16; 0: not even two products do
    bool fp4, words;       // words: see codes; other FP4 is signed bytes
    const uint8_t* codes;  // [groups][2 blocks][steps][16 rows][4 columns], or two columns as int16
    const f32x16* meta;    // [groups][2 blocks][scale, offset]
    const uint8_t* ahead[kMaxComponents];  // the next panel's components ...
    int ahead_bytes[kMaxComponents];       // ... and how much of them to prefetch per step; 0: there is none
};

// y += dot * token scale * meta[0] + meta[1] * token sum, which FP4 lacks. Written once, so that a row gets the same bits on
// every way.
NDP_INLINE void add_dot(f32x16 dot, float scale, float sum, const f32x16* meta, float* y, bool fp4) {
    f32x16 out = load<f32x16>(y);
    out += dot * scale * meta[0];
    if (!fp4) out += meta[1] * sum;
    store(y, out);
}

// Which row of its matrix row `r` of a unit is.
NDP_INLINE int place_in_unit(const FullView& w, int unit, int r) {
    return w.second ? unit * kBlockRows + r % kBlockRows : unit * kUnitRows + r;
}

// Where it lies; past the end any row will do, whose result `clear_past` clears.
NDP_INLINE const void* row_of_unit(const FullView& w, int unit, int r) {
    const int row = place_in_unit(w, unit, r), held = row < w.num_rows ? row : w.num_rows - 1;
    const void* matrix = w.second && r >= kBlockRows ? w.second : w.first;
    return static_cast<const char*>(matrix) + static_cast<ptrdiff_t>(held) * w.cols * bytes_of(w.dtype);
}

NDP_INLINE void clear_past(const FullView& w, int unit, int tokens, float* y, ptrdiff_t stride) {
    for (int r = 0; r < kUnitRows; ++r)
        for (int t = 0; t < tokens && place_in_unit(w, unit, r) >= w.num_rows; ++t) y[t * stride + r] = 0.0f;
}

}  // namespace
