// A small pool: chunks are handed out one by one, waiting spins for a bounded time and then sleeps on a futex.
// Knows no kernel. OpenMP is not used because its waiting collapses when cores are shared.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ndp {

class ThreadPool {
   public:
    explicit ThreadPool(int threads);  // including the caller of run()
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return threads_; }

    // Workers look ten times as long for the next run before they sleep.
    void stay_awake(bool awake) { awake_ = awake; }

    // Calls work(context, task, thread) once for every task in [0, tasks); returns when all are done. One caller at a
    // time. A worker that the system does not schedule holds nothing up: only tasks that were taken are waited for.
    void run(int tasks, void (*work)(void*, int task, int thread), void* context);

    template <class Work>
    void run(int tasks, const Work& work) {
        run(tasks, [](void* w, int task, int thread) { (*static_cast<const Work*>(w))(task, thread); },
            const_cast<Work*>(&work));
    }

   private:
    void worker_loop(int thread);
    void take_tasks(int thread);

    int threads_;
    std::vector<std::thread> workers_;
    // tasks << 32 | next task: one add takes a task and says whether it exists, so a late worker can tell that the
    // run it woke up for is over.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<uint32_t> done_{0};
    std::atomic<uint32_t> generation_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> awake_{false};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stop_{false};
    void (*work_)(void*, int, int) = nullptr;
    void* context_ = nullptr;
};

}  // namespace ndp
