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
constexpr size_t kShortText = 256;  // as messages.ShortText
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
    using Asked = std::array<uint64_t, kAsked>;
    // x [T, H] of one format; rows, experts, bits and gates [P].
    struct Tensors {
        char format;
        uint64_t rows, hidden, pairs;
        std::array<std::string_view, 5> parts;
    };

    explicit Executes(const std::vector<Head>& heads) {
        for (const auto& [format, bytes, places] : heads) {
            if (format.size() != 1 || bytes.size() > kHeaderRoom || bytes.size() < kCrcBytes)
                throw std::invalid_argument("a header cannot be");
            for (const auto& [at, which] : places)
                if (at + 8 > bytes.size() - kCrcBytes || which >= kNumbers)
                    throw std::invalid_argument("a number lies outside of its header");
            heads_.push_back({format[0], std::string(bytes.c_str(), bytes.size()), places});
        }
    }

    // 0: it does not go this way; else as Channel::publish.
    int put(Channel& ring, const Asked& asked, nb::handle x, nb::handle rows, nb::handle experts, nb::handle bits,
            nb::handle gates) const {
        const std::array<Array, 5> arrays{Array(x), Array(rows), Array(experts), Array(bits), Array(gates)};
        constexpr std::array<char, 5> kFormats{0, 'i', 'i', 'B', 'f'};
        if (!arrays[0].is(arrays[0].format(), 2)) return 0;
        for (size_t i = 1; i < arrays.size(); ++i)
            if (!arrays[i].is(kFormats[i], 1) || arrays[i].shape(0) != arrays[1].shape(0)) return 0;
        Tensors of{arrays[0].format(), arrays[0].shape(0), arrays[0].shape(1), arrays[1].shape(0), {}};
        for (size_t i = 0; i < arrays.size(); ++i) of.parts[i] = {arrays[i].data(), arrays[i].size()};
        return write(ring, asked, of);
    }

    // The same, without Python.
    int write(Channel& ring, const Asked& asked, const Tensors& of) const {
        const Known* head = nullptr;
        for (const Known& each : heads_)
            if (each.format == of.format) head = &each;
        if (!head) return 0;
        std::array<uint64_t, kNumbers> numbers;
        std::copy(asked.begin(), asked.end(), numbers.begin());
        numbers[6] = of.rows;
        numbers[7] = of.hidden;
        numbers[8] = of.pairs;
        uint64_t end = aligned(of.parts[0].size());
        for (size_t i = 1; i < of.parts.size(); ++i) {
            numbers[8 + i] = end;
            end = aligned(end + of.parts[i].size());
        }
        if (end > kCopyBody) return 0;
        Channel::Slot to;
        try {
            to = ring.claim(head->bytes.size(), end);
        } catch (const std::invalid_argument&) {  // the carrier will say so
        }
        if (!to.head) return 0;
        char patched[kHeaderRoom];
        std::memcpy(patched, head->bytes.data(), head->bytes.size());
        for (const auto& [at, which] : head->places)
            for (int byte = 0; byte < 8; ++byte) patched[at + byte] = static_cast<char>(numbers[which] >> (56 - 8 * byte));
        const uint64_t before = head->bytes.size() - kCrcBytes;
        uint32_t crc = checksum::copy(0, to.head, patched, before);
        for (const std::string_view& part : of.parts) {
            crc = copied(crc, to.body, part.data(), part.size(), end);
            crc = copied(crc, to.body, kZeros, aligned(part.size()) - part.size(), end);
        }
        write_crc(to.head + before, crc);
        return ring.publish();
    }

