// The kernels of every path, written once over 64-byte vectors. The including file gives, in an unnamed namespace:
//   i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps)   acc[r] += sum over j < 4 of codes[4r + j] * steps[r].byte[j]
//   f32x16 half_to_float(const uint16_t*)
//   kOwnRows         up to this many activation rows (token limbs), and for one token, own_tokens (below) computes, which the
//                    file defines after it has included this one; 0: it has none
//   NDP_UNROLL(n)    unrolls the next loop, or nothing
//   Words            the widest vector of uint16_t that lives in a register
//   look_up(table, Words codes)   what a table of 16 bytes has for each byte
//   dot_bytes(Words factors, Words numbers)   sums of two products of unsigned and signed bytes as 16 bits, that fit
//   fp4_zero(const int8_t*, columns)   a word of Activations' zeros as this file's products begin with it
//   kFp4TileRows     from so many activation rows on own_products has MXFP4 codes as shifted bytes; 0: never
//   kFewRows         up to this many activation rows (token limbs) codes stay in registers; 0 where dot4 is not exact for codes
//                    up to 255, so that a field may stay where it lies in its byte
//   PackWord, kPackRows, store_rows, pick   see packing.inc.h
//   Floats, halves_to_floats, kFullRows, kFullTokens   full precision: the vector, how to load it from fp16, and how many rows
//                    of weights and of activations have their sums in registers
//   float8_to_floats(codes, w)   kLanes rows of two columns of E4M3 as numbers, what float16 takes their bits for, 2^-8 of them
//   kGemmRows        activation rows (token limbs) per register block of 2 x 16 weight rows
//   own_products<LIMBS>(panel, activations, first group, y, stride)   does what multiply_panel does and returns true,
//                    or false to leave it to multiply_panel
// No STL, everything in an unnamed namespace (see kernel_table.h).
#pragma once

#include "packing.inc.h"
#include "vectors.inc.h"

namespace {

// Bytes of software prefetch, measured (docs/log/kernels.md).
constexpr int kGemvLead = 3072;
constexpr int kMetaLead = 4;  // groups

constexpr int kUsualChunks = 4;            // of the groups that most files have

// ---- codes -----------------------------------------------------------------------------------------------------

// A chunk of a block as four vectors that hold two codes per byte: a low field and a high one, garbage between. A code of
// 8 bits is a byte of its own: eight vectors of one field.
// W0 and W1 are the component widths (W1 = 0: one component). Two components are merged in place, which costs half of
// what two passes of products do. DROPPED lowest bits do not count: in place they are masked off, and the sums, exact
// multiples, are shifted down, so that nothing after them differs from components that never had these bits.
// FP4 codes are E2M1 numbers: each becomes its level, twice the number plus kFp4Zero, where it is shifted down. Sums of the
// columns under one scale, FP4 many, begin at what takes that zero away, so that they need no offset, and are multiplied by
// what their scale is of their group's.
template <int W0, int W1, int DROPPED = 0, int FP4 = 0, bool SIGNED = false>
struct Codes {
    static constexpr int kWidth0 = W0, kWidth1 = W1, kDropped = DROPPED;
    static constexpr bool kFp4 = FP4 != 0, kShifts = FP4 == kMxfp4, kSigned = SIGNED;
    static constexpr int kScales = kFp4 ? kChunkCols / FP4 : 1;  // of a chunk
    static constexpr int kMetaBytes = (FP4 == kNvfp4 ? 4 + kFp4Columns / kNvfp4 : 4) * kUnitRows;  // of a group of a unit
    // The largest factor of a product; sums of levels may wrap around, as they end without the levels' zero.
    static constexpr int kTop = FP4 ? kFp4Zero : ((1 << (W0 + W1)) - 1) >> DROPPED;
    static constexpr int kFields = W0 == 8 ? 1 : 2, kVectors = 8 / kFields;
    static constexpr uint8_t kMask = ((1 << (W0 + W1)) - 1) >> DROPPED << DROPPED;  // of the low field
    static constexpr int kHigh = W1 ? 4 : W0;  // bit of the high field, where there is one

    // Which of the chunk's 8 steps a field of vector q belongs to.
    static constexpr int step(int q, int high) {
        if (kFields == 1) return q;
        if (W1) return q / 2 * 4 + q % 2 + 2 * high;
        return W0 == 1 ? step_of_bit(2 * q + high) : 2 * q + high;
    }

    // The low or the high field of each byte of a vector, shifted down.
    template <class Words>
    static NDP_INLINE Words field(Words v, int high) {
        const Words codes = (v >> (high * kHigh + DROPPED)) & repeat<Words>(kMask >> DROPPED);
        if constexpr (FP4) return look_up(kFp4Levels, codes);
        return codes;
    }

    // Scale and offset of 16 rows, of a group's meta data from the rows' block on.
    static NDP_INLINE void read_meta(const uint8_t* meta, f32x16& scale, f32x16& offset) {
        if constexpr (FP4) {
            scale = kShifts ? (f32x16)(load<u32x16>(meta) & 0x7f800000u) : load<f32x16>(meta);
            offset = f32x16{};
        } else if constexpr (SIGNED) {
            scale = load<f32x16>(meta);
            offset = scale * float{-kSignedZero};
        } else {
            scale = half_to_float(reinterpret_cast<const uint16_t*>(meta));
            offset = half_to_float(reinterpret_cast<const uint16_t*>(meta) + kBlockRows);
        }
    }

    // Of FP4: what the sums under a group's scale are multiplied by, or shifted up, of the rows from this byte of their vector on.
    template <class Ints = i32x16>
    static NDP_INLINE Ints factors(const uint8_t* meta, int scale, size_t part = 0) {
        if constexpr (kShifts) return (load<Ints>(meta + part) >> (4 * scale)) & 15;
        const i32x16 all = bytes_to_ints(meta + 64 + scale * kBlockRows);
        const Ints both = load<Ints>(reinterpret_cast<const char*>(&all) + part);
        return (both & 15) << (both >> 4);
    }

