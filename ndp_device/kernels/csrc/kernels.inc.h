// The kernels of every path, written once over 64-byte vectors. The including file gives, in an unnamed namespace:
//   i32x16 dot4(i32x16 acc, u8x64 codes, i32x16 steps)   acc[r] += sum over j < 4 of codes[4r + j] * steps[r].byte[j]
//   f32x16 half_to_float(const uint16_t*)
//   kInPlaceFields   dot4 is exact for codes up to 255, so that a field may stay where it lies in its byte; else one
//                    token goes the way of several
//   NDP_UNROLL(n)    unrolls the next loop, or nothing
//   kGemmRows        activation rows (token limbs) per register block, kGemmUnits units per register block
//   template <int BLOCKS> bool tile_products(...)   or false: integer products of many rows by other means (AMX)
// No STL, everything in an unnamed namespace (see kernel_table.h).
#pragma once

#include "vectors.inc.h"

namespace {

// ---- codes -----------------------------------------------------------------------------------------------------

// Bytes of a component per chunk of 32 columns and unit.
constexpr int chunk_bytes(int width) { return width * kUnitBlocks * 64; }

template <int WIDTH>
NDP_INLINE u8x64 field(u8x64 v, int index) {
    constexpr uint8_t mask = (1 << WIDTH) - 1;
    return (u8x64)((u16x32)v >> (WIDTH * index)) & mask;
}

// The codes of one group of `UNITS` units as bytes: out [UNITS * 2 blocks][steps][16 rows][4 columns].
// W0 then W1 are the component widths (W1 = 0: one component).
template <int W0, int W1>
NDP_INLINE void unpack_group(const uint8_t* c0, const uint8_t* c1, int chunks, uint8_t* out) {
    constexpr int kLead = 2048;  // bytes of software prefetch
    const int steps = chunks * 8;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const uint8_t* p0 = c0 + chunk * chunk_bytes(W0);
        const uint8_t* p1 = c1 + chunk * chunk_bytes(W1);
        for (int block = 0; block < kUnitBlocks; ++block) {
            u8x64 v0[W0], v1[W1 ? W1 : 1];
            for (int v = 0; v < W0; ++v) {
                const uint8_t* p = p0 + (v * kUnitBlocks + block) * 64;
                __builtin_prefetch(p + kLead);
                v0[v] = load<u8x64>(p);
            }
            for (int v = 0; v < W1; ++v) {
                const uint8_t* p = p1 + (v * kUnitBlocks + block) * 64;
                __builtin_prefetch(p + kLead);
                v1[v] = load<u8x64>(p);
            }
            uint8_t* to = out + (static_cast<ptrdiff_t>(block) * steps + chunk * 8) * 64;
NDP_UNROLL(8)
            for (int step = 0; step < 8; ++step) {
                u8x64 code = field<W0>(v0[step * W0 / 8], step % (8 / W0));
                if constexpr (W1 > 0) {
                    code = (code << W1) | field<W1>(v1[step * W1 / 8], step % (8 / W1));
                }
                store(to + step * 64, code);
            }
        }
    }
}

// ---- one token: fields stay in registers -----------------------------------------------------------------------------

