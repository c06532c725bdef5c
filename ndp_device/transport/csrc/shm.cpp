// The shared-memory rings (channel.h), a layer's messages in them (layer_messages.h), the thread that sends them
// (sender_thread.h) and the checksum, for Python. Waiting means spinning for a bounded time without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "channel.h"
#include "sender_thread.h"
#include "layer_messages.h"
#include "spin.h"

namespace {

constexpr size_t kMaxSpun = 64;
// Looks until one of the channels has a message, as spin_until.
int spin(nb::list rings, uint64_t timeout_ns) {
    std::array<const Channel*, kMaxSpun> channels;
    const size_t count = rings.size();
    if (count > kMaxSpun) throw std::invalid_argument("too many channels to look at");
    for (size_t i = 0; i < count; ++i) channels[i] = nb::cast<const Channel*>(rings[i]);
    const auto readable = [&] {
        for (size_t i = 0; i < count; ++i)
            if (channels[i]->readable()) return true;
        return false;
    };
    if (readable()) return 1;
    nb::gil_scoped_release release;
    return spin_until(readable, timeout_ns);
}

// What a SenderThread needs: where a packet's parts lie, and how long its rows are.
using Places = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, char, uint64_t, uint64_t, uint64_t>;

void begin(SenderThread& sender, Channel& ring, nb::capsule finder, const Places& places, int64_t layer,
           const Asked& asked, uint64_t spin_ns, uint64_t idle_ns) {
    if (!finder.name() || std::string_view(finder.name()) != kFinder) throw std::invalid_argument("this finds no pairs");
    const auto& [word, ids, weights, x, y, format, row_bytes, rows, hidden] = places;
    const SenderThread::Memory memory{reinterpret_cast<std::atomic<uint32_t>*>(word), reinterpret_cast<const int32_t*>(ids),
                                  reinterpret_cast<const float*>(weights), reinterpret_cast<const char*>(x),
                                  reinterpret_cast<float*>(y), format, row_bytes, rows, hidden};
    sender.begin(ring, *static_cast<const Finder*>(finder.data()), memory, layer, asked, spin_ns, idle_ns);
}

uint32_t sum(uint32_t crc, const View& view) {
    if (view.size() <= kCopyBody) return checksum::sum(crc, view.data(), view.size());
    nb::gil_scoped_release release;
    return checksum::sum(crc, view.data(), view.size());
}

uint32_t crc_of(nb::handle data, uint32_t crc) { return sum(crc, View(data, PyBUF_SIMPLE)); }

// The header with its last bytes replaced by the checksum of what stands before them and of `body`.
nb::object write_checksum(nb::handle header, nb::handle body) {
    const View head(header, PyBUF_SIMPLE), rest(body, PyBUF_SIMPLE);
    const uint64_t before = head.size() < kCrcBytes ? 0 : head.size() - kCrcBytes;
    nb::object result = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(before + kCrcBytes)));
    if (!result.is_valid()) throw nb::python_error();
    char* to = PyBytes_AS_STRING(result.ptr());
    write_crc(to + before, sum(checksum::copy(0, to, head.data(), before), rest));
    return result;
}

bool checksum_fits(nb::handle header, nb::handle body) {
    const View head(header, PyBUF_SIMPLE), rest(body, PyBUF_SIMPLE);
    if (head.size() < kCrcBytes) return false;
    const uint64_t before = head.size() - kCrcBytes;
    return sum(checksum::sum(0, head.data(), before), rest) == read_crc(head.data() + before);
}

}  // namespace

NB_MODULE(_shm, module) {
    nb::set_leak_warnings(false);  // a host that ends while it holds a channel is no news
    nb::class_<Channel>(module, "Channel")
        .def(nb::init<nb::handle, int, int, int, uint32_t, uint64_t, bool>(), nb::arg("mapping"), nb::arg("fd"),
             nb::arg("doorbell_in"), nb::arg("doorbell_out"), nb::arg("num_slots"), nb::arg("body_room"),
             nb::arg("is_device"))
        .def_static("total_bytes", &Channel::total_bytes)
        .def("put", &Channel::put, nb::arg("header"), nb::arg("body"), nb::arg("writes_checksum"))
        .def("take", &Channel::take)
        .def("release", &Channel::release)
        .def("readable", &Channel::readable)
        .def("is_intact", &Channel::is_intact)
        .def("prepare_sleep", &Channel::prepare_sleep)
        .def("awake", &Channel::awake)
        .def_prop_ro("slot_stride", &Channel::slot_stride);
    nb::class_<SenderThread>(module, "SenderThread")
        .def(nb::init<uint16_t>(), nb::arg("version"))
        .def("begin", &begin, nb::arg("ring"), nb::arg("finder"), nb::arg("places"), nb::arg("layer"), nb::arg("asked"),
             nb::arg("spin_ns"), nb::arg("idle_ns"))
        .def("end", &SenderThread::end, nb::arg("timeout_ns"))
        .def("cancel", &SenderThread::cancel);
    module.def("put_execute", &put_execute);
    module.def("take_result", &take_result);
    module.def("read_head", &read_head);
    module.def("result_head", &result_head, nb::arg("version"), nb::arg("id"), nb::arg("incarnation"), nb::arg("epoch"),
               nb::arg("rows"), nb::arg("hidden"), nb::arg("timing").none());
    module.attr("TIMING_KINDS") = kTiming;
    module.attr("MAX_HEADED_BODY_BYTES") = kCopyBody;
    module.def("spin", &spin);
    module.def("crc32", &crc_of, nb::arg("data"), nb::arg("crc") = 0);
    module.def("write_checksum", &write_checksum, nb::arg("header"), nb::arg("body"));
    module.def("checksum_fits", &checksum_fits, nb::arg("header"), nb::arg("body"));
    module.attr("MAX_CHECKED_BODY_BYTES") = kCheckedBody;
}
