// csrc/sender_thread.h under the model checker relacy: a host, the thread, and a GPU that writes packets, in interleavings
// and with the relaxed orders that C++ allows. The checked file is the real one; what it includes is replaced here.
// A lost wake-up is a deadlock, and data that is read before it was written is a race on a rl::var.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <thread>

#include <relacy/relacy.hpp>  // behind the standard library, whose words it redefines
#undef new
#undef delete
#undef memory_order_relaxed
#undef memory_order_consume
#undef memory_order_acquire
#undef memory_order_release
#undef memory_order_acq_rel
#undef memory_order_seq_cst

void operator delete(void* at, std::size_t) noexcept { ::operator delete(at); }  // which relacy, older than it, leaves out

// -- the standard library's, as relacy has them ----------------------------------------------------------------------------

struct World;
World* world;  // of the running execution

namespace model_std {
using namespace ::std;

inline rl::memory_order of(::std::memory_order order) {
    switch (order) {
    case ::std::memory_order_relaxed: return rl::mo_relaxed;
    case ::std::memory_order_acquire: return rl::mo_acquire;
    case ::std::memory_order_release: return rl::mo_release;
    default: return rl::mo_seq_cst;
    }
}

template <class T>
struct atomic {
    rl::atomic<T> value;
    atomic(T first = T()) { value.store(first, rl::mo_relaxed, $); }
    T load(::std::memory_order order = ::std::memory_order_seq_cst) const { return value.load(of(order), $); }
    void store(T to, ::std::memory_order order = ::std::memory_order_seq_cst) { value.store(to, of(order), $); }
    operator T() const { return load(); }
    T operator=(T to) { return store(to), to; }
};

struct mutex {
    rl::mutex inner;
    void lock() { inner.lock($); }
    void unlock() { inner.unlock($); }
};

struct condition_variable {  // which wakes nobody without cause: a lost notification is a thread that waits for ever
    rl::atomic<int> notified;
    condition_variable() { notified.store(0, rl::mo_relaxed, $); }
    void notify_one() { notified.fetch_add(1, rl::mo_relaxed, $); }
    template <class Ready>
    void wait(::std::unique_lock<mutex>& lock, Ready ready) {
        while (!ready()) {
            const int seen = notified.load(rl::mo_relaxed, $);
            lock.unlock();
            while (notified.load(rl::mo_relaxed, $) == seen) rl::yield(1, $);
            lock.lock();
        }
    }
};

struct thread {
    thread() = default;
    explicit thread(::std::function<void()> body);
    void join();
};
}  // namespace model_std

// -- what the real file includes -------------------------------------------------------------------------------------------

namespace nb {
struct object {
    int state = -1;  // none
    bool is_none() const { return state < 0; }
};
inline object none() { return {}; }
template <class... Rest>
object make_tuple(int state, Rest&&...) { return {state}; }
struct gil_scoped_release {};
}  // namespace nb

struct Channel {
    bool readable();
};
struct FoundPairs {
    uint64_t pairs = 0, rows = 0;
    const int32_t *local = nullptr, *experts = nullptr;
    const uint8_t* bits = nullptr;
    const float* gates = nullptr;
};
struct Finder {
    bool (*find)(void* whose, int64_t layer, const int32_t* ids, const float* weights, FoundPairs& pairs);
    void* whose;
};
struct Asked {};
struct ExecuteTensors {
    char format;
    uint64_t rows, hidden, pairs;
    std::string_view parts[5];
};
struct FoundResult {
    int head = 0;
};
inline nb::object described(int) { return {0}; }
int write_execute(Channel&, uint16_t, const Asked&, const ExecuteTensors&);
bool read_result(Channel&, int, uint64_t, uint64_t, float*, FoundResult&);

constexpr int kLooks = 2;
template <class Ready>
int spin_until(const Ready& ready, uint64_t) {  // a time that is over soon
    for (int look = 0; look < kLooks; ++look) {
        if (ready()) return 1;
        rl::yield(1, $);
    }
    return 0;
}

