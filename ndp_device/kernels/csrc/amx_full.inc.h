// Weights in bfloat16 and float8 by AMX tiles. Of bfloat16 16 rows as they lie in memory times 16 rows of activations, whose
// pairs of columns split_row interleaves. A row of floats becomes two of bfloat16, as in isa_avx512bf16.cpp. A tile
// instruction costs the same for 1 row of activations as for 16, which is less than its weights take to be read.
// Tiles 0..3 hold sums [16 rows][16 tokens], 4 and 5 weights [16 rows][32 columns], 6 and 7 activations [16 pairs][16 tokens][2];
// of float8, whose codes lie in pairs of columns, activations stand in 4 and 5 and weights in 6 and 7.
#pragma once

namespace {

constexpr int kTileCols = 32;
constexpr int kFewFloat8 = 4;   // rows of activations, of which vectors compute so many sooner than tiles
constexpr int kRange = 256;     // columns of weights that stay in the caches for all rows of activations
constexpr int kSumGroups = 32;  // groups of 16 tokens times units whose sums wait between ranges: 64 KB

typedef uint16_t u16x16 __attribute__((vector_size(32)));

// Gives `put` of every 16 columns, padded to a multiple of 32 with zeros, the nearest bfloat16 and, with `rest`, those of what
// they leave, else zeros; and returns whether that is anything. An infinity or NaN leaves nothing.
template <class Put>
NDP_INLINE bool split(const float* x, int cols, bool rest, const Put& put) {
    const auto nearest = [](f32x16 v) {  // in the upper halves; a NaN stays one
        const u32x16 bits = (u32x16)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
        return (v == v ? rounded : (bits | 0x400000)) & 0xffff0000u;
    };
    const int padded = (cols + kTileCols - 1) / kTileCols * kTileCols;
    u32x16 any = {};
    for (int i = 0; i < padded; i += 16) {
        alignas(64) float some[16] = {};
        std::memcpy(some, x + i, sizeof(float) * (cols - i < 16 ? (cols > i ? cols - i : 0) : 16));
        const f32x16 v = load<f32x16>(some);
        const u32x16 near = nearest(v);
        const f32x16 left = v - (f32x16)near, size = left < 0.0f ? -left : left;
        const u32x16 kept = rest ? (size < __builtin_inff() ? nearest(left) : u32x16{}) : u32x16{};
        any |= kept << 1;
        put(i, padded, __builtin_convertvector(near >> 16, u16x16), __builtin_convertvector(kept >> 16, u16x16));
    }
    for (int i = 0; i < 16; ++i)
        if (any[i] != 0) return true;
    return false;
}

// rows: groups of 16 rows, each [pairs of columns][16 rows][2] of the nearest bfloat16 and after them the same of the rest.
bool split_row(const float* x, int cols, bool rest, float* rows, ptrdiff_t stride, int row) {
    uint32_t* to = reinterpret_cast<uint32_t*>(rows + row / kTileRows * kTileRows * stride) + row % kTileRows;
    return split(x, cols, rest, [to](int col, int padded, u16x16 near, u16x16 kept) {
        uint32_t pairs[2][8];
        store(pairs[0], near);
        store(pairs[1], kept);
        for (int part = 0; part < 2; ++part)
            for (int p = 0; p < 8; ++p) to[(part * padded / 2 + col / 2 + p) * kTileRows] = pairs[part][p];
    });
}

// A row: the nearest bfloat16, the rest, and zeros, which a last group's padding meets.
bool split_row_float8(const float* x, int cols, bool rest, float* rows, ptrdiff_t stride, int row) {
    uint16_t* to = reinterpret_cast<uint16_t*>(rows + row * stride);
    std::memset(to + 2 * ((cols + kTileCols - 1) / kTileCols * kTileCols), 0, sizeof(uint16_t) * kMostByteColumns);
    return split(x, cols, rest, [to](int col, int padded, u16x16 near, u16x16 kept) {
        store(to + col, near);
        store(to + padded + col, kept);
    });
}

// 16 rows of weights, fewer at the end of a matrix.
struct WeightRows {
    const uint16_t* first;
    int count;

