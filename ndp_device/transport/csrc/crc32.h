// CRC-32 as zlib computes it, alone or while copying. PCLMULQDQ where the processor has it; else, and for what is left of 16
// bytes, a table.
//
// source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009;
// the constants are those of its appendix for the reflected polynomial 0xEDB88320.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace checksum {

constexpr std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        table[byte] = byte;
        for (int bit = 0; bit < 8; ++bit) table[byte] = table[byte] >> 1 ^ (table[byte] & 1 ? 0xEDB88320u : 0);
    }
    return table;
}

inline constexpr std::array<uint32_t, 256> kTable = make_table();

// `state` is the complement of the CRC so far.
inline uint32_t by_bytes(uint32_t state, const unsigned char* from, size_t bytes) {
    for (; bytes; ++from, --bytes) state = state >> 8 ^ kTable[(state ^ *from) & 255];
    return state;
}

#if defined(__x86_64__)
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i next, __m128i by) {
    return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00),
                                             _mm_clmulepi64_si128(value, by, 0x11)));
}

template <bool copies>
__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const unsigned char* from, unsigned char* to) {
    const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if (copies) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
    return value;
}

// At least 64 bytes, a multiple of 16. Each byte of `from` is read once: what is copied is what was summed.
template <bool copies>
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(uint32_t state, unsigned char* to,
                                                             const unsigned char* from, size_t bytes) {
    const __m128i by512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i a = _mm_xor_si128(load<copies>(from, to), _mm_cvtsi32_si128(static_cast<int>(state)));
    __m128i b = load<copies>(from + 16, to + 16), c = load<copies>(from + 32, to + 32);
    __m128i d = load<copies>(from + 48, to + 48);
    for (from += 64, to += 64, bytes -= 64; bytes >= 64; from += 64, to += 64, bytes -= 64) {
        a = fold(a, load<copies>(from, to), by512);
        b = fold(b, load<copies>(from + 16, to + 16), by512);
        c = fold(c, load<copies>(from + 32, to + 32), by512);
        d = fold(d, load<copies>(from + 48, to + 48), by512);
    }
    a = fold(fold(fold(a, b, by128), c, by128), d, by128);
    for (; bytes; from += 16, to += 16, bytes -= 16) a = fold(a, load<copies>(from, to), by128);
    const __m128i low = _mm_set_epi32(0, -1, 0, -1);
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by128, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), _mm_set_epi64x(0, 0x0163cd6124), 0));
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10), low);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, barrett, 0x00));
    return static_cast<uint32_t>(_mm_extract_epi32(a, 1));
}

inline bool can_fold() {
    static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    return can;
}
#endif

inline size_t folded_bytes(size_t bytes) {
#if defined(__x86_64__)
    if (bytes >= 64 && can_fold()) return bytes & ~size_t{15};
#endif
    return 0;
}

// zlib's crc32(from, crc).
inline uint32_t sum(uint32_t crc, const void* source, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(source);
    const size_t folded = folded_bytes(bytes);
    uint32_t state = ~crc;
#if defined(__x86_64__)
    if (folded) state = by_folding<false>(state, const_cast<unsigned char*>(from), from, folded);
#endif
    return ~by_bytes(state, from + folded, bytes - folded);
}

// The same of bytes copied to `target`. Either side may be memory that somebody else writes: what is summed is what was
// copied, because every byte of the source is read once and none of the target.
inline uint32_t copy(uint32_t crc, void* target, const void* source, size_t bytes) {
    const auto* from = static_cast<const unsigned char*>(source);
    auto* to = static_cast<unsigned char*>(target);
    size_t done = folded_bytes(bytes);
    uint32_t state = ~crc;
#if defined(__x86_64__)
    if (done) state = by_folding<true>(state, to, from, done);
#endif
    unsigned char block[1024];
    for (size_t size; done < bytes; done += size) {
        size = bytes - done < sizeof block ? bytes - done : sizeof block;
        std::memcpy(block, from + done, size);
        state = by_bytes(state, block, size);
        std::memcpy(to + done, block, size);
    }
    return ~state;
}

}  // namespace checksum
