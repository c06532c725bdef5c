// Several tokens of quantized weights by AMX int8 tiles; one token goes the VNNI way, because a tile instruction costs the
// same for 1 row as for 16. The including file gives `struct Tiles`: the tile instructions.
// Tiles 0..3 hold sums [16 rows][16], 4 and 5 activations [16 rows][64 columns], 6 and 7 codes [16 steps][16][4].
#pragma once

#include "avx512vnni.inc.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;
// Below this many rows VNNI wins (docs/log/kernels.md).
constexpr int kFewestTileRows = 7;
constexpr int kFewRows = kFewestTileRows - 1, kFp4TileRows = kFewestTileRows;

struct TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that ldtilecfg reads");

template <int LIMBS>
bool own_products(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t stride);

}  // namespace

#include "kernels.inc.h"

namespace {

constexpr int kDotRows = 2 * kTileRows;
using Dots = i32x16[kDotRows][kUnitBlocks];

// Sums of a group of a panel with one or two blocks of activation rows: four products per two loads of each side.
template <bool SIGNED, class Prefetch>
NDP_INLINE void multiply_tiles(const uint8_t* codes, const int8_t* x, int steps, bool two, const Prefetch& prefetch, Dots& dots) {
    const ptrdiff_t row_bytes = steps * 4;
    Tiles::zero();
    for (int step = 0; step < steps; step += kTileSteps) {
        Tiles::load<6>(codes + step * 64, 64);
        Tiles::load<4>(x + step * 4, row_bytes);
        Tiles::multiply<SIGNED, 0, 4, 6>();
        Tiles::load<7>(codes + (steps + step) * 64, 64);
        Tiles::multiply<SIGNED, 1, 4, 7>();
        prefetch();
        if (!two) continue;
        Tiles::load<5>(x + kTileRows * row_bytes + step * 4, row_bytes);
        Tiles::multiply<SIGNED, 2, 5, 6>();
        Tiles::multiply<SIGNED, 3, 5, 7>();
    }
    Tiles::save<0>(&dots[0][0], sizeof dots[0]);
    Tiles::save<1>(&dots[0][1], sizeof dots[0]);
    if (!two) return;
    Tiles::save<2>(&dots[kTileRows][0], sizeof dots[0]);
    Tiles::save<3>(&dots[kTileRows][1], sizeof dots[0]);
}

// Adds those of some groups, times their scales, to y.
template <int LIMBS, bool FP4>
NDP_INLINE void add_dots(const Dots* dots, int groups, const Activations& a, ptrdiff_t at, int tokens, const f32x16* meta,
                         float* y, ptrdiff_t stride) {
    for (int t = 0; t < tokens; ++t) {
        NDP_UNROLL(2)
        for (int block = 0; block < kUnitBlocks; ++block) {
            float* to = y + t * stride + block * kBlockRows;
            f32x16 out = load<f32x16>(to);
            for (int g = 0; g < groups; ++g) {
                f32x16 dot = to_float(dots[g][t * LIMBS][block]);
                if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[g][t * LIMBS + 1][block]);
                const ptrdiff_t of = at + g * a.tokens + t;
                add_dot(dot, a.scale[of], a.sum[of], meta + (g * kUnitBlocks + block) * 2, reinterpret_cast<float*>(&out), FP4);
            }
            store(to, out);
        }
    }
}

// Rows of y are read and written once for two groups.
template <int LIMBS, bool FP4>
NDP_INLINE void tile_products(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t stride) {
    constexpr int kTokens = kDotRows / LIMBS, kGroups = 2;
    alignas(64) Dots dots[kGroups];
    const int row_bytes = panel.steps * 4;
    const uint8_t* ahead[] = {panel.ahead[0], panel.ahead[1]};
    for (int g = 0; g < panel.groups; g += kGroups) {
        const int groups = panel.groups - g < kGroups ? panel.groups - g : kGroups;
        for (int first = 0; first < a.tokens; first += kTokens) {
            const int left = a.tokens - first;
            const ptrdiff_t at = static_cast<ptrdiff_t>(first_group + g) * a.tokens + first;
            const auto prefetch = [&] {
                for (int c = 0; c < kMaxComponents && first == 0; ++c)
                    for (int step = 0; step < kTileSteps && panel.ahead_bytes[c]; ++step)
                        __builtin_prefetch(ahead[c] += panel.ahead_bytes[c], 0, 2);  // the first cache is full
            };
            for (int i = 0; i < groups; ++i)
                multiply_tiles<FP4>(panel.codes + static_cast<ptrdiff_t>(g + i) * kUnitRows * row_bytes,
                                    a.codes + (at + i * a.tokens) * LIMBS * row_bytes, panel.steps, left > kTokens / 2, prefetch, dots[i]);
            add_dots<LIMBS, FP4>(dots, groups, a, at, left < kTokens ? left : kTokens, panel.meta + g * kUnitBlocks * 2,
                                 y + first * stride, stride);
        }
    }
}

template <int LIMBS>
bool own_products(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t stride) {
    if (a.tokens * LIMBS < kFewestTileRows || panel.steps % kTileSteps != 0 || panel.words) return false;
    (panel.fp4 ? tile_products<LIMBS, true> : tile_products<LIMBS, false>)(panel, a, first_group, y, stride);
    return true;
}

void multiply_with_tiles(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride,
                         void* scratch) {
    if (a.tokens == 1) return multiply(w, a, first, last, y, stride, scratch);
    const TileConfig config;
    Tiles::configure(config);
    multiply(w, a, first, last, y, stride, scratch);
    Tiles::release();
}

}  // namespace

#include "amx_full.inc.h"

namespace {

constexpr KernelTable make_tile_table(const char* name) {
    KernelTable table = make_table(name);
    table.multiply = multiply_with_tiles;
    table.multiply_full = multiply_full_with_tiles;
    table.split_row = split_row;
    table.split_row_float8 = split_row_float8;
    table.split_together = kTileRows;
    return table;
}

}  // namespace
