// The kernels of every path, written once over 64-byte vectors. The including file gives, in an unnamed namespace:
//   f32x16 half_to_float(const uint16_t*)
//   NDP_UNROLL(n)    unrolls the next loop, or nothing
//   Words            the widest vector of uint16_t that lives in a register
//   fp4_levels(Words codes)   E2M1 codes, a byte each, as what kFp4Levels (kernel_table.h) gives for them
//   fp4_zero(const int8_t*, columns)   a word of Activations' zeros as this file's products begin with it
//   PackWord, kPackRows, store_rows, pick   see packing.inc.h
//   Floats, halves_to_floats, kFullRows, kFullTokens   full precision: the vector, how to load it from fp16, and how many rows
//                    of weights and of activations have their sums in registers
//   int8_to_floats, float8_to_floats   so many bytes as numbers, those of E4M3 as what float16 takes their bits for, 2^-8 of them
//   multiply_width   see below; rows64.inc.h has it for 64-byte vectors
// No STL, everything in an unnamed namespace (see kernel_table.h).
#pragma once

#include "packing.inc.h"
#include "vectors.inc.h"

namespace {

// Bytes of software prefetch, measured (docs/log/kernels.md).
constexpr int kGemvLead = 2048;
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
template <int W0, int W1, int DROPPED = 0, int FP4 = 0>
struct Codes {
    static constexpr int kWidth0 = W0, kWidth1 = W1, kDropped = DROPPED;
    static constexpr bool kFp4 = FP4 != 0, kShifts = FP4 == kMxfp4;
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
        if constexpr (FP4) return fp4_levels(codes);
        return codes;
    }

    // Scale and offset of 16 rows, of a group's meta data from the rows' block on.
    static NDP_INLINE void read_meta(const uint8_t* meta, f32x16& scale, f32x16& offset) {
        if constexpr (FP4) {
            scale = kShifts ? (f32x16)(load<u32x16>(meta) & 0x7f800000u) : load<f32x16>(meta);
            offset = f32x16{};
        } else {
            scale = half_to_float(reinterpret_cast<const uint16_t*>(meta));
            offset = half_to_float(reinterpret_cast<const uint16_t*>(meta) + kBlockRows);
        }
    }

    // Of FP4: what the sums under a group's scale are multiplied by, or shifted up.
    static NDP_INLINE i32x16 factors(const uint8_t* meta, int scale) {
        if constexpr (kShifts) return (load<i32x16>(meta) >> (4 * scale)) & 15;
        const i32x16 both = bytes_to_ints(meta + 64 + scale * kBlockRows);
        return (both & 15) << (both >> 4);
    }

