// A layer's two messages with heads of fixed size: an Execute is written into its slot, a Result read from it, in one call
// each, and nothing of MessagePack is made or parsed on the way.
//
// This is the one place that says how the heads lie in memory; docs/protocol.md describes them. A Result is taken if it is
// exactly as it should be; anything else stays where it lies, for the codec to judge. Does not know what was asked, nor which
// simulated times are possible.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "channel.h"

namespace {

constexpr uint64_t kAlignment = 64;  // as messages.ALIGNMENT
constexpr char kZeros[kAlignment] = {};

// No map of MessagePack begins with such a byte.
constexpr uint8_t kExecute = 1, kResult = 2;

// Values of both kinds. `format`: of x, as Python's buffers name it; of a Result 'f'.
struct LayerHead {
    uint8_t kind;
    char format;
    uint16_t version;  // as `ndp` of a MessagePack header
    uint32_t has_timing;
    uint64_t id, epoch, rows, hidden;
};

// What a host asks: the fields of messages.Execute in their order.
constexpr size_t kAsked = 6;
using Asked = std::array<uint64_t, kAsked>;  // id, epoch, layer, step, submit_ps, ttl_us

struct ExecuteHead {
    LayerHead of;
    uint64_t layer, step, submit_ps, ttl_us, pairs;
    uint32_t zero, crc;
};

// The fields of work.Timing in their order: i a number, f a real, s a text, which zeros fill up.
constexpr char kTiming[] = "iiiiiiiiiiiiiisiiiiiffiss";
constexpr size_t kTextRoom = 32;
constexpr size_t timing_bytes() {
    size_t bytes = 0;
    for (const char* kind = kTiming; *kind; ++kind) bytes += *kind == 's' ? kTextRoom : 8;
    return bytes;
}

struct ResultHead {
    LayerHead of;
    char incarnation[kTextRoom];
    char timing[timing_bytes()];  // zeros where there is none
    uint32_t zero, crc;
};
static_assert(sizeof(ExecuteHead) == 88 && sizeof(ResultHead) == 352, "the heads are what docs/protocol.md says");
static_assert(offsetof(ExecuteHead, crc) + kCrcBytes == sizeof(ExecuteHead) &&
              offsetof(ResultHead, crc) + kCrcBytes == sizeof(ResultHead), "a header ends with its checksum");

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::string_view text_in(const char* from) { return {from, strnlen(from, kTextRoom)}; }
bool is_ascii(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char letter) { return static_cast<uint8_t>(letter) < 0x80; });
}

// Whether the values are such that a message may have: numbers below 2^63, texts of ASCII.
bool is_legal(const LayerHead& of) { return of.id <= INT64_MAX && of.epoch <= INT64_MAX && of.has_timing <= 1; }
bool is_legal(const ExecuteHead& head) {
    return is_legal(head.of) && head.layer <= INT64_MAX && head.step <= INT64_MAX && head.submit_ps <= INT64_MAX &&
           head.ttl_us <= INT64_MAX && static_cast<uint8_t>(head.of.format) < 0x80;
}
bool is_legal(const ResultHead& head) {
    bool legal = is_legal(head.of) && is_ascii(text_in(head.incarnation));
    const char* at = head.timing;
    for (const char* kind = kTiming; *kind; at += *kind++ == 's' ? kTextRoom : 8)
        if (*kind == 's') legal &= is_ascii(text_in(at));
    return legal;
}

bool has_finite(const char* values, uint64_t count) {
    constexpr uint32_t kExponent = 0x7f800000;
    bool finite = true;
    for (uint64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i * sizeof bits, sizeof bits);
        finite &= (bits & kExponent) != kExponent;
    }
    return finite;
}

// x [T, H] of one format; rows, experts, bits and gates [P].
struct ExecuteTensors {
    char format;
    uint64_t rows, hidden, pairs;
    std::array<std::string_view, 5> parts;
};

// Publishes an Execute. 0: it does not go this way; else as Channel::publish.
int write_execute(Channel& ring, uint16_t version, const Asked& asked, const ExecuteTensors& of) {
    uint64_t end = 0;
    for (const std::string_view& part : of.parts) end = aligned(end + part.size());
    if (end > kCopyBody) return 0;
    Channel::Slot to;
    try {
        to = ring.claim(sizeof(ExecuteHead), end);
    } catch (const std::invalid_argument&) {  // the carrier will say so
    }
    if (!to.head) return 0;
    const ExecuteHead head{{kExecute, of.format, version, 0, asked[0], asked[1], of.rows, of.hidden},
                           asked[2], asked[3], asked[4], asked[5], of.pairs, 0, 0};
    uint32_t crc = checksum::copy(0, to.head, &head, offsetof(ExecuteHead, crc));
    const auto copy = [&](const char* from, uint64_t bytes) {
        if (end <= kCheckedBody)
            crc = checksum::copy(crc, to.body, from, bytes);
        else if (bytes)
            std::memcpy(to.body, from, bytes);
        to.body += bytes;
    };
    for (const std::string_view& part : of.parts) {
        copy(part.data(), part.size());
        copy(kZeros, aligned(part.size()) - part.size());
    }
    write_crc(to.head + offsetof(ExecuteHead, crc), crc);
    return ring.publish();
}