private:
    struct Known {
        char format;
        std::string bytes;
        std::vector<std::pair<uint32_t, uint32_t>> places;
    };

    static uint32_t copied(uint32_t crc, char*& to, const char* from, uint64_t bytes, uint64_t of_body) {
        if (of_body <= kCheckedBody)
            crc = checksum::copy(crc, to, from, bytes);
        else if (bytes)
            std::memcpy(to, from, bytes);
        to += bytes;
        return crc;
    }

    std::vector<Known> heads_;
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
    // A number, a real or a text of a timing. The text lies in its Found.
    struct Value {
        uint64_t number = 0;
        double real = 0;
        std::string_view text;
    };
    // A Result's header. Its views lie in `head`.
    struct Found {
        char head[kHeaderRoom];
        uint64_t id = 0, epoch = 0, rows = 0, hidden = 0;
        std::string_view incarnation;
        bool has_timing = false;
        std::vector<Value> timing;
    };

    // timing_fields: names and types ("int", "float" or "str") of work.Timing.
    Results(uint64_t major, std::vector<std::pair<std::string, std::string>> timing_fields)
        : major_(major), timing_fields_(std::move(timing_fields)) {}

    // None, and nothing was taken. Or as `described`, and y as bytes: the next message is a Result of T rows, all finite.
    nb::object take(Channel& ring) const {
        Found found;
        Channel::Message next;
        uint32_t crc;
        if (!look(ring, found, next, crc)) return nb::none();
        const uint64_t bytes = found.rows * found.hidden * sizeof(float);
        nb::object sums = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
        if (!sums.is_valid()) throw nb::python_error();
        if (!land(ring, found, next, crc, PyByteArray_AS_STRING(sums.ptr()))) return nb::none();
        return nb::make_tuple(described(found), sums);
    }

    // The same without Python, for y [rows, hidden] with room for so many.
    bool read(Channel& ring, uint64_t most_rows, uint64_t hidden, float* y, Found& found) const {
        Channel::Message next;
        uint32_t crc;
        return look(ring, found, next, crc) && found.rows <= most_rows && found.hidden == hidden &&
               land(ring, found, next, crc, reinterpret_cast<char*>(y));
    }

    // (id, incarnation, epoch, values of its timing or None, (T, H)).
    nb::object described(const Found& found) const {
        nb::object timing = nb::none();
        if (found.has_timing) {
            timing = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(found.timing.size())));
            if (!timing.is_valid()) throw nb::python_error();
            for (size_t i = 0; i < found.timing.size(); ++i) {
                const Value& value = found.timing[i];
                const char kind = timing_fields_[i].second[0];
                nb::object made = kind == 'i'   ? nb::object(nb::int_(value.number))
                                  : kind == 'f' ? nb::object(nb::float_(value.real))
                                                : nb::object(nb::str(value.text.data(), value.text.size()));
                PyTuple_SET_ITEM(timing.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
            }
        }
        return nb::make_tuple(found.id, nb::str(found.incarnation.data(), found.incarnation.size()), found.epoch, timing,
                              nb::make_tuple(found.rows, found.hidden));
    }

private:
    // Whether the next message has the header of a sound Result, whose body has the right size; and its checksum so far.
    bool look(const Channel& ring, Found& found, Channel::Message& next, uint32_t& crc) const {
        try {
            if (!ring.look(next)) return false;
        } catch (const std::invalid_argument&) {  // the carrier will say so
            return false;
        }
        if (next.head_bytes < kCrcBytes || next.body_bytes > kCopyBody) return false;
        const uint64_t before = next.head_bytes - kCrcBytes;
        crc = checksum::copy(0, found.head, next.head, before);
        std::memcpy(found.head + before, next.head + before, kCrcBytes);
        return read(Reader(found.head, next.head_bytes), found) &&
               aligned(found.rows * found.hidden * sizeof(float)) == next.body_bytes;  // each fits 32 bits
    }

    // Takes the message if its sums are sound, with them in `to`.
    static bool land(Channel& ring, const Found& found, const Channel::Message& next, uint32_t crc, char* to) {
        const uint64_t bytes = found.rows * found.hidden * sizeof(float);
        if (next.body_bytes <= kCheckedBody) {
            crc = checksum::copy(crc, to, next.body, bytes);
            crc = checksum::sum(crc, next.body + bytes, next.body_bytes - bytes);
        } else {
            std::memcpy(to, next.body, bytes);
        }
        const bool sound = crc == read_crc(found.head + next.head_bytes - kCrcBytes) && is_finite(to, found.rows * found.hidden);
        if (sound) ring.accept();
        return sound;
    }

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
            if (key == 5) found.incarnation = from.text();
            if (key == 6) found.epoch = from.number();
            if (key == 7 && !read_timing(from, found)) return false;
            if (key == 8) return false;
        }
        return from.ended() && seen == (1u << kKeys.size()) - 1 && found.id <= INT64_MAX && found.epoch <= INT64_MAX &&
               is_ascii(found.incarnation) && found.incarnation.size() <= kShortText;
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
        if (!(found.has_timing = !from.nil())) return true;
        if (from.map() != timing_fields_.size()) return false;
        found.timing.resize(timing_fields_.size());
        for (size_t i = 0; i < timing_fields_.size(); ++i) {
            if (from.text() != timing_fields_[i].first) return false;
            Value& value = found.timing[i];
            const char kind = timing_fields_[i].second[0];
            if (kind == 'i') value.number = from.number();
            else if (kind == 'f') value.real = from.real();
            else value.text = from.text();
            if (from.failed() || !is_ascii(value.text)) return false;
        }
        return true;
    }

    // Others are the codec's to judge.
    static bool is_ascii(std::string_view text) {
        return std::all_of(text.begin(), text.end(), [](char letter) { return static_cast<uint8_t>(letter) < 0x80; });
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
