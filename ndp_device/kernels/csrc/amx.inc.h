// Several tokens of quantized weights by AMX int8 tiles; one token goes the VNNI way, because a tile instruction costs the
// same for 1 row as for 16. The including file gives `struct Tiles`: the tile instructions, real or done in software.
// Tiles 0..3 hold sums [16 rows][16], 4 and 5 activations [16 rows][64 columns], 6 and 7 codes [16 steps][16][4].
#pragma once

#include "avx512vnni.inc.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;
// Below this many rows VNNI wins (docs/log/kernels.md).
constexpr int kFewestTileRows = 9;
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

// Two row blocks by two weight blocks at a time: four products per two loads of each side.
template <int LIMBS>
bool own_products(const Panel& panel, const Activations& a, int first_group, float* y, ptrdiff_t stride) {
    const int rows = a.tokens * LIMBS, steps = panel.steps;
    if (rows < kFewestTileRows || steps % kTileSteps != 0 || panel.words) return false;
    const int chunks = steps / 8;
    constexpr int kTokens = kTileRows / LIMBS;
    const ptrdiff_t row_bytes = steps * 4;
    alignas(64) i32x16 dots[2 * kTileRows][kUnitBlocks];
    const uint8_t* ahead[] = {panel.ahead[0], panel.ahead[1]};
    for (int g = 0; g < panel.groups; ++g) {
        const uint8_t* codes = panel.codes + static_cast<ptrdiff_t>(g) * kUnitBlocks * steps * 64;
        const f32x16* meta = panel.meta + g * kUnitBlocks * 2;
        const ptrdiff_t at = static_cast<ptrdiff_t>(first_group + g) * a.tokens;
        for (int first = 0; first < a.tokens; first += 2 * kTokens) {
            const bool two = first + kTokens < a.tokens;
            const int8_t* x = a.codes + (at + first) * LIMBS * row_bytes;
            Tiles::zero();
            for (int step = 0; step < steps; step += kTileSteps) {
                Tiles::load<6>(codes + step * 64, 64);
                Tiles::load<7>(codes + (steps + step) * 64, 64);
                Tiles::load<4>(x + step * 4, row_bytes);
                Tiles::multiply<0, 4, 6>();
                Tiles::multiply<1, 4, 7>();
                for (int i = 0; i < kTileSteps && first == 0; ++i) {
                    __builtin_prefetch(ahead[0] += panel.ahead_bytes[0]);
                    __builtin_prefetch(ahead[1] += panel.ahead_bytes[1]);
                }
                if (two) {
                    Tiles::load<5>(x + kTileRows * row_bytes + step * 4, row_bytes);
                    Tiles::multiply<2, 5, 6>();
                    Tiles::multiply<3, 5, 7>();
                }
            }
            Tiles::save<0>(&dots[0][0], sizeof dots[0]);
            Tiles::save<1>(&dots[0][1], sizeof dots[0]);
            if (two) {
                Tiles::save<2>(&dots[kTileRows][0], sizeof dots[0]);
                Tiles::save<3>(&dots[kTileRows][1], sizeof dots[0]);
            }
            const int count = a.tokens - first < 2 * kTokens ? a.tokens - first : 2 * kTokens;
            for (int t = 0; t < count; ++t) {
                for (int block = 0; block < kUnitBlocks; ++block) {
                    int32_t zero[2] = {};
                    for (int limb = 0; panel.fp4 && limb < LIMBS; ++limb)
                        zero[limb] = zero_of_shifted(a.zeros + ((at + first + t) * LIMBS + limb) * chunks, chunks);
                    f32x16 dot = to_float(dots[t * LIMBS][block] + zero[0]);
                    if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[t * LIMBS + 1][block] + zero[1]);
                    add_dot(dot, a.scale[at + first + t], a.sum[at + first + t], meta + block * 2,
                            y + (first + t) * stride + block * kBlockRows, panel.fp4);
                }
            }
        }
    }
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
    table.split_together = kTileRows;
    return table;
}

}  // namespace
