// The Python face of GPTQ's column loop: arrays in and out, rows shared out to threads, without the GIL. ../gptq.py is
// its user.
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

namespace nb = nanobind;
using namespace ndp::gptq;

namespace {

constexpr size_t kRowsAtOnce = 16;

template <class T, int DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<DIMENSIONS>, nb::c_contig, nb::device::cpu>;

const Functions& functions_for(const std::string& isa) {
#if defined(__x86_64__)
    const bool fast = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == "avx2" && !fast) throw std::invalid_argument("this processor has no AVX2 with FMA: use isa \"auto\"");
    const bool wide = fast && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
    if (isa == "avx512" && !wide) throw std::invalid_argument("this processor has no AVX-512: use isa \"auto\"");
    if (isa == "avx512" || (isa == "auto" && wide)) return avx512;
    if (isa == "avx2" || (isa == "auto" && fast)) return avx2;
#endif
    if (isa == "auto" || isa == "portable") return portable;
    throw std::invalid_argument("isa must be \"auto\", \"avx512\", \"avx2\" (x86-64 only) or \"portable\", got \"" + isa + "\"");
}

struct Room {
    float* floats;
    explicit Room(size_t columns)
        : floats(static_cast<float*>(::operator new(sizeof(float) * room_floats(columns), std::align_val_t{64}))) {}
    ~Room() { ::operator delete(floats, std::align_val_t{64}); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
};

void solve_group(const std::vector<int>& widths, const std::vector<float>& costs, Array<const float, 2> weights,
                 Array<float, 3> product, Array<const float, 2> square, std::optional<Array<const float, 2>> feedback,
                 std::optional<Array<const float, 1>> importance, Array<uint8_t, 2> codes, Array<float, 2> scale,
                 Array<float, 2> offset, int sweeps, size_t threads, const std::string& isa) {
    Group group{};
    group.rows = weights.shape(0);
    group.columns = weights.shape(1);
    const size_t tracks = widths.size(), n = group.columns;
    if (widths.empty() || tracks != costs.size() || !threads || !n || n % 8 || sweeps < 0)
        throw std::invalid_argument("wanted one cost per width, a thread, and columns by eights");
    std::fill(group.track, group.track + kMaxBits, -1);
    for (size_t i = 0; i < tracks; ++i) {
        if (widths[i] <= group.bits || widths[i] > kMaxBits) throw std::invalid_argument("widths must rise from 1 to 4");
        group.bits = widths[i];
        group.cost[group.bits - 1] = costs[i];
        group.track[group.bits - 1] = static_cast<int>(i);
    }
    const auto is = [](const auto& array, size_t a, size_t b) { return array.shape(0) == a && array.shape(1) == b; };
    if (product.shape(0) != tracks || product.shape(1) != group.rows || product.shape(2) != n || !is(square, n, n) ||
        feedback.has_value() != importance.has_value() ||
        (feedback && (!is(*feedback, n, n) || importance->shape(0) != n)) || !is(codes, group.rows, n) ||
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
    const Functions& functions = functions_for(isa);
    const auto run = feedback ? functions.quantize : functions.polish;

    nb::gil_scoped_release release;
    std::atomic<size_t> next{0};
    const auto work = [&] {
        const Room room(n);
        for (size_t first; (first = next.fetch_add(kRowsAtOnce)) < group.rows;)
            run(group, first, std::min(first + kRowsAtOnce, group.rows), room.floats);
    };
    threads = std::max<size_t>(1, std::min(threads, (group.rows + kRowsAtOnce - 1) / kRowsAtOnce));
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    try {
        for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads to be had: the others do it
    }
    work();
    for (auto& helper : helpers) helper.join();
}

}  // namespace

NB_MODULE(_gptq, m) {
    nb::set_leak_warnings(false);  // a calibration ends without a last collection: ../build.py
    m.def("solve_group", &solve_group, nb::arg("widths"), nb::arg("costs"), nb::arg("weights"), nb::arg("product"),
          nb::arg("square"), nb::arg("feedback").none(), nb::arg("importance").none(), nb::arg("codes"),
          nb::arg("scale"), nb::arg("offset"), nb::arg("sweeps"), nb::arg("threads"), nb::arg("isa") = "auto");
}
