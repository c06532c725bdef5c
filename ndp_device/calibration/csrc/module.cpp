// The Python face of both fits: arrays in and out, rows shared out to threads, without the GIL. Its users are
// ../data_free.py (lloyd.h) and ../gptq.py (columns.h).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "columns.h"
#include "lloyd.h"

namespace nb = nanobind;
using namespace ndp;

namespace {

constexpr size_t kRowsAtOnce = 16;  // of a thread's turn: a millisecond or so

template <class T, int DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<DIMENSIONS>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu, nb::ro>;

// The build of `Functions` that was asked for; "auto": the widest that this processor has.
template <class Functions>
const Functions& functions_for(const std::string& isa, const Functions& portable, const Functions* avx2, const Functions* avx512) {
#if defined(__x86_64__)
    const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool wide = fast && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
    if (avx512 && wide && (isa == "auto" || isa == "avx512")) return *avx512;
    if (avx2 && fast && (isa == "auto" || isa == "avx2")) return *avx2;
#endif
    if (isa == "auto" || isa == "portable") return portable;
    throw std::invalid_argument("isa must be one that this processor has: \"auto\", \"avx512\", \"avx2\" or \"portable\", got \"" +
                                isa + "\"");
}
#if defined(__x86_64__)
#define NDP_BUILDS(room) room::portable, &room::avx2, &room::avx512
#else
#define NDP_BUILDS(room) room::portable, nullptr, nullptr
#endif

// Which widths are made, and what an error at each of them costs.
template <class Job>
void set_widths(Job& job, const std::vector<int>& widths, const std::vector<float>& costs) {
    if (widths.empty() || widths.size() != costs.size()) throw std::invalid_argument("wanted one cost per width");
    constexpr int kMaxBits = sizeof job.track / sizeof *job.track;
    std::fill(job.track, job.track + kMaxBits, -1);
    for (size_t i = 0; i < widths.size(); ++i) {
        if (widths[i] <= job.bits || widths[i] > kMaxBits) throw std::invalid_argument("widths must rise from 1 to 4");
        job.bits = widths[i];
        job.cost[job.bits - 1] = costs[i];
        job.track[job.bits - 1] = static_cast<int>(i);
    }
}

template <class Array, class... Sizes>
bool is(const Array& array, Sizes... sizes) {
    const size_t wanted[] = {sizes...};
    for (size_t i = 0; i < sizeof...(sizes); ++i)
        if (array.shape(i) != wanted[i]) return false;
    return true;
}

// A thread's own floats.
struct Room {
    float* floats;
    explicit Room(size_t count) : floats(static_cast<float*>(::operator new(sizeof(float) * count, std::align_val_t{64}))) {}
    ~Room() { ::operator delete(floats, std::align_val_t{64}); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
};

// Calls work(first row, last row, floats) for all rows, from several threads.
template <class Work>
void share_rows(size_t rows, size_t threads, size_t room_floats, const Work& work) {
    if (!threads) throw std::invalid_argument("wanted a thread");
    nb::gil_scoped_release release;
    std::atomic<size_t> next{0};
    const auto run = [&] {
        const Room room(room_floats);
        for (size_t first; (first = next.fetch_add(kRowsAtOnce)) < rows;)
            work(first, std::min(first + kRowsAtOnce, rows), room.floats);
    };
    threads = std::max<size_t>(1, std::min(threads, (rows + kRowsAtOnce - 1) / kRowsAtOnce));
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    try {
        for (size_t i = 1; i < threads; ++i) helpers.emplace_back(run);
    } catch (const std::system_error&) {  // no more threads to be had: the others do it
    }
    run();
    for (auto& helper : helpers) helper.join();
}

// ---- the fit of data-free replicas ---------------------------------------------------------------------------------

data_free::DType dtype_of(const std::string& name, size_t item_bytes) {
    if (name == "float32" && item_bytes == 4) return data_free::DType::kFloat32;
    if (name == "float16" && item_bytes == 2) return data_free::DType::kFloat16;
    if (name == "bfloat16" && item_bytes == 2) return data_free::DType::kBfloat16;
    throw std::invalid_argument("weights must be float32, float16 or bfloat16 (as uint16), got " + name + " of " +
                                std::to_string(item_bytes) + " bytes a value");
}

void fit_matrix(Weights weights, const std::string& dtype, size_t group_size, const std::vector<int>& widths,
                const std::vector<float>& costs, Array<uint8_t, 3> planes, Array<uint16_t, 3> scale,
                Array<uint16_t, 3> offset, size_t threads, const std::string& isa) {
    data_free::Job job{};
    job.dtype = dtype_of(dtype, weights.itemsize());
    job.weights = weights.data();
    job.rows = weights.shape(0);
    job.cols = weights.shape(1);
    job.group_size = group_size;
    if (!group_size || !job.cols || job.cols % 8)
        throw std::invalid_argument("wanted a group size and a multiple of 8 columns, each at least 1");
    set_widths(job, widths, costs);
    const size_t groups = (job.cols - 1) / group_size + 1;
    if (!is(planes, size_t(job.bits), job.rows, job.cols / 8) || !is(scale, widths.size(), job.rows, groups) ||
        !is(offset, widths.size(), job.rows, groups))
        throw std::invalid_argument("planes must be [bits, N, C / 8], scale and offset [widths, N, groups]");
    job.planes = planes.data();
    job.scale = scale.data();
    job.offset = offset.data();
    const auto fit_rows = functions_for(isa, NDP_BUILDS(data_free)).fit_rows;
    const size_t group_floats = (std::min(group_size, job.cols) + 2 * kLanes - 1) / kLanes * kLanes;
    const size_t mask_floats = 2 * data_free::kMaxBits * (group_floats / 64 + 1);
    share_rows(job.rows, threads, group_floats + mask_floats, [&](size_t first, size_t last, float* room) {
        fit_rows(job, first, last, {room, reinterpret_cast<uint64_t*>(room + group_floats)});
    });
}

void dequantize_matrix(Array<const uint8_t, 3> planes, Array<const uint16_t, 2> scale, Array<const uint16_t, 2> offset,
                       size_t group_size, Array<float, 2> values, const std::string& isa) {
    const size_t rows = planes.shape(1), row_bytes = planes.shape(2);
    if (!group_size || group_size % 8)
        throw std::invalid_argument("the group size must be a multiple of 8, at least 8");
    const size_t groups = (row_bytes + group_size / 8 - 1) / (group_size / 8);
    if (!is(scale, rows, groups) || !is(offset, rows, groups) || !is(values, rows, 8 * row_bytes))
        throw std::invalid_argument("scale and offset must be [N, groups], values [N, C] of planes [bits, N, C / 8]");
    const auto dequantize = functions_for(isa, NDP_BUILDS(data_free)).dequantize;
    nb::gil_scoped_release release;
    dequantize({planes.data(), static_cast<int>(planes.shape(0)), rows, 8 * row_bytes, group_size, scale.data(),
                offset.data(), values.data()});
}

// ---- GPTQ's column loop ----------------------------------------------------------------------------------------------

void solve_group(const std::vector<int>& widths, const std::vector<float>& costs, Array<const float, 2> weights,
                 Array<float, 3> product, Array<const float, 2> square, std::optional<Array<const float, 2>> feedback,
                 std::optional<Array<const float, 1>> importance, Array<uint8_t, 2> codes, Array<float, 2> scale,
                 Array<float, 2> offset, int sweeps, size_t threads, const std::string& isa) {
    gptq::Group group{};
    group.rows = weights.shape(0);
    group.columns = weights.shape(1);
    const size_t tracks = widths.size(), n = group.columns;
    if (!n || n % 8 || sweeps < 0) throw std::invalid_argument("wanted columns by eights");
    set_widths(group, widths, costs);
    if (!is(product, tracks, group.rows, n) || !is(square, n, n) || feedback.has_value() != importance.has_value() ||
        (feedback && (!is(*feedback, n, n) || !is(*importance, n))) || !is(codes, group.rows, n) ||
        !is(scale, tracks, group.rows) || !is(offset, tracks, group.rows))
        throw std::invalid_argument("the arrays of a group do not fit each other");
    group.sweeps = sweeps;
    group.weights = weights.data();
    group.product = product.data();
    group.square = square.data();
    group.feedback = feedback ? feedback->data() : nullptr;
    group.importance = importance ? importance->data() : nullptr;
    group.codes = codes.data();
    group.scale = scale.data();
    group.offset = offset.data();
    const gptq::Functions& functions = functions_for(isa, NDP_BUILDS(gptq));
    const auto run = feedback ? functions.quantize : functions.polish;
    share_rows(group.rows, threads, gptq::room_floats(n),
               [&](size_t first, size_t last, float* room) { run(group, first, last, room); });
}

}  // namespace

NB_MODULE(_fits, m) {
    nb::set_leak_warnings(false);  // a calibration ends without a last collection: ../build.py
    m.def("fit_matrix", &fit_matrix, nb::arg("weights"), nb::arg("dtype"), nb::arg("group_size"), nb::arg("widths"),
          nb::arg("costs"), nb::arg("planes"), nb::arg("scale"), nb::arg("offset"), nb::arg("threads"),
          nb::arg("isa") = "auto");
    m.def("dequantize_matrix", &dequantize_matrix, nb::arg("planes"), nb::arg("scale"), nb::arg("offset"),
          nb::arg("group_size"), nb::arg("values"), nb::arg("isa") = "auto");
    m.def("solve_group", &solve_group, nb::arg("widths"), nb::arg("costs"), nb::arg("weights"), nb::arg("product"),
          nb::arg("square"), nb::arg("feedback").none(), nb::arg("importance").none(), nb::arg("codes"),
          nb::arg("scale"), nb::arg("offset"), nb::arg("sweeps"), nb::arg("threads"), nb::arg("isa") = "auto");
}
