// One end of the rings (ring.h) for Python: frames in and out.
//
// Of the protocol it knows the checksum only: the last 4 bytes of a header are the CRC-32 of what stands before them and of a
// body of at most kCheckedBody bytes; it is made and checked while copying. Nothing the peer wrote is used before it was copied
// and checked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>

#include "crc32.h"
#include "ring.h"

namespace nb = nanobind;

namespace {

constexpr uint64_t kCrcBytes = 4;
constexpr uint64_t kCheckedBody = 64 << 10;
constexpr uint64_t kCopyBody = 256 << 10;  // larger bodies are lent, not copied

// A view of a Python buffer that keeps it alive.
class View {
public:
    View(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags)) throw nb::python_error();
    }
    ~View() { PyBuffer_Release(&buffer_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    char* data() const { return static_cast<char*>(buffer_.buf); }
    uint64_t size() const { return static_cast<uint64_t>(buffer_.len); }

private:
    Py_buffer buffer_;
};

// The last bytes of a header: what it says its checksum is.
void write_crc(char* to, uint32_t crc) {
    for (uint64_t i = 0; i < kCrcBytes; ++i) to[i] = static_cast<char>(crc >> 8 * i);
}
uint32_t read_crc(const char* from) {
    uint32_t crc = 0;
    for (uint64_t i = 0; i < kCrcBytes; ++i) crc |= uint32_t{static_cast<unsigned char>(from[i])} << 8 * i;
    return crc;
}

struct Held {
    View view;
};

class Channel : private Held, public Ring {
public:
    Channel(nb::handle mapping, int fd, int doorbell_in, int doorbell_out, uint32_t num_slots, uint64_t body_room,
            bool is_device)
        : Held{{mapping, PyBUF_WRITABLE}},
          Ring(view.data(), view.size(), fd, doorbell_in, doorbell_out, num_slots, body_room, is_device) {}

    // 0: no room, use the wire; else as `publish`. Writes the checksum, if asked to.
    int put(nb::handle header, nb::handle body, bool writes_checksum) {
        const View head(header, PyBUF_SIMPLE), rest(body, PyBUF_SIMPLE);
        if (writes_checksum && head.size() < kCrcBytes) return 0;
        const Slot to = claim(head.size(), rest.size());
        if (!to.head) return 0;
        if (writes_checksum) {
            const uint64_t before = head.size() - kCrcBytes;
            uint32_t crc = checksum::copy(0, to.head, head.data(), before);
            if (rest.size() <= kCheckedBody)
                crc = checksum::copy(crc, to.body, rest.data(), rest.size());
            else
                copy(to.body, rest.data(), rest.size());
            write_crc(to.head + before, crc);
        } else {
            std::memcpy(to.head, head.data(), head.size());
            copy(to.body, rest.data(), rest.size());
        }
        return publish();
    }

    // None, or (header, body, intact) with a copied body, or with (offset, size) of a body to be read in place.
    nb::object take() {
        Message next;
        if (!look(next)) return nb::none();
        accept();
        nb::object header = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(next.head_bytes)));
        if (!header.is_valid()) throw nb::python_error();
        char* head_to = PyBytes_AS_STRING(header.ptr());
        const uint64_t before = next.head_bytes < kCrcBytes ? 0 : next.head_bytes - kCrcBytes;
        uint32_t crc = checksum::copy(0, head_to, next.head, before);
        std::memcpy(head_to + before, next.head + before, next.head_bytes - before);
        nb::object rest;
        if (next.body_bytes > kCopyBody) {
            rest = nb::make_tuple(static_cast<uint64_t>(next.body - view.data()), next.body_bytes);
        } else {
            rest = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(next.body_bytes)));
            if (!rest.is_valid()) throw nb::python_error();
            char* body_to = PyByteArray_AS_STRING(rest.ptr());
            if (next.body_bytes <= kCheckedBody)
                crc = checksum::copy(crc, body_to, next.body, next.body_bytes);
            else
                std::memcpy(body_to, next.body, next.body_bytes);
        }
        const bool intact = next.head_bytes >= kCrcBytes && crc == read_crc(head_to + before);
        return nb::make_tuple(header, rest, intact);
    }

private:
    static void copy(char* to, const char* from, uint64_t bytes) {
        if (bytes <= kCopyBody) {
            std::memcpy(to, from, bytes);
            return;
        }
        nb::gil_scoped_release release;
        std::memcpy(to, from, bytes);
    }
};

}  // namespace