// total[block][limb] += the dot product of one group with this component's fields, times 2^shift of its lowest bit.
template <int WIDTH, int LIMBS, int CHUNKS>
NDP_INLINE void add_component(const uint8_t* p, const int8_t* x, int chunks_now, int padded_group, int shift,
                              i32x16 (&total)[kUnitBlocks][LIMBS]) {
    constexpr int kLead = 1536 * WIDTH / 2;  // bytes of software prefetch, measured
    constexpr int kFields = 8 / WIDTH;
    constexpr uint8_t mask = (1 << WIDTH) - 1;
    // Fields that stay in place need a sum of their own, which is shifted down at the group's end; at width 1 the high
    // four are moved down first, because eight sums cost more than one shift.
    constexpr int kSums = kFields < 4 ? kFields : 4;
    i32x16 sum[kSums][kUnitBlocks][LIMBS] = {};
    const int chunks = CHUNKS ? CHUNKS : chunks_now;
NDP_UNROLL(4)
    for (int chunk = 0; chunk < chunks; ++chunk) {
NDP_UNROLL(4)
        for (int v = 0; v < WIDTH; ++v) {
            u8x64 packed[kUnitBlocks];
NDP_UNROLL(2)
            for (int block = 0; block < kUnitBlocks; ++block) {
                const uint8_t* at = p + chunk * chunk_bytes(WIDTH) + (v * kUnitBlocks + block) * 64;
                __builtin_prefetch(at + kLead);
                packed[block] = load<u8x64>(at);
            }
NDP_UNROLL(8)
            for (int f = 0; f < kFields; ++f) {
                const int8_t* at = x + (chunk * 8 + v * kFields + f) * 4;
                i32x16 steps[LIMBS];
NDP_UNROLL(2)
                for (int limb = 0; limb < LIMBS; ++limb) steps[limb] = broadcast_step(at + limb * padded_group);
NDP_UNROLL(2)
                for (int block = 0; block < kUnitBlocks; ++block) {
                    u8x64 from = f < 4 ? packed[block] : (u8x64)((u16x32)packed[block] >> 4);
                    u8x64 codes = from & static_cast<uint8_t>(mask << (WIDTH * (f % kSums)));
NDP_UNROLL(2)
                    for (int limb = 0; limb < LIMBS; ++limb) {
                        i32x16& to = sum[f % kSums][block][limb];
                        to = dot4(to, codes, steps[limb]);
                    }
                }
            }
        }
    }
NDP_UNROLL(2)
    for (int block = 0; block < kUnitBlocks; ++block) {
NDP_UNROLL(2)
        for (int limb = 0; limb < LIMBS; ++limb) {
            i32x16 all = sum[0][block][limb];
NDP_UNROLL(4)
            for (int s = 1; s < kSums; ++s) all += sum[s][block][limb] >> (WIDTH * s);
            total[block][limb] += all << shift;
        }
    }
}

template <int W0, int W1, int LIMBS, int CHUNKS>
void gemv(const QuantizedView& w, const Activations& a, int first, int last, float* y) {
    const int chunks = CHUNKS ? CHUNKS : w.padded_group / kChunkCols;
    const int padded = chunks * kChunkCols;
    for (int unit = first; unit < last; ++unit) {
        const ptrdiff_t group0 = static_cast<ptrdiff_t>(unit) * w.groups;
        const uint8_t* c0 = w.component[0] + group0 * chunks * chunk_bytes(W0);
        const uint8_t* c1 = W1 ? w.component[1] + group0 * chunks * chunk_bytes(W1) : nullptr;
        const uint16_t* meta = w.meta + group0 * 2 * kUnitRows;
        const int8_t* x = a.codes;
        f32x16 out[kUnitBlocks] = {};
        for (int g = 0; g < w.groups; ++g) {
            i32x16 total[kUnitBlocks][LIMBS] = {};
            add_component<W0, LIMBS, CHUNKS>(c0, x, chunks, padded, W1, total);
            if constexpr (W1 > 0) add_component<W1, LIMBS, CHUNKS>(c1, x, chunks, padded, 0, total);
            __builtin_prefetch(meta + 512);
            __builtin_prefetch(meta + 512 + kUnitRows);
NDP_UNROLL(2)
            for (int block = 0; block < kUnitBlocks; ++block) {
                f32x16 dot = to_float(total[block][0]);
                if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(total[block][1]);
                out[block] += dot * a.scale[g] * half_to_float(meta + block * 32);
                out[block] += half_to_float(meta + block * 32 + 16) * a.sum[g];
            }
            c0 += chunks * chunk_bytes(W0);
            if constexpr (W1 > 0) c1 += chunks * chunk_bytes(W1);
            meta += 2 * kUnitRows;
            x += LIMBS * padded;
        }
        store(y, out[0]);
        store(y + kBlockRows, out[1]);
        y += kUnitRows;
    }
}

// ---- several tokens: codes are unpacked once per group --------------------------------------------------------------

