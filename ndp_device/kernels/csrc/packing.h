// From the container's bit planes to the components that the kernels stream. Knows layouts, no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernel_table.h"
#include "thread_pool.h"

namespace ndp {

// Memory the kernels stream: aligned to a line, with slack for prefetches and vector loads, not initialized, so that
// the thread that packs a page is the one that places it (first touch).
class Buffer {
   public:
    explicit Buffer(size_t bytes);
    uint8_t* data() const { return data_.get(); }
    size_t bytes() const { return bytes_; }

   private:
    struct Free {
        size_t bytes;
        void operator()(uint8_t* p) const;
    };
    size_t bytes_;
    std::unique_ptr<uint8_t, Free> data_;
};

// Sizes of a packed matrix. Rows are `halves` equal parts (2: gate and up, interleaved by blocks of 16).
struct Geometry {
    int rows;
    int cols;
    int halves;
    int group;  // columns per kernel group; divides the replica's group size
    bool ends_with_columns = false;  // the last group has chunks for its columns only

    int rows_per_half() const { return rows / halves; }
    int units() const {
        const int per_unit = kUnitRows / halves;
        return (rows_per_half() + per_unit - 1) / per_unit;
    }
    int groups() const { return (cols + group - 1) / group; }
    int padded_group() const { return (group + kChunkCols - 1) / kChunkCols * kChunkCols; }
    int unit_chunks() const { return ends_with_columns ? cols / kChunkCols : groups() * padded_group() / kChunkCols; }
    // The matrix row behind row r (0 .. 31) of a unit, or -1 where the unit is padded.
    int source_row(int unit, int r) const;
};

// Columns per kernel group for a replica's group size: itself up to 128, else the largest of 128, 96, 64 and 32 that
// divides it (they share the scale), else itself.
int kernel_group(int group_size, int cols);

// planes: [width][rows][cols / 8], `plane_stride` bytes apart, most significant first.
std::shared_ptr<Buffer> pack_component(const KernelTable& kernels, ThreadPool& pool, const Geometry& geometry,
                                       const uint8_t* planes, ptrdiff_t plane_stride, int width);

// scale, offset: fp16 [rows][ceil(cols / group_size)].
std::shared_ptr<Buffer> pack_meta(ThreadPool& pool, const Geometry& geometry, const uint16_t* scale,
                                  const uint16_t* offset, int group_size);

// FP4: codes [rows][cols / 2], the first column in the low bits. MXFP4: scales [rows][cols / 32], E8M0, of which those below 2
// count as zero. NVFP4, where there are scales of rows [rows]: scales [rows][cols / 16], E4M3 above zero. Sets the group of the
// geometry, see QuantizedView.
struct Packed {
    std::shared_ptr<Buffer> codes, meta;
};
Packed pack_fp4(ThreadPool& pool, Geometry& geometry, const uint8_t* codes, const uint8_t* scales, const float* of_rows);

// int8, see QuantizedView, or float8, see FullView. Sets the group of the geometry.
Packed pack_bytes(ThreadPool& pool, Geometry& geometry, const FullView& source);

}  // namespace ndp
