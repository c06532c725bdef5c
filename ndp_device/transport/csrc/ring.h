// Two rings of slots in one shared mapping: messages of two frames, one ring per direction, one writer and one reader each.
//
//   page 0         written by the device, read by the host when it attaches (transport/shm.py)
//   page 1, 2      RingHead of host -> device, device -> host
//   then           num_slots slots of each ring: SlotHead | header, padded to 4096 | body
//
// Knows neither Python nor protocol. Who wants to sleep says so with prepare_sleep() and is then woken by the other side by
// other means. Nothing the peer wrote is used before it was checked; what does not fit the rules throws invalid_argument, and
// the caller gives the mapping up. tests/ndp_device/transport/ring_check.cpp runs both ends at once.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHeaderRoom = 4096;
constexpr int kHostToDevice = 0;
constexpr uint32_t kSocketDoorbell = 1, kPipeDoorbell = 2;

// publish() and prepare_sleep() each write one word and then look at the other's: all four are sequentially consistent, so
// that one of the two at least sees what the other wrote (Dekker). Weaker, a message and a reader that sleeps miss each other.
struct alignas(64) RingHead {
    alignas(64) std::atomic<uint64_t> written;   // messages the writer has published
    alignas(64) std::atomic<uint64_t> released;  // messages whose slot the reader has given back
    alignas(64) std::atomic<uint32_t> sleeping;  // the reader wants its doorbell rung: 1 through the socket, 2 through its pipe

    // `messages` are there in all. Which doorbell the writer must ring, 0: the reader is awake.
    uint32_t publish(uint64_t messages) {
        written.store(messages);
        return sleeping.load() ? sleeping.exchange(0) : 0;
    }

    // True: a reader that took so many messages will be rung. False: something has arrived meanwhile.
    bool prepare_sleep(uint64_t taken, uint32_t doorbell) {
        sleeping.store(doorbell);
        if (written.load() == taken) return true;
        sleeping.store(0);
        return false;
    }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RingHead) <= kPage);

struct alignas(64) SlotHead {
    uint64_t number;  // of the message, from 1
    uint64_t header_bytes;
    uint64_t body_bytes;
};

class Ring {
public:
    Ring(char* mapping, uint64_t size, int fd, int doorbell_in, int doorbell_out, uint32_t num_slots, uint64_t body_room,
         bool is_device)
        : mapping_(mapping), fd_(fd), doorbell_in_(doorbell_in), doorbell_out_(doorbell_out), num_slots_(num_slots),
          body_room_(body_room), reserved_(num_slots, 0) {
        if (!num_slots || size < total_bytes(num_slots, body_room))
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

    // Parts of the next slot, for a message of these sizes; none where it must take the wire.
    struct Slot {
        char *head = nullptr, *body = nullptr;
    };
    Slot claim(uint64_t head_bytes, uint64_t body_bytes) {
        const uint64_t released = out_->released.load(std::memory_order_acquire);
        if (released > sent_) throw std::invalid_argument("the peer returned slots it never had");
        if (sent_ - released >= num_slots_ || head_bytes > kHeaderRoom || body_bytes > body_room_) return {};
        const uint32_t index = sent_ % num_slots_;
        const uint64_t offset = out_slots_ + index * slot_bytes(body_room_);
        const uint64_t needed = sizeof(SlotHead) + kHeaderRoom + body_bytes;
        if (needed > reserved_[index]) {  // a page that cannot be had must be an error here, not a SIGBUS later
            if (posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(needed))) return {};
            reserved_[index] = needed;
        }
        char* slot = mapping_ + offset;
        const SlotHead described{sent_ + 1, head_bytes, body_bytes};
        std::memcpy(slot, &described, sizeof described);
        return {slot + sizeof(SlotHead), slot + sizeof(SlotHead) + kHeaderRoom};
    }

    // The slot that was claimed last is full. 1: published; 2: published, and the reader sleeps until the socket rings.
    // A reader that sleeps on its pipe is woken here.
    int publish() {
        const uint32_t rung = out_->publish(++sent_);
        return !rung || (rung == kPipeDoorbell && ring_pipe()) ? 1 : 2;
    }

    // The next message where it lies, which the peer may change at any time.
    struct Message {
        const char *head = nullptr, *body = nullptr;
        uint64_t head_bytes = 0, body_bytes = 0;
    };

    // Whether there is one. It stays the next until `accept`.
    bool look(Message& found) const {
        const uint64_t written = in_->written.load(std::memory_order_acquire);
        if (written == taken_) return false;
        if (written < taken_ || written - returned_ > num_slots_)
            throw std::invalid_argument("the peer published messages that cannot be");
        const char* slot = mapping_ + in_slots_ + (taken_ % num_slots_) * slot_bytes(body_room_);
        SlotHead described;
        std::memcpy(&described, slot, sizeof described);  // once: the peer may change it while we look
        if (described.number != taken_ + 1 || described.header_bytes > kHeaderRoom || described.body_bytes > body_room_)
            throw std::invalid_argument("a slot describes a message that cannot be");
        const char* head = slot + sizeof(SlotHead);
        found = {head, head + kHeaderRoom, described.header_bytes, described.body_bytes};
        return true;
    }
    void accept() { ++taken_; }

    // Give the slot of the oldest message taken back to the writer.
    void release() {
        if (returned_ < taken_) in_->released.store(++returned_, std::memory_order_release);
    }

    bool readable() const { return in_->written.load(std::memory_order_acquire) != taken_; }

    // What this side alone writes is what it wrote.
    bool is_intact() const { return out_->written.load() == sent_ && in_->released.load() == returned_; }

    // True: the writer will ring from now on. False: something has arrived meanwhile.
    bool prepare_sleep() {
        return in_->prepare_sleep(taken_, doorbell_in_ >= 0 ? kPipeDoorbell : kSocketDoorbell);
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
    RingHead* ring(int direction) { return reinterpret_cast<RingHead*>(mapping_ + (1 + direction) * kPage); }
    uint64_t slots_offset(int direction) const {
        return 3 * kPage + direction * num_slots_ * slot_bytes(body_room_);
    }

    char* mapping_;
    int fd_, doorbell_in_, doorbell_out_;  // not blocking; -1: there is no pipe
    uint32_t num_slots_;
    uint64_t body_room_;
    std::vector<uint64_t> reserved_;  // bytes of each outgoing slot that are known to exist
    RingHead *out_, *in_;
    uint64_t out_slots_, in_slots_;
    uint64_t sent_, taken_, returned_;
};

}  // namespace