// y rows += scale * (integer dot product) * row scale + offset * row sum, for ROWS limbs of ROWS / LIMBS tokens.
template <int BLOCKS, int LIMBS>
NDP_INLINE void add_group(const i32x16 (*dots)[BLOCKS], int tokens, const float* scale, const float* sum,
                          const f32x16 (*meta)[2], float* y, ptrdiff_t stride) {
    for (int t = 0; t < tokens; ++t) {
NDP_UNROLL(4)
        for (int block = 0; block < BLOCKS; ++block) {
            f32x16 dot = to_float(dots[t * LIMBS][block]);
            if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[t * LIMBS + 1][block]);
            float* to = y + t * stride + block * kBlockRows;
            store(to, load<f32x16>(to) + dot * scale[t] * meta[block][0] + meta[block][1] * sum[t]);
        }
    }
}

// Not inlined: one copy serves every width.
template <int ROWS, int BLOCKS, int LIMBS>
__attribute__((noinline)) void multiply_rows(const uint8_t* codes, int steps, const int8_t* x, const float* scale, const float* sum,
                              const f32x16 (*meta)[2], float* y, ptrdiff_t stride) {
    i32x16 dots[ROWS][BLOCKS] = {};
    for (int step = 0; step < steps; ++step) {
        u8x64 w[BLOCKS];
NDP_UNROLL(4)
        for (int block = 0; block < BLOCKS; ++block) {
            w[block] = load<u8x64>(codes + (static_cast<ptrdiff_t>(block) * steps + step) * 64);
        }
NDP_UNROLL(8)
        for (int row = 0; row < ROWS; ++row) {
            i32x16 four = broadcast_step(x + (static_cast<ptrdiff_t>(row) * steps + step) * 4);
NDP_UNROLL(4)
            for (int block = 0; block < BLOCKS; ++block) dots[row][block] = dot4(dots[row][block], w[block], four);
        }
    }
    add_group<BLOCKS, LIMBS>(dots, ROWS / LIMBS, scale, sum, meta, y, stride);
}

template <int MAX_TOKENS, int BLOCKS, int LIMBS>
void multiply_tokens(int tokens, const uint8_t* codes, int steps, const int8_t* x, const float* scale,
                                const float* sum, const f32x16 (*meta)[2], float* y, ptrdiff_t stride) {
    if (tokens == MAX_TOKENS) {
        multiply_rows<MAX_TOKENS * LIMBS, BLOCKS, LIMBS>(codes, steps, x, scale, sum, meta, y, stride);
    } else if constexpr (MAX_TOKENS > 1) {
        multiply_tokens<MAX_TOKENS - 1, BLOCKS, LIMBS>(tokens, codes, steps, x, scale, sum, meta, y, stride);
    }
}

template <int W0, int W1, int LIMBS, int UNITS>
void gemm_units(const QuantizedView& w, const Activations& a, int unit, float* y, ptrdiff_t stride, uint8_t* scratch) {
    constexpr int kBlocks = UNITS * kUnitBlocks;
    constexpr int kTokens = kGemmRows / LIMBS;
    const int chunks = w.padded_group / kChunkCols;
    const int steps = chunks * 8;
    const ptrdiff_t group0 = static_cast<ptrdiff_t>(unit) * w.groups;
    const int blocks_of_tokens = (a.tokens + kTokens - 1) / kTokens;
    for (int t = 0; t < a.tokens; ++t) std::memset(y + t * stride, 0, sizeof(float) * UNITS * kUnitRows);
    for (int g = 0; g < w.groups; ++g) {
        f32x16 meta[kBlocks][2];
        for (int u = 0; u < UNITS; ++u) {
            const ptrdiff_t group = group0 + static_cast<ptrdiff_t>(u) * w.groups + g;
            const uint8_t* c0 = w.component[0] + group * chunks * chunk_bytes(W0);
            const uint8_t* c1 = W1 ? w.component[1] + group * chunks * chunk_bytes(W1) : nullptr;
            unpack_group<W0, W1>(c0, c1, chunks, scratch + static_cast<ptrdiff_t>(u) * kUnitBlocks * steps * 64);
            const uint16_t* halves = w.meta + group * 2 * kUnitRows;
            __builtin_prefetch(halves + 512);
            __builtin_prefetch(halves + 512 + kUnitRows);
            for (int i = 0; i < 2 * kUnitBlocks; ++i) meta[u * kUnitBlocks + i / 2][i % 2] = half_to_float(halves + 16 * i);
        }
        const int8_t* x = a.codes + static_cast<ptrdiff_t>(g) * a.tokens * LIMBS * w.padded_group;
        const float* scale = a.scale + static_cast<ptrdiff_t>(g) * a.tokens;
        const float* sum = a.sum + static_cast<ptrdiff_t>(g) * a.tokens;
        if (tile_products<kBlocks, LIMBS>(scratch, steps, x, a.tokens, scale, sum, meta, y, stride)) continue;
        int done = 0;
        for (int i = 0; i < blocks_of_tokens; ++i) {  // blocks of equal size: 8 rows are 4 + 4, not 6 + 2
            const int tokens = (a.tokens - done) / (blocks_of_tokens - i);
            multiply_tokens<kTokens, kBlocks, LIMBS>(tokens, scratch, steps,
                                                     x + static_cast<ptrdiff_t>(done) * LIMBS * w.padded_group,
                                                     scale + done, sum + done, meta, y + done * stride, stride);
            done += tokens;
        }
    }
}

