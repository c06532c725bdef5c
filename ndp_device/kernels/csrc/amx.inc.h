// Several tokens by AMX int8 tiles; one token goes the VNNI way, because a tile instruction costs the same for 1 row as
// for 16. The including file gives `struct Tiles`: the tile instructions, real or done in software.
// Tiles 0..3 hold sums [16 rows][16], tile 4 activations [16 rows][64 columns], tile 5 codes [16 steps][16][4].
#pragma once

#include "avx512vnni.inc.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;
// Below this many rows VNNI wins: R rows x 4 blocks cost 2 R cycles per step of 4 columns, tiles 64 cycles per 16 steps
// and block whatever R, and a pass over the sums. From instruction rates, not measured on a machine with AMX.
constexpr int kFewestTileRows = 5;

struct TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that ldtilecfg reads");

template <int BLOCKS, int LIMBS>
bool tile_products(const uint8_t* codes, int steps, const int8_t* x, int tokens, const float* scale, const float* sum,
                   const f32x16 (*meta)[2], float* y, ptrdiff_t stride);

}  // namespace

#include "kernels.inc.h"

namespace {

template <int BLOCKS, int LIMBS>
bool tile_products(const uint8_t* codes, int steps, const int8_t* x, int tokens, const float* scale, const float* sum,
                   const f32x16 (*meta)[2], float* y, ptrdiff_t stride) {
    if (tokens * LIMBS < kFewestTileRows || steps % kTileSteps != 0) return false;
    constexpr int kTokens = kTileRows / LIMBS;
    alignas(64) i32x16 dots[kTileRows][BLOCKS];
    for (int first = 0; first < tokens; first += kTokens) {
        const int8_t* rows = x + static_cast<ptrdiff_t>(first) * LIMBS * steps * 4;
        Tiles::template zero<BLOCKS>();
        for (int step = 0; step < steps; step += kTileSteps) {
            Tiles::template load<4>(rows + step * 4, steps * 4);
            const auto products = [&](auto block) __attribute__((always_inline)) {
                constexpr int kBlock = decltype(block)::value;
                if constexpr (kBlock < BLOCKS) {
                    Tiles::template load<5>(codes + (static_cast<ptrdiff_t>(kBlock) * steps + step) * 64, 64);
                    Tiles::template multiply<kBlock>();
                }
            };
            products(Index<0>{});
            products(Index<1>{});
            products(Index<2>{});
            products(Index<3>{});
        }
        Tiles::template save<BLOCKS>(dots, sizeof dots[0]);
        const int count = tokens - first < kTokens ? tokens - first : kTokens;
        add_group<BLOCKS, LIMBS>(dots, count, scale + first, sum + first, meta, y + first * stride, stride);
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

constexpr KernelTable make_tile_table(const char* name) {
    KernelTable table = make_table(name);
    table.multiply = multiply_with_tiles;
    return table;
}

}  // namespace
