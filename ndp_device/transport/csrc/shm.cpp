// Two rings of slots in one shared mapping: messages of two frames, one ring per direction, one writer and one reader each.
//
//   page 0         written by the device, read by the host when it attaches (transport/shm.py)
//   page 1, 2      RingHead of host -> device, device -> host
//   then           num_slots slots of each ring: SlotHead | header, padded to 4096 | body
//
// Knows no socket, and of the protocol only the checksum: the last 4 bytes of a header are the CRC-32 of what stands before
// them and of a body of at most kCheckedBody bytes; it is made and checked while copying. Waiting means spinning for a
// bounded time without the GIL; who wants to sleep says so with prepare_sleep() and is then woken by the other side by other means. Nothing the peer wrote is used before it was
// copied and checked; what does not fit the rules raises ValueError, and the caller gives the mapping up.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "crc32.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHeaderRoom = 4096;
constexpr uint64_t kCrcBytes = 4;
constexpr uint64_t kCheckedBody = 64 << 10;
constexpr uint64_t kCopyBody = 256 << 10;  // larger bodies are lent, not copied
constexpr int kHostToDevice = 0;
constexpr size_t kMaxSpun = 64;
constexpr uint32_t kSocketDoorbell = 1, kPipeDoorbell = 2;
constexpr int kLooksPerYield = 128;  // 7 us: a yield takes one, during which nobody looks

struct alignas(64) RingHead {
    alignas(64) std::atomic<uint64_t> written;   // messages the writer has published
    alignas(64) std::atomic<uint64_t> released;  // messages whose slot the reader has given back
    alignas(64) std::atomic<uint32_t> sleeping;  // the reader wants its doorbell rung: 1 through the socket, 2 through its pipe
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RingHead) <= kPage);

struct alignas(64) SlotHead {
    uint64_t number;  // of the message, from 1
    uint64_t header_bytes;
    uint64_t body_bytes;
};

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

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

class Channel {
public:
    Channel(nb::handle mapping, int fd, int doorbell_in, int doorbell_out, uint32_t num_slots, uint64_t body_room,
            bool is_device)
        : mapping_(mapping, PyBUF_WRITABLE), fd_(fd), doorbell_in_(doorbell_in), doorbell_out_(doorbell_out), num_slots_(num_slots),
          body_room_(body_room), reserved_(num_slots, 0) {
        if (!num_slots || mapping_.size() < total_bytes(num_slots, body_room))
            throw std::invalid_argument("the mapping is smaller than its rings");
        const int sends = is_device ? 1 - kHostToDevice : kHostToDevice;
        out_ = ring(sends);
        in_ = ring(1 - sends);
        out_slots_ = slots_offset(sends);
        in_slots_ = slots_offset(1 - sends);
        sent_ = out_->written.load();
        taken_ = returned_ = in_->released.load();
    }

    static uint64_t total_bytes(uint32_t num_slots, uint64_t body_room) {
        return 3 * kPage + 2 * num_slots * slot_bytes(body_room);
    }

