#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ndp {
namespace {

constexpr size_t kSlack = 4096;  // beyond the furthest vector load; prefetches may go anywhere
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMapped = 2 * kHugePage;  // from here on a buffer is a mapping of its own: huge pages, and given
                                           // back to the system when it is freed
constexpr size_t kTaskBytes = kHugePage;   // of packed weights: two threads rarely meet in one huge page

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

uint8_t* allocate(size_t bytes) {
    if (bytes < kMapped) return static_cast<uint8_t*>(std::aligned_alloc(64, round_up(bytes, 64)));
    const size_t room = round_up(bytes, kPage) + kHugePage - kPage;
    void* mapped = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    const auto start = reinterpret_cast<uintptr_t>(mapped), first = round_up(start, kHugePage);
    const size_t used = round_up(bytes, kPage);
    if (first > start) munmap(mapped, first - start);
    if (start + room > first + used) munmap(reinterpret_cast<void*>(first + used), start + room - first - used);
    madvise(reinterpret_cast<void*>(first), used, MADV_HUGEPAGE);  // refused: small pages, twice the time to clear them
    return reinterpret_cast<uint8_t*>(first);
}

// `count` <= 32 bits of a row of packed bits, starting at any bit.
uint32_t read_bits(const uint8_t* row, ptrdiff_t row_bytes, int start, int count) {
    uint64_t word = 0;
    const ptrdiff_t byte = start / 8;
    std::memcpy(&word, row + byte, static_cast<size_t>(std::min<ptrdiff_t>(5, row_bytes - byte)));
    return static_cast<uint32_t>((word >> (start % 8)) & ((uint64_t{1} << count) - 1));
}

// The block of 16 rows that starts at row `first` of some planes, of which `rows` exist.
struct Block {
    const Geometry& geometry;
    const uint8_t* planes;
    ptrdiff_t plane_stride;
    int width, first, rows;

