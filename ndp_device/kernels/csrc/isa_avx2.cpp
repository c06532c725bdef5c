// AVX2 with FMA and F16C. Compiled with those flags, so reached only through its table (see cpu.cpp).
#include <immintrin.h>

#include "vectors.inc.h"

#define NDP_UNROLL(n) _Pragma(NDP_TEXT(GCC unroll n))
#define NDP_TEXT(words) #words

namespace {

typedef uint16_t Words __attribute__((vector_size(32)));
constexpr int kOwnRows = 6;
constexpr int kFewRows = 0, kFp4TileRows = 0;
constexpr int kGemmRows = 2;            // 2 rows x 2 blocks x 2 halves = 8 of 16 registers

NDP_INLINE Words look_up(const uint8_t* table, Words codes) {
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
}

NDP_INLINE Words dot_bytes(Words factors, Words numbers) { return (Words)_mm256_maddubs_epi16((__m256i)factors, (__m256i)numbers); }

// Of columns 0 and 1 of each step and of columns 2 and 3, whose products add up in two sums of 16 bits.
NDP_INLINE int32_t fp4_zero(const int8_t* codes, int columns) {
    __m128i sums{};  // pairs of columns
    for (int i = 0; i < columns; i += 16)
        sums = _mm_add_epi16(sums, _mm_maddubs_epi16(_mm_set1_epi8(kFp4Zero), load<__m128i>(codes + i)));
    sums = _mm_add_epi16(sums, _mm_srli_si128(sums, 8));
    sums = _mm_add_epi16(sums, _mm_srli_si128(sums, 4));
    return _mm_cvtsi128_si32(_mm_sub_epi16(__m128i{}, sums));
}

typedef uint32_t PackWord __attribute__((vector_size(32)));
constexpr int kPackRows = 8;

NDP_INLINE PackWord pick(uint32_t mask, PackWord a, PackWord b) { return b ^ ((a ^ b) & mask); }

NDP_INLINE void store_rows(PackWord (&row)[8], uint8_t* out, ptrdiff_t stride) {
    __m256i* r = reinterpret_cast<__m256i*>(row);
    NDP_UNROLL(2)
    for (int i = 0; i < 8; i += 4) {  // four rows: quarter q of lane l of every 128-bit half becomes one of r[i + l]
        const __m256i a = _mm256_unpacklo_epi32(r[i], r[i + 1]), b = _mm256_unpackhi_epi32(r[i], r[i + 1]);
        const __m256i c = _mm256_unpacklo_epi32(r[i + 2], r[i + 3]), d = _mm256_unpackhi_epi32(r[i + 2], r[i + 3]);
        r[i] = _mm256_unpacklo_epi64(a, c);
        r[i + 1] = _mm256_unpackhi_epi64(a, c);
        r[i + 2] = _mm256_unpacklo_epi64(b, d);
        r[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    NDP_UNROLL(4)
    for (int lane = 0; lane < 4; ++lane) {
        store(out + lane * stride, _mm256_permute2x128_si256(r[lane], r[lane + 4], 0x20));
        store(out + (lane + 4) * stride, _mm256_permute2x128_si256(r[lane], r[lane + 4], 0x31));
    }
}

NDP_INLINE i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps) {
    __m256i a[2], c[2], s[2];
    std::memcpy(a, &acc, 64);
    std::memcpy(c, &codes, 64);
    std::memcpy(s, &steps, 64);
    for (int i = 0; i < 2; ++i) {
        __m256i pairs = _mm256_maddubs_epi16(c[i], s[i]);
        a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    std::memcpy(&acc, a, 64);
    return acc;
}

NDP_INLINE f32x16 half_to_float(const uint16_t* p) {
    __m256 v[2] = {_mm256_cvtph_ps(load<__m128i>(p)), _mm256_cvtph_ps(load<__m128i>(p + 8))};
    return load<f32x16>(v);
}

typedef float Floats __attribute__((vector_size(32)));
constexpr int kFullRows = 2, kFullTokens = 6;  // 12 of 16 registers

NDP_INLINE Floats halves_to_floats(const uint16_t* p) { return (Floats)_mm256_cvtph_ps(load<__m128i>(p)); }

NDP_INLINE void float8_to_floats(const uint8_t* p, Floats (&w)[2]) {
    const __m128i pairs = load<__m128i>(p), bits = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m128i even = _mm_srai_epi16(_mm_slli_epi16(pairs, 8), 1), odd = _mm_srai_epi16(pairs, 1);
    w[0] = (Floats)_mm256_cvtph_ps(_mm_and_si128(even, bits));
    w[1] = (Floats)_mm256_cvtph_ps(_mm_and_si128(odd, bits));
}

// Four columns of a row as pairs for the codes of columns 0 and 2, and of 1 and 3: products of codes above 127 do not fit the
// sums of _mm256_maddubs_epi16.
struct WideStep {
    __m256i even, odd;

    NDP_INLINE WideStep() {}
    explicit NDP_INLINE WideStep(const int8_t* columns) {
        int32_t four;
        std::memcpy(&four, columns, 4);
        const __m256i all = _mm256_set1_epi32(four);
        even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
        odd = _mm256_srai_epi16(all, 8);
    }
};

// Adds one step's products of ROWS rows with the codes at `codes` and, for the second block, `block_bytes` further.
template <int ROWS>
NDP_INLINE void add_wide_step(const uint8_t* codes, ptrdiff_t block_bytes, const WideStep (&x)[ROWS],
                              __m256i (&sums)[ROWS][4]) {
    NDP_UNROLL(4)
    for (int part = 0; part < 4; ++part) {
        const __m256i w = load<__m256i>(codes + part / 2 * block_bytes + part % 2 * 32);
        const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(w, 8);
        NDP_UNROLL(2)
        for (int row = 0; row < ROWS; ++row) {
            sums[row][part] = _mm256_add_epi32(sums[row][part], _mm256_madd_epi16(even, x[row].even));
            sums[row][part] = _mm256_add_epi32(sums[row][part], _mm256_madd_epi16(odd, x[row].odd));
            asm volatile("" : "+x"(sums[row][part]));  // or g++ adds products up in trees, out of registers
        }
    }
}

// Adds one step's products of ROWS rows with both blocks. The steps of the second block begin at codes + block_bytes.
template <int ROWS>
NDP_INLINE void add_step(const uint8_t* codes, ptrdiff_t block_bytes, const int8_t* const (&x)[ROWS], int step,
                         __m256i (&pairs)[ROWS][4]) {
    __m256i four[ROWS];
    NDP_UNROLL(2)
    for (int row = 0; row < ROWS; ++row) {
        int32_t columns;
        std::memcpy(&columns, x[row] + step * 4, 4);
        four[row] = _mm256_set1_epi32(columns);
    }
    NDP_UNROLL(4)
    for (int part = 0; part < 4; ++part) {
        const uint8_t* at = codes + step * 64 + part / 2 * block_bytes + part % 2 * 32;
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        NDP_UNROLL(2)
        for (int row = 0; row < ROWS; ++row) {
            pairs[row][part] = _mm256_add_epi16(pairs[row][part], _mm256_maddubs_epi16(w, four[row]));
            asm volatile("" : "+x"(pairs[row][part]));  // or g++ adds products up in trees, out of registers
        }
    }
}

// The integer products of ROWS rows with a group of both blocks: `chunks_in_16` chunks of 8 steps add up in 16 bits.
template <int ROWS>
void dot_rows(const uint8_t* codes, int steps, int chunks_in_16, const int8_t* first, __m256i (*dots)[4]) {
    constexpr int kSteps = 8;
    const ptrdiff_t block_bytes = steps * 64;
    const int at_once = chunks_in_16;
    const int8_t* x[ROWS];
    for (int row = 0; row < ROWS; ++row) {
        x[row] = first + row * steps * 4;
        for (int part = 0; part < 4; ++part) dots[row][part] = __m256i{};
    }
    for (int left = steps / kSteps; left > 0; left -= at_once) {
        __m256i pairs[ROWS][4] = {};
        for (int some = left < at_once ? left : at_once; some > 0; --some) {
            NDP_UNROLL(8)
            for (int step = 0; step < kSteps; ++step) add_step<ROWS>(codes, block_bytes, x, step, pairs);
            codes += kSteps * 64;
            for (int row = 0; row < ROWS; ++row) x[row] += kSteps * 4;
        }
        NDP_UNROLL(2)
        for (int row = 0; row < ROWS; ++row) {
            NDP_UNROLL(4)
            for (int part = 0; part < 4; ++part)
                dots[row][part] = _mm256_add_epi32(dots[row][part], _mm256_madd_epi16(pairs[row][part], _mm256_set1_epi16(1)));
        }
    }
}

// dot_rows for codes of more than 7 bits.
template <int ROWS>
void dot_wide_rows(const uint8_t* codes, int steps, int, const int8_t* first, __m256i (*dots)[4]) {
    __m256i sums[ROWS][4] = {};
    for (int step = 0; step < steps; ++step) {
        WideStep x[ROWS];
        NDP_UNROLL(2)
        for (int row = 0; row < ROWS; ++row) x[row] = WideStep(first + (row * steps + step) * 4);
        add_wide_step<ROWS>(codes + step * 64, steps * 64, x, sums);
    }
    NDP_UNROLL(2)
    for (int row = 0; row < ROWS; ++row) {
        NDP_UNROLL(4)
        for (int part = 0; part < 4; ++part) dots[row][part] = sums[row][part];
    }
}

// dot_rows for words.
template <int ROWS>
void dot_words(const uint8_t* codes, int steps, int, const int8_t* first, __m256i (*dots)[4]) {
    __m256i sums[ROWS][4] = {};
    for (int step = 0; step < steps; ++step) {
        __m256i pair[ROWS];
        NDP_UNROLL(2)
        for (int row = 0; row < ROWS; ++row) pair[row] = _mm256_set1_epi32(load<int32_t>(first + (row * steps + step) * 4));
        NDP_UNROLL(4)
        for (int part = 0; part < 4; ++part) {
            const __m256i w = load<__m256i>(codes + (part / 2 * steps + step) * 64 + part % 2 * 32);
            NDP_UNROLL(2)
            for (int row = 0; row < ROWS; ++row) {
                sums[row][part] = _mm256_add_epi32(sums[row][part], _mm256_madd_epi16(w, pair[row]));
                asm volatile("" : "+x"(sums[row][part]));  // or g++ adds products up in trees, out of registers
            }
        }
    }
    NDP_UNROLL(2)
    for (int row = 0; row < ROWS; ++row) {
        NDP_UNROLL(4)
        for (int part = 0; part < 4; ++part) dots[row][part] = sums[row][part];
    }
}

// multiply_panel with 32-byte registers: g++ keeps 64-byte vectors in memory here, which costs ten times the time.
template <int LIMBS>
bool own_products(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t stride) {
    constexpr int kTokens = 2 / LIMBS;
    const ptrdiff_t row_bytes = panel.steps * 4;
    const auto dot_two = panel.words ? dot_words<2> : panel.chunks_in_16 ? dot_rows<2> : dot_wide_rows<2>;
    const auto dot_one = panel.words ? dot_words<1> : panel.chunks_in_16 ? dot_rows<1> : dot_wide_rows<1>;
    // Each call of a dot_* has its share of the next panel's lines to prefetch.
    const int calls = (a.tokens + kTokens - 1) / kTokens, steps = (panel.steps + calls - 1) / calls;
    const uint8_t* ahead[] = {panel.ahead[0], panel.ahead[1]};
    for (int first = 0; first < a.tokens; first += kTokens) {
        const int count = a.tokens - first < kTokens ? a.tokens - first : kTokens;
        for (int g = 0; g < panel.groups; ++g) {
            for (int step = 0; step < steps; ++step) {
                __builtin_prefetch(ahead[0] += panel.ahead_bytes[0]);
                if (panel.ahead_bytes[1]) __builtin_prefetch(ahead[1] += panel.ahead_bytes[1]);
            }
            const ptrdiff_t at = static_cast<ptrdiff_t>(first_group + g) * a.tokens + first;
            const uint8_t* codes = panel.codes + static_cast<ptrdiff_t>(g) * kUnitBlocks * panel.steps * 64;
            __m256i dots[2][4];
            const int8_t* x = a.codes + at * LIMBS * row_bytes;
            (count * LIMBS == 2 ? dot_two : dot_one)(codes, panel.steps, panel.chunks_in_16, x, dots);
            for (int t = 0; t < count; ++t) {
                for (int part = 0; part < 4; ++part) {
                    __m256 dot = _mm256_cvtepi32_ps(dots[t * LIMBS][part]);
                    if constexpr (LIMBS == 2)
                        dot = _mm256_fmadd_ps(dot, _mm256_set1_ps(128), _mm256_cvtepi32_ps(dots[t * LIMBS + 1][part]));
                    const float* meta = reinterpret_cast<const float*>(panel.meta + (g * kUnitBlocks + part / 2) * 2);
                    float* to = y + (first + t) * stride + part * 8;
                    dot = _mm256_mul_ps(dot, _mm256_set1_ps(a.scale[at + t]));
                    __m256 out = _mm256_fmadd_ps(dot, _mm256_loadu_ps(meta + part % 2 * 8), _mm256_loadu_ps(to));
                    if (!panel.fp4)
                        out = _mm256_fmadd_ps(_mm256_loadu_ps(meta + 16 + part % 2 * 8), _mm256_set1_ps(a.sum[at + t]), out);
                    _mm256_storeu_ps(to, out);
                }
            }
        }
    }
    return true;
}

}  // namespace

#include "kernels.inc.h"

namespace {

// Bytes of prefetch here, of one component and of two.
constexpr int kOwnLead = 1280, kTwoLead = 2048;

// Of FP4: what both of a row's sums of 16 bits under a group's scale are multiplied by, of 8 rows of a block's meta data.
template <class Code>
NDP_INLINE __m256i factors_of(const uint8_t* meta, int half, int scale) {
    const __m256i low = _mm256_set1_epi32(15);
    if constexpr (Code::kShifts) {
        const __m256i shifts = _mm256_srli_epi32(load<__m256i>(meta + half * 32), 4 * scale);
        return _mm256_sllv_epi32(_mm256_set1_epi32(0x00010001), _mm256_and_si256(shifts, low));
    }
    const __m256i both = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(meta + 64 + scale * kBlockRows + half * 8)));
    const __m256i factors = _mm256_sllv_epi32(_mm256_and_si256(both, low), _mm256_srli_epi32(both, 4));
    return _mm256_or_si256(factors, _mm256_slli_epi32(factors, 16));
}

// The integer products of one row with the codes of one group of a unit as they lie in memory: [limb][part], a part being 8
// of the unit's 32 rows. One chunk, eight steps, adds up in 16 bits.
template <class Code, int LIMBS>
NDP_INLINE void dot_in_registers(const uint8_t* c0, const uint8_t* c1, int chunks, const int8_t* x, const int32_t* zeros,
                                 const uint8_t* meta, int padded, __m256i (&dots)[LIMBS][4]) {
    NDP_UNROLL(2)
    for (int limb = 0; limb < LIMBS; ++limb) {
        NDP_UNROLL(4)
        for (int part = 0; part < 4; ++part) dots[limb][part] = __m256i{};
    }
    // At once: with more of them sums leave the registers; 3 bits are faster so all the same.
    constexpr int kParts = Code::kWidth1 == 1 ? 4 : 4 / LIMBS;
    constexpr int kVectors = Code::kVectors / Code::kScales;  // under one scale
    static_assert(8 * 2 * Code::kTop * kTopLimb <= 32767, "sums of 16 bits");
    for (int chunk = 0; chunk < chunks; ++chunk) {
        NDP_UNROLL(2)
        for (int first = 0; first < 4; first += kParts) {
            __m256i pairs[LIMBS][kParts] = {};
            NDP_UNROLL(4)
            for (int q = 0; q < 4; ++q) {
                if (Code::kFp4 && q % kVectors == 0) {
                    NDP_UNROLL(2)
                    for (int limb = 0; limb < LIMBS; ++limb) {
                        NDP_UNROLL(4)
                        for (int part = 0; part < kParts; ++part)
                            pairs[limb][part] = _mm256_set1_epi32(zeros[(limb * chunks + chunk) * Code::kScales + q / kVectors]);
                    }
                }
                __m256i four[2][LIMBS];
                NDP_UNROLL(2)
                for (int high = 0; high < 2; ++high) {
                    NDP_UNROLL(2)
                    for (int limb = 0; limb < LIMBS; ++limb) {
                        int32_t step;
                        std::memcpy(&step, x + limb * padded + (chunk * 8 + Code::step(q, high)) * 4, 4);
                        four[high][limb] = _mm256_set1_epi32(step);
                    }
                }
                NDP_UNROLL(4)
                for (int part = 0; part < kParts; ++part) {
                    const uint8_t* b0 = c0 + chunk * chunk_bytes(Code::kWidth0) + (first + part) * 32;
                    const uint8_t* b1 = c1 + chunk * chunk_bytes(Code::kWidth1) + (first + part) * 32;
                    if (part % 2 == 0) Code::prefetch(b0, b1, q, Code::kWidth1 ? kTwoLead : kOwnLead);
                    const Words v = Code::template vector<Words>(b0, b1, q);
                    const __m256i low = (__m256i)Code::field(v, 0), high = (__m256i)Code::field(v, 1);
                    NDP_UNROLL(2)
                    for (int limb = 0; limb < LIMBS; ++limb) {
                        __m256i& sum = pairs[limb][part];
                        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(low, four[0][limb]));
                        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(high, four[1][limb]));
                        asm volatile("" : "+x"(sum));  // or g++ adds products up in trees, out of registers
                    }
                }
                if ((q + 1) % kVectors != 0) continue;
                NDP_UNROLL(4)
                for (int part = 0; part < kParts; ++part) {
                    __m256i factors = _mm256_set1_epi16(1);
                    if constexpr (Code::kFp4) {
                        const int of = first + part;
                        factors = factors_of<Code>(meta + of / 2 * (Code::kMetaBytes / 2), of % 2,
                                                   chunk * Code::kScales + q / kVectors);
                    }
                    NDP_UNROLL(2)
                    for (int limb = 0; limb < LIMBS; ++limb) {
                        __m256i& sum = dots[limb][first + part];
                        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs[limb][part], factors));
                    }
                }
            }
        }
    }
}