#define sched_yield() rl::yield(1, $)
#define std model_std
#include "sender_thread.h"
#undef std
#undef sched_yield

// -- three threads -------------------------------------------------------------------------------------------------------------

constexpr int kLayers = 2;

struct World : rl::test_suite<World, 3> {
    SenderThread sender{2};
    Channel ring;
    model_std::atomic<uint32_t> word{0};
    rl::atomic<int> launched, written, started, ended;
    rl::var<int> packet, pairs, sums;
    std::function<void()> body;

    void before() {
        world = this;
        for (auto* each : {&launched, &written, &started, &ended}) each->store(0, rl::mo_relaxed, $);
        packet($) = pairs($) = sums($) = 0;
    }

    void thread(unsigned index) {
        if (index == 0) host();
        if (index == 1) worker();
        if (index == 2) gpu();
    }

    void host() {
        const Finder finder{&World::find, this};
        const SenderThread::Memory memory{&word, nullptr, nullptr, nullptr, nullptr, 'f', 4, 1, 1};
        for (int layer = 1; layer <= kLayers; ++layer) {
            sender.begin(ring, finder, memory, layer, Asked{}, rl::rand(2), 1);
            const bool is_lost = rl::rand(4) == 0;  // the step ends in an error
            if (!is_lost) launched.store(layer, rl::mo_release, $);
            bool sent = false;
            if (is_lost) {
                sent = sender.cancel();
                RL_ASSERT(!sent);
                launched.store(layer, rl::mo_release, $);
                while (written.load(rl::mo_acquire, $) < layer) rl::yield(1, $);  // as the caller fetches the packet
                word.store(0, std::memory_order_relaxed);
                continue;
            }
            nb::object found;
            while ((found = sender.end(1)).is_none()) rl::yield(1, $);
            if (found.state == SenderThread::kLeft) {  // the caller reads the packet itself
                RL_ASSERT(packet($) == layer);
                continue;
            }
            RL_ASSERT(pairs($) == layer);
            if (found.state == SenderThread::kTaken) RL_ASSERT(sums($) == layer);
        }
        if (rl::rand(2)) {  // the engine ends in the middle of a layer whose packet does not come
            sender.begin(ring, finder, memory, kLayers + 1, Asked{}, 1, 1);
        }
        sender.close();
        launched.store(kLayers + 1, rl::mo_release, $);
    }

    void worker() {
        while (!started.load(rl::mo_acquire, $)) rl::yield(1, $);
        body();
        ended.store(1, rl::mo_release, $);
    }

    void gpu() {
        for (int layer = 1; layer <= kLayers; ++layer) {
            while (launched.load(rl::mo_acquire, $) < layer) rl::yield(1, $);
            packet($) = layer;
            word.store(1, std::memory_order_release);
            written.store(layer, rl::mo_release, $);
        }
    }

    static bool find(void* whose, int64_t layer, const int32_t*, const float*, FoundPairs& found) {
        World& self = *static_cast<World*>(whose);
        RL_ASSERT(self.packet($) == layer);
        if (rl::rand(4) == 0) return false;
        self.pairs($) = static_cast<int>(layer);
        found.pairs = found.rows = rl::rand(4) ? 1 : 0;
        return true;
    }
};

namespace model_std {
thread::thread(::std::function<void()> of) {
    world->body = of;
    world->started.store(1, rl::mo_release, $);
}
void thread::join() {
    while (!world->ended.load(rl::mo_acquire, $)) rl::yield(1, $);
}
}  // namespace model_std

bool Channel::readable() { return rl::rand(2); }
int write_execute(Channel&, uint16_t, const Asked&, const ExecuteTensors&) { return rl::rand(3); }
bool read_result(Channel&, int, uint64_t, uint64_t, float*, FoundResult&) {
    world->sums($) = world->pairs($);
    return true;
}

int main(int, char** given) {
    rl::test_params how;
    how.search_type = rl::random_scheduler_type;
    how.iteration_count = static_cast<rl::iteration_t>(std::atoll(given[1]));
    how.execution_depth_limit = 4000;
    return rl::simulate<World>(how) ? 0 : 1;
}
