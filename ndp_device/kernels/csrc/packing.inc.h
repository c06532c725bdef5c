// Bit planes to a component's bytes, written once over vectors of 32-bit lanes; a lane is 32 columns of one row. The
// including file gives, in an unnamed namespace:
//   PackWord      lanes that shifts by a constant and bitwise operators work on
//   kPackRows     rows that store_rows takes at once
//   store_rows(PackWord (&row)[kPackRows], out, stride)   lane l of row r to out + l * stride + 4 * r. Not past the
//                 caches: a fresh page was just cleared there (13.0 instead of 10.6 ms for 29 MB)
//   pick(mask, a, b)   the bits of mask from a, the others from b
// Knows no geometry: packing.cpp says which bytes are a row. No STL, everything in an unnamed namespace.
#pragma once

#include "vectors.inc.h"

namespace {

constexpr int kPackLead = 128;  // bytes of software prefetch, measured

// Bits are moved by permuting the bits of their index. In a plane the index is [v f1 f0 c1 c0] from bit 4 down: column
// c of four, field f of vector v (width 2). In a component it is [c1 c0 f1 f0 p], p the plane, and v names the vector.

// A bit of the index in a lane trades places with the choice between the two words.
template <int K>
NDP_INLINE void trade(PackWord& zero, PackWord& one) {
    constexpr uint32_t kMask[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
    const PackWord from_one = one << (1 << K), from_zero = zero >> (1 << K);
    zero = pick(kMask[K], zero, from_one);
    one = pick(kMask[K], from_zero, one);
}

// Two bits of the index in a lane trade places.
template <int I, int J>
NDP_INLINE PackWord swap_index(PackWord x) {
    constexpr uint32_t kMask[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
    constexpr int kShift = (1 << I) - (1 << J);
    constexpr uint32_t kLow = kMask[I] & ~kMask[J], kHigh = ~kMask[I] & kMask[J];  // bit I clear and J set; reverse
    return pick(~(kLow | kHigh), x, pick(kHigh, x << kShift, x >> kShift));
}

// Word b, the plane of bit b, holds [s2 s1 s0 c1 c0]; word s becomes the bytes of step s, [c1 c0 b2 b1 b0]. The highest
// bit of a word's number trades places with bits of the lane; that bits of the number trade places only renames words.
NDP_INLINE void bytes_of_planes(PackWord (&word)[8]) {
    const auto rename = [&](int a, int b) {
        const PackWord kept = word[a];
        word[a] = word[b];
        word[b] = kept;
    };
    for (int i = 0; i < 4; ++i) trade<2>(word[i], word[i + 4]);
    rename(1, 4);
    rename(3, 6);
    for (int i = 0; i < 4; ++i) {
        trade<0>(word[i], word[i + 4]);
        trade<3>(word[i], word[i + 4]);
    }
    rename(2, 4);
    rename(3, 5);
    for (int i = 0; i < 4; ++i) {
        trade<1>(word[i], word[i + 4]);
        trade<4>(word[i], word[i + 4]);
    }
}

// One step of kPackRows rows: as many columns as a word has lanes of 32.
template <int WIDTH>
NDP_INLINE void pack_step(const PackJob& job, ptrdiff_t at, uint8_t* out) {
    constexpr ptrdiff_t kLine = kUnitBlocks * 64;
    PackWord words[WIDTH][kPackRows];
    NDP_UNROLL(16)
    for (int r = 0; r < kPackRows; ++r, at += job.row_bytes) {
        for (int p = 0; p < WIDTH; ++p) __builtin_prefetch(job.planes[p] + at + kPackLead);
        if constexpr (WIDTH == 1) {  // [s2 s1 s0 c1 c0] to [c1 c0 s1 s2 s0], s the step: see step_of_bit
            words[0][r] = swap_index<2, 0>(swap_index<3, 0>(swap_index<4, 1>(load<PackWord>(job.planes[0] + at))));
        } else if constexpr (WIDTH == 8) {
            PackWord own[8];
            for (int bit = 0; bit < 8; ++bit) own[bit] = load<PackWord>(job.planes[7 - bit] + at);
            bytes_of_planes(own);
            for (int step = 0; step < 8; ++step) words[step][r] = own[step];
        } else {
            PackWord pairs[WIDTH / 2][2];  // of planes
            for (int p = 0; p < WIDTH; p += 2) {
                PackWord& zero = pairs[p / 2][0] = load<PackWord>(job.planes[p + 1] + at);
                PackWord& one = pairs[p / 2][1] = load<PackWord>(job.planes[p] + at);
                trade<0>(zero, one);
                trade<3>(zero, one);
                trade<2>(zero, one);
                trade<1>(zero, one);
                trade<4>(zero, one);
            }
            for (int v = 0; v < WIDTH; ++v) {  // WIDTH 4: two of four steps in a byte, each with bits of both pairs
                const auto spread = [&](int pair) {
                    const PackWord own = pairs[pair][v / 2] >> (v % 2 * 4);
                    return pick(0x03030303u, own, own << 2);
                };
                if constexpr (WIDTH == 2) words[v][r] = pairs[0][v];
                else words[v][r] = pick(0x33333333u, spread(1), spread(0) << 2);
            }
        }
    }
    for (int v = 0; v < WIDTH; ++v) store_rows(words[v], out + v * kLine, WIDTH * kLine);
}

template <int WIDTH>
NDP_INLINE void pack_rows(const PackJob& job) {
    constexpr int kStepChunks = sizeof(PackWord) / 4;
    for (int row = 0; row < kBlockRows; row += kPackRows) {
        ptrdiff_t at = row * job.row_bytes;
        uint8_t* out = job.out + 4 * row;
        for (int chunk = 0; chunk < job.chunks; chunk += kStepChunks) {
            pack_step<WIDTH>(job, at, out);
            at += sizeof(PackWord);
            out += kStepChunks * chunk_bytes(WIDTH);
        }
    }
}

void pack(const PackJob& job) {
    if (job.width == 1) pack_rows<1>(job);
    else if (job.width == 2) pack_rows<2>(job);
    else if (job.width == 4) pack_rows<4>(job);
    else pack_rows<8>(job);
}

}  // namespace
