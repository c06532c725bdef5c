// Both ends of the rings at once, without Python; test_device_ring_check.py builds and runs it.
//
//   ring_check wakes ROUNDS      a message is published while its reader goes to sleep: do they ever miss each other?
//   ring_check stream MESSAGES   messages through three slots to a thread that sleeps on its pipe: does each arrive as it was?
//
// Prints what was wrong, if something was, and ends with 1.
#include <poll.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "ring.h"
#include "spin.h"

namespace {

void until(const std::atomic<uint64_t>& word, uint64_t round) {
    for (uint32_t looks = 1; word.load() < round; ++looks)
        if (looks % 16384 == 0) sched_yield();
}

// Until both have come here for this round, as close in time as can be had; one of them a little later, each time by another
// while.
void meet(std::atomic<uint64_t>& mine, const std::atomic<uint64_t>& other, uint64_t round, uint32_t salt) {
    mine.store(round);
    until(other, round);
    for (uint64_t left = (round * salt >> 7) % 300; left; --left) asm volatile("");
}

// Which of the processors that we may use this thread stays on: on one alone, nothing happens at the same moment.
void stay_on(int which) {
    cpu_set_t ours, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof ours, &ours) || CPU_COUNT(&ours) < 2) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &ours) && which-- == 0) CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

int wakes(uint64_t rounds) {
    static RingHead head{};
    static std::atomic<uint64_t> writer{0}, reader{0}, over{0};
    static bool sleeps;
    uint64_t missed = 0;
    std::thread reads([&] {
        stay_on(1);
        for (uint64_t round = 1; round <= rounds; ++round) {
            meet(reader, writer, round, 2654435761U);
            sleeps = head.prepare_sleep(round - 1, kSocketDoorbell);
            over.store(round);
        }
    });
    stay_on(0);
    for (uint64_t round = 1; round <= rounds; ++round) {
        meet(writer, reader, round, 40503U);
        const bool rung = head.publish(round);
        until(over, round);
        missed += sleeps && !rung;
        head.sleeping.store(0);
    }
    reads.join();
    if (missed) std::printf("%llu of %llu messages were published beside a reader that sleeps and was not rung\n",
                            static_cast<unsigned long long>(missed), static_cast<unsigned long long>(rounds));
    return missed != 0;
}

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("%s\n", what);
    std::exit(1);
}

// Any bytes that a message and a place in it have for themselves.
char byte_of(uint64_t message, uint64_t at) { return static_cast<char>(message * 31 + at * 7); }
uint64_t size_of(uint64_t message, uint64_t room) { return message * 2654435761U % (room + 1); }

void send(Ring& ring, uint64_t message, uint64_t room) {
    const uint64_t bytes = size_of(message, room);
    Ring::Slot to = ring.claim(8, bytes);
    for (; !to.head; to = ring.claim(8, bytes)) sched_yield();
    std::memcpy(to.head, &message, 8);
    for (uint64_t at = 0; at < bytes; ++at) to.body[at] = byte_of(message, at);
    ring.publish();
}

void take(Ring& ring, uint64_t message, uint64_t room, int doorbell) {
    Ring::Message found;
    while (!ring.look(found)) {
        if (!ring.prepare_sleep()) continue;
        pollfd rung{doorbell, POLLIN, 0};
        require(poll(&rung, 1, 60'000) == 1, "a reader that sleeps was not rung");
        ring.awake();
    }
    uint64_t number = 0;
    require(found.head_bytes == 8 && found.body_bytes == size_of(message, room), "a message has another size than it had");
    std::memcpy(&number, found.head, 8);
    require(number == message, "messages came in another order");
    for (uint64_t at = 0; at < found.body_bytes; ++at)
        require(found.body[at] == byte_of(message, at), "a message is not what it was");
    ring.accept();
    ring.release();
}

int stream(uint64_t messages) {
    constexpr uint32_t kSlots = 3;
    constexpr uint64_t kRoom = 9000;
    const uint64_t bytes = Ring::total_bytes(kSlots, kRoom);
    const int fd = memfd_create("ring_check", 0);
    int doorbell[2];
    require(fd >= 0 && !ftruncate(fd, static_cast<off_t>(bytes)) && !pipe2(doorbell, O_NONBLOCK), "no memory or pipe can be had");
    char* mapping = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    require(mapping != MAP_FAILED, "the memory cannot be mapped");
    Ring host(mapping, bytes, fd, -1, doorbell[1], kSlots, kRoom, false);
    Ring device(mapping, bytes, fd, doorbell[0], -1, kSlots, kRoom, true);
    std::thread reads([&] {
        for (uint64_t message = 1; message <= messages; ++message) take(device, message, kRoom, doorbell[0]);
    });
    for (uint64_t message = 1; message <= messages; ++message) send(host, message, kRoom);
    reads.join();
    require(host.is_intact() && device.is_intact(), "an end does not know what it wrote");
    return 0;
}

}  // namespace

int main(int count, char** words) {
    const std::string what = count == 3 ? words[1] : "";
    if (what == "wakes") return wakes(std::strtoull(words[2], nullptr, 10));
    if (what == "stream") return stream(std::strtoull(words[2], nullptr, 10));
    std::printf("ring_check wakes ROUNDS | stream MESSAGES\n");
    return 2;
}