// A Result that was found in a ring, and its checksum so far.
struct FoundResult {
    ResultHead head;
    Channel::Message message;
    uint32_t crc;
};

// Whether the next message has the head of a sound Result of this major version, whose body has the right size.
bool look_at_result(const Channel& ring, uint64_t major, FoundResult& found) {
    try {
        if (!ring.look(found.message)) return false;
    } catch (const std::invalid_argument&) {  // the carrier will say so
        return false;
    }
    if (found.message.head_bytes != sizeof(ResultHead) || found.message.body_bytes > kCopyBody) return false;
    found.crc = checksum::copy(0, &found.head, found.message.head, offsetof(ResultHead, crc));
    std::memcpy(&found.head.crc, found.message.head + offsetof(ResultHead, crc), kCrcBytes);
    const LayerHead& of = found.head.of;
    return of.kind == kResult && of.version >> 8 == major && is_legal(found.head) && of.rows && of.hidden && of.rows <= kCopyBody &&
           of.hidden <= kCopyBody && aligned(of.rows * of.hidden * sizeof(float)) == found.message.body_bytes;
}

// Takes the message that was found if its sums are sound, with them in `to`.
bool land_result(Channel& ring, FoundResult& found, char* to) {
    const uint64_t count = found.head.of.rows * found.head.of.hidden, bytes = count * sizeof(float);
    const Channel::Message& from = found.message;
    if (from.body_bytes <= kCheckedBody) {
        found.crc = checksum::copy(found.crc, to, from.body, bytes);
        found.crc = checksum::sum(found.crc, from.body + bytes, from.body_bytes - bytes);
    } else {
        std::memcpy(to, from.body, bytes);
    }
    const bool sound = found.crc == read_crc(reinterpret_cast<const char*>(&found.head.crc)) && has_finite(to, count);
    if (sound) ring.accept();
    return sound;
}

// Both, for y [rows, hidden] with room for so many.
bool read_result(Channel& ring, uint64_t major, uint64_t most_rows, uint64_t hidden, float* y, FoundResult& found) {
    return look_at_result(ring, major, found) && found.head.of.rows <= most_rows && found.head.of.hidden == hidden &&
           land_result(ring, found, reinterpret_cast<char*>(y));
}

// -- for Python ------------------------------------------------------------------------------------------------------

