// What one instruction-set path offers, and the views it works on. Plain data only: every path's translation unit
// includes this file, so nothing here may instantiate code (a template or inline function compiled with AVX-512 flags
// could be the copy the linker keeps for everyone). Knows no memory owner, no thread, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ndp {

// Rows come in units of two 16-row blocks: gate block and up block of the same 16 hidden units for w13, 32
// consecutive rows for w2. Columns come in groups of one scale and offset per row, padded to a multiple of 32.
constexpr int kBlockRows = 16;
constexpr int kUnitBlocks = 2;
constexpr int kUnitRows = kBlockRows * kUnitBlocks;
constexpr int kChunkCols = 32;         // 8 steps of 4 columns: a W-bit component spends W vectors of 64 bytes on them
constexpr int kMaxPaddedGroup = 4096;  // keeps every 32-bit integer sum below 2^31: 255 * 127 * 4096 = 1.3e8
constexpr int kMaxComponents = 2;
constexpr int kMaxComponentWidth = 8;
constexpr int kMostInRegisters = 4;  // tokens at most that meet codes in registers, on any path
constexpr int kRowSlack = 16;  // rows past the last one that a tile load may read (and whose results are dropped)

// One quantized matrix as it is streamed. A code is its components' bits one after the other, top bits first, without
// the `dropped` lowest ones: where the components are those of a replica one bit wider.
//   component c  [units][groups][chunks * width][2 blocks][16 rows][4 columns]; a byte of a W-bit component holds
//                the codes of 8/W consecutive steps of 4 columns, lowest bits first (W = 1: see step_of_bit; W = 8: one)
//   meta         fp16 [units][groups][2 blocks][scale, offset][16 rows]
//   FP4: one component of 4 bits; scales are whole multiples of their group's smallest power of two, half of which is its meta
//   data's float32, times a scale of the row. Groups have 128 columns, or fewer where scales are too far apart.
//   MXFP4: meta [units][groups][2 blocks][16 rows]; the mantissa says in 4 bits for each chunk of the group, the first in the
//   lowest, by how many bits its sums are shifted up
//   NVFP4: meta [units][groups][2 blocks] of [16 rows] float32, then [8 scales][16 rows] bytes: a factor of 4 bits in the low
//   ones, and by how many bits it is shifted up
//   Signed: one component of 8 bits, codes plus kSignedZero; meta float32 [units][groups][2 blocks][16 rows], the scales
struct QuantizedView {
    int units;
    int groups;
    int padded_group;  // columns per group, a multiple of 32
    int unit_chunks;   // of a component in a unit; less than the groups' where the last one ends in the next unit
    int num_components;
    int dropped;  // 0 or 1
    int fp4;  // where codes are E2M1 numbers, columns under one scale: kMxfp4 or kNvfp4; else 0
    bool is_signed;
    int width[kMaxComponents];
    const uint8_t* component[kMaxComponents];
    const uint8_t* meta;
};

// An E2M1 code's number in halves, plus kFp4Zero: what kernels multiply by.
constexpr int kMxfp4 = 32;          // columns under one power of two (OCP Microscaling Formats 1.0)
constexpr int kNvfp4 = 16;          // columns under one E4M3 scale
constexpr int kFp4Columns = 128;    // of a group whose sums are added up as whole numbers
constexpr int kMostByteColumns = 128;  // of a group of int8 and float8
constexpr int kFp4Zero = 12;
constexpr int kSignedZero = 128;
constexpr int kTopLimb = 127;  // the largest code of the only, or the higher, limb of an activation
constexpr uint8_t kFp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kFp4Halves[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};  // the same as int8, from 0

// Quantized inputs of T tokens: x ~ scale * (128 * high + low) with two limbs, scale * code with one.
//   codes [groups][T * limbs][padded_group], scale and sum (of the values the codes stand for) [groups][T]
//   Beside FP4: zeros [groups][T * limbs][scales], what takes from the sums under a scale that its levels begin at kFp4Zero, for
//   up to kMostInRegisters tokens; words [groups][T][padded_group], both limbs in one number, of every four columns in the order
//   0 2 1 3
struct Activations {
    int tokens;
    int limbs;
    const int8_t* codes;
    const float* scale;
    const float* sum;
    const int32_t* zeros;
    const int16_t* words;
};

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2, float8 = 3, int8 = 4 };  // float8: E4M3

constexpr int bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : dtype < DType::float8 ? 2 : 1; }

// Of weights of 8 bits: one float for each block of so many rows and columns of a matrix, `across` of them side by side. No
// kernel reads these; packed ones have one for each row of a group of columns, see FullView.
struct BlockScales {
    const float* first;
    const float* second;
    int rows;
    int cols;
    int across;
};

