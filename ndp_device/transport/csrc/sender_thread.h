// A layer's message sent and its answer taken by a thread that never holds Python's lock, while the host launches.
//
//   host      begin | launches ................................ end: waits for no more than that the message has left
//   thread          | packet there? find pairs, send, answer there? take it
//
// Whoever writes the packet sets its word to 1 last; the thread clears it. The thread looks at words for as long as it is
// told, and sleeps when no layer comes. It hands a layer back as soon as something is not as it should be, or the host
// comes to wait itself: the caller goes on from there. Between begin and end the ring is the thread's. Knows no plans.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "channel.h"
#include "find_pairs.h"
#include "layer_messages.h"
#include "spin.h"

namespace {

class SenderThread {
public:
    // How far a layer came. kRings: its reader sleeps until the socket rings.
    enum State { kLeft, kNothing, kFound, kRings, kSent, kTaken };

    // Where a layer's packet lies and its sums go: the word; ids and weights [T, k]; x [T, H] of a format, as Python's buffers name it,
    // of so many bytes a row; y f32 [T, H].
    struct Memory {
        std::atomic<uint32_t>* word;
        const int32_t* ids;
        const float* weights;
        const char* x;
        float* y;
        char format;
        uint64_t row_bytes, rows, hidden;
    };

    explicit SenderThread(uint16_t version) : version_(version) {}
    ~SenderThread() { close(); }  // with the interpreter's lock
    SenderThread(const SenderThread&) = delete;
    SenderThread& operator=(const SenderThread&) = delete;

    // layer: as the finder counts. spin_ns: for how long the thread looks for an answer; idle_ns: and then for another layer.
    void begin(Channel& ring, const Finder& finder, const Memory& memory, int64_t layer, const Asked& asked,
               uint64_t spin_ns, uint64_t idle_ns) {
        if (stage_.load() != kIdle) throw std::runtime_error("a layer is under way");
        if (!worker_ || pid_ != getpid()) start();
        ring_ = &ring;
        finder_ = finder;
        memory_ = memory;
        layer_ = layer;
        asked_ = asked;
        spin_ns_ = spin_ns;
        idle_ns_ = idle_ns;
        host_waits_ = false;
        stage_.store(kAsked);
        if (sleeps_.load()) {
            std::lock_guard<std::mutex> lock(worker_->mutex);
            worker_->wakes.notify_one();
        }
    }

    // None: the packet has not come within timeout_ns, and the layer is still under way. Else (state, when the message was
    // sent in ns of the monotonic clock, whether the core was lost, whether the thread looked for the answer in vain, what
    // take_result gives but for y), and it is over.
    nb::object end(uint64_t timeout_ns) {
        host_waits_ = true;
        {
            nb::gil_scoped_release release;
            spin_until([this] { return stage_.load() == kOver; }, timeout_ns);
        }
        if (stage_.load() != kOver) return nb::none();
        stage_.store(kIdle);
        return nb::make_tuple(static_cast<int>(state_), sent_ns_, static_cast<bool>(seen_ & 2), !(seen_ & 1),
                              state_ == kTaken ? described(found_.head) : nb::none());
    }

    // Give a layer up whose packet may never come. Whether its message was sent.
    bool cancel() {
        if (stage_.load() == kIdle) return false;
        cancelled_ = host_waits_ = true;
        {
            nb::gil_scoped_release release;
            while (stage_.load() != kOver) sched_yield();
        }
        cancelled_ = false;
        stage_.store(kIdle);
        return state_ >= kRings;
    }

    // The thread ends, whatever it waits for.
    void close() {
        if (!worker_ || pid_ != getpid()) {  // in a forked child the thread is the parent's: only its memory is here
            (void)worker_.release();
            return;
        }
        {
            std::lock_guard<std::mutex> lock(worker_->mutex);
            closing_ = cancelled_ = host_waits_ = true;
            worker_->wakes.notify_one();
        }
        nb::gil_scoped_release release;
        worker_->thread.join();
        worker_.reset();
    }

private:
    enum Stage { kIdle, kAsked, kOver };

    struct Worker {
        std::mutex mutex;
        std::condition_variable wakes;
        std::thread thread;
    };

    void start() {
        (void)worker_.release();
        worker_ = std::make_unique<Worker>();
        pid_ = getpid();
        sleeps_ = false;
        worker_->thread = std::thread([this, &worker = *worker_] { run(worker); });
    }

    void run(Worker& worker) {
        const auto asked = [this] { return stage_.load() == kAsked || closing_.load(); };
        while (!closing_) {
            if (!(spin_until(asked, idle_ns_) & 1)) {
                std::unique_lock<std::mutex> lock(worker.mutex);
                sleeps_.store(true);  // Dekker: then look whether a layer came meanwhile
                worker.wakes.wait(lock, asked);
                sleeps_.store(false);
            }
            if (stage_.load() != kAsked) continue;
            seen_ = 1;
            state_ = serve();
            stage_.store(kOver);
        }
    }

    State serve() {
        const auto there = [this] { return memory_.word->load(std::memory_order_acquire) == 1 || cancelled_.load(); };
        while (!(spin_until(there, kLongNs) & 1)) {
        }
        if (cancelled_) return kLeft;
        memory_.word->store(0, std::memory_order_relaxed);
        FoundPairs pairs;
        if (!finder_.find(finder_.whose, layer_, memory_.ids, memory_.weights, pairs)) return kLeft;
        if (!pairs.pairs) return kNothing;
        const auto part = [](const auto* values, uint64_t count) {
            return std::string_view(reinterpret_cast<const char*>(values), count * sizeof *values);
        };
        const ExecuteTensors tensors{
            memory_.format, pairs.rows, memory_.hidden, pairs.pairs,
            {part(memory_.x, pairs.rows * memory_.row_bytes), part(pairs.local, pairs.pairs), part(pairs.experts, pairs.pairs),
             part(pairs.bits, pairs.pairs), part(pairs.gates, pairs.pairs)}};
        const int put = write_execute(*ring_, version_, asked_, tensors);
        if (!put) return kFound;
        sent_ns_ = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
        if (put == 2) return kRings;
        const auto answered = [this] { return ring_->readable() || host_waits_.load(std::memory_order_relaxed); };
        if (spin_ns_) seen_ = spin_until(answered, spin_ns_);
        return ring_->readable() && read_result(*ring_, version_ >> 8, memory_.rows, memory_.hidden, memory_.y, found_) ? kTaken : kSent;
    }

    static constexpr uint64_t kLongNs = 1'000'000;

    const uint16_t version_;
    std::unique_ptr<Worker> worker_;
    pid_t pid_ = 0;
    std::atomic<bool> sleeps_{false}, closing_{false}, cancelled_{false}, host_waits_{false};
    std::atomic<int> stage_{kIdle};

    // of the layer under way
    Channel* ring_ = nullptr;
    Finder finder_{};
    Memory memory_{};
    int64_t layer_ = 0;
    Asked asked_{};
    uint64_t spin_ns_ = 0;
    std::atomic<uint64_t> idle_ns_{0};
    State state_ = kLeft;
    int seen_ = 1;  // as spin_until
    uint64_t sent_ns_ = 0;
    FoundResult found_;
};

}  // namespace