    // Whether no shift of these groups is above 3, or 2 beside factors: soon known, and so it is with most.
    static NDP_INLINE bool are_small(const uint8_t* meta, int groups) {
        u32x16 all{};
        for (int line = 0; line < groups * kMetaBytes; line += 64)
            if (kShifts || line % (kMetaBytes / 2)) all |= load<u32x16>(meta + line) & (kShifts ? 0xccccu : 0xc0c0c0c0u);
        uint32_t any = 0;
        for (int r = 0; r < kBlockRows; ++r) any |= all[r];
        return !any;
    }

    template <class Ints>
    static NDP_INLINE Ints multiplied(Ints sum, Ints factor) {
        if constexpr (kShifts) return sum << factor;
        return sum * factor;
    }

    // `block` points to this block's first vector of the chunk; its vectors lie kUnitBlocks * 64 bytes apart.
    template <class Words>
    static NDP_INLINE Words vector(const uint8_t* block0, const uint8_t* block1, int q) {
        constexpr int kNext = kUnitBlocks * 64;
        if constexpr (kFields == 1) {
            return load<Words>(block0 + q * kNext);
        } else if constexpr (W1 == 0) {
            constexpr int kPerVector = 4 / W0;
            return load<Words>(block0 + q / kPerVector * kNext) >> (2 * W0 * (q % kPerVector));
        } else {
            const Words top = load<Words>(block0 + q / 2 * kNext);
            const Words rest = load<Words>(block1 + (W1 == 2 ? q / 2 * kNext : 0));
            if constexpr (W1 == 2) return q % 2 ? choose(0xcc, top, rest >> 2) : choose(0xcc, top << 2, rest);
            return choose(0x66, q % 2 ? top >> 1 : top << 1, rest >> q);
        }
    }

    // Prefetches what vector() reads for the first time at this q.
    static NDP_INLINE void prefetch(const uint8_t* block0, const uint8_t* block1, int q, int lead) {
        constexpr int kNext = kUnitBlocks * 64, kPerVector = W1 ? 2 : kFields == 1 ? 1 : 4 / W0;
        if (q % kPerVector == 0) __builtin_prefetch(block0 + q / kPerVector * kNext + lead);
        if (W1 == 2 && q % 2 == 0) __builtin_prefetch(block1 + q / 2 * kNext + lead);
        if (W1 == 1 && q == 0) __builtin_prefetch(block1 + lead);
    }
};

// The codes of one group of a unit as bytes: out [2 blocks][steps][16 rows][4 columns].
// MXFP4: for tiles, numbers as signed bytes, shifted as the group's meta data says.
template <class Code>
NDP_INLINE void unpack_group(const uint8_t* c0, const uint8_t* c1, int chunks, const uint8_t* meta, uint8_t* out) {
    typedef int32_t Lanes __attribute__((vector_size(sizeof(Words))));
    const int steps = chunks * 8;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int block = 0; block < kUnitBlocks; ++block) {
            const uint8_t* b0 = c0 + chunk * chunk_bytes(Code::kWidth0) + block * 64;
            const uint8_t* b1 = c1 + chunk * chunk_bytes(Code::kWidth1) + block * 64;
            uint8_t* to = out + (static_cast<ptrdiff_t>(block) * steps + chunk * 8) * 64;
            i32x16 by{}, keep{};  // what a byte's shift left of it
            if constexpr (Code::kShifts) {
                by = Code::factors(meta + block * (Code::kMetaBytes / 2), chunk);
                keep = ((255 << by) & 255) * 0x01010101;
            }
            for (size_t part = 0; part < 64; part += sizeof(Words)) {
                const Lanes by_part = load<Lanes>(reinterpret_cast<const char*>(&by) + part);
                const Lanes keep_part = load<Lanes>(reinterpret_cast<const char*>(&keep) + part);
                NDP_UNROLL(8)
                for (int q = 0; q < Code::kVectors; ++q) {
                    const Words v = Code::template vector<Words>(b0 + part, b1 + part, q);
                    NDP_UNROLL(2)
                    for (int high = 0; high < Code::kFields; ++high) {
                        uint8_t* step = to + Code::step(q, high) * 64 + part;
                        if constexpr (Code::kShifts) {
                            const Lanes halves = (Lanes)look_up(kFp4Halves, (v >> (high * 4)) & repeat<Words>(15));
                            store(step, (halves << by_part) & keep_part);
                        } else {
                            store(step, Code::field(v, high));
                        }
                    }
                }
            }
        }
    }
}

// FP4 codes of one group of a unit as numbers, times their scale's factor if `scaled`: out [2 blocks][steps][16 rows][2 columns].
template <class Code>
NDP_INLINE void unpack_words(const uint8_t* codes, int chunks, const uint8_t* meta, bool scaled, uint8_t* out) {
    typedef int32_t Lanes __attribute__((vector_size(sizeof(Words))));
    for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int block = 0; block < kUnitBlocks; ++block) {
            const uint8_t* from = codes + chunk * chunk_bytes(Code::kWidth0) + block * 64;
            uint8_t* to = out + (static_cast<ptrdiff_t>(block) * chunks + chunk) * 16 * 64;
            const uint8_t* of_block = meta + block * (Code::kMetaBytes / 2);
            for (size_t part = 0; part < 64; part += sizeof(Words)) {
                Words even{}, odd{};
                NDP_UNROLL(4)
                for (int q = 0; q < Code::kVectors; ++q) {
                    if (q * Code::kScales % Code::kVectors == 0) {
                        const int scale = chunk * Code::kScales + q * Code::kScales / Code::kVectors;
                        Lanes by = 1 - Lanes{};
                        if (scaled) by = Code::multiplied(by, Code::template factors<Lanes>(of_block, scale, part));
                        even = (Words)(by | by << 16);
                        odd = even << 8;
                    }
                    const Words v = Code::template vector<Words>(from + part, from + part, q);
                    NDP_UNROLL(2)
                    for (int high = 0; high < 2; ++high) {
                        const Words halves = look_up(kFp4Halves, (v >> (high * 4)) & repeat<Words>(15));
                        uint8_t* step = to + Code::step(q, high) * 2 * 64 + part;
                        store(step, dot_bytes(even, halves));
                        store(step + 64, dot_bytes(odd, halves));
                    }
                }
            }
        }
    }
}

