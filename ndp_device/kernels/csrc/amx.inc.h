// Several tokens of quantized weights by AMX int8 tiles; one token goes the VNNI way, because a tile instruction costs the
// same for 1 row as for 16. The including file gives `struct Tiles`: the tile instructions, real or done in software.
// Tiles 0..3 hold sums [16 rows][16], 4 and 5 activations [16 rows][64 columns], 6 and 7 codes [16 steps][16][4].
#pragma once

#include "avx512vnni.inc.h"

namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;
constexpr int kFewestTileRows = 9;  // below, VNNI wins (docs/log/kernels.md)
constexpr int kWidestGroup = 256;   // columns of codes as bytes: 8 KiB

struct TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout that ldtilecfg reads");

}  // namespace

#include "rows64.inc.h"

namespace {

// FP4's levels may be shifted up themselves where their shifts are at most 3 bits: they then begin at kShiftedZero, and a group's
// sum at what takes that away.
constexpr int kShiftedZero = kFp4Zero << 3;

NDP_INLINE bool shifts_codes(const uint8_t* meta) {
    uint32_t all = 0;
    for (int r = 0; r < kUnitRows; ++r) all |= load<uint32_t>(meta + 4 * r);
    return (all & 0xcccc) == 0;
}

NDP_INLINE int32_t zero_of_shifted(const int32_t* zeros, int chunks) {
    int32_t sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) sum += zeros[chunk];
    return sum * (kShiftedZero / kFp4Zero);
}

// The codes of one group of a unit as bytes: out [2 blocks][steps][16 rows][4 columns].
template <class Code>
NDP_INLINE void unpack_group(const uint8_t* c0, const uint8_t* c1, int chunks, const uint8_t* meta, uint8_t* out) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int block = 0; block < kUnitBlocks; ++block) {
            const uint8_t* b0 = c0 + chunk * chunk_bytes(Code::kWidth0) + block * 64;
            const uint8_t* b1 = c1 + chunk * chunk_bytes(Code::kWidth1) + block * 64;
            uint8_t* to = out + (block * chunks + chunk) * 8 * 64;
            i32x16 shifts{}, zeros{};
            if constexpr (Code::kFp4) {
                shifts = Code::factors(meta + block * (Code::kMetaBytes / 2), chunk);
                zeros = kShiftedZero * 0x01010101 - ((kFp4Zero * 0x01010101 - i32x16{}) << shifts);
            }
            NDP_UNROLL(8)
            for (int q = 0; q < Code::kVectors; ++q) {
                const Words v = Code::template vector<Words>(b0, b1, q);
                NDP_UNROLL(2)
                for (int high = 0; high < Code::kFields; ++high) {
                    Words codes = Code::field(v, high);
                    if constexpr (Code::kFp4) codes = (Words)(((i32x16)codes << shifts) + zeros);
                    store(to + Code::step(q, high) * 64, codes);
                }
            }
        }
    }
}

// Two row blocks by two weight blocks at a time: four products per two loads of each side. False: not of this shape.
template <class Code, int LIMBS>
bool multiply_unit(const QuantizedView& w, const Activations& a, int unit, float* y, ptrdiff_t stride) {
    const int chunks = w.padded_group / kChunkCols, steps = chunks * 8;
    if (a.tokens * LIMBS < kFewestTileRows || (Code::kFp4 && !Code::kShifts) || steps % kTileSteps != 0 || w.padded_group > kWidestGroup) return false;
    const uint8_t* stored = w.meta + static_cast<ptrdiff_t>(unit) * w.groups * Code::kMetaBytes;
    for (int g = 0; Code::kFp4 && g < w.groups; ++g)
        if (!shifts_codes(stored + g * Code::kMetaBytes)) return false;
    const ptrdiff_t start = static_cast<ptrdiff_t>(unit) * w.unit_chunks;
    const uint8_t* c0 = w.component[0] + start * chunk_bytes(Code::kWidth0);
    const uint8_t* c1 = Code::kWidth1 ? w.component[1] + start * chunk_bytes(Code::kWidth1) : c0;
    constexpr int kTokens = kTileRows / LIMBS;
    const ptrdiff_t row_bytes = steps * 4;
    alignas(64) uint8_t codes[kWidestGroup * kUnitRows];
    alignas(64) i32x16 dots[2 * kTileRows][kUnitBlocks];
    for (int t = 0; t < a.tokens; ++t) std::memset(y + t * stride, 0, sizeof(float) * kUnitRows);
    for (int g = 0; g < w.groups; ++g) {
        unpack_group<Code>(c0, c1, chunks, stored, codes);
        f32x16 scale[kUnitBlocks], offset[kUnitBlocks];
        for (int block = 0; block < kUnitBlocks; ++block)
            Code::read_meta(stored + block * (Code::kMetaBytes / 2), scale[block], offset[block]);
        stored += Code::kMetaBytes;
        c0 += chunks * chunk_bytes(Code::kWidth0);
        c1 += chunks * chunk_bytes(Code::kWidth1);
        const ptrdiff_t at = static_cast<ptrdiff_t>(g) * a.tokens;
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
                    __builtin_prefetch(c0 + (step + i) * (chunk_bytes(Code::kWidth0) / 8));
                    __builtin_prefetch(Code::kFields == 1 ? c0 + (step + i) * (chunk_bytes(Code::kWidth0) / 8) + 64
                                                          : c1 + (step + i) * (chunk_bytes(Code::kWidth1) / 8));
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
                    for (int limb = 0; Code::kFp4 && limb < LIMBS; ++limb)
                        zero[limb] = zero_of_shifted(a.zeros + ((at + first + t) * LIMBS + limb) * chunks, chunks);
                    f32x16 dot = to_float(dots[t * LIMBS][block] + zero[0]);
                    if constexpr (LIMBS == 2) dot = dot * 128.0f + to_float(dots[t * LIMBS + 1][block] + zero[1]);
                    float* to = y + (first + t) * stride + block * kBlockRows;
                    f32x16 out = load<f32x16>(to);
                    out += dot * a.scale[at + first + t] * scale[block];
                    if constexpr (!Code::kFp4) out += offset[block] * a.sum[at + first + t];
                    store(to, out);
                }
            }
        }
    }
    return true;
}

template <class Code, int LIMBS>
void multiply_width(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    for (int unit = first; unit < last; ++unit) {
        float* to = y + (unit - first) * kUnitRows;
        if (!multiply_unit<Code, LIMBS>(w, a, unit, to, stride))
            multiply_in_registers<Code, LIMBS>(w, a, unit, unit + 1, to, stride);
    }
}

void multiply_with_tiles(const QuantizedView& w, const Activations& a, int first, int last, float* y, ptrdiff_t stride) {
    if (a.tokens * a.limbs < kFewestTileRows) return multiply(w, a, first, last, y, stride);
    const TileConfig config;
    Tiles::configure(config);
    multiply(w, a, first, last, y, stride);
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
