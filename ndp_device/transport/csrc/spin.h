// Looking at memory until something is there, for a bounded time; without Python's lock.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLooksPerYield = 128;  // 7 us: a yield takes one, during which nobody looks

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks until `ready` (bit 0 of the answer) or timeout_ns are over. Yields, so that a core shared with the peer is not taken
// from it. Bit 1: meanwhile somebody else had our core for a while.
template <class Ready>
int spin_until(const Ready& ready, uint64_t timeout_ns) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kLost = std::chrono::microseconds(500);
    if (ready()) return 1;
    const auto start = Clock::now();
    const auto end = start + std::chrono::nanoseconds(timeout_ns);
    int lost = 0;
    for (auto last = start; last < end || last == start;) {
        for (int look = 0; look < kLooksPerYield; ++look) {
            if (ready()) return lost | 1;
            pause_briefly();
        }
        sched_yield();
        const auto now = Clock::now();
        if (now - last > kLost) lost = 2;
        last = now;
    }
    return lost;
}

}  // namespace
