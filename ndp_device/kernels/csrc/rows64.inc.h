// multiply_width in 64-byte vectors, of which a file defines, besides what kernels.inc.h asks for:
//   i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps)   acc[r] += sum over j < 4 of codes[4r + j] * steps[r].byte[j], exact for
//               codes up to 255, so that a field may stay where it lies in its byte
// Codes are taken apart again for every four tokens: with the products of so many that is faster than to read them from a
// panel (docs/log/kernels.md).
#pragma once

#include "kernels.inc.h"

namespace {

// Where the meta data of one of some blocks begins; those of two units lie `stride` apart.
template <class Code>
NDP_INLINE const uint8_t* block_meta(const uint8_t* meta, ptrdiff_t stride, int block) {
    return meta + block / kUnitBlocks * stride + block % kUnitBlocks * (Code::kMetaBytes / 2);
}

// TOKENS tokens from `token` on meet each vector of codes as it is unpacked, of UNITS units: two are two streams, which the
// memory system likes better than one. Same sums in the same order for any of them. CHUNKS: of a group, or 0 where there are
// others.
template <class Code, int LIMBS, int TOKENS, int UNITS, int CHUNKS>
void multiply_units(const QuantizedView& w, const Activations& a, int token, int unit, float* y, ptrdiff_t y_stride) {
    constexpr int kBlocks = UNITS * kUnitBlocks, kRows = TOKENS * LIMBS;
    // High fields of one token stay in place, in sums of their own, which are shifted down at the end.
    constexpr bool kInPlace = TOKENS == 1 && Code::kFields == 2 && !Code::kFp4;
    constexpr int kVectors = Code::kVectors / Code::kScales;  // under one scale
    const int chunks = CHUNKS ? CHUNKS : w.padded_group / kChunkCols, padded = chunks * kChunkCols;
    const ptrdiff_t stride0 = static_cast<ptrdiff_t>(w.unit_chunks) * chunk_bytes(Code::kWidth0);
    const ptrdiff_t stride1 = static_cast<ptrdiff_t>(w.unit_chunks) * chunk_bytes(Code::kWidth1);
    const ptrdiff_t meta_stride = static_cast<ptrdiff_t>(w.groups) * Code::kMetaBytes;
    const uint8_t* c0 = w.component[0] + unit * stride0;
    const uint8_t* c1 = Code::kWidth1 ? w.component[1] + unit * stride1 : nullptr;
    const uint8_t* meta = w.meta + unit * meta_stride;
    const int8_t* x = a.codes + token * LIMBS * padded;
    const int32_t* zeros = Code::kFp4 ? a.zeros + token * LIMBS * chunks * Code::kScales : nullptr;
    f32x16 out[TOKENS][kBlocks] = {};
    for (int g = 0; g < w.groups; ++g) {
        i32x16 sums[kInPlace + 1][kRows][kBlocks] = {}, total[kRows][kBlocks] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            NDP_UNROLL(8)
            for (int q = 0; q < Code::kVectors; ++q) {
                if (Code::kFp4 && q % kVectors == 0) {
                    NDP_UNROLL(8)
                    for (int row = 0; row < kRows; ++row) {
                        NDP_UNROLL(4)
                        for (int block = 0; block < kBlocks; ++block)
                            sums[0][row][block] = zeros[(row * chunks + chunk) * Code::kScales + q / kVectors] - i32x16{};
                    }
                }
                u16x32 v[kBlocks];
                NDP_UNROLL(4)
                for (int block = 0; block < kBlocks; ++block) {
                    const int of = block / kUnitBlocks, within = block % kUnitBlocks * 64;
                    const uint8_t* b0 = c0 + of * stride0 + chunk * chunk_bytes(Code::kWidth0) + within;
                    const uint8_t* b1 = c1 + of * stride1 + chunk * chunk_bytes(Code::kWidth1) + within;
                    Code::prefetch(b0, b1, q, kGemvLead);
                    v[block] = Code::template vector<u16x32>(b0, b1, q);
                }
                NDP_UNROLL(2)
                for (int high = 0; high < Code::kFields; ++high) {
                    const int8_t* at = x + (chunk * 8 + Code::step(q, high)) * 4;
                    u8x64 codes[kBlocks];
                    NDP_UNROLL(4)
                    for (int block = 0; block < kBlocks; ++block) {
                        if constexpr (kInPlace) {
                            codes[block] = (u8x64)(v[block] & repeat<u16x32>(Code::kMask << (high * Code::kHigh)));
                        } else {
                            codes[block] = (u8x64)Code::field(v[block], high);
                        }
                    }
                    NDP_UNROLL(8)
                    for (int row = 0; row < kRows; ++row) {
                        const i32x16 four = broadcast_step(at + row * padded);
                        NDP_UNROLL(4)
                        for (int block = 0; block < kBlocks; ++block) {
                            i32x16& sum = sums[kInPlace && high][row][block];
                            sum = dot4(sum, codes[block], four);
                        }
                    }
                }
                asm volatile("" : "+r"(c0), "+r"(c1), "+r"(x));  // or g++ loads ahead until it runs out of registers
                if (Code::kFp4 && (q + 1) % kVectors == 0) {
                    NDP_UNROLL(4)
                    for (int block = 0; block < kBlocks; ++block) {
                        const uint8_t* at = block_meta<Code>(meta, meta_stride, block);
                        const i32x16 factors = Code::factors(at, chunk * Code::kScales + q / kVectors);
                        NDP_UNROLL(8)
                        for (int row = 0; row < kRows; ++row)
                            total[row][block] += Code::multiplied(sums[0][row][block], factors);
                    }
                }
            }
        }
        NDP_UNROLL(4)
        for (int block = 0; block < kBlocks; ++block) {
            NDP_UNROLL(8)
            for (int row = 0; row < kRows && !Code::kFp4; ++row) {
                total[row][block] = sums[0][row][block];
                if constexpr (kInPlace) {
                    total[row][block] += sums[1][row][block] >> Code::kHigh;
                    total[row][block] >>= Code::kDropped;
                }
            }
            const uint8_t* at = block_meta<Code>(meta, meta_stride, block);
            NDP_UNROLL(3)
            for (int line = 0; line < Code::kMetaBytes / 2; line += 64)
                __builtin_prefetch(at + kMetaLead * Code::kMetaBytes + line);
            f32x16 scale, offset;
            Code::read_meta(at, scale, offset);
            NDP_UNROLL(4)
            for (int t = 0; t < TOKENS; ++t) {
                f32x16 dot = to_float(total[t * LIMBS][block]);
                if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(total[t * LIMBS + 1][block]);
                out[t][block] += dot * a.scale[static_cast<ptrdiff_t>(g) * a.tokens + token + t] * scale;
                if constexpr (!Code::kFp4) out[t][block] += offset * a.sum[static_cast<ptrdiff_t>(g) * a.tokens + token + t];
            }
        }
        c0 += chunks * chunk_bytes(Code::kWidth0);
        if constexpr (Code::kWidth1 > 0) c1 += chunks * chunk_bytes(Code::kWidth1);
        meta += Code::kMetaBytes;
        x += static_cast<ptrdiff_t>(a.tokens) * LIMBS * padded;
        if constexpr (Code::kFp4) zeros += static_cast<ptrdiff_t>(a.tokens) * LIMBS * chunks * Code::kScales;
    }
    NDP_UNROLL(4)
    for (int t = 0; t < TOKENS; ++t) {
        NDP_UNROLL(4)
        for (int block = 0; block < kBlocks; ++block) store(y + (token + t) * y_stride + block * kBlockRows, out[t][block]);
    }
}