template <int W0, int W1, int LIMBS>
void multiply_width(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
                    void* scratch) {
    if constexpr (kInPlaceFields) {
        if (a.tokens == 1) {
            if (w.padded_group == 128) return gemv<W0, W1, LIMBS, 4>(w, a, first, last, y);
            return gemv<W0, W1, LIMBS, 0>(w, a, first, last, y);
        }
    }
    uint8_t* unpacked = static_cast<uint8_t*>(scratch);
    int unit = first;
    for (; unit + kGemmUnits <= last; unit += kGemmUnits) {
        gemm_units<W0, W1, LIMBS, kGemmUnits>(w, a, unit, y + (unit - first) * kUnitRows, stride, unpacked);
    }
    for (; unit < last; ++unit) {
        gemm_units<W0, W1, LIMBS, 1>(w, a, unit, y + (unit - first) * kUnitRows, stride, unpacked);
    }
}

void multiply(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
              void* scratch) {
    const int second = w.num_components == 2 ? w.width[1] : 0;
    const bool two = a.limbs == 2;
    switch (w.width[0] * 10 + second) {
        case 10: return (two ? multiply_width<1, 0, 2> : multiply_width<1, 0, 1>)(w, a, first, last, y, stride, scratch);
        case 20: return (two ? multiply_width<2, 0, 2> : multiply_width<2, 0, 1>)(w, a, first, last, y, stride, scratch);
        case 21: return (two ? multiply_width<2, 1, 2> : multiply_width<2, 1, 1>)(w, a, first, last, y, stride, scratch);
        case 22: return (two ? multiply_width<2, 2, 2> : multiply_width<2, 2, 1>)(w, a, first, last, y, stride, scratch);
        case 40: return (two ? multiply_width<4, 0, 2> : multiply_width<4, 0, 1>)(w, a, first, last, y, stride, scratch);
        default: __builtin_trap();  // the packer makes no other widths
    }
}

// ---- activations ---------------------------------------------------------------------------------------------------

// Largest code of two limbs: 127 * 128 + 63, so that the high limb of every code fits into int8.
constexpr float kLargestCode[2] = {127.0f, 127.0f * 128.0f + 63.0f};

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
        const float most = kLargestCode[job.limbs - 1];
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
        // A NaN or infinity in x makes the last term NaN, and with it the result.
        const float exact = sum_lanes(sums);
        job.scale[g * job.token_stride] = scale;
        job.sum[g * job.token_stride] = sum_lanes(to_float(code_sums)) * scale + (exact - exact);
    }
}

void swiglu(const float* y, int units, float* h) {
    for (int u = 0; u < units; ++u) {
        f32x16 gate = load<f32x16>(y + u * kUnitRows);
        f32x16 up = load<f32x16>(y + u * kUnitRows + kBlockRows);
        store(h + u * kBlockRows, gate / (1.0f + exp_lanes(-gate)) * up);
    }
}

void add_scaled(float* out, const float* y, float gate, int count) {
    for (int i = 0; i < count; ++i) out[i] += gate * y[i];
}

// ---- full precision ------------------------------------------------------------------------------------------------