// ---- a few tokens: codes stay in registers ---------------------------------------------------------------------------

// Where the meta data of one of some blocks begins; those of two units lie `stride` apart.
template <class Code>
NDP_INLINE const uint8_t* block_meta(const uint8_t* meta, ptrdiff_t stride, int block) {
    return meta + block / kUnitBlocks * stride + block % kUnitBlocks * (Code::kMetaBytes / 2);
}

// Bytes of prefetch in a group of a unit's. At its end a stream goes on `skip` bytes further, behind units of other streams.
NDP_INLINE int lead_of_group(int g, int groups, int group_bytes, ptrdiff_t skip) {
    return kGemvLead + ((groups - g) * group_bytes <= kGemvLead ? static_cast<int>(skip) : 0);
}

// For so few rows unpacking into a panel and reading it back costs more than it saves (docs/log/kernels.md), so up to kFewRows
// rows meet each vector of codes as it is unpacked, of UNITS units: two are two streams, which the memory system likes better
// than one. Same sums in the same order as on every other way. CHUNKS: of a group, or 0 where there are others.
template <class Code, int LIMBS, int TOKENS, int UNITS, int CHUNKS>
void few_units(const QuantizedView& w, const Activations& a, int unit, float* y, ptrdiff_t y_stride) {
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
    const int8_t* x = a.codes;
    f32x16 out[TOKENS][kBlocks] = {};
    for (int g = 0; g < w.groups; ++g) {
        i32x16 sums[kInPlace + 1][kRows][kBlocks] = {}, total[kRows][kBlocks] = {};
        const int lead = lead_of_group(g, w.groups, chunks * chunk_bytes(Code::kWidth0), (UNITS - 1) * stride0);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            NDP_UNROLL(8)
            for (int q = 0; q < Code::kVectors; ++q) {
                if (Code::kFp4 && q % kVectors == 0) {
                    const int32_t* zeros = a.zeros + (g * kRows * chunks + chunk) * Code::kScales + q / kVectors;
                    NDP_UNROLL(8)
                    for (int row = 0; row < kRows; ++row) {
                        NDP_UNROLL(4)
                        for (int block = 0; block < kBlocks; ++block)
                            sums[0][row][block] = zeros[row * chunks * Code::kScales] - i32x16{};
                    }
                }
                u16x32 v[kBlocks];
                NDP_UNROLL(4)
                for (int block = 0; block < kBlocks; ++block) {
                    const int of = block / kUnitBlocks, within = block % kUnitBlocks * 64;
                    const uint8_t* b0 = c0 + of * stride0 + chunk * chunk_bytes(Code::kWidth0) + within;
                    const uint8_t* b1 = c1 + of * stride1 + chunk * chunk_bytes(Code::kWidth1) + within;
                    Code::prefetch(b0, b1, q, lead);
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
                if (!Code::kFp4 || (q + 1) % kVectors != 0) continue;
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
                out[t][block] += dot * a.scale[g * TOKENS + t] * scale;
                if constexpr (!Code::kFp4) out[t][block] += offset * a.sum[g * TOKENS + t];
            }
        }
        c0 += chunks * chunk_bytes(Code::kWidth0);
        if constexpr (Code::kWidth1 > 0) c1 += chunks * chunk_bytes(Code::kWidth1);
        meta += Code::kMetaBytes;
        x += kRows * padded;
    }
    NDP_UNROLL(4)
    for (int t = 0; t < TOKENS; ++t) {
        NDP_UNROLL(4)
        for (int block = 0; block < kBlocks; ++block) store(y + t * y_stride + block * kBlockRows, out[t][block]);
    }
}

template <class Code, int LIMBS, int TOKENS, int CHUNKS>
void few_tokens(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    if (a.tokens != TOKENS) {
        if constexpr (TOKENS > 1) few_tokens<Code, LIMBS, TOKENS - 1, CHUNKS>(w, a, first, last, y, stride);
        return;
    }
    constexpr bool kTwo = Code::kWidth1 == 0 && TOKENS * LIMBS <= 4;  // streams of codes where registers allow it
    constexpr int kUnits = kTwo ? 2 : 1;
    int unit = first;
    for (; unit + kUnits <= last; unit += kUnits)
        few_units<Code, LIMBS, TOKENS, kUnits, CHUNKS>(w, a, unit, y + (unit - first) * kUnitRows, stride);
    for (; unit < last; ++unit)
        few_units<Code, LIMBS, TOKENS, 1, CHUNKS>(w, a, unit, y + (unit - first) * kUnitRows, stride);
}

// ---- several tokens: codes are unpacked once per panel ---------------------------------------------------------------

