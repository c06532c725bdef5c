// A layer's two messages without the codec: an Execute is written into its slot, a Result read from it, in one call each.
//
// protocol/messages.py says what they are, and its encoder made the header that an Execute is written from. A Result is
// taken if it is exactly as it should be; anything else stays where it lies, for the codec to judge. Knows MessagePack as
// far as a Result needs it. Does not know what was asked, nor which simulated times are possible.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "channel.h"

namespace {

constexpr uint64_t kAlignment = 64;  // as messages.ALIGNMENT
constexpr Py_ssize_t kShortText = 256;  // as messages.ShortText
constexpr char kZeros[kAlignment] = {};

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

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
    bool is(char format, int rank) const { return held_ && buffer_.ndim == rank && this->format() == format; }
    char format() const {
        return held_ && buffer_.format && buffer_.format[0] && !buffer_.format[1] ? buffer_.format[0] : '\0';
    }
    uint64_t shape(int axis) const { return static_cast<uint64_t>(buffer_.shape[axis]); }
    const char* data() const { return static_cast<const char*>(buffer_.buf); }
    uint64_t size() const { return static_cast<uint64_t>(buffer_.len); }

private:
    Py_buffer buffer_;
    bool held_;
};

class Executes {
public:
    // For activations of one format, as Python's buffers name it: an encoded header, and where the eight bytes of a number
    // stand in it, with which number that is: id, epoch, layer, step, submit_ps, ttl_us, T, H, P, four offsets.
    using Head = std::tuple<std::string, nb::bytes, std::vector<std::pair<uint32_t, uint32_t>>>;
    static constexpr size_t kAsked = 6, kNumbers = 13;

    explicit Executes(std::vector<Head> heads) : heads_(std::move(heads)) {
        for (const auto& [format, bytes, places] : heads_) {
            if (format.size() != 1 || bytes.size() > kHeaderRoom || bytes.size() < kCrcBytes)
                throw std::invalid_argument("a header cannot be");
            for (const auto& [at, which] : places)
                if (at + 8 > bytes.size() - kCrcBytes || which >= kNumbers)
                    throw std::invalid_argument("a number lies outside of its header");
        }
    }

    // x [T, H]; rows, experts, bits and gates [P]. 0: it does not go this way; else as Channel::publish.
    int put(Channel& ring, const std::array<uint64_t, kAsked>& asked, nb::handle x, nb::handle rows, nb::handle experts,
            nb::handle bits, nb::handle gates) const {
        const std::array<Array, 5> parts{Array(x), Array(rows), Array(experts), Array(bits), Array(gates)};
        const Head* head = nullptr;
        for (const Head& each : heads_)
            if (parts[0].is(std::get<0>(each)[0], 2)) head = &each;
        if (!head || !parts[1].is('i', 1) || !parts[2].is('i', 1) || !parts[3].is('B', 1) || !parts[4].is('f', 1)) return 0;
        const uint64_t pairs = parts[1].shape(0);
        std::array<uint64_t, kNumbers> numbers;
        std::copy(asked.begin(), asked.end(), numbers.begin());
        numbers[6] = parts[0].shape(0);
        numbers[7] = parts[0].shape(1);
        numbers[8] = pairs;
        uint64_t end = aligned(parts[0].size());
        for (size_t i = 1; i < parts.size(); ++i) {
            if (parts[i].shape(0) != pairs) return 0;
            numbers[8 + i] = end;
            end = aligned(end + parts[i].size());
        }
        if (end > kCopyBody) return 0;
        const nb::bytes& header = std::get<1>(*head);
        Channel::Slot to;
        try {
            to = ring.claim(header.size(), end);
        } catch (const std::invalid_argument&) {  // the carrier will say so
        }
        if (!to.head) return 0;
        char patched[kHeaderRoom];
        std::memcpy(patched, header.c_str(), header.size());
        for (const auto& [at, which] : std::get<2>(*head))
            for (int byte = 0; byte < 8; ++byte) patched[at + byte] = static_cast<char>(numbers[which] >> (56 - 8 * byte));
        const uint64_t before = header.size() - kCrcBytes;
        uint32_t crc = checksum::copy(0, to.head, patched, before);
        for (const Array& part : parts) {
            crc = copied(crc, to.body, part.data(), part.size(), end);
            crc = copied(crc, to.body, kZeros, aligned(part.size()) - part.size(), end);
        }
        write_crc(to.head + before, crc);
        return ring.publish();
    }

private:
    static uint32_t copied(uint32_t crc, char*& to, const char* from, uint64_t bytes, uint64_t of_body) {
        if (of_body <= kCheckedBody)
            crc = checksum::copy(crc, to, from, bytes);
        else if (bytes)
            std::memcpy(to, from, bytes);
        to += bytes;
        return crc;
    }

