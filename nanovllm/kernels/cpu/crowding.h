// How many of some threads work: fewer while other programs use their cores.
//
// A thread that waits for its core in the middle of a task delays the job. With fewer threads each has a core for itself.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanovllm {

// Those of the threads 0 to count - 1 that work are the first. Thread 0 is whichever calls `active`.
class Crowding {
   public:
    explicit Crowding(int count) : count_(count), active_(count), ids_(count) {}

    // A thread says which it is, from 1 on.
    void enter(int thread) { ids_[thread].store(id_of_this_thread(), std::memory_order_relaxed); }

    bool works(int thread) const { return thread < active_.load(std::memory_order_relaxed); }

    // How many work now. To be called by one thread at a time, often: each 50 ms it looks how long the threads waited.
    int active() {
        if (count_ == 1) return 1;
        const auto now = Clock::now();
        if (now >= next_look_) look(now);
        return active_.load(std::memory_order_relaxed);
    }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds WINDOW{50}, LEAST_REST{100}, MOST_REST{1600};
    static constexpr double CROWDED = 0.4;  // cores that the threads wait for, from which on fewer work

    void look(Clock::time_point now) {
        const auto window = now - begun_;
        const int64_t waited = total_wait();
        const bool measured = active_.load(std::memory_order_relaxed) == count_ && window < 4 * WINDOW;  // else there was a pause
        const double cores = measured ? (double)(waited - waited_) / std::chrono::nanoseconds(window).count() : 0;
        auto next = std::chrono::nanoseconds(WINDOW);
        if (cores > CROWDED) {
            // Two programs that share a core each wait half of the time.
            active_.store(std::max(1, count_ - std::max(1, (int)std::lround(2 * cores))), std::memory_order_relaxed);
            next = rest_;
            rest_ = std::min(2 * rest_, MOST_REST);
        } else {
            if (measured) rest_ = LEAST_REST;
            active_.store(count_, std::memory_order_relaxed);
        }
        begun_ = now, next_look_ = now + next, waited_ = waited;
    }

    // Nanoseconds that all threads have waited for a core while they could run.
    int64_t total_wait() {
        ids_[0].store(id_of_this_thread(), std::memory_order_relaxed);
        int64_t total = 0;
        for (const auto& id : ids_) total += wait_of(id.load(std::memory_order_relaxed));
        return total;
    }

#if defined(__linux__)
    static int id_of_this_thread() { return (int)syscall(SYS_gettid); }

    // 0 if Linux does not tell. Source: https://docs.kernel.org/scheduler/sched-stats.html
    static int64_t wait_of(int id) {
        char path[64];
        std::snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", id);
        FILE* file = std::fopen(path, "r");
        if (!file) return 0;
        long long ran, waited = 0;
        if (std::fscanf(file, "%lld %lld", &ran, &waited) != 2) waited = 0;
        std::fclose(file);
        return waited;
    }
#else
    static int id_of_this_thread() { return 0; }
    static int64_t wait_of(int) { return 0; }
#endif

    const int count_;
    std::atomic<int> active_;
    std::vector<std::atomic<int>> ids_;
    Clock::time_point begun_{}, next_look_{};
    int64_t waited_ = 0;
    std::chrono::milliseconds rest_ = LEAST_REST;
};

}  // namespace nanovllm
