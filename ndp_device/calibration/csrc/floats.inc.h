// Eight floats at once, and float16 as bits. Included once per instruction set; everything here is in an anonymous
// namespace and uses no inline function of the standard library, so that no code with these instructions is shared with
// another file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

#define NDP_INLINE inline __attribute__((always_inline))

#ifndef NDP_LANES
#define NDP_LANES 8
#endif
constexpr size_t kLanes = NDP_LANES;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UInts __attribute__((vector_size(4 * kLanes)));
typedef Floats AnyFloats __attribute__((aligned(4), may_alias));  // memcpy would go through the stack in halves

NDP_INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

NDP_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

NDP_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, magnitude = uint32_t(half & 0x7fffu) << 13;
    const uint32_t infinite = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // and NaN
    return bits_to_float(sign | infinite | float_to_bits(bits_to_float(magnitude) * 0x1p112f));
}

// The nearest values that float16 holds, ties to even.
template <class F, class I, class U>
NDP_INLINE F round_all_to_half(const F& values) {
    const I bits = I(values), magnitude = bits & 0x7fffffff;
    const U up = U(magnitude) + 0xfffu + (U(magnitude) >> 13 & 1u);
    const I small = I((F(magnitude) + 0.5f) - 0.5f);  // steps of 2**-24
    const I infinite = magnitude > 0x7f800000 ? (magnitude & 0) + 0x7fc00000 : (magnitude & 0) + 0x7f800000;
    I rounded = magnitude < 0x38800000 ? small : I(up & ~0x1fffu);
    rounded = (rounded >= 0x47800000) | (magnitude > 0x7f800000) ? infinite : rounded;
    return F(rounded | (bits ^ magnitude));
}
NDP_INLINE Floats round_to_half(const Floats& values) { return round_all_to_half<Floats, Ints, UInts>(values); }

// Of a value that float16 holds.
NDP_INLINE uint16_t half_bits(float value) {
    const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x7f800000u)
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (magnitude < 0x38800000u)
        half = uint32_t(bits_to_float(magnitude) * 0x1p24f);
    else
        half = (magnitude - 0x38000000u) >> 13;
    return uint16_t((bits >> 16 & 0x8000u) | half);
}

NDP_INLINE void store(float* p, const Floats& v) { *reinterpret_cast<AnyFloats*>(p) = v; }
NDP_INLINE Floats load(const float* p) { return *reinterpret_cast<const AnyFloats*>(p); }

}  // namespace