// A C-contiguous array of Python's; `is` of nothing where the object is none.
class Array {
public:
    explicit Array(nb::handle object) {
        held_ = !PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
        if (!held_) PyErr_Clear();
    }
    ~Array() {
        if (held_) PyBuffer_Release(&buffer_);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    bool is(const char* formats, int rank) const {
        return held_ && buffer_.ndim == rank && format() && std::strchr(formats, format());
    }
    char format() const {
        return held_ && buffer_.format && buffer_.format[0] && !buffer_.format[1] ? buffer_.format[0] : '\0';
    }
    uint64_t shape(int axis) const { return static_cast<uint64_t>(buffer_.shape[axis]); }
    std::string_view bytes() const { return {static_cast<const char*>(buffer_.buf), static_cast<size_t>(buffer_.len)}; }

private:
    Py_buffer buffer_;
    bool held_;
};

// write_execute of Python's arrays.
int put_execute(Channel& ring, uint16_t version, const Asked& asked, nb::handle x, nb::handle rows, nb::handle experts,
                nb::handle bits, nb::handle gates) {
    const std::array<Array, 5> arrays{Array(x), Array(rows), Array(experts), Array(bits), Array(gates)};
    constexpr std::array<const char*, 5> kFormats{"fHe", "i", "i", "B", "f"};
    if (!arrays[0].is(kFormats[0], 2)) return 0;
    for (size_t i = 1; i < arrays.size(); ++i)
        if (!arrays[i].is(kFormats[i], 1) || arrays[i].shape(0) != arrays[1].shape(0)) return 0;
    ExecuteTensors of{arrays[0].format(), arrays[0].shape(0), arrays[0].shape(1), arrays[1].shape(0), {}};
    for (size_t i = 0; i < arrays.size(); ++i) of.parts[i] = arrays[i].bytes();
    return write_execute(ring, version, asked, of);
}

nb::object string_of(std::string_view text) { return nb::str(text.data(), text.size()); }

// (version, id, incarnation, epoch, T, H, values of its timing or None). Its texts are ASCII.
nb::object described(const ResultHead& head) {
    nb::object timing = nb::none();
    if (head.of.has_timing) {
        constexpr size_t kFields = sizeof kTiming - 1;
        timing = nb::steal(PyTuple_New(kFields));
        if (!timing.is_valid()) throw nb::python_error();
        const char* at = head.timing;
        for (size_t i = 0; i < kFields; ++i) {
            nb::object value;
            if (kTiming[i] == 's') {
                value = string_of(text_in(at));
                at += kTextRoom;
            } else {
                uint64_t number;
                double real;
                std::memcpy(&number, at, 8);
                std::memcpy(&real, at, 8);
                value = kTiming[i] == 'i' ? nb::object(nb::int_(number)) : nb::object(nb::float_(real));
                at += 8;
            }
            PyTuple_SET_ITEM(timing.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr());
        }
    }
    return nb::make_tuple(head.of.version, head.of.id, string_of(text_in(head.incarnation)), head.of.epoch, head.of.rows,
                          head.of.hidden, timing);
}

// None, and nothing was taken. Or as `described`, and y as bytes: the next message is a Result of T rows, all finite.
nb::object take_result(Channel& ring, uint64_t major) {
    FoundResult found;
    if (!look_at_result(ring, major, found)) return nb::none();
    const uint64_t bytes = found.head.of.rows * found.head.of.hidden * sizeof(float);
    nb::object sums = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
    if (!sums.is_valid()) throw nb::python_error();
    if (!land_result(ring, found, PyByteArray_AS_STRING(sums.ptr()))) return nb::none();
    return nb::make_tuple(described(found.head), sums);
}

// A header with the fields of an Execute: (version, id, epoch, layer, step, submit_ps, ttl_us, format, T, H, P); of a Result: as
// `described`. None: it is neither.
nb::object read_head(nb::handle header) {
    const View view(header, PyBUF_SIMPLE);
    const uint8_t kind = view.size() ? static_cast<uint8_t>(view.data()[0]) : 0;
    if (kind == kExecute && view.size() == sizeof(ExecuteHead)) {
        ExecuteHead head;
        std::memcpy(&head, view.data(), sizeof head);
        if (!is_legal(head)) return nb::none();
        return nb::make_tuple(head.of.version, head.of.id, head.of.epoch, head.layer, head.step, head.submit_ps, head.ttl_us,
                              string_of({&head.of.format, 1}), head.of.rows, head.of.hidden, head.pairs);
    }
    if (kind == kResult && view.size() == sizeof(ResultHead)) {
        ResultHead head;
        std::memcpy(&head, view.data(), sizeof head);
        if (is_legal(head)) return described(head);
    }
    return nb::none();
}

bool fill_text(char* to, nb::handle text) {
    Py_ssize_t bytes;
    const char* from = PyUnicode_AsUTF8AndSize(text.ptr(), &bytes);
    if (!from) throw nb::python_error();
    const bool fits = static_cast<size_t>(bytes) <= kTextRoom && std::memchr(from, 0, static_cast<size_t>(bytes)) == nullptr &&
                      is_ascii({from, static_cast<size_t>(bytes)});
    if (fits) std::memcpy(to, from, static_cast<size_t>(bytes));
    return fits;
}

// The head of a Result, its checksum still 0. None: some value has no room in it. timing: its values, or None.
nb::object result_head(uint16_t version, uint64_t id, nb::handle incarnation, uint64_t epoch, uint64_t rows, uint64_t hidden,
                       nb::handle timing) {
    ResultHead head{};
    head.of = {kResult, 'f', version, !timing.is_none(), id, epoch, rows, hidden};
    if (!fill_text(head.incarnation, incarnation)) return nb::none();
    if (!timing.is_none()) {
        const nb::tuple values = nb::borrow<nb::tuple>(timing);
        if (values.size() != sizeof kTiming - 1) throw std::invalid_argument("a timing has other fields");
        char* at = head.timing;
        for (size_t i = 0; i < values.size(); ++i) {
            if (kTiming[i] == 's') {
                if (!fill_text(at, values[i])) return nb::none();
                at += kTextRoom;
                continue;
            }
            if (kTiming[i] == 'i') {
                uint64_t number;
                if (!nb::try_cast<uint64_t>(values[i], number)) return nb::none();
                std::memcpy(at, &number, 8);
            } else {
                const double real = nb::cast<double>(values[i]);
                std::memcpy(at, &real, 8);
            }
            at += 8;
        }
    }
    return nb::bytes(&head, sizeof head);
}

}  // namespace