// Rows of a checkpoint's own weights: 16 of `first` and 16 of `second` per unit, or 32 of `first` where there is no
// second matrix. Rows past num_rows count as zero.
// float8, packed: codes [units][groups][pairs of columns][32 rows][2], columns in a group padded to a multiple of 32, and
// scales [units][groups][32 rows], 2^8 times as large, as bytes become numbers 2^-8 of theirs.
struct FullView {
    DType dtype;
    const void* first;
    const void* second;
    int num_rows;
    int cols;
    BlockScales scales;
};

struct QuantizeJob {
    const float* x;       // one row
    const int32_t* perm;  // or null
    int cols;
    int group;  // valid columns per group
    int padded_group;
    int limbs;
    int8_t* codes;           // first limb of this row in group 0
    ptrdiff_t group_stride;  // bytes from one group's codes to the next
    float* scale;            // [groups], `token_stride` apart
    float* sum;
    ptrdiff_t token_stride;
    int32_t* zeros;  // null, or [groups][limbs][scales], token_stride * limbs * scales apart
    int16_t* words;  // null, or this row's in group 0, token_stride * padded_group from one group to the next
    int fp4;         // columns under one scale where there are words
};

// One block of 16 rows of some planes, cut into words of 32 columns, and where its part of a component lies.
struct PackJob {
    int width;                  // planes: 1, 2, 4 or 8
    const uint8_t* planes[kMaxComponentWidth];  // top bits first; row r lies r * row_bytes further
    ptrdiff_t row_bytes;
    int chunks;                 // a multiple of kPackChunks
    uint8_t* out;               // the block's first line in its unit
};

constexpr int kPackChunks = 16;  // the widest vector holds so many words of a row

// (clamp(up, -limit, limit) + up_bias) * g * sigmoid(linear * g + cubic * g^3), where g = min(gate, limit); SiLU as it is.
struct Activation {
    float linear = 1.0f;
    float cubic = 0.0f;
    float up_bias = 0.0f;
    float limit = __builtin_inff();  // none
};

struct KernelTable {
    const char* name;
    void (*pack)(const PackJob&);
    // y[t * stride + 32 * (unit - first) + row] for units first .. last - 1; scratch holds scratch_bytes(padded_group)
    void (*multiply)(const QuantizedView&, const Activations&, int first, int last, float* y, ptrdiff_t stride,
                     void* scratch);
    // `rests`: whether any of these rows, if they are split, has something left.
    void (*multiply_full)(const FullView&, const float* x, ptrdiff_t x_stride, int tokens, bool rests, int first,
                          int last, float* y, ptrdiff_t y_stride);
    // Null, or writes what multiply_full reads in place of row `row` of `rows` where weights are bfloat16, or float8: as many bytes.
    // With `rest` it keeps what the nearest bfloat16 leave, and returns whether that is anything.
    bool (*split_row)(const float* x, int cols, bool rest, float* rows, ptrdiff_t stride, int row);
    bool (*split_row_float8)(const float* x, int cols, bool rest, float* rows, ptrdiff_t stride, int row);
    int split_together;  // rows that split_row interleaves: `rows` has room for a multiple of so many
    void (*quantize)(const QuantizeJob&);
    // h[16 * u + r] of the gate y[32 * u + r] and the up y[32 * u + 16 + r]
    void (*activate)(const float* y, int units, const Activation&, float* h);
    void (*add_scaled)(float* out, const float* y, float gate, int count);
    // Sum of all 64-byte lines, read as `streams` (1, 2 or 4) concurrent streams with a prefetch this far ahead.
    uint64_t (*read_stream)(const void* data, size_t bytes, int streams, int prefetch_bytes);
};

// A byte of a 1-bit component holds steps 0, 1, 4, 5, 2, 3, 6, 7 from its lowest bit up: then bits q and q + 4 are the
// two codes that belong with vector q of a 2-bit component.
constexpr int step_of_bit(int bit) { return (bit & 1) | (bit & 2) << 1 | (bit & 4) >> 1; }

// Bytes of a component per chunk of 32 columns and unit.
constexpr int chunk_bytes(int width) { return width * kUnitBlocks * 64; }

constexpr int kPanelCols = 256;  // columns unpacked at a time (at least one group): 8 KB of codes

constexpr size_t scratch_bytes(int padded_group) {
    return static_cast<size_t>(padded_group > kPanelCols ? padded_group : kPanelCols) * kUnitRows + 16 * 1024;
}

const KernelTable& portable_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512vnni_kernels();
const KernelTable& avx512bf16_kernels();
const KernelTable& amx_kernels();

}  // namespace ndp