// dot_in_registers for codes of a byte each.
template <int LIMBS>
NDP_INLINE void dot_single_bytes(const uint8_t* codes, int steps, const int8_t* x, int padded, __m256i (&dots)[LIMBS][4]) {
    __m256i sums[LIMBS][4] = {};
    for (int step = 0; step < steps; ++step, codes += kUnitRows * 4) {
        __builtin_prefetch(codes + kOwnLead);
        __builtin_prefetch(codes + kOwnLead + 64);
        WideStep columns[LIMBS];
        NDP_UNROLL(2)
        for (int limb = 0; limb < LIMBS; ++limb) columns[limb] = WideStep(x + limb * padded + step * 4);
        add_wide_step<LIMBS>(codes, 64, columns, sums);
    }
    NDP_UNROLL(2)
    for (int limb = 0; limb < LIMBS; ++limb) {
        NDP_UNROLL(4)
        for (int part = 0; part < 4; ++part) dots[limb][part] = sums[limb][part];
    }
}

// A few tokens, one after the other: codes stay in registers. The same sums in the same order as own_products. Units of one
// component in pairs: two streams, which the memory system likes better than one.
template <class Code, int LIMBS, int CHUNKS>
void own_tokens(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    constexpr int kStreams = Code::kWidth1 ? 1 : 2;
    const int chunks = CHUNKS ? CHUNKS : w.padded_group / kChunkCols, padded = chunks * kChunkCols;
    const ptrdiff_t unit_bytes0 = static_cast<ptrdiff_t>(w.unit_chunks) * chunk_bytes(Code::kWidth0);
    const ptrdiff_t unit_bytes1 = static_cast<ptrdiff_t>(w.unit_chunks) * chunk_bytes(Code::kWidth1);
    const ptrdiff_t unit_meta = static_cast<ptrdiff_t>(w.groups) * Code::kMetaBytes;
    for (int i = 0; i < (last - first + kStreams - 1) / kStreams * a.tokens; ++i) {
        const int unit = first + i / a.tokens * kStreams, token = i % a.tokens;
        const int streams = last - unit < kStreams ? last - unit : kStreams;
        __m256 out[kStreams][4] = {};
        for (int g = 0; g < w.groups; ++g) {
            const ptrdiff_t of = static_cast<ptrdiff_t>(g) * a.tokens + token;
            const int8_t* x = a.codes + of * LIMBS * padded;
            const int32_t* zeros = Code::kFp4 ? a.zeros + of * LIMBS * chunks * Code::kScales : nullptr;
            for (int s = 0; s < streams; ++s) {
                const ptrdiff_t chunk = static_cast<ptrdiff_t>(g) * chunks;
                const uint8_t* c0 = w.component[0] + (unit + s) * unit_bytes0 + chunk * chunk_bytes(Code::kWidth0);
                const uint8_t* c1 = Code::kWidth1 ? w.component[1] + (unit + s) * unit_bytes1 + chunk * chunk_bytes(Code::kWidth1) : c0;
                const uint8_t* stored = w.meta + (unit + s) * unit_meta + g * Code::kMetaBytes;
                __m256i dots[LIMBS][4];
                if constexpr (Code::kFields == 1) dot_single_bytes<LIMBS>(c0, chunks * 8, x, padded, dots);
                else dot_in_registers<Code, LIMBS>(c0, c1, chunks, x, zeros, stored, padded, dots);
                NDP_UNROLL(6)
                for (int line = 0; line < Code::kMetaBytes; line += 64)
                    __builtin_prefetch(stored + kMetaLead * Code::kMetaBytes + line);
                NDP_UNROLL(4)
                for (int part = 0; part < 4; ++part) {
                    __m256 scale, offset{};
                    if constexpr (Code::kFp4) {
                        const __m256i bits = load<__m256i>(stored + part / 2 * (Code::kMetaBytes / 2) + part % 2 * 32);
                        scale = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(Code::kShifts ? 0x7f800000 : -1)));
                    } else if constexpr (Code::kSigned) {
                        scale = load<__m256>(stored + part * 32);
                        offset = _mm256_mul_ps(scale, _mm256_set1_ps(-kSignedZero));
                    } else {
                        const uint8_t* meta = stored + (part / 2 * 32 + part % 2 * 8) * 2;
                        scale = _mm256_cvtph_ps(load<__m128i>(meta));
                        offset = _mm256_cvtph_ps(load<__m128i>(meta + 32));
                    }
                    __m256 dot = _mm256_cvtepi32_ps(dots[0][part]);
                    if constexpr (LIMBS == 2)
                        dot = _mm256_fmadd_ps(dot, _mm256_set1_ps(128), _mm256_cvtepi32_ps(dots[1][part]));
                    dot = _mm256_mul_ps(dot, _mm256_set1_ps(a.scale[of]));
                    __m256& sum = out[s][part];
                    sum = _mm256_fmadd_ps(dot, scale, sum);
                    if constexpr (!Code::kFp4) sum = _mm256_fmadd_ps(offset, _mm256_set1_ps(a.sum[of]), sum);
                }
            }
        }
        for (int s = 0; s < streams; ++s)
            for (int part = 0; part < 4; ++part)
                _mm256_storeu_ps(y + token * stride + (unit + s - first) * kUnitRows + part * 8, out[s][part]);
    }
}

constexpr KernelTable kTable = make_table("avx2");

}  // namespace

const ndp::KernelTable& ndp::avx2_kernels() { return kTable; }