template <DType DTYPE>
NDP_INLINE f32x16 load_weights(const void* row, int col) {
    if constexpr (DTYPE == DType::float32) return load<f32x16>(static_cast<const float*>(row) + col);
    if constexpr (DTYPE == DType::float16) return half_to_float(static_cast<const uint16_t*>(row) + col);
    if constexpr (DTYPE == DType::bfloat16) return bfloat16_to_float(static_cast<const uint16_t*>(row) + col);
}

constexpr int kFullRows = 4;

template <DType DTYPE, int TOKENS>
NDP_INLINE void full_rows(const void* const (&rows)[kFullRows], int cols, const float* x, ptrdiff_t x_stride,
                          float* y, ptrdiff_t y_stride) {
    constexpr int kItem = DTYPE == DType::float32 ? 4 : 2;
    f32x16 sum[TOKENS][kFullRows] = {};
    int col = 0;
    for (; col + 16 <= cols; col += 16) {
        f32x16 w[kFullRows];
NDP_UNROLL(4)
        for (int r = 0; r < kFullRows; ++r) {
            __builtin_prefetch(static_cast<const char*>(rows[r]) + (col + 16) * kItem + 512);
            w[r] = load_weights<DTYPE>(rows[r], col);
        }
NDP_UNROLL(4)
        for (int t = 0; t < TOKENS; ++t) {
            f32x16 v = load<f32x16>(x + t * x_stride + col);
NDP_UNROLL(4)
            for (int r = 0; r < kFullRows; ++r) sum[t][r] += w[r] * v;
        }
    }
    if (col < cols) {  // the last columns through zero-padded copies
        const int rest = cols - col;
        alignas(64) char tail[64];
        alignas(64) float x_tail[16];
        for (int r = 0; r < kFullRows; ++r) {
            std::memset(tail, 0, sizeof tail);
            std::memcpy(tail, static_cast<const char*>(rows[r]) + static_cast<ptrdiff_t>(col) * kItem, rest * kItem);
            f32x16 w = load_weights<DTYPE>(tail, 0);
            for (int t = 0; t < TOKENS; ++t) {
                std::memset(x_tail, 0, sizeof x_tail);
                std::memcpy(x_tail, x + t * x_stride + col, rest * sizeof(float));
                sum[t][r] += w * load<f32x16>(x_tail);
            }
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < kFullRows; ++r) y[t * y_stride + r] = sum_lanes(sum[t][r]);
}

template <DType DTYPE>
void full_matrix(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                 ptrdiff_t y_stride) {
    constexpr int kItem = DTYPE == DType::float32 ? 4 : 2;
    for (int unit = first; unit < last; ++unit) {
        for (int r = 0; r < kUnitRows; r += kFullRows) {
            const bool up = w.second && r >= kBlockRows;
            const void* matrix = up ? w.second : w.first;
            const int row = w.second ? unit * kBlockRows + r % kBlockRows : unit * kUnitRows + r;
            float* to = y + (unit - first) * kUnitRows + r;
            const void* rows[kFullRows];
            for (int i = 0; i < kFullRows; ++i) {  // past the end: any row will do, its result is cleared below
                const ptrdiff_t source = row + i < w.num_rows ? row + i : w.num_rows - 1;
                rows[i] = static_cast<const char*>(matrix) + source * w.cols * kItem;
            }
            int t = 0;
            for (; t + 4 <= tokens; t += 4) full_rows<DTYPE, 4>(rows, w.cols, x + t * x_stride, x_stride, to + t * y_stride, y_stride);
            for (; t < tokens; ++t) full_rows<DTYPE, 1>(rows, w.cols, x + t * x_stride, x_stride, to + t * y_stride, y_stride);
            for (int i = 0; i < kFullRows; ++i)
                if (row + i >= w.num_rows)
                    for (t = 0; t < tokens; ++t) to[t * y_stride + i] = 0.0f;
        }
    }
}

void multiply_full(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                   ptrdiff_t y_stride) {
    switch (w.dtype) {
        case DType::float32: return full_matrix<DType::float32>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::float16: return full_matrix<DType::float16>(w, x, x_stride, tokens, first, last, y, y_stride);
        case DType::bfloat16: return full_matrix<DType::bfloat16>(w, x, x_stride, tokens, first, last, y, y_stride);
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
    return {name, multiply, multiply_full, quantize, swiglu, add_scaled, read_stream};
}

}  // namespace