    std::vector<Head> heads_;
};

// Values of MessagePack, one after the other. What is not what was asked for leaves it failed for good.
class Reader {
public:
    Reader(const char* from, uint64_t bytes) : at_(from), end_(from + bytes) {}

    bool failed() const { return failed_; }
    bool ended() const { return !failed_ && at_ == end_; }
    bool nil() {
        const bool is = at_ < end_ && static_cast<uint8_t>(*at_) == 0xc0;
        at_ += is;
        return is;
    }
    uint64_t number() {
        const uint8_t mark = next();
        if (mark < 0x80) return mark;
        return mark >= 0xcc && mark <= 0xcf ? big(1 << (mark - 0xcc)) : fail();
    }
    double real() {
        const uint64_t bits = next() == 0xcb ? big(8) : fail();
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    std::string_view text() {
        const uint8_t mark = next();
        const uint64_t bytes = mark >> 5 == 5 ? mark & 31 : mark == 0xd9 ? big(1) : mark == 0xda ? big(2) : fail();
        return raw(bytes);
    }
    std::string_view bytes() { return raw(next() == 0xc4 ? big(1) : fail()); }
    uint64_t array() { return counted(0x90, 0xdc); }
    uint64_t map() { return counted(0x80, 0xde); }

private:
    static constexpr uint8_t kNever = 0xc1;

    uint64_t fail() {
        failed_ = true;
        return 0;
    }
    uint8_t next() {
        if (failed_ || at_ == end_) return fail(), kNever;
        return static_cast<uint8_t>(*at_++);
    }
    uint64_t big(int bytes) {
        uint64_t value = 0;
        for (int i = 0; i < bytes; ++i) value = value << 8 | next();
        return value;
    }
    std::string_view raw(uint64_t bytes) {
        if (failed_ || bytes > static_cast<uint64_t>(end_ - at_)) return fail(), std::string_view();
        at_ += bytes;
        return {at_ - bytes, bytes};
    }
    uint64_t counted(uint8_t few, uint8_t many) {
        const uint8_t mark = next();
        return (mark & 0xf0) == few ? mark & 15 : mark == many ? big(2) : fail();
    }

    const char *at_, *end_;
    bool failed_ = false;
};

class Results {
public:
    // timing_fields: names and types ("int", "float" or "str") of work.Timing.
    Results(uint64_t major, std::vector<std::pair<std::string, std::string>> timing_fields)
        : major_(major), timing_fields_(std::move(timing_fields)) {}

    // None, and nothing was taken. Or (id, incarnation, epoch, values of its timing or None, (T, H), y as bytes): the next
    // message is a Result of T rows, all finite.
    nb::object take(Channel& ring) const {
        Channel::Message next;
        try {
            if (!ring.look(next)) return nb::none();
        } catch (const std::invalid_argument&) {  // the carrier will say so
            return nb::none();
        }
        if (next.head_bytes < kCrcBytes || next.body_bytes > kCopyBody) return nb::none();
        char head[kHeaderRoom];
        const uint64_t before = next.head_bytes - kCrcBytes;
        uint32_t crc = checksum::copy(0, head, next.head, before);
        std::memcpy(head + before, next.head + before, kCrcBytes);
        Found found;
        if (!read(Reader(head, next.head_bytes), found)) return nb::none();
        const uint64_t bytes = found.rows * found.hidden * sizeof(float);  // each fits 32 bits
        if (aligned(bytes) != next.body_bytes) return nb::none();
        nb::object sums = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(next.body_bytes)));
        if (!sums.is_valid()) throw nb::python_error();
        char* to = PyByteArray_AS_STRING(sums.ptr());
        if (next.body_bytes <= kCheckedBody)
            crc = checksum::copy(crc, to, next.body, next.body_bytes);
        else
            std::memcpy(to, next.body, next.body_bytes);
        if (crc != read_crc(head + before) || !is_finite(to, found.rows * found.hidden)) return nb::none();
        ring.accept();
        return nb::make_tuple(found.id, found.incarnation, found.epoch, found.timing,
                              nb::make_tuple(found.rows, found.hidden), sums);
    }

