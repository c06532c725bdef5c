#include "packing.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ndp {
namespace {

constexpr size_t kSlack = 4096;  // beyond the furthest vector load; prefetches may go anywhere

// `count` <= 32 bits of a row of packed bits, starting at any bit.
uint32_t read_bits(const uint8_t* row, int row_bytes, int start, int count) {
    uint64_t word = 0;
    const int byte = start / 8;
    std::memcpy(&word, row + byte, static_cast<size_t>(std::min(5, row_bytes - byte)));
    return static_cast<uint32_t>((word >> (start % 8)) & ((uint64_t{1} << count) - 1));
}

// Bits 0..3 of a nibble to the lowest bit of bytes 0..3.
uint32_t spread(uint32_t nibble) { return (nibble * 0x00204081u) & 0x01010101u; }

}  // namespace

Buffer::Buffer(size_t bytes)
    : bytes_(bytes), data_(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + kSlack + 63) / 64 * 64))) {
    if (!data_) throw std::bad_alloc();
}

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

int Geometry::source_row(int unit, int r) const {
    const int half = halves == 2 ? r / kBlockRows : 0;
    const int row = halves == 2 ? unit * kBlockRows + r % kBlockRows : unit * kUnitRows + r;
    return row < rows_per_half() ? half * rows_per_half() + row : -1;
}

int kernel_group(int group_size, int cols) {
    if (group_size >= cols) group_size = (cols + kChunkCols - 1) / kChunkCols * kChunkCols;
    if (group_size <= 128) return group_size;
    for (int group : {128, 96, 64, 32})
        if (group_size % group == 0) return group;
    return group_size;
}

std::shared_ptr<Buffer> pack_component(ThreadPool& pool, const Geometry& geometry, const uint8_t* planes,
                                       ptrdiff_t plane_stride, int width) {
    const int groups = geometry.groups(), chunks = geometry.padded_group() / kChunkCols;
    const int row_bytes = geometry.cols / 8, fields = 8 / width;
    const size_t chunk_bytes = static_cast<size_t>(width) * kUnitBlocks * 64;
    const size_t unit_bytes = groups * chunks * chunk_bytes;
    auto buffer = std::make_shared<Buffer>(geometry.units() * unit_bytes);
    pool.run(geometry.units(), [&](int unit, int) {
        uint8_t* out = buffer->data() + unit * unit_bytes;
        std::memset(out, 0, unit_bytes);
        int source[kUnitRows];
        for (int r = 0; r < kUnitRows; ++r) source[r] = geometry.source_row(unit, r);
        for (int g = 0; g < groups; ++g) {
            const int group_start = g * geometry.group;
            const int group_end = std::min(group_start + geometry.group, geometry.cols);
            for (int chunk = 0; chunk < chunks; ++chunk, out += chunk_bytes) {
                const int col = group_start + chunk * kChunkCols;
                const int count = std::min(kChunkCols, group_end - col);
                if (count <= 0) continue;
                for (int r = 0; r < kUnitRows; ++r) {
                    if (source[r] < 0) continue;
                    uint32_t bits[4];
                    for (int p = 0; p < width; ++p) {
                        const uint8_t* row = planes + p * plane_stride + static_cast<ptrdiff_t>(source[r]) * row_bytes;
                        bits[p] = read_bits(row, row_bytes, col, count);
                    }
                    uint8_t* to = out + r * 4;  // block r / 16, row r % 16: 4 bytes each, 64 per block
                    for (int v = 0; v < width; ++v) {
                        uint32_t packed = 0;
                        for (int f = 0; f < fields; ++f) {
                            const int step = width == 1 ? step_of_bit(f) : v * fields + f;
                            for (int p = 0; p < width; ++p)
                                packed |= spread((bits[p] >> (4 * step)) & 15) << (width * f + width - 1 - p);
                        }
                        std::memcpy(to + v * kUnitBlocks * 64, &packed, 4);
                    }
                }
            }
        }
    });
    return buffer;
}

std::shared_ptr<Buffer> pack_meta(ThreadPool& pool, const Geometry& geometry, const uint16_t* scale,
                                  const uint16_t* offset, int group_size) {
    const int groups = geometry.groups(), stored = (geometry.cols + group_size - 1) / group_size;
    const size_t unit_halves = static_cast<size_t>(groups) * 2 * kUnitRows;
    auto buffer = std::make_shared<Buffer>(geometry.units() * unit_halves * 2);
    pool.run(geometry.units(), [&](int unit, int) {
        auto* out = reinterpret_cast<uint16_t*>(buffer->data()) + unit * unit_halves;
        for (int g = 0; g < groups; ++g) {
            const int from = g * geometry.group / group_size;
            for (int r = 0; r < kUnitRows; ++r) {
                const int row = geometry.source_row(unit, r);
                const ptrdiff_t at = static_cast<ptrdiff_t>(row) * stored + from;
                uint16_t* to = out + (g * kUnitBlocks + r / kBlockRows) * 2 * kBlockRows + r % kBlockRows;
                to[0] = row < 0 ? 0 : scale[at];
                to[kBlockRows] = row < 0 ? 0 : offset[at];
            }
        }
    });
    return buffer;
}

}  // namespace ndp
