#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace ndp {
namespace {

// Longer than the gap between two phases of one call, shorter than a scheduler's time slice.
constexpr auto kSpin = std::chrono::microseconds(50);
// Longer than what a layer has between two calls.
constexpr auto kAwake = std::chrono::microseconds(500);

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

template <class Done>
bool spin_until(std::chrono::microseconds time, Done&& done) {
    const auto end = std::chrono::steady_clock::now() + time;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads) {
    for (int thread = 1; thread < threads; ++thread) {
        workers_.emplace_back([this, thread] { worker_loop(thread); });
        pthread_setname_np(workers_.back().native_handle(), "ndp-kernel");  // for top -H and the like
    }
}

ThreadPool::~ThreadPool() {
    stop_ = true;
    ++generation_;
    futex_wake(generation_);
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::take_tasks(int thread) {
    for (;;) {
        const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        const uint32_t task = static_cast<uint32_t>(ticket), tasks = static_cast<uint32_t>(ticket >> 32);
        if (task >= tasks) return;
        work_(context_, static_cast<int>(task), thread);
        if (done_.fetch_add(1) + 1 == tasks && caller_sleeps_) futex_wake(done_);
    }
}

void ThreadPool::run(int tasks, void (*work)(void*, int, int), void* context) {
    if (tasks <= 0) return;
    if (threads_ == 1 || tasks == 1) {
        for (int task = 0; task < tasks; ++task) work(context, task, 0);
        return;
    }
    work_ = work;
    context_ = context;
    done_ = 0;
    ticket_.store(static_cast<uint64_t>(tasks) << 32, std::memory_order_release);
    ++generation_;
    if (sleepers_ > 0) futex_wake(generation_);
    take_tasks(0);
    const auto finished = [&] { return done_ == static_cast<uint32_t>(tasks); };
    if (spin_until(kSpin, finished)) return;
    caller_sleeps_ = true;
    for (uint32_t seen = done_; seen != static_cast<uint32_t>(tasks); seen = done_) futex_wait(done_, seen);
    caller_sleeps_ = false;
}

void ThreadPool::worker_loop(int thread) {
    uint32_t seen = 0;
    while (!stop_) {
        if (!spin_until(awake_ ? kAwake : kSpin, [&] { return generation_ != seen; })) {
            ++sleepers_;
            while (generation_ == seen) futex_wait(generation_, seen);
            --sleepers_;
        }
        seen = generation_;
        take_tasks(thread);
    }
}

}  // namespace ndp
