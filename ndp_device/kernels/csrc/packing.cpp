#include "packing.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

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

template <int COLUMNS>
constexpr uint8_t kFp4Least = COLUMNS == kMxfp4 ? 2 : 1;  // smaller scales count as zero

// A scale of FP4 codes as a whole number, of 4 bits, times a power of two; 0: of nothing but zeros.
struct Scale {
    uint32_t factor;
    int exponent;
};

template <int COLUMNS>
Scale scale_of(const uint8_t* codes, uint8_t bits) {
    uint64_t values[COLUMNS / 16], any = 0;
    std::memcpy(values, codes, sizeof values);
    for (uint64_t eight : values) any |= eight & 0x7777777777777777u;
    if (!any || bits < kFp4Least<COLUMNS>) return {0, 0};
    if constexpr (COLUMNS == kMxfp4) return {1, bits};
    return {bits % 8u + (bits < 8 ? 0 : 8), std::max(bits / 8, 1)};
}

// Meta data of `count` scales of a row in a group, see QuantizedView; false where they are too far apart for sums of 32 bits.
template <int COLUMNS>
bool write_scales(const uint8_t* codes, const uint8_t* bits, int count, int group, float of_row, uint8_t* block, int row) {
    Scale scales[kFp4Columns / COLUMNS] = {};
    int smallest = 0, largest = 0;
    for (int i = 0; i < count; ++i) {
        scales[i] = scale_of<COLUMNS>(codes + i * (COLUMNS / 2), bits[i]);
        if (!scales[i].factor) continue;
        smallest = smallest ? std::min(smallest, scales[i].exponent) : scales[i].exponent;
        largest = std::max(largest, scales[i].exponent);
    }
    constexpr int64_t kMost = int64_t{kFp4Zero} * kTopLimb * (COLUMNS == kMxfp4 ? 1 : 15);
    if (largest - smallest > 15 || group * kMost << (largest - smallest) > INT32_MAX) return false;
    uint32_t word = smallest ? (smallest - 1u) << 23 : 0;
    const float half = smallest ? std::ldexp(of_row, smallest - 11) : 0.0f;  // E4M3 is 2^-10 of the whole number; levels are halves
    if constexpr (COLUMNS == kNvfp4) std::memcpy(&word, &half, 4);
    for (int i = 0; i < kFp4Columns / COLUMNS; ++i) {
        const uint32_t shift = scales[i].factor ? scales[i].exponent - smallest : 0;
        if constexpr (COLUMNS == kMxfp4) word |= shift << (4 * i);
        else block[4 * kBlockRows + i * kBlockRows + row] = static_cast<uint8_t>(scales[i].factor | shift << 4);
    }
    std::memcpy(block + 4 * row, &word, 4);
    return true;
}