// What a panel adds to ROWS / LIMBS tokens: y += scale * (integer dot product) * token scale + offset * token sum.
// x and the tokens' scale and sums begin at the panel's first group and this block's first token. STEPS is the panel's,
// or 0: known at compile time, every row's address is a constant away from the first one's.
template <int ROWS, int LIMBS, int STEPS, bool PREFETCH, bool WORDS>
void multiply_rows(const Panel& panel, const int8_t* x, ptrdiff_t group_stride, const float* scale, const float* sum, int tokens,
                   float* y, ptrdiff_t y_stride) {
    const int steps = STEPS ? STEPS : panel.steps;
    const uint8_t* ahead0 = panel.ahead[0];
    const uint8_t* ahead1 = panel.ahead[1];
    const uint8_t* codes = panel.codes;
    const int8_t* next_rows = x + ROWS * steps * 4;
    for (int g = 0; g < panel.groups; ++g) {
        const int8_t* next_x = g + 1 < panel.groups ? x + group_stride : next_rows;
        i32x16 dots[ROWS][kUnitBlocks] = {};
        for (int step = 0; step < steps; ++step) {
            if constexpr (PREFETCH) {
                __builtin_prefetch(ahead0);
                __builtin_prefetch(ahead1);
                ahead0 += panel.ahead_bytes[0];
                ahead1 += panel.ahead_bytes[1];
            }
            __builtin_prefetch(next_x + step * ROWS * 4);
            const u8x64 w0 = load<u8x64>(codes + step * 64);
            const u8x64 w1 = load<u8x64>(codes + (steps + step) * 64);
            NDP_UNROLL(12)
            for (int row = 0; row < ROWS; ++row) {
                const i32x16 four = broadcast_step(x + (row * steps + step) * 4);
                dots[row][0] = WORDS ? dot2(dots[row][0], (i32x16)w0, four) : dot4(dots[row][0], w0, four);
                dots[row][1] = WORDS ? dot2(dots[row][1], (i32x16)w1, four) : dot4(dots[row][1], w1, four);
            }
        }
        f32x16 meta[kUnitBlocks][2];
        std::memcpy(meta, panel.meta + g * kUnitBlocks * 2, sizeof meta);
        NDP_UNROLL(12)
        for (int t = 0; t < ROWS / LIMBS; ++t) {
            NDP_UNROLL(2)
            for (int block = 0; block < kUnitBlocks; ++block) {
                f32x16 dot = to_float(dots[t * LIMBS][block]);
                if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[t * LIMBS + 1][block]);
                add_dot(dot, scale[t], sum[t], meta[block], y + t * y_stride + block * kBlockRows, WORDS);
            }
        }
        codes += kUnitBlocks * steps * 64;
        x += group_stride;
        scale += tokens;
        sum += tokens;
    }
}

template <int MAX_TOKENS, int LIMBS, int STEPS, bool PREFETCH, bool WORDS>
void multiply_tokens(int count, const Panel& panel, const int8_t* x, ptrdiff_t group_stride, const float* scale,
                     const float* sum, int tokens, float* y, ptrdiff_t y_stride) {
    if (count == MAX_TOKENS) {
        multiply_rows<MAX_TOKENS * LIMBS, LIMBS, STEPS, PREFETCH, WORDS>(panel, x, group_stride, scale, sum, tokens, y, y_stride);
    } else if constexpr (MAX_TOKENS > 1) {
        multiply_tokens<MAX_TOKENS - 1, LIMBS, STEPS, PREFETCH, WORDS>(count, panel, x, group_stride, scale, sum, tokens, y,
                                                                       y_stride);
    }
}

template <int LIMBS, bool WORDS>
void multiply_panel(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t y_stride) {
    constexpr int kTokens = kGemmRows / LIMBS, kUsual = 128 / (WORDS ? 2 : 4);
    const ptrdiff_t row_bytes = panel.steps * 4, group_stride = a.tokens * LIMBS * row_bytes;
    const int blocks = (a.tokens + kTokens - 1) / kTokens;
    for (int i = 0, done = 0; i < blocks; ++i) {  // blocks of equal size: 16 rows are 8 + 8, not 12 + 4
        const int count = (a.tokens - done) / (blocks - i);
        const ptrdiff_t at = static_cast<ptrdiff_t>(first_group) * a.tokens + done;
        const int8_t* x = a.codes + first_group * group_stride + done * LIMBS * row_bytes;
        (panel.steps != kUsual ? multiply_tokens<kTokens, LIMBS, 0, true, WORDS>
         : i == 0              ? multiply_tokens<kTokens, LIMBS, kUsual, true, WORDS>
                               : multiply_tokens<kTokens, LIMBS, kUsual, false, WORDS>)(
            count, panel, x, group_stride, a.scale + at, a.sum + at, a.tokens, y + done * y_stride, y_stride);
        done += count;
    }
}

// Whether every factor is a byte, and sums of every group's words stay below 2^31, whatever its codes.
template <class Code>
NDP_INLINE bool fits_words(const uint8_t* meta, int groups, int scales) {
    constexpr int kMost = 0x7fffffff / (kFp4Zero * (kChunkCols / Code::kScales) * (kTopLimb * 128 + 63));
    if (Code::are_small(meta, groups)) return true;
    i32x16 room{};
    for (int block = 0; block < groups * kUnitBlocks; ++block, meta += Code::kMetaBytes / 2) {
        i32x16 left = kMost - i32x16{};
        for (int scale = 0; scale < scales; ++scale) {
            const i32x16 factor = Code::multiplied(1 - i32x16{}, Code::factors(meta, scale));
            left -= factor;
            room |= 255 - factor;  // negative where any is
        }
        room |= left;
    }
    int32_t all = 0;
    for (int r = 0; r < kBlockRows; ++r) all |= room[r];
    return all >= 0;
}

// What a panel of FP4 words, not scaled, adds where scaled ones would not fit: limbs one after the other.
template <class Code, int LIMBS>
void add_apart(const Panel& panel, const uint8_t* meta, const Activations& a, int first, float* y, ptrdiff_t stride) {
    constexpr int kSteps = kChunkCols / Code::kScales / 2;  // under one scale
    for (int i = 0; i < panel.groups * kUnitBlocks * a.tokens; ++i) {
        const int t = i % a.tokens, block = i / a.tokens;  // of all groups
        const ptrdiff_t at = static_cast<ptrdiff_t>(first + block / kUnitBlocks) * a.tokens + t;
        i32x16 dots[LIMBS] = {}, sum{};
        for (int limb = 0; limb < LIMBS; ++limb) {
            const int8_t* x = a.codes + (at * LIMBS + limb) * panel.steps * 2;
            for (int step = 0; step < panel.steps; ++step) {
                const int8_t* pair = x + step / 2 * 4 + step % 2;
                sum = dot2(sum, load<i32x16>(panel.codes + (block * panel.steps + step) * 64), (pair[0] & 0xffff) + pair[2] * 65536 - i32x16{});
                if ((step + 1) % kSteps != 0) continue;
                dots[limb] += Code::multiplied(sum, Code::factors(meta + block * (Code::kMetaBytes / 2), step / kSteps));
                sum = i32x16{};
            }
        }
        f32x16 dot = to_float(dots[0]);
        if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[1]);
        add_dot(dot, a.scale[at], 0.0f, panel.meta + block * 2, y + t * stride + block % kUnitBlocks * kBlockRows, true);
    }
}