    // Loads 32 columns from `col` on, of `cols` in all; past the end through a zero-padded copy.
    template <int TILE>
    NDP_INLINE void load(int col, int cols) const {
        if (count == kTileRows && col + kTileCols <= cols) {
            Tiles::load<TILE>(first + col, cols * static_cast<ptrdiff_t>(sizeof(uint16_t)));
            return;
        }
        alignas(64) uint16_t copy[kTileRows][kTileCols] = {};
        for (int r = 0; r < count; ++r)
            std::memcpy(copy[r], first + static_cast<ptrdiff_t>(r) * cols + col,
                        sizeof(uint16_t) * (cols - col < kTileCols ? cols - col : kTileCols));
        Tiles::load<TILE>(copy, sizeof copy[0]);
    }
};

// Adds columns `from` to `to` of a unit's rows times one or two groups of tokens to sums. `ahead`: lines to prefetch, or null.
template <int GROUPS, int PARTS>
void add_tiles(const WeightRows (&rows)[kUnitBlocks], const uint16_t* const* ahead, int from, int to, int cols,
               const uint16_t* const (&x)[2], ptrdiff_t part, float (*sums)[kTileRows][16]) {
    if (from == 0) {
        Tiles::zero();
    } else {
        Tiles::load<0>(sums[0], sizeof sums[0][0]);
        Tiles::load<1>(sums[1], sizeof sums[0][0]);
        if constexpr (GROUPS == 2) {
            Tiles::load<2>(sums[2], sizeof sums[0][0]);
            Tiles::load<3>(sums[3], sizeof sums[0][0]);
        }
    }
    for (int col = from; col < to; col += kTileCols) {
        rows[0].load<4>(col, cols);
        rows[1].load<5>(col, cols);
        if (ahead)
            for (int r = 0; r < kUnitRows; ++r) __builtin_prefetch(ahead[r] + col - from, 0, 2);
        for (int p = 0; p < PARTS; ++p) {
            Tiles::load<6>(x[0] + p * part + col * kTileRows, 64);
            Tiles::multiply_bfloats<0, 4, 6>();
            Tiles::multiply_bfloats<1, 5, 6>();
            if constexpr (GROUPS == 2) {
                Tiles::load<7>(x[1] + p * part + col * kTileRows, 64);
                Tiles::multiply_bfloats<2, 4, 7>();
                Tiles::multiply_bfloats<3, 5, 7>();
            }
        }
    }
    Tiles::save<0>(sums[0], sizeof sums[0][0]);
    Tiles::save<1>(sums[1], sizeof sums[0][0]);
    if constexpr (GROUPS == 2) {
        Tiles::save<2>(sums[2], sizeof sums[0][0]);
        Tiles::save<3>(sums[3], sizeof sums[0][0]);
    }
}

WeightRows rows_of(const FullView& w, int unit, int block) {
    const void* matrix = w.second && block == 1 ? w.second : w.first;
    const int row = w.second ? unit * kBlockRows : unit * kUnitRows + block * kBlockRows;
    const int left = w.num_rows - row;
    return {static_cast<const uint16_t*>(matrix) + static_cast<ptrdiff_t>(left > 0 ? row : 0) * w.cols,
            left > kTileRows ? kTileRows : left > 0 ? left : 0};
}

// Units `first` to `last`, whose sums fit, times `groups` groups of tokens.
template <int PARTS>
void tile_units(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y,
                ptrdiff_t y_stride) {
    alignas(64) float sums[kSumGroups][kUnitBlocks][kTileRows][16];
    const int groups = (tokens + kTileRows - 1) / kTileRows, padded = (w.cols + kTileCols - 1) / kTileCols * kTileCols;
    const ptrdiff_t part = static_cast<ptrdiff_t>(padded) * kTileRows;
    const auto group = [&](int g) { return reinterpret_cast<const uint16_t*>(x + g * kTileRows * x_stride); };
    for (int from = 0; from < w.cols; from += kRange) {
        const int to = from + kRange < w.cols ? from + kRange : w.cols;
        for (int unit = first; unit < last; ++unit) {
            const WeightRows rows[kUnitBlocks] = {rows_of(w, unit, 0), rows_of(w, unit, 1)};
            // The next unit's part of this range, or, after the last unit, the first one's part of the next.
            const bool ends = unit + 1 == last, over = ends && to == w.cols;
            const uint16_t* ahead[kUnitRows];
            for (int block = 0; block < kUnitBlocks; ++block) {
                const WeightRows next = rows_of(w, over ? last : ends ? first : unit + 1, block);
                for (int r = 0; r < kBlockRows; ++r)
                    ahead[block * kBlockRows + r] =
                        next.first + static_cast<ptrdiff_t>(r < next.count ? r : 0) * w.cols + (over ? 0 : ends ? to : from);
            }
            for (int g = 0; g < groups; g += 2) {
                const uint16_t* const pair[] = {group(g), group(g + 1 < groups ? g + 1 : g)};
                const auto add = g + 1 < groups ? add_tiles<2, PARTS> : add_tiles<1, PARTS>;
                add(rows, g == 0 ? ahead : nullptr, from, to, w.cols, pair, part, sums[(unit - first) * groups + g]);
            }
        }
    }
    for (int unit = first; unit < last; ++unit) {
        for (int block = 0; block < kUnitBlocks; ++block) {
            const int count = rows_of(w, unit, block).count;
            for (int t = 0; t < tokens; ++t) {
                const auto& sum = sums[(unit - first) * groups + t / kTileRows][block];
                float* to = y + t * y_stride + (unit - first) * kUnitRows + block * kBlockRows;
                for (int r = 0; r < kBlockRows; ++r) to[r] = r < count ? sum[r][t % kTileRows] : 0.0f;
            }
        }
    }
}

// A group of float8 codes as bfloat16, [2 blocks][pairs of columns][16 rows][2], times 16 or 32 rows of activations.
template <int PARTS>
NDP_INLINE void multiply_float8_tiles(const uint32_t (&panel)[kUnitBlocks][kMostByteColumns / 2][kBlockRows], int cols,
                                      const uint16_t* x, ptrdiff_t stride, ptrdiff_t part, bool two, f32x16 (&dots)[kDotRows][kUnitBlocks]) {
    Tiles::zero();
    for (int col = 0; col < cols; col += kTileCols) {
        Tiles::load<6>(panel[0][col / 2], 64);
        Tiles::load<7>(panel[1][col / 2], 64);
        for (int p = 0; p < PARTS; ++p) {
            Tiles::load<4>(x + p * part + col, stride * 2);
            Tiles::multiply_bfloats<0, 4, 6>();
            Tiles::multiply_bfloats<1, 4, 7>();
            if (!two) continue;
            Tiles::load<5>(x + kTileRows * stride + p * part + col, stride * 2);
            Tiles::multiply_bfloats<2, 5, 6>();
            Tiles::multiply_bfloats<3, 5, 7>();
        }
    }
    Tiles::save<0>(&dots[0][0], sizeof dots[0]);
    Tiles::save<1>(&dots[0][1], sizeof dots[0]);
    if (!two) return;
    Tiles::save<2>(&dots[kTileRows][0], sizeof dots[0]);
    Tiles::save<3>(&dots[kTileRows][1], sizeof dots[0]);
}

// The same of up to TOKENS rows in vectors, which a tile adds up in this order: even columns, odd ones, then both to its sums.
// Products of two bfloat16 are exact, so a row gets the same bits either way.
template <int TOKENS, int PARTS>
void float8_rows(const uint8_t* codes, int cols, const uint16_t* x, ptrdiff_t stride, ptrdiff_t part, int tokens, f32x16 (*dots)[kUnitBlocks]) {
    if (tokens < TOKENS) {
        if constexpr (TOKENS > 1) float8_rows<TOKENS - 1, PARTS>(codes, cols, x, stride, part, tokens, dots);
        return;
    }
    for (int col = 0; col < cols; col += kTileCols) {
        f32x16 sums[TOKENS][PARTS][kUnitBlocks][2] = {};
        const uint16_t* at = x + col;
        for (int pair = 0; pair < kTileCols / 2; ++pair, at += 2, codes += 2 * kUnitRows) {
            __builtin_prefetch(codes + kGemvLead);
            Floats columns[kUnitBlocks][2];
            NDP_UNROLL(2)
            for (int block = 0; block < kUnitBlocks; ++block) float8_to_floats(codes + block * 2 * kBlockRows, columns[block]);
            NDP_UNROLL(4)
            for (int t = 0; t < TOKENS; ++t) {
                NDP_UNROLL(2)
                for (int p = 0; p < PARTS; ++p) {
                    const i32x16 both = broadcast_step(reinterpret_cast<const int8_t*>(at + t * stride + p * part));
                    const f32x16 even = (f32x16)(both << 16), odd = (f32x16)(both & static_cast<int32_t>(0xffff0000));
                    NDP_UNROLL(2)
                    for (int block = 0; block < kUnitBlocks; ++block) {
                        sums[t][p][block][0] += columns[block][0] * even;
                        sums[t][p][block][1] += columns[block][1] * odd;
                    }
                }
            }
        }
        NDP_UNROLL(4)
        for (int t = 0; t < TOKENS; ++t) {
            NDP_UNROLL(2)
            for (int p = 0; p < PARTS; ++p) {
                NDP_UNROLL(2)
                for (int block = 0; block < kUnitBlocks; ++block) {
                    const f32x16 sum = sums[t][p][block][0] + sums[t][p][block][1];
                    dots[t][block] = col == 0 && p == 0 ? sum : dots[t][block] + sum;
                }
            }
        }
    }
}

template <int PARTS>
void float8_units(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, int first, int last, float* y, ptrdiff_t y_stride) {
    alignas(64) uint32_t panel[kUnitBlocks][kMostByteColumns / 2][kBlockRows];
    alignas(64) f32x16 dots[2][kDotRows][kUnitBlocks];
    constexpr int kFew = kFewFloat8 / PARTS;
    const int group = w.scales.cols, padded = (group + kTileCols - 1) / kTileCols * kTileCols, groups = (w.cols + group - 1) / group;
    const ptrdiff_t part = (w.cols + kTileCols - 1) / kTileCols * kTileCols;
    const uint16_t* rows = reinterpret_cast<const uint16_t*>(x);
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        for (int t = 0; t < tokens; ++t) std::memset(to + t * y_stride, 0, sizeof(float) * kUnitRows);
        for (int g = 0; g < groups; ++g) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(unit) * groups + g;
            const uint8_t* codes = static_cast<const uint8_t*>(w.first) + at * padded * kUnitRows;
            const float* scale = w.scales.first + at * kUnitRows;
            const f32x16 scales[kUnitBlocks] = {load<f32x16>(scale), load<f32x16>(scale + kBlockRows)};
            const uint16_t* of_group = rows + g * group;
            if (tokens <= kFew) float8_rows<kFew, PARTS>(codes, padded, of_group, 2 * x_stride, part, tokens, dots[0]);
            for (int pair = 0; pair < padded / 2 && tokens > kFew; ++pair, codes += 2 * kUnitRows) {
                __builtin_prefetch(codes + kGemvLead);
                for (int block = 0; block < kUnitBlocks; ++block) {
                    Floats columns[2];
                    float8_to_floats(codes + block * 2 * kBlockRows, columns);
                    store(panel[block][pair], (u32x16)columns[0] >> 16 | ((u32x16)columns[1] & 0xffff0000u));
                }
            }
            for (int t = 0, i = 0; t < tokens + kDotRows; t += kDotRows, ++i) {
                if (t < tokens && tokens > kFew)
                    multiply_float8_tiles<PARTS>(panel, padded, of_group + t * 2 * x_stride, 2 * x_stride, part,
                                                 tokens - t > kTileRows, dots[i % 2]);
                for (int past = t - kDotRows; past >= 0 && past < t && past < tokens; ++past)
                    for (int block = 0; block < kUnitBlocks; ++block) {
                        float* sum = to + past * y_stride + block * kBlockRows;
                        store(sum, load<f32x16>(sum) + dots[(i - 1) % 2][past % kDotRows][block] * scales[block]);
                    }
            }
        }
    }
}

void multiply_full_with_tiles(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, bool rests, int first,
                              int last, float* y, ptrdiff_t y_stride) {
    const bool is_float8 = w.dtype == DType::float8;
    if (!is_float8 && w.dtype != DType::bfloat16) return multiply_full(w, x, x_stride, tokens, rests, first, last, y, y_stride);
    const TileConfig config;
    Tiles::configure(config);
    if (is_float8) (rests ? float8_units<2> : float8_units<1>)(w, x, x_stride, tokens, first, last, y, y_stride);
    constexpr int kMost = kSumGroups * kTileRows;
    for (int t = 0; t < tokens && !is_float8; t += kMost) {
        const int now = tokens - t < kMost ? tokens - t : kMost, at_once = kSumGroups / ((now + kTileRows - 1) / kTileRows);
        for (int unit = first; unit < last; unit += at_once)
            (rests ? tile_units<2> : tile_units<1>)(w, x + t * x_stride, x_stride, now, unit,
                                                    unit + at_once < last ? unit + at_once : last,
                                                    y + t * y_stride + (unit - first) * kUnitRows, y_stride);
    }
    Tiles::release();
}

}  // namespace