private:
    struct Found {
        uint64_t id = 0, epoch = 0, rows = 0, hidden = 0;
        nb::object incarnation, timing;
    };

    bool read(Reader from, Found& found) const {
        constexpr std::array<std::string_view, 8> kKeys{"type",        "id",     "ndp",   "tensors", "crc",
                                                        "incarnation", "epoch", "timing"};
        if (from.map() != kKeys.size()) return false;
        unsigned seen = 0;
        for (size_t i = 0; i < kKeys.size() && !from.failed(); ++i) {
            const auto key = std::find(kKeys.begin(), kKeys.end(), from.text()) - kKeys.begin();
            seen |= 1u << key;
            if (key == 0 && from.text() != "result") return false;
            if (key == 1) found.id = from.number();
            if (key == 2 && from.number() >> 8 != major_) return false;
            if (key == 3 && !read_shape(from, found)) return false;
            if (key == 4 && from.bytes().size() != kCrcBytes) return false;
            if (key == 5 && !(found.incarnation = nb::steal(read_value(from, 's'))).is_valid()) return false;
            if (key == 6) found.epoch = from.number();
            if (key == 7 && !read_timing(from, found)) return false;
            if (key == 8) return false;
        }
        return from.ended() && seen == (1u << kKeys.size()) - 1 && found.id <= INT64_MAX && found.epoch <= INT64_MAX &&
               PyUnicode_GET_LENGTH(found.incarnation.ptr()) <= kShortText;
    }

    static bool read_shape(Reader& from, Found& found) {
        if (from.array() != 1 || from.array() != 4 || from.text() != "y" || from.text() != "float32" || from.array() != 2)
            return false;
        found.rows = from.number();
        found.hidden = from.number();
        return !from.number() && !from.failed() && found.rows && found.hidden && found.rows <= kCopyBody &&
               found.hidden <= kCopyBody;
    }

    bool read_timing(Reader& from, Found& found) const {
        if (from.nil()) {
            found.timing = nb::none();
            return true;
        }
        if (from.map() != timing_fields_.size()) return false;
        found.timing = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(timing_fields_.size())));
        if (!found.timing.is_valid()) throw nb::python_error();
        for (size_t i = 0; i < timing_fields_.size(); ++i) {
            if (from.text() != timing_fields_[i].first) return false;
            PyObject* value = read_value(from, timing_fields_[i].second[0]);
            if (!value) return false;
            PyTuple_SET_ITEM(found.timing.ptr(), static_cast<Py_ssize_t>(i), value);
        }
        return true;
    }

    // Null for what is none: no error is set.
    static PyObject* read_value(Reader& from, char kind) {
        if (kind == 'i') {
            const uint64_t number = from.number();
            return from.failed() ? nullptr : PyLong_FromUnsignedLongLong(number);
        }
        if (kind == 'f') {
            const double real = from.real();
            return from.failed() ? nullptr : PyFloat_FromDouble(real);
        }
        const std::string_view text = from.text();
        if (from.failed()) return nullptr;
        PyObject* value = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
        if (!value) PyErr_Clear();
        return value;
    }

    static bool is_finite(const char* values, uint64_t count) {
        constexpr uint32_t kExponent = 0x7f800000;
        bool finite = true;
        for (uint64_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, values + i * sizeof bits, sizeof bits);
            finite &= (bits & kExponent) != kExponent;
        }
        return finite;
    }

    uint64_t major_;
    std::vector<std::pair<std::string, std::string>> timing_fields_;
};

}  // namespace
