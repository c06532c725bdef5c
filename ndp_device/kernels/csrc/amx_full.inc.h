// Checkpoint rows in bfloat16 by AMX tiles: 16 rows of weights as they lie in memory times 16 rows of activations, whose
// pairs of columns split_row interleaves. A row of floats becomes two of bfloat16, as in isa_avx512bf16.cpp. A tile
// instruction costs the same for 1 row of activations as for 16, which is less than its weights take to be read.
// Tiles 0..3 hold sums [16 rows][16 tokens], 4 and 5 weights [16 rows][32 columns], 6 and 7 activations [16 pairs][16 tokens][2].
#pragma once

namespace {

constexpr int kTileCols = 32;
constexpr int kRange = 256;     // columns of weights that stay in the caches for all rows of activations
constexpr int kSumGroups = 32;  // groups of 16 tokens times units whose sums wait between ranges: 64 KB

// rows: groups of 16 rows, each [pairs of columns][16 rows][2] of the nearest bfloat16 and after them the same of what
// these leave, or zeros. Columns are padded to a multiple of 32 with zeros. An infinity or NaN leaves nothing.
bool split_row(const float* x, int cols, bool rest, float* rows, ptrdiff_t stride, int row) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    const auto nearest = [](f32x16 v) {  // in the upper halves; a NaN stays one
        const u32x16 bits = (u32x16)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
        return (v == v ? rounded : (bits | 0x400000)) & 0xffff0000u;
    };
    const int padded = (cols + kTileCols - 1) / kTileCols * kTileCols;
    uint32_t* high = reinterpret_cast<uint32_t*>(rows + row / kTileRows * kTileRows * stride) + row % kTileRows;
    uint32_t* low = high + static_cast<ptrdiff_t>(padded / 2) * kTileRows;
    u32x16 any = {};
    for (int i = 0; i < padded; i += 16) {
        alignas(64) float some[16] = {};
        std::memcpy(some, x + i, sizeof(float) * (cols - i < 16 ? (cols > i ? cols - i : 0) : 16));
        const f32x16 v = load<f32x16>(some);
        const u32x16 near = nearest(v);
        const f32x16 left = v - (f32x16)near, size = left < 0.0f ? -left : left;
        const u32x16 kept = rest ? (size < __builtin_inff() ? nearest(left) : u32x16{}) : u32x16{};
        any |= kept << 1;
        uint32_t pairs[2][8];
        store(pairs[0], __builtin_convertvector(near >> 16, u16x16));
        store(pairs[1], __builtin_convertvector(kept >> 16, u16x16));
        for (int p = 0; p < 8; ++p) {
            high[(i / 2 + p) * kTileRows] = pairs[0][p];
            low[(i / 2 + p) * kTileRows] = pairs[1][p];
        }
    }
    for (int i = 0; i < 16; ++i)
        if (any[i] != 0) return true;
    return false;
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

void multiply_full_with_tiles(const FullView& w, const float* x, ptrdiff_t x_stride, int tokens, bool rests, int first,
                              int last, float* y, ptrdiff_t y_stride) {
    if (w.dtype != DType::bfloat16) return multiply_full(w, x, x_stride, tokens, rests, first, last, y, y_stride);
    const TileConfig config;
    Tiles::configure(config);
    constexpr int kMost = kSumGroups * kTileRows;
    for (int t = 0; t < tokens; t += kMost) {
        const int now = tokens - t < kMost ? tokens - t : kMost, at_once = kSumGroups / ((now + kTileRows - 1) / kTileRows);
        for (int unit = first; unit < last; unit += at_once)
            (rests ? tile_units<2> : tile_units<1>)(w, x + t * x_stride, x_stride, now, unit,
                                                    unit + at_once < last ? unit + at_once : last,
                                                    y + t * y_stride + (unit - first) * kUnitRows, y_stride);
    }
    Tiles::release();
}

}  // namespace