    // 0: no room, use the wire; 1: published; 2: published, and the reader sleeps until the socket rings. A reader that
    // sleeps on its pipe is woken here. Writes the checksum, if asked to.
    int put(nb::handle header, nb::handle body, bool writes_checksum) {
        const View head(header, PyBUF_SIMPLE), rest(body, PyBUF_SIMPLE);
        const uint64_t released = out_->released.load(std::memory_order_acquire);
        if (released > sent_) throw std::invalid_argument("the peer returned slots it never had");
        if (sent_ - released >= num_slots_ || head.size() > kHeaderRoom || rest.size() > body_room_) return 0;
        if (writes_checksum && head.size() < kCrcBytes) return 0;
        const uint32_t index = sent_ % num_slots_;
        const uint64_t offset = out_slots_ + index * slot_bytes(body_room_);
        const uint64_t needed = sizeof(SlotHead) + kHeaderRoom + rest.size();
        if (needed > reserved_[index]) {  // a page that cannot be had must be an error here, not a SIGBUS later
            if (posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(needed))) return 0;
            reserved_[index] = needed;
        }
        char* slot = mapping_.data() + offset;
        char* head_to = slot + sizeof(SlotHead);
        char* body_to = head_to + kHeaderRoom;
        const SlotHead described{sent_ + 1, head.size(), rest.size()};
        std::memcpy(slot, &described, sizeof described);
        if (writes_checksum) {
            const uint64_t before = head.size() - kCrcBytes;
            uint32_t crc = checksum::copy(0, head_to, head.data(), before);
            if (rest.size() <= kCheckedBody)
                crc = checksum::copy(crc, body_to, rest.data(), rest.size());
            else
                copy(body_to, rest.data(), rest.size());
            write_crc(head_to + before, crc);
        } else {
            std::memcpy(head_to, head.data(), head.size());
            copy(body_to, rest.data(), rest.size());
        }
        out_->written.store(++sent_, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // Dekker: publish, then look whether the reader sleeps
        const uint32_t rung = out_->sleeping.load() ? out_->sleeping.exchange(0) : 0;
        return !rung || (rung == kPipeDoorbell && ring_pipe()) ? 1 : 2;
    }

    // None, or (header, body, intact) with a copied body, or with (offset, size) of a body to be read in place.
    nb::object take() {
        const uint64_t written = in_->written.load(std::memory_order_acquire);
        if (written == taken_) return nb::none();
        if (written < taken_ || written - returned_ > num_slots_)
            throw std::invalid_argument("the peer published messages that cannot be");
        const uint64_t offset = in_slots_ + (taken_ % num_slots_) * slot_bytes(body_room_);
        const char* slot = mapping_.data() + offset;
        SlotHead described;
        std::memcpy(&described, slot, sizeof described);  // once: the peer may change it while we look
        const uint64_t head_bytes = described.header_bytes, body_bytes = described.body_bytes;
        if (described.number != taken_ + 1 || head_bytes > kHeaderRoom || body_bytes > body_room_)
            throw std::invalid_argument("a slot describes a message that cannot be");
        ++taken_;
        nb::object header = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head_bytes)));
        if (!header.is_valid()) throw nb::python_error();
        char* head_to = PyBytes_AS_STRING(header.ptr());
        const uint64_t before = head_bytes < kCrcBytes ? 0 : head_bytes - kCrcBytes;
        uint32_t crc = checksum::copy(0, head_to, slot + sizeof(SlotHead), before);
        std::memcpy(head_to + before, slot + sizeof(SlotHead) + before, head_bytes - before);
        const uint64_t body = offset + sizeof(SlotHead) + kHeaderRoom;
        nb::object rest;
        if (body_bytes > kCopyBody) {
            rest = nb::make_tuple(body, body_bytes);
        } else {
            rest = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(body_bytes)));
            if (!rest.is_valid()) throw nb::python_error();
            char* body_to = PyByteArray_AS_STRING(rest.ptr());
            if (body_bytes <= kCheckedBody)
                crc = checksum::copy(crc, body_to, mapping_.data() + body, body_bytes);
            else
                std::memcpy(body_to, mapping_.data() + body, body_bytes);
        }
        const bool intact = head_bytes >= kCrcBytes && crc == read_crc(head_to + before);
        return nb::make_tuple(header, rest, intact);
    }

    // Give the slot of the oldest message taken back to the writer.
    void release() {
        if (returned_ < taken_) in_->released.store(++returned_, std::memory_order_release);
    }

    bool readable() const { return in_->written.load(std::memory_order_acquire) != taken_; }

    // What this side alone writes is what it wrote.
    bool is_intact() const { return out_->written.load() == sent_ && in_->released.load() == returned_; }

    // True: the writer will ring from now on. False: something has arrived meanwhile.
    bool prepare_sleep() {
        in_->sleeping.store(doorbell_in_ >= 0 ? kPipeDoorbell : kSocketDoorbell);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!readable()) return true;
        in_->sleeping.store(0);
        return false;
    }

    void awake() {
        in_->sleeping.store(0);
        if (char rung[64]; doorbell_in_ >= 0 && read(doorbell_in_, rung, sizeof rung) < 0) errno = 0;  // nobody rang: timed out
    }

    uint64_t slot_stride() const { return slot_bytes(body_room_); }