template <class Code, int LIMBS>
void gemm_unit(const QuantizedView& w, const Activations& a, int unit, float* y, ptrdiff_t stride, void* scratch) {
    const int chunks = w.padded_group / kChunkCols;
    const int most = kPanelCols > w.padded_group ? kPanelCols / w.padded_group : 1;
    const ptrdiff_t group_bytes[] = {chunks * chunk_bytes(Code::kWidth0), chunks * chunk_bytes(Code::kWidth1)};
    f32x16* meta = static_cast<f32x16*>(scratch);
    uint8_t* codes = reinterpret_cast<uint8_t*>(meta + kPanelCols / kChunkCols * 2 * kUnitBlocks);
    for (int t = 0; t < a.tokens; ++t) std::memset(y + t * stride, 0, sizeof(float) * kUnitRows);
    for (int first = 0; first < w.groups; first += most) {
        const ptrdiff_t at = static_cast<ptrdiff_t>(unit) * w.groups + first;
        const ptrdiff_t chunk = static_cast<ptrdiff_t>(unit) * w.unit_chunks + first * chunks;
        const uint8_t* c0 = w.component[0] + chunk * chunk_bytes(Code::kWidth0);
        const uint8_t* c1 = Code::kWidth1 ? w.component[1] + chunk * chunk_bytes(Code::kWidth1) : c0;
        constexpr int kChunksIn16 = 32767 / (8 * 2 * kTopLimb * Code::kTop);
        const int groups = most < w.groups - first ? most : w.groups - first;
        const uint8_t* stored = w.meta + at * Code::kMetaBytes;
        bool words = Code::kFp4, fits = true;
        if constexpr (Code::kFp4) {
            if (Code::kShifts && kFp4TileRows && a.tokens * LIMBS >= kFp4TileRows && chunks % 2 == 0) words = !Code::are_small(stored, groups);
            if (words) fits = fits_words<Code>(stored, groups, chunks * Code::kScales);
        }
        const int steps = chunks * (words ? 16 : 8);
        Panel panel{groups, steps, kChunksIn16, Code::kFp4, words, codes, meta, {}, {}};
        panel.ahead[0] = c0 + panel.groups * group_bytes[0];
        panel.ahead[1] = c1 + panel.groups * group_bytes[1];
        panel.ahead_bytes[0] = chunk_bytes(Code::kWidth0) * chunks / steps;
        panel.ahead_bytes[1] = chunk_bytes(Code::kWidth1) / 8;
        if constexpr (Code::kFields == 1) {  // two lines a step
            panel.ahead[1] = panel.ahead[0] + 64;
            panel.ahead_bytes[1] = panel.ahead_bytes[0];
        }
        for (int g = 0; g < panel.groups; ++g) {
            const uint8_t* of_group = stored + g * Code::kMetaBytes;
            for (int block = 0; block < kUnitBlocks; ++block) {
                f32x16* to = meta + (g * kUnitBlocks + block) * 2;
                Code::read_meta(of_group + block * (Code::kMetaBytes / 2), to[0], to[1]);
            }
            const uint8_t* of0 = c0 + g * group_bytes[0];
            uint8_t* out = codes + static_cast<ptrdiff_t>(g) * kUnitBlocks * steps * 64;
            if constexpr (Code::kFp4) {
                if (words) unpack_words<Code>(of0, chunks, of_group, fits, out);
            }
            if (!words) unpack_group<Code>(of0, c1 + g * group_bytes[1], chunks, of_group, out);
        }
        if constexpr (Code::kFp4) {
            const Activations pairs{a.tokens, 1, reinterpret_cast<const int8_t*>(a.words), a.scale, a.sum, nullptr, nullptr};
            if (!fits) add_apart<Code, LIMBS>(panel, stored, a, first, y, stride);
            else if (!words) own_products<LIMBS>(panel, a, first, y, stride);
            else if (!own_products<1>(panel, pairs, first, y, stride)) multiply_panel<1, true>(panel, pairs, first, y, stride);
        } else if (!own_products<LIMBS>(panel, a, first, y, stride)) {
            multiply_panel<LIMBS, false>(panel, a, first, y, stride);
        }
    }
}

// A few tokens, codes in registers, where kFewRows is 0.
template <class Code, int LIMBS, int CHUNKS>
void own_tokens(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride);

template <class Code, int LIMBS>
void multiply_width(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
                    void* scratch) {
    constexpr int kChunks = kUsualChunks;
    const bool is_usual = w.padded_group == kChunks * kChunkCols;
    if constexpr (kFewRows > 0) {
        constexpr int kFewTokens = kFewRows / LIMBS < kMostInRegisters ? kFewRows / LIMBS : kMostInRegisters;
        if (a.tokens <= kFewTokens && is_usual)
            return few_tokens<Code, LIMBS, kFewTokens, kChunks>(w, a, first, last, y, stride);
        if (a.tokens == 1) return few_tokens<Code, LIMBS, 1, 0>(w, a, first, last, y, stride);
    }
    static_assert(kOwnRows <= 2 * kMostInRegisters, "more tokens would find no zeros");
    if constexpr (kOwnRows > 0) {
        if (a.tokens == 1 || (LIMBS == 2 && a.tokens * LIMBS <= kOwnRows)) {
            if (is_usual) return own_tokens<Code, LIMBS, kChunks>(w, a, first, last, y, stride);
            return own_tokens<Code, LIMBS, 0>(w, a, first, last, y, stride);
        }
    }
    for (int unit = first; unit < last; ++unit)
        gemm_unit<Code, LIMBS>(w, a, unit, y + (unit - first) * kUnitRows, stride, scratch);
}

