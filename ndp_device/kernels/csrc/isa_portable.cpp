// Plain C++ for machines without AVX2, and the yardstick the other paths are compared with.
#include "vectors.inc.h"

#define NDP_UNROLL(n)

namespace {

typedef uint16_t Words __attribute__((vector_size(16)));
constexpr int kOwnRows = 0;
constexpr int kFewRows = 0, kFp4TileRows = 0;
constexpr int kGemmRows = 2;

NDP_INLINE i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps) {
    uint8_t c[64];
    int8_t s[64];
    store(c, codes);
    store(s, steps);
    for (int r = 0; r < 16; ++r)
        for (int j = 0; j < 4; ++j) acc[r] += c[4 * r + j] * s[4 * r + j];
    return acc;
}

NDP_INLINE f32x16 half_to_float(const uint16_t* p) { return half_to_float_by_bits(p); }

using Floats = f32x16;
constexpr int kFullRows = 4, kFullTokens = 4;

NDP_INLINE Floats halves_to_floats(const uint16_t* p) { return half_to_float(p); }

NDP_INLINE void float8_to_floats(const uint8_t* p, Floats (&w)[2]) {
    uint16_t halves[2][16];
    for (int i = 0; i < 32; ++i) halves[i % 2][i / 2] = static_cast<int8_t>(p[i]) * 128 & 0xbfff;
    for (int odd = 0; odd < 2; ++odd) w[odd] = half_to_float(halves[odd]);
}

NDP_INLINE Words look_up(const uint8_t* table, Words codes) {
    uint8_t bytes[sizeof codes];
    store(bytes, codes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load<Words>(bytes);
}

NDP_INLINE Words dot_bytes(Words factors, Words numbers) {
    typedef int16_t Shorts __attribute__((vector_size(sizeof(Words))));
    const Shorts n = (Shorts)numbers;
    return (Words)((Shorts)(factors & 0xff) * (n << 8 >> 8) + (Shorts)(factors >> 8) * (n >> 8));
}

NDP_INLINE int32_t fp4_zero(const int8_t* codes, int columns) { return zero_of_levels(codes, columns); }

typedef uint64_t PackWord;
constexpr int kPackRows = 1;

NDP_INLINE PackWord pick(uint32_t mask, PackWord a, PackWord b) {
    return b ^ ((a ^ b) & (mask * 0x100000001u));
}

NDP_INLINE void store_rows(PackWord (&row)[1], uint8_t* out, ptrdiff_t stride) {
    store(out, static_cast<uint32_t>(row[0]));
    store(out + stride, static_cast<uint32_t>(row[0] >> 32));
}

template <int LIMBS>
NDP_INLINE bool own_products(const Panel&, const Activations&, int, float*, ptrdiff_t) {
    return false;
}

}  // namespace

#include "kernels.inc.h"

namespace {
constexpr KernelTable kTable = make_table("portable");
}

const ndp::KernelTable& ndp::portable_kernels() { return kTable; }