private:
    bool ring_pipe() const {  // full: it has been rung before
        return doorbell_out_ >= 0 && (write(doorbell_out_, "", 1) == 1 || errno == EAGAIN);
    }
    static uint64_t slot_bytes(uint64_t body_room) {
        return (sizeof(SlotHead) + kHeaderRoom + body_room + kPage - 1) / kPage * kPage;
    }
    RingHead* ring(int direction) { return reinterpret_cast<RingHead*>(mapping_.data() + (1 + direction) * kPage); }
    uint64_t slots_offset(int direction) const {
        return 3 * kPage + direction * num_slots_ * slot_bytes(body_room_);
    }
    static void copy(char* to, const char* from, uint64_t bytes) {
        if (bytes <= kCopyBody) {
            std::memcpy(to, from, bytes);
            return;
        }
        nb::gil_scoped_release release;
        std::memcpy(to, from, bytes);
    }

    View mapping_;
    int fd_, doorbell_in_, doorbell_out_;  // not blocking; -1: there is no pipe
    uint32_t num_slots_;
    uint64_t body_room_;
    std::vector<uint64_t> reserved_;  // bytes of each outgoing slot that are known to exist
    RingHead *out_, *in_;
    uint64_t out_slots_, in_slots_;
    uint64_t sent_, taken_, returned_;
};

// Looks until one of the channels has a message (bit 0 of the answer) or timeout_ns are over. Yields, so that a core
// shared with the peer is not taken from it. Bit 1: meanwhile somebody else had our core for a while.
int spin(nb::list rings, uint64_t timeout_ns) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kLost = std::chrono::microseconds(500);
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
    const auto start = Clock::now();
    const auto end = start + std::chrono::nanoseconds(timeout_ns);
    int lost = 0;
    for (auto last = start; last < end || last == start;) {
        for (int look = 0; look < kLooksPerYield; ++look) {
            if (readable()) return lost | 1;
            pause_briefly();
        }
        sched_yield();
        const auto now = Clock::now();
        if (now - last > kLost) lost = 2;
        last = now;
    }
    return lost;
}

uint32_t sum(uint32_t crc, const View& view) {
    if (view.size() <= kCopyBody) return checksum::sum(crc, view.data(), view.size());
    nb::gil_scoped_release release;
    return checksum::sum(crc, view.data(), view.size());
}

uint32_t crc_of(nb::handle data, uint32_t crc) { return sum(crc, View(data, PyBUF_SIMPLE)); }

uint32_t crc_by_tables(nb::handle data, uint32_t crc) {
    const View view(data, PyBUF_SIMPLE);
    return ~checksum::by_tables(~crc, reinterpret_cast<const unsigned char*>(view.data()), view.size());
}

// Copies `source` to `target` from `offset` on; the CRC-32 of it, continued from `crc`.
uint32_t copy_into(nb::handle target, uint64_t offset, nb::handle source, uint32_t crc) {
    const View to(target, PyBUF_WRITABLE), from(source, PyBUF_SIMPLE);
    if (offset > to.size() || from.size() > to.size() - offset) throw std::invalid_argument("no room in the target");
    nb::gil_scoped_release release;
    return checksum::copy(crc, to.data() + offset, from.data(), from.size());
}

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
    module.def("spin", &spin);
    module.def("crc32", &crc_of, nb::arg("data"), nb::arg("crc") = 0);
    module.def("crc32_by_tables", &crc_by_tables, nb::arg("data"), nb::arg("crc") = 0);
    module.def("copy_into", &copy_into, nb::arg("target"), nb::arg("offset"), nb::arg("source"), nb::arg("crc"));
    module.def("write_checksum", &write_checksum, nb::arg("header"), nb::arg("body"));
    module.def("checksum_fits", &checksum_fits, nb::arg("header"), nb::arg("body"));
    module.attr("MAX_CHECKED_BODY_BYTES") = kCheckedBody;
}