template <int W0, int W1, int DROPPED = 0, int FP4 = 0, bool SIGNED = false>
void multiply_codes(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
                    void* scratch) {
    using Code = Codes<W0, W1, DROPPED, FP4, SIGNED>;
    (a.limbs == 2 ? multiply_width<Code, 2> : multiply_width<Code, 1>)(w, a, first, last, y, stride, scratch);
}

void multiply(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
              void* scratch) {
    const int second = w.num_components == 2 ? w.width[1] : 0;
    switch (w.fp4 * 1000 + w.width[0] * 100 + second * 10 + w.dropped) {
        case 100: return multiply_codes<1, 0>(w, a, first, last, y, stride, scratch);
        case 200: return multiply_codes<2, 0>(w, a, first, last, y, stride, scratch);
        case 201: return multiply_codes<2, 0, 1>(w, a, first, last, y, stride, scratch);
        case 210: return multiply_codes<2, 1>(w, a, first, last, y, stride, scratch);
        case 220: return multiply_codes<2, 2>(w, a, first, last, y, stride, scratch);
        case 221: return multiply_codes<2, 2, 1>(w, a, first, last, y, stride, scratch);
        case 400: return multiply_codes<4, 0>(w, a, first, last, y, stride, scratch);
        case kMxfp4 * 1000 + 400: return multiply_codes<4, 0, 0, kMxfp4>(w, a, first, last, y, stride, scratch);
        case kNvfp4 * 1000 + 400: return multiply_codes<4, 0, 0, kNvfp4>(w, a, first, last, y, stride, scratch);
        case 800:
            return (w.is_signed ? multiply_codes<8, 0, 0, 0, true> : multiply_codes<8, 0>)(w, a, first, last, y, stride, scratch);
        default: __builtin_trap();  // PackedMatrix::check lets no other ones through
    }
}

// ---- activations ---------------------------------------------------------------------------------------------------

void quantize(const QuantizeJob& job) {
    float values[kMaxPaddedGroup];
    const int groups = (job.cols + job.group - 1) / job.group;
    for (int g = 0; g < groups; ++g) {
        const int start = g * job.group;
        const int count = job.cols - start < job.group ? job.cols - start : job.group;
        if (job.perm) {
            for (int i = 0; i < count; ++i) values[i] = job.x[job.perm[start + i]];
        } else {
            std::memcpy(values, job.x + start, sizeof(float) * count);
        }
        std::memset(values + count, 0, sizeof(float) * (job.padded_group - count));
        f32x16 largest = {}, sums = {};
        for (int i = 0; i < job.padded_group; i += 16) {
            f32x16 v = load<f32x16>(values + i);
            f32x16 size = (f32x16)((u32x16)v & 0x7fffffffu);
            largest = size > largest ? size : largest;
            sums += v;
        }
        const float top = max_lanes(largest);
        const float most = job.limbs == 2 ? kTopLimb * 128.0f + 63.0f : kTopLimb;
        const float scale = top / most;
        const float inverse = scale > 0.0f ? most / top : 0.0f;  // a group of subnormals counts as zero
        int8_t* to = job.codes + g * job.group_stride;
        i32x16 code_sums = {};
        for (int i = 0; i < job.padded_group; i += 16) {
            i32x16 code = round_to_int(load<f32x16>(values + i) * inverse);
            code_sums += code;
            if (job.words) store(job.words + g * job.token_stride * job.padded_group + i, ints_to_words(code));
            if (job.limbs == 2) {
                i32x16 high = (code + 64) >> 7;
                store(to + i, ints_to_bytes(high));
                store(to + job.padded_group + i, ints_to_bytes(code - (high << 7)));
            } else {
                store(to + i, ints_to_bytes(code));
            }
        }
        // The sum of what the codes mean, not of x: rounding errors then meet the centred weights, half as large.
        // A NaN or infinity in x makes the last terms NaN, and with them the result.
        const float exact = sum_lanes(sums);
        job.scale[g * job.token_stride] = scale + (exact - exact);
        job.sum[g * job.token_stride] = sum_lanes(to_float(code_sums)) * scale + (exact - exact);
        const int scales = job.zeros ? job.padded_group / job.fp4 * job.limbs : 0;
        for (int i = 0; i < scales; ++i) job.zeros[g * job.token_stride * scales + i] = fp4_zero(to + i * job.fp4, job.fp4);
    }
}

void activate(const float* y, int units, const Activation& a, float* h) {
    const f32x16 limit = broadcast(a.limit), largest_square = broadcast(1e30f);
    for (int u = 0; u < units; ++u) {
        f32x16 gate = load<f32x16>(y + u * kUnitRows);
        f32x16 up = load<f32x16>(y + u * kUnitRows + kBlockRows);
        gate = gate > limit ? limit : gate;  // a NaN stays one
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        f32x16 square = gate * gate;
        square = square > largest_square ? largest_square : square;  // infinity times a cubic of 0 would be a NaN
        const f32x16 argument = gate * (a.linear + a.cubic * square);
        store(h + u * kBlockRows, gate / (1.0f + exp_lanes(-argument)) * (up + a.up_bias));
    }
}

void add_scaled(float* out, const float* y, float gate, int count) {
    for (int i = 0; i < count; ++i) out[i] += gate * y[i];
}

// ---- full precision ------------------------------------------------------------------------------------------------

// Lanes of Floats.
constexpr int kLanes = sizeof(Floats) / sizeof(float);
// Columns after which another group of rows has its turn, so that those of kFullTokens activation rows stay in the first cache.
constexpr int kFullCols = 1024;