    ptrdiff_t row_bytes() const { return geometry.cols / 8; }
    const uint8_t* row(int plane, int r) const {
        return planes + plane * plane_stride + (first + r) * row_bytes();
    }
    // Row and chunk as a word of 32 columns, zeros where there are none.
    uint32_t word(int plane, int r, int chunk) const {
        const int chunks = geometry.padded_group() / kChunkCols, group = chunk / chunks * geometry.group;
        const int col = group + chunk % chunks * kChunkCols;
        const int count = std::min({kChunkCols, group + geometry.group - col, geometry.cols - col});
        return count > 0 ? read_bits(row(plane, r), row_bytes(), col, count) : 0;
    }
};

void pack_block(const KernelTable& kernels, const Block& block, uint8_t* out) {
    const Geometry& geometry = block.geometry;
    const int chunks = geometry.groups() * geometry.padded_group() / kChunkCols, width = block.width;
    int chunk = 0;
    if (block.rows == kBlockRows && geometry.group == geometry.padded_group()) {  // words lie in the planes as they are
        chunk = static_cast<int>(block.row_bytes() / (4 * kPackChunks) * kPackChunks);
        PackJob job{width, {}, block.row_bytes(), chunk, out};
        for (int p = 0; p < width; ++p) job.planes[p] = block.row(p, 0);
        kernels.pack(job);
    }
    for (; chunk < chunks; chunk += kPackChunks) {
        uint32_t words[kMaxComponentWidth][kBlockRows][kPackChunks] = {};
        alignas(64) uint8_t packed[kPackChunks * chunk_bytes(kMaxComponentWidth)];
        const int count = std::min(kPackChunks, chunks - chunk);
        for (int p = 0; p < width; ++p)
            for (int r = 0; r < block.rows; ++r)
                for (int c = 0; c < count; ++c) words[p][r][c] = block.word(p, r, chunk + c);
        PackJob job{width, {}, sizeof words[0][0], kPackChunks, packed};
        for (int p = 0; p < width; ++p) job.planes[p] = reinterpret_cast<const uint8_t*>(words[p]);
        kernels.pack(job);
        for (int line = 0; line < count * width; ++line)
            std::memcpy(out + (static_cast<ptrdiff_t>(chunk) * width + line) * kUnitBlocks * 64,
                        packed + line * kUnitBlocks * 64, 64);
    }
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes), data_(allocate(bytes + kSlack), {bytes + kSlack}) {
    if (!data_) throw std::bad_alloc();
}

void Buffer::Free::operator()(uint8_t* p) const {
    if (bytes < kMapped) std::free(p);
    else munmap(p, round_up(bytes, kPage));
}

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

std::shared_ptr<Buffer> pack_component(const KernelTable& kernels, ThreadPool& pool, const Geometry& geometry,
                                       const uint8_t* planes, ptrdiff_t plane_stride, int width) {
    const size_t unit_bytes = static_cast<size_t>(geometry.groups()) * geometry.padded_group() / kChunkCols *
                              static_cast<size_t>(chunk_bytes(width));
    const int units = geometry.units();
    auto buffer = std::make_shared<Buffer>(units * unit_bytes);
    const int at_most = std::max(1, units / (4 * pool.threads()));
    const int step = std::clamp(static_cast<int>(kTaskBytes / unit_bytes), 1, at_most);
    pool.run((units + step - 1) / step, [&](int task, int) {
        for (int unit = task * step; unit < std::min((task + 1) * step, units); ++unit) {
            for (int block = 0; block < kUnitBlocks; ++block) {
                int rows = 0;
                const int first = geometry.source_row(unit, block * kBlockRows);
                while (rows < kBlockRows && geometry.source_row(unit, block * kBlockRows + rows) >= 0) ++rows;
                pack_block(kernels, {geometry, planes, plane_stride, width, first, rows},
                           buffer->data() + unit * unit_bytes + block * 64);
            }
        }
    });
    return buffer;
}

std::shared_ptr<Buffer> pack_meta(ThreadPool& pool, const Geometry& geometry, const uint16_t* scale,
                                  const uint16_t* offset, int group_size) {
    const int groups = geometry.groups(), stored = (geometry.cols + group_size - 1) / group_size;
    const bool same = geometry.group == group_size;
    const size_t unit_halves = static_cast<size_t>(groups) * 2 * kUnitRows;
    auto buffer = std::make_shared<Buffer>(geometry.units() * unit_halves * 2);
    pool.run(geometry.units(), [&](int unit, int) {
        for (int r = 0; r < kUnitRows; ++r) {
            auto* to = reinterpret_cast<uint16_t*>(buffer->data()) + unit * unit_halves +
                       r / kBlockRows * 2 * kBlockRows + r % kBlockRows;
            const int row = geometry.source_row(unit, r);
            const ptrdiff_t first = static_cast<ptrdiff_t>(row) * stored;
            for (int g = 0, col = 0; g < groups; ++g, col += geometry.group, to += kUnitBlocks * 2 * kBlockRows) {
                const ptrdiff_t at = first + (same ? g : col / group_size);
                to[0] = row < 0 ? 0 : scale[at];
                to[kBlockRows] = row < 0 ? 0 : offset[at];
            }
        }
    });
    return buffer;
}

PackedFp4 pack_fp4(ThreadPool& pool, Geometry& geometry, const uint8_t* codes, const uint8_t* exponents) {
    const auto spread = [](uint32_t four) {  // four codes to the low bits of four bytes
        four = (four | four << 8) & 0x00ff00ffu;
        return (four | four << 4) & 0x0f0f0f0fu;
    };
    const int chunks = geometry.cols / kChunkCols;
    // Four scales of a row as meta data, those of nothing but zeros left out; false where they are too far apart.
    const auto meta_of = [&](int row, int first, int count, uint32_t& meta) {
        int smallest = 0, largest = 0;
        bool counts[kFp4Columns / kFp4Group] = {};
        const uint8_t* exponent = exponents + static_cast<ptrdiff_t>(row) * chunks + first;
        for (int c = 0; c < count; ++c) {
            uint64_t both[2];
            std::memcpy(both, codes + (static_cast<ptrdiff_t>(row) * chunks + first + c) * sizeof both, sizeof both);
            counts[c] = exponent[c] > 1 && ((both[0] | both[1]) & 0x7777777777777777u);
            if (!counts[c]) continue;
            smallest = smallest ? std::min<int>(smallest, exponent[c]) : exponent[c];
            largest = std::max<int>(largest, exponent[c]);
        }
        if (largest - smallest > kFp4MostShift) return false;
        meta = smallest ? (smallest - 1u) << 23 : 0;
        for (int c = 0; c < count; ++c)
            if (counts[c]) meta |= static_cast<uint32_t>(exponent[c] - smallest) << (4 * c);
        return true;
    };
    geometry.ends_with_columns = true;
    for (geometry.group = kFp4Columns;; geometry.group = kFp4Group) {
        const int groups = geometry.groups(), of_group = geometry.group / kChunkCols;
        PackedFp4 packed{std::make_shared<Buffer>(static_cast<size_t>(geometry.units()) * chunks * chunk_bytes(4)),
                         std::make_shared<Buffer>(static_cast<size_t>(geometry.units()) * groups * kUnitRows * 4)};
        std::atomic<bool> fits{true};
        pool.run(geometry.units(), [&](int unit, int) {
            uint8_t* out = packed.codes->data() + static_cast<ptrdiff_t>(unit) * chunks * chunk_bytes(4);
            uint8_t* meta_out = packed.meta->data() + static_cast<ptrdiff_t>(unit) * groups * kUnitRows * 4;
            for (int r = 0; r < kUnitRows && fits; ++r) {
                const int row = geometry.source_row(unit, r);
                for (int g = 0; g < groups; ++g) {
                    uint32_t meta = 0;
                    if (row >= 0 && !meta_of(row, g * of_group, std::min(of_group, chunks - g * of_group), meta)) fits = false;
                    std::memcpy(meta_out + (g * kUnitRows + r) * 4, &meta, 4);
                }
                uint8_t* to = out + r / kBlockRows * 64 + r % kBlockRows * 4;
                for (int i = 0; i < chunks * 4; ++i, to += kUnitBlocks * 64) {  // words of 8 columns, two steps each
                    uint32_t word = 0;
                    const ptrdiff_t at = static_cast<ptrdiff_t>(row) * chunks + i / 4;
                    if (row >= 0 && exponents[at] > 1) std::memcpy(&word, codes + at * 16 + i % 4 * 4, 4);
                    word = spread(word & 0xffffu) | spread(word >> 16) << 4;
                    std::memcpy(to, &word, 4);
                }
            }
        });
        if (fits) return packed;
    }
}

}  // namespace ndp
