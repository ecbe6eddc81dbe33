// How many of some threads work: fewer while other programs use their cores.
//
// A thread that waits for its core in the middle of a task delays the job. With fewer threads each has a core for itself.
// At least half of the threads work: other programs with as many threads leave each of these half of a core, not none.
// Threads that rest try their cores before they work again: they spin, without a task that others would wait for.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nanovllm {

// Those of the threads 0 to count - 1 that work are the first. Thread 0 is whichever calls `active`.
class Crowding {
   public:
    using Clock = std::chrono::steady_clock;

    explicit Crowding(int count) : count_(count), active_(count), ids_(count), before_(count) {}

    // A thread says which it is, from 1 on.
    void enter(int thread) { enter(thread, id_of_this_thread()); }
    void enter(int thread, int id) { ids_[thread].store(id, std::memory_order_relaxed); }

    bool works(int thread) const { return thread < active_.load(std::memory_order_relaxed); }

    // The number of the last try.
    int tries() const { return tries_.load(); }

    // How long a thread spins in a try.
    static constexpr std::chrono::milliseconds WINDOW{50};

    // How many work now. To be called by one thread at a time, often: each 50 ms it looks how long the threads waited. In a
    // long job all work, and in the jobs of the next 50 ms: a thread that waits for its core delays it by less than it helps.
    int active(bool is_long = false) {
        if (count_ == 1) return 1;
        if (is_long) return all(Clock::now());
        const auto now = Clock::now();
        return now < next_look_ ? active_.load(std::memory_order_relaxed) : look(now, id_of_this_thread(), wait_of);
    }

    // All work from `now` on. Waits of this time do not count.
    int all(Clock::time_point now) {
        active_.store(count_, std::memory_order_relaxed);
        begun_ = {}, next_look_ = now + WINDOW, trying_ = false, rest_ = LEAST_REST;
        return count_;
    }

    // How many work from `now` on. wait_of(id): nanoseconds that a thread has waited for a core while it could run; -1: the
    // system does not tell.
    template <typename WaitOf>
    int look(Clock::time_point now, int caller, WaitOf&& wait_of) {
        enter(0, caller);
        const auto window = now - begun_;
        int64_t waited = 0;
        for (int i = 0; i < count_; i++) {
            const int id = ids_[i].load(std::memory_order_relaxed);
            const Reading reading{id, id ? wait_of(id) : -1};
            // Callers, such as those of two engines, have each waited for a time of their own.
            if (reading.id == before_[i].id && reading.waited >= 0 && before_[i].waited >= 0)
                waited += reading.waited - before_[i].waited;
            before_[i] = reading;
        }
        const bool measured = (trying_ || active_.load(std::memory_order_relaxed) == count_) && window < 4 * WINDOW;
        const double cores = measured ? (double)waited / std::chrono::nanoseconds(window).count() : 0;  // else there was a pause
        auto next = std::chrono::nanoseconds(WINDOW);
        const bool tries = !measured && active_.load(std::memory_order_relaxed) < count_;
        if (tries) {
            tries_.fetch_add(1);
        } else if (cores > CROWDED) {
            // Two programs that share a core each wait half of the time.
            const int others = std::max(1, (int)std::lround(2 * std::min<double>(cores, count_)));
            active_.store(std::max((count_ + 1) / 2, count_ - others), std::memory_order_relaxed);
            next = rest_;
            rest_ = std::min(2 * rest_, MOST_REST);
        } else {
            if (measured) rest_ = LEAST_REST;
            active_.store(count_, std::memory_order_relaxed);
        }
        begun_ = now, next_look_ = now + next, trying_ = tries;
        return active_.load(std::memory_order_relaxed);
    }

   private:
    static constexpr std::chrono::milliseconds LEAST_REST{50}, MOST_REST{1600};
    static constexpr double CROWDED = 0.4;  // cores that the threads wait for, from which on fewer work

    // What a thread had waited when the window began.
    struct Reading {
        int id = 0;
        int64_t waited = -1;
    };

#if defined(__linux__)
    static int id_of_this_thread() { return (int)syscall(SYS_gettid); }

    // Source: https://docs.kernel.org/scheduler/sched-stats.html
    static int64_t wait_of(int id) {
        char text[96];
        std::snprintf(text, sizeof text, "/proc/self/task/%d/schedstat", id);
        const int file = open(text, O_RDONLY | O_CLOEXEC);
        if (file < 0) return -1;
        const ssize_t size = read(file, text, sizeof text - 1);
        close(file);
        if (size <= 0) return -1;
        text[size] = 0;
        char *second, *end;  // "time run, time waited, turns"
        std::strtoll(text, &second, 10);
        const int64_t waited = std::strtoll(second, &end, 10);
        return end == second ? -1 : waited;
    }
#else
    static int id_of_this_thread() { return 0; }
    static int64_t wait_of(int) { return -1; }
#endif

    const int count_;
    std::atomic<int> active_, tries_{0};
    std::vector<std::atomic<int>> ids_;
    std::vector<Reading> before_;
    Clock::time_point begun_{}, next_look_{};
    std::chrono::milliseconds rest_ = LEAST_REST;
    bool trying_ = false;  // all spin or work since `begun_`
};

}  // namespace nanovllm