template <DType DTYPE>
NDP_INLINE Floats load_weights(const void* row, int col) {
    if constexpr (DTYPE == DType::float32) return load<Floats>(static_cast<const float*>(row) + col);
    if constexpr (DTYPE == DType::float16) return halves_to_floats(static_cast<const uint16_t*>(row) + col);
    if constexpr (DTYPE == DType::bfloat16) {
        typedef uint16_t Halves __attribute__((vector_size(sizeof(Floats) / 2)));
        typedef uint32_t Whole __attribute__((vector_size(sizeof(Floats))));
        return (Floats)(__builtin_convertvector(load<Halves>(static_cast<const uint16_t*>(row) + col), Whole) << 16);
    }
}

// Adds columns `from` to `to` of ROWS rows times TOKENS activation rows to sums[row][token].
template <DType DTYPE, int ROWS, int TOKENS>
NDP_INLINE void full_rows(const void* const* rows, int from, int to, const float* x, ptrdiff_t x_stride,
                          Floats (*sums)[kFullTokens]) {
    constexpr int kItem = bytes_of(DTYPE);
    Floats sum[TOKENS][ROWS];
NDP_UNROLL(16)
    for (int t = 0; t < TOKENS; ++t) {
NDP_UNROLL(4)
        for (int r = 0; r < ROWS; ++r) sum[t][r] = sums[r][t];
    }
    int col = from;
    for (; col + kLanes <= to; col += kLanes) {
        Floats w[ROWS];
NDP_UNROLL(4)
        for (int r = 0; r < ROWS; ++r) {
            __builtin_prefetch(static_cast<const char*>(rows[r]) + (col + kLanes) * kItem + 512);
            w[r] = load_weights<DTYPE>(rows[r], col);
        }
NDP_UNROLL(16)
        for (int t = 0; t < TOKENS; ++t) {
            const Floats v = load<Floats>(x + t * x_stride + col);
NDP_UNROLL(4)
            for (int r = 0; r < ROWS; ++r) sum[t][r] += w[r] * v;
        }
    }
    if (col < to) {  // the last columns through zero-padded copies
        const int rest = to - col;
        alignas(64) char tail[64];
        alignas(64) float x_tail[kLanes];
        for (int r = 0; r < ROWS; ++r) {
            std::memset(tail, 0, sizeof tail);
            std::memcpy(tail, static_cast<const char*>(rows[r]) + static_cast<ptrdiff_t>(col) * kItem, rest * kItem);
            const Floats w = load_weights<DTYPE>(tail, 0);
            for (int t = 0; t < TOKENS; ++t) {
                std::memset(x_tail, 0, sizeof x_tail);
                std::memcpy(x_tail, x + t * x_stride + col, rest * sizeof(float));
                sum[t][r] += w * load<Floats>(x_tail);
            }
        }
    }
NDP_UNROLL(16)
    for (int t = 0; t < TOKENS; ++t) {
NDP_UNROLL(4)
        for (int r = 0; r < ROWS; ++r) sums[r][t] = sum[t][r];
    }
}

// All rows of a unit with 1 to TOKENS activation rows.
template <DType DTYPE, int TOKENS>
void full_unit(const void* const* rows, int cols, const float* x, ptrdiff_t x_stride, int tokens, int cols_at_once, float* y,
               ptrdiff_t y_stride) {
    if (tokens < TOKENS) {
        if constexpr (TOKENS > 1) full_unit<DTYPE, TOKENS - 1>(rows, cols, x, x_stride, tokens, cols_at_once, y, y_stride);
        return;
    }
    constexpr int kRows = TOKENS <= 2 ? 4 : kFullRows;  // few sums at once would wait for each other
    Floats sums[kUnitRows][kFullTokens] = {};
    for (int from = 0; from < cols; from += cols_at_once) {
        const int to = from + cols_at_once < cols ? from + cols_at_once : cols;
        for (int r = 0; r < kUnitRows; r += kRows)
            full_rows<DTYPE, kRows, TOKENS>(rows + r, from, to, x, x_stride, sums + r);
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < kUnitRows; ++r) y[t * y_stride + r] = sum_lanes(sums[r][t]);
}

template <DType DTYPE>
void full_matrix(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                 ptrdiff_t y_stride) {
    const int cols_at_once = tokens <= kFullTokens ? w.cols : kFullCols;
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        const void* rows[kUnitRows];
        for (int r = 0; r < kUnitRows; ++r) rows[r] = row_of_unit(w, unit, r);
        for (int t = 0; t < tokens; t += kFullTokens) {
            const int count = tokens - t < kFullTokens ? tokens - t : kFullTokens;
            full_unit<DTYPE, kFullTokens>(rows, w.cols, x + t * x_stride, x_stride, count, cols_at_once, to + t * y_stride,
                                          y_stride);
        }
        clear_past(w, unit, tokens, to, y_stride);
    }
}

// ---- float8: packed, a lane is a row --------------------------------------------------------------------------------

constexpr int kParts = kUnitRows / kLanes;  // vectors of a unit's rows
constexpr int kSomeParts = kParts < 2 ? kParts : 2;
constexpr int kFloat8Tokens = kFullRows * kFullTokens / (2 * kSomeParts);