template <int COLUMNS>
Packed pack_scaled(ThreadPool& pool, Geometry& geometry, const uint8_t* codes, const uint8_t* scales,
                      const float* of_rows) {
    const auto spread = [](uint32_t four) {  // four codes to the low bits of four bytes
        four = (four | four << 8) & 0x00ff00ffu;
        return (four | four << 4) & 0x0f0f0f0fu;
    };
    constexpr int kBlockBytes = (COLUMNS == kMxfp4 ? 4 : 4 + kFp4Columns / COLUMNS) * kBlockRows;
    const ptrdiff_t per_row = geometry.cols / COLUMNS;
    for (const int group : {kFp4Columns, kChunkCols, COLUMNS}) {  // the last one holds a scale of its own
        geometry.group = group;
        geometry.ends_with_columns = group % kChunkCols == 0;
        const int groups = geometry.groups(), chunks = geometry.unit_chunks(), of_group = geometry.padded_group() / kChunkCols;
        const ptrdiff_t code_bytes = static_cast<ptrdiff_t>(chunks) * chunk_bytes(4);
        const ptrdiff_t meta_bytes = static_cast<ptrdiff_t>(groups) * kBlockBytes * kUnitBlocks;
        Packed packed{std::make_shared<Buffer>(geometry.units() * code_bytes),
                         std::make_shared<Buffer>(geometry.units() * meta_bytes)};
        std::atomic<bool> fits{true};
        pool.run(geometry.units(), [&](int unit, int) {
            std::memset(packed.meta->data() + unit * meta_bytes, 0, meta_bytes);
            int row_of[kUnitRows];
            for (int r = 0; r < kUnitRows; ++r) row_of[r] = geometry.source_row(unit, r);
            for (int g = 0; g < groups && fits; ++g)  // all rows of a group: their words lie side by side
                for (int r = 0; r < kUnitRows; ++r) {
                    const int row = row_of[r], words = std::min(of_group, chunks - g * of_group) * 4;
                    const ptrdiff_t first = row * per_row + g * (group / COLUMNS);
                    const int count = std::min<int>(group, geometry.cols - g * group) / COLUMNS;
                    uint8_t* block = packed.meta->data() + unit * meta_bytes + (g * kUnitBlocks + r / kBlockRows) * kBlockBytes;
                    if (row >= 0 && !write_scales<COLUMNS>(codes + first * (COLUMNS / 2), scales + first, count, group,
                                                           of_rows ? of_rows[row] : 1.0f, block, r % kBlockRows))
                        fits = false;
                    uint8_t* to = packed.codes->data() + unit * code_bytes + r / kBlockRows * 64 + r % kBlockRows * 4 +
                                  static_cast<ptrdiff_t>(g) * of_group * 4 * kUnitBlocks * 64;
                    for (int i = 0; i < words; ++i, to += kUnitBlocks * 64) {  // words of 8 columns, two steps each
                        uint32_t word = 0;
                        if (row >= 0 && i * 8 < group && scales[first + i * 8 / COLUMNS] >= kFp4Least<COLUMNS>)
                            std::memcpy(&word, codes + first * (COLUMNS / 2) + i * 4, 4);
                        word = spread(word & 0xffffu) | spread(word >> 16) << 4;
                        std::memcpy(to, &word, 4);
                    }
                }
        });
        if (fits) return packed;
    }
    throw std::invalid_argument("a single scale of FP4 codes always fits");
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

Packed pack_fp4(ThreadPool& pool, Geometry& geometry, const uint8_t* codes, const uint8_t* scales, const float* of_rows) {
    return (of_rows ? pack_scaled<kNvfp4> : pack_scaled<kMxfp4>)(pool, geometry, codes, scales, of_rows);
}

Packed pack_bytes(ThreadPool& pool, Geometry& geometry, const FullView& source) {
    const BlockScales& s = source.scales;
    const bool is_int8 = source.dtype == DType::int8;
    int group = std::min(geometry.padded_group(), kMostByteColumns);
    while (s.cols < source.cols && s.cols % group) --group;
    geometry.group = group;
    const int groups = geometry.groups(), padded = geometry.padded_group();
    const int width = is_int8 ? 4 : 2;  // columns of a row side by side
    const uint32_t zero = is_int8 ? kSignedZero * 0x01010101u : 0;
    const size_t tasks = static_cast<size_t>(geometry.units()) * groups, task_bytes = static_cast<size_t>(padded) * kUnitRows;
    Packed packed{std::make_shared<Buffer>(tasks * task_bytes), std::make_shared<Buffer>(tasks * kUnitRows * sizeof(float))};
    pool.run(static_cast<int>(tasks), [&](int task, int) {
        const int first = task % groups * group, last = std::min(first + group, source.cols);
        uint8_t* to = packed.codes->data() + task * task_bytes;
        auto* scale = reinterpret_cast<float*>(packed.meta->data()) + static_cast<ptrdiff_t>(task) * kUnitRows;
        std::memset(to, static_cast<uint8_t>(zero), task_bytes);
        for (int r = 0; r < kUnitRows; ++r) {
            const int row = geometry.source_row(task / groups, r), second = row >= source.num_rows;
            scale[r] = 0.0f;
            if (row < 0) continue;
            const ptrdiff_t within = row - second * source.num_rows;
            const auto* codes = static_cast<const uint8_t*>(second ? source.second : source.first) + within * source.cols;
            scale[r] = ((second ? s.second : s.first) + within / s.rows * s.across)[first / s.cols] * (is_int8 ? 1.0f : 256.0f);
            for (int col = first; col < last; col += 4) {
                uint32_t word = 0;
                if (col + 4 <= last) std::memcpy(&word, codes + col, 4);
                else std::memcpy(&word, codes + col, last - col);
                word ^= zero;
                uint8_t* at = to + (col - first) * kUnitRows + r * width;
                std::memcpy(at, &word, 2);
                std::memcpy(at + (is_int8 ? 2 : 2 * kUnitRows), reinterpret_cast<char*>(&word) + 2, 2);
            }
        }
    });
    return packed;
}

}  // namespace ndp