    static NDP_INLINE i32x16 multiplied(i32x16 sum, i32x16 factor) {
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

// y[t * stride + 32 * (unit - first) + row]: of rows64.inc.h, or of a file with registers of another kind.
template <class Code, int LIMBS>
void multiply_width(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride);

template <int W0, int W1, int DROPPED = 0, int FP4 = 0>
void multiply_codes(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    using Code = Codes<W0, W1, DROPPED, FP4>;
    (a.limbs == 2 ? multiply_width<Code, 2> : multiply_width<Code, 1>)(w, a, first, last, y, stride);
}

void multiply(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    const int second = w.num_components == 2 ? w.width[1] : 0;
    switch (w.fp4 * 1000 + w.width[0] * 100 + second * 10 + w.dropped) {
        case 100: return multiply_codes<1, 0>(w, a, first, last, y, stride);
        case 200: return multiply_codes<2, 0>(w, a, first, last, y, stride);
        case 201: return multiply_codes<2, 0, 1>(w, a, first, last, y, stride);
        case 210: return multiply_codes<2, 1>(w, a, first, last, y, stride);
        case 220: return multiply_codes<2, 2>(w, a, first, last, y, stride);
        case 221: return multiply_codes<2, 2, 1>(w, a, first, last, y, stride);
        case kMxfp4 * 1000 + 400: return multiply_codes<4, 0, 0, kMxfp4>(w, a, first, last, y, stride);
        case kNvfp4 * 1000 + 400: return multiply_codes<4, 0, 0, kNvfp4>(w, a, first, last, y, stride);
        case 800: return multiply_codes<8, 0>(w, a, first, last, y, stride);
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
            typedef int8_t i8x16 __attribute__((vector_size(16)));
            if (job.limbs == 2) {
                i32x16 high = (code + 64) >> 7;
                store(to + i, __builtin_convertvector(high, i8x16));
                store(to + job.padded_group + i, __builtin_convertvector(code - (high << 7), i8x16));
            } else {
                store(to + i, __builtin_convertvector(code, i8x16));
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
    if constexpr (DTYPE == DType::int8) return int8_to_floats(static_cast<const char*>(row) + col);
    if constexpr (DTYPE == DType::float8) return float8_to_floats(static_cast<const char*>(row) + col);
}

// Adds columns `from` to `to` of ROWS rows times TOKENS activation rows to sums[row][token]. scales: each row's of these
// columns, where weights have any.
template <DType DTYPE, int ROWS, int TOKENS>
NDP_INLINE void full_rows(const void* const* rows, const float* const* scales, int from, int to, const float* x,
                          ptrdiff_t x_stride, Floats (*sums)[kFullTokens]) {
    constexpr int kItem = bytes_of(DTYPE);
    constexpr bool kScaled = kItem == 1;
    constexpr float kUnit = DTYPE == DType::float8 ? 256.0f : 1.0f;  // of load_weights
    Floats sum[TOKENS][ROWS] = {};
NDP_UNROLL(16)
    for (int t = 0; t < TOKENS; ++t) {
NDP_UNROLL(4)
        for (int r = 0; r < ROWS && !kScaled; ++r) sum[t][r] = sums[r][t];
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
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (kScaled) sums[r][t] += sum[t][r] * (*scales[r] * kUnit);
            else sums[r][t] = sum[t][r];
        }
    }
}

// full_rows, where weights have scales of `block` columns each.
template <DType DTYPE, int ROWS, int TOKENS>
NDP_INLINE void full_blocks(const void* const* rows, const float* const* scales, int from, int to, int block, int scale_cols,
                            const float* x, ptrdiff_t x_stride, Floats (*sums)[kFullTokens]) {
    if constexpr (bytes_of(DTYPE) > 1) return full_rows<DTYPE, ROWS, TOKENS>(rows, nullptr, from, to, x, x_stride, sums);
    for (int begin = from; begin < to; begin += block) {
        const float* here[ROWS];
        for (int r = 0; r < ROWS; ++r) here[r] = scales[r] + begin / scale_cols;
        full_rows<DTYPE, ROWS, TOKENS>(rows, here, begin, begin + block < to ? begin + block : to, x, x_stride, sums);
    }
}

// All rows of a unit with 1 to TOKENS activation rows.
template <DType DTYPE, int TOKENS>
void full_unit(const void* const* rows, const float* const* scales, int cols, const float* x, ptrdiff_t x_stride, int tokens,
               int cols_at_once, int block, int scale_cols, float* y, ptrdiff_t y_stride) {
    if (tokens < TOKENS) {
        if constexpr (TOKENS > 1)
            full_unit<DTYPE, TOKENS - 1>(rows, scales, cols, x, x_stride, tokens, cols_at_once, block, scale_cols, y, y_stride);
        return;
    }
    constexpr int kRows = TOKENS <= 2 ? 4 : kFullRows;  // few sums at once would wait for each other
    Floats sums[kUnitRows][kFullTokens] = {};
    for (int from = 0; from < cols; from += cols_at_once) {
        const int to = from + cols_at_once < cols ? from + cols_at_once : cols;
        for (int r = 0; r < kUnitRows; r += kRows)
            full_blocks<DTYPE, kRows, TOKENS>(rows + r, scales + r, from, to, block, scale_cols, x, x_stride, sums + r);
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < kUnitRows; ++r) y[t * y_stride + r] = sum_lanes(sums[r][t]);
}

template <DType DTYPE>
void full_matrix(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                 ptrdiff_t y_stride) {
    constexpr int kItem = bytes_of(DTYPE);
    const BlockScales& s = w.scales;
    // Columns that are added up before they are scaled: as many for one row as for several, whose bits they would change.
    const int block = kItem == 1 && s.cols < w.cols ? s.cols : kFullCols;
    const int cols_at_once = tokens <= kFullTokens ? w.cols : block < kFullCols ? kFullCols / block * block : block;
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        const void* rows[kUnitRows];
        const float* scales[kUnitRows] = {};
        bool is_past[kUnitRows];
        for (int r = 0; r < kUnitRows; ++r) {  // past the end: any row will do, its result is cleared below
            const void* matrix = w.second && r >= kBlockRows ? w.second : w.first;
            const int row = w.second ? unit * kBlockRows + r % kBlockRows : unit * kUnitRows + r;
            is_past[r] = row >= w.num_rows;
            const int held = is_past[r] ? w.num_rows - 1 : row;
            rows[r] = static_cast<const char*>(matrix) + static_cast<ptrdiff_t>(held) * w.cols * kItem;
            if constexpr (kItem == 1)
                scales[r] = (matrix == w.first ? s.first : s.second) + static_cast<ptrdiff_t>(held / s.rows) * s.across;
        }
        for (int t = 0; t < tokens; t += kFullTokens) {
            const int count = tokens - t < kFullTokens ? tokens - t : kFullTokens;
            full_unit<DTYPE, kFullTokens>(rows, scales, w.cols, x + t * x_stride, x_stride, count, cols_at_once, block, s.cols,
                                          to + t * y_stride, y_stride);
        }
        for (int r = 0; r < kUnitRows; ++r)
            if (is_past[r])
                for (int t = 0; t < tokens; ++t) to[t * y_stride + r] = 0.0f;
    }
}

void multiply_full(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, bool, int first, int last,
                   float* y, ptrdiff_t y_stride) {
    switch (w.dtype) {
        case DType::float32: return full_matrix<DType::float32>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::float16: return full_matrix<DType::float16>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::bfloat16: return full_matrix<DType::bfloat16>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::float8: return full_matrix<DType::float8>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::int8: return full_matrix<DType::int8>(w, x, x_stride, tokens, first, last, y, y_stride);
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
    return {name, pack, multiply, multiply_full, nullptr, 1, quantize, activate, add_scaled, read_stream};
}

}  // namespace