// Some of TOKENS or fewer tokens; returns how many.
template <class Code, int LIMBS, int TOKENS, int CHUNKS>
int multiply_tokens(const QuantizedView& w, const Activations& a, int token, int first, int last, float* y, ptrdiff_t stride) {
    if (a.tokens - token < TOKENS) {
        if constexpr (TOKENS > 1) return multiply_tokens<Code, LIMBS, TOKENS - 1, CHUNKS>(w, a, token, first, last, y, stride);
    }
    constexpr bool kTwo = Code::kWidth1 == 0 && TOKENS * LIMBS <= 4;  // streams of codes where registers allow it
    constexpr int kUnits = kTwo ? 2 : 1;
    int unit = first;
    for (; unit + kUnits <= last; unit += kUnits)
        multiply_units<Code, LIMBS, TOKENS, kUnits, CHUNKS>(w, a, token, unit, y + (unit - first) * kUnitRows, stride);
    for (; unit < last; ++unit)
        multiply_units<Code, LIMBS, TOKENS, 1, CHUNKS>(w, a, token, unit, y + (unit - first) * kUnitRows, stride);
    return TOKENS;
}

// multiply_width, with codes in registers.
template <class Code, int LIMBS>
void multiply_in_registers(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    constexpr int kTokens = 4;  // with two limbs 8 rows x 2 blocks of sums: 16 of 32 registers
    const bool is_usual = w.padded_group == kUsualChunks * kChunkCols;
    const auto multiply = is_usual ? multiply_tokens<Code, LIMBS, kTokens, kUsualChunks> : multiply_tokens<Code, LIMBS, kTokens, 0>;
    for (int unit = first; unit < last; unit += 2) {  // which stay in the second cache
        const int end = unit + 2 < last ? unit + 2 : last;
        for (int token = 0; token < a.tokens;) token += multiply(w, a, token, unit, end, y + (unit - first) * kUnitRows, stride);
    }
}

}  // namespace