// Adds a group's products of PARTS vectors of rows with TOKENS activation rows. from: the codes, or they as floats
// [columns][32 rows]. Sums of even columns and of odd ones do not wait for each other.
template <int PARTS, int TOKENS, class Weight>
void add_float8(const Weight* from, int cols, const float* x, ptrdiff_t x_stride, const float* scale, float* y,
                ptrdiff_t y_stride) {
    Floats sums[TOKENS][PARTS][2] = {};
    for (int col = 0; col < cols; col += 2, from += 2 * kUnitRows) {
        constexpr bool kCodes = sizeof(Weight) == 1;
        if constexpr (kCodes) __builtin_prefetch(from + kGemvLead);
        Floats w[PARTS][2];
NDP_UNROLL(4)
        for (int part = 0; part < PARTS && kCodes; ++part)
            float8_to_floats(reinterpret_cast<const uint8_t*>(from) + part * 2 * kLanes, w[part]);
NDP_UNROLL(2)
        for (int odd = 0; odd < 2; ++odd) {
NDP_UNROLL(4)
            for (int part = 0; part < PARTS && !kCodes; ++part) w[part][odd] = load<Floats>(from + odd * kUnitRows + part * kLanes);
NDP_UNROLL(6)
            for (int t = 0; t < TOKENS; ++t) {
                const float value = x[t * x_stride + col + odd];
NDP_UNROLL(4)
                for (int part = 0; part < PARTS; ++part) sums[t][part][odd] += w[part][odd] * value;
            }
            asm volatile("" : "+r"(x), "+r"(from));  // or g++ loads ahead until it runs out of registers
        }
    }
NDP_UNROLL(6)
    for (int t = 0; t < TOKENS; ++t) {
NDP_UNROLL(4)
        for (int part = 0; part < PARTS; ++part) {
            float* to = y + t * y_stride + part * kLanes;
            store(to, load<Floats>(to) + (sums[t][part][0] + sums[t][part][1]) * load<Floats>(scale + part * kLanes));
        }
    }
}

// The same for 1 to TOKENS activation rows and all rows of a unit.
template <int TOKENS, class Weight>
void add_some_float8(const Weight* from, int cols, const float* x, ptrdiff_t x_stride, int tokens, const float* scale, float* y,
                     ptrdiff_t y_stride) {
    if (tokens < TOKENS) {
        if constexpr (TOKENS > 1) add_some_float8<TOKENS - 1>(from, cols, x, x_stride, tokens, scale, y, y_stride);
        return;
    }
    constexpr int kOnce = TOKENS == 1 ? kParts : kSomeParts;
    for (int part = 0; part < kUnitRows; part += kOnce * kLanes)
        add_float8<kOnce, TOKENS>(from + part * (sizeof(Weight) == 1 ? 2 : 1), cols, x, x_stride, scale + part, y + part, y_stride);
}

void multiply_float8(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                     ptrdiff_t y_stride) {
    alignas(64) float panel[kMostByteColumns * kUnitRows];
    const int group = w.scales.cols, padded = (group + kChunkCols - 1) / kChunkCols * kChunkCols;
    const int groups = (w.cols + group - 1) / group, blocks = (tokens + kFloat8Tokens - 1) / kFloat8Tokens;
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        for (int t = 0; t < tokens; ++t) std::memset(to + t * y_stride, 0, sizeof(float) * kUnitRows);
        for (int g = 0; g < groups; ++g) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(unit) * groups + g;
            const uint8_t* codes = static_cast<const uint8_t*>(w.first) + at * padded * kUnitRows;
            const float* scale = w.scales.first + at * kUnitRows;
            const float* of_group = x + g * group;
            const int cols = group < w.cols - g * group ? group : w.cols - g * group;
            if (blocks == 1) {
                add_some_float8<kFloat8Tokens>(codes, cols, of_group, x_stride, tokens, scale, to, y_stride);
                continue;
            }
            for (int col = 0; col < cols; col += 2) {
                __builtin_prefetch(codes + col * kUnitRows + kGemvLead);
                for (int part = 0; part < kParts; ++part) {
                    Floats pair[2];
                    float8_to_floats(codes + col * kUnitRows + part * 2 * kLanes, pair);
                    store(panel + col * kUnitRows + part * kLanes, pair[0]);
                    store(panel + (col + 1) * kUnitRows + part * kLanes, pair[1]);
                }
            }
            for (int i = 0, done = 0; i < blocks; ++i) {
                const int count = (tokens - done) / (blocks - i);
                add_some_float8<kFloat8Tokens>(panel, cols, of_group + done * x_stride, x_stride, count, scale,
                                               to + done * y_stride, y_stride);
                done += count;
            }
        }
    }
}

void multiply_full(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, bool, int first, int last,
                   float* y, ptrdiff_t y_stride) {
    switch (w.dtype) {
        case DType::float32: return full_matrix<DType::float32>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::float16: return full_matrix<DType::float16>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::bfloat16: return full_matrix<DType::bfloat16>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::float8: return multiply_float8(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::int8: __builtin_trap();  // never as floats
    }
}

// ---- the limit -----------------------------------------------------------------------------------------------------

template <int STREAMS>
NDP_INLINE uint64_t read_streams(const char* data, size_t bytes, int prefetch_bytes) {
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    u64x8 sum[4] = {};
    const size_t part = bytes / STREAMS / 256 * 256;
    for (size_t i = 0; i < part; i += 256) {
NDP_UNROLL(4)
        for (int s = 0; s < STREAMS; ++s) {
NDP_UNROLL(4)
            for (int j = 0; j < 4; ++j) {
                const char* at = data + s * part + i + j * 64;
                __builtin_prefetch(at + prefetch_bytes);
                sum[j] += load<u64x8>(at);
            }
        }
    }
    u64x8 all = sum[0] + sum[1] + sum[2] + sum[3];
    uint64_t total = 0;
    for (int i = 0; i < 8; ++i) total += all[i];
    return total;
}

uint64_t read_stream(const void* data, size_t bytes, int streams, int prefetch_bytes) {
    const char* p = static_cast<const char*>(data);
    if (streams == 4) return read_streams<4>(p, bytes, prefetch_bytes);
    if (streams == 2) return read_streams<2>(p, bytes, prefetch_bytes);
    return read_streams<1>(p, bytes, prefetch_bytes);
}

constexpr KernelTable make_table(const char* name) {
    return {name, pack, multiply, multiply_full, nullptr, nullptr, 1, quantize, activate, add_scaled, read_stream};
}

}  // namespace
