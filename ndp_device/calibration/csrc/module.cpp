// The Python face of the fit: arrays in and out, rows shared out to threads, without the GIL. data_free.py is its user.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "lloyd.h"

namespace nb = nanobind;
using namespace ndp::data_free;

namespace {

constexpr size_t kRowsAtOnce = 16;  // of a thread's turn: a millisecond or so

using Weights = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;
template <class T>
using Cube = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

const Functions& functions_for(const std::string& isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2");
    const bool wide = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("f16c");
    if (isa == "auto" && wide) return avx512;
    if (isa == "avx2" && !has_avx2) throw std::invalid_argument("this processor has no AVX2: use isa \"auto\"");
    if (isa == "avx2" || (isa == "auto" && has_avx2)) return avx2;
#endif
    if (isa == "auto" || isa == "portable") return portable;
    throw std::invalid_argument("isa must be \"auto\", \"avx2\" (x86-64 only) or \"portable\", got \"" + isa + "\"");
}

DType dtype_of(const std::string& name, size_t item_bytes) {
    if (name == "float32" && item_bytes == 4) return DType::kFloat32;
    if (name == "float16" && item_bytes == 2) return DType::kFloat16;
    if (name == "bfloat16" && item_bytes == 2) return DType::kBfloat16;
    throw std::invalid_argument("weights must be float32, float16 or bfloat16 (as uint16), got " + name + " of " +
                                std::to_string(item_bytes) + " bytes a value");
}

void fit_matrix(Weights weights, const std::string& dtype, size_t group_size, const std::vector<int>& widths,
                const std::vector<float>& costs, Cube<uint8_t> planes, Cube<uint16_t> scale, Cube<uint16_t> offset,
                size_t threads, const std::string& isa) {
    Job job{};
    job.dtype = dtype_of(dtype, weights.itemsize());
    job.weights = weights.data();
    job.rows = weights.shape(0);
    job.cols = weights.shape(1);
    job.group_size = group_size;
    if (widths.empty() || widths.size() != costs.size() || !group_size || !threads || !job.cols || job.cols % 8)
        throw std::invalid_argument(
            "wanted one cost per width, a group size, a thread and a multiple of 8 columns, each at least 1");
    std::fill(job.track, job.track + kMaxBits, -1);
    for (size_t i = 0; i < widths.size(); ++i) {
        if (widths[i] <= job.bits || widths[i] > kMaxBits) throw std::invalid_argument("widths must rise from 1 to 4");
        job.bits = widths[i];
        job.cost[job.bits - 1] = costs[i];
        job.track[job.bits - 1] = static_cast<int>(i);
    }
    const size_t groups = (job.cols - 1) / group_size + 1;
    const auto is = [](const auto& array, size_t a, size_t b, size_t c) {
        return array.shape(0) == a && array.shape(1) == b && array.shape(2) == c;
    };
    if (!is(planes, static_cast<size_t>(job.bits), job.rows, job.cols / 8) ||
        !is(scale, widths.size(), job.rows, groups) || !is(offset, widths.size(), job.rows, groups))
        throw std::invalid_argument("planes must be [bits, N, C / 8], scale and offset [widths, N, groups]");
    job.planes = planes.data();
    job.scale = scale.data();
    job.offset = offset.data();
    const auto fit_rows = functions_for(isa).fit_rows;

    nb::gil_scoped_release release;
    std::atomic<size_t> next{0};
    const auto work = [&](std::vector<float>& group, std::vector<uint64_t>& masks) {
        for (size_t first; (first = next.fetch_add(kRowsAtOnce)) < job.rows;)
            fit_rows(job, first, std::min(first + kRowsAtOnce, job.rows), {group.data(), masks.data()});
    };
    threads = std::max<size_t>(1, std::min(threads, (job.rows + kRowsAtOnce - 1) / kRowsAtOnce));
    std::vector<std::vector<float>> groups_room(threads, std::vector<float>(std::min(group_size, job.cols) + kLanes));
    std::vector<std::vector<uint64_t>> masks_room(threads, std::vector<uint64_t>(kMaxBits * (groups_room[0].size() / 64 + 1)));
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    try {
        for (size_t i = 1; i < threads; ++i)
            helpers.emplace_back(work, std::ref(groups_room[i]), std::ref(masks_room[i]));
    } catch (const std::system_error&) {  // no more threads to be had: the others do it
    }
    work(groups_room[0], masks_room[0]);
    for (auto& helper : helpers) helper.join();
}

template <class T>
using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void dequantize_matrix(Cube<const uint8_t> planes, Table<const uint16_t> scale, Table<const uint16_t> offset,
                       size_t group_size, Table<float> values, const std::string& isa) {
    const size_t rows = planes.shape(1), row_bytes = planes.shape(2);
    if (!group_size || group_size % 8)
        throw std::invalid_argument("the group size must be a multiple of 8, at least 8");
    const size_t groups = (row_bytes + group_size / 8 - 1) / (group_size / 8);
    const auto is = [rows](const auto& array, size_t columns) {
        return array.shape(0) == rows && array.shape(1) == columns;
    };
    if (!is(scale, groups) || !is(offset, groups) || !is(values, 8 * row_bytes))
        throw std::invalid_argument("scale and offset must be [N, groups], values [N, C] of planes [bits, N, C / 8]");
    const auto dequantize = functions_for(isa).dequantize;
    nb::gil_scoped_release release;
    dequantize({planes.data(), static_cast<int>(planes.shape(0)), rows, 8 * row_bytes, group_size, scale.data(),
                offset.data(), values.data()});
}

}  // namespace

NB_MODULE(_data_free, m) {
    m.def("fit_matrix", &fit_matrix, nb::arg("weights"), nb::arg("dtype"), nb::arg("group_size"), nb::arg("widths"),
          nb::arg("costs"), nb::arg("planes"), nb::arg("scale"), nb::arg("offset"), nb::arg("threads"),
          nb::arg("isa") = "auto");
    m.def("dequantize_matrix", &dequantize_matrix, nb::arg("planes"), nb::arg("scale"), nb::arg("offset"),
          nb::arg("group_size"), nb::arg("values"), nb::arg("isa") = "auto");
}
