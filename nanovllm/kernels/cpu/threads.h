// Threads that share the tasks of one job after the other.
//
// Within a step jobs follow each other in microseconds, so a thread without work spins for a moment. Then it sleeps: a
// process that waits for its user takes no CPU time. The caller works too, and waits only for tasks that a thread has
// begun: a thread that the system does not run, because another process has its core, delays no other. While other
// processes use the cores, fewer threads work (crowding.h). Several threads may call, such as those of two engines: one of
// them has the others' help at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <sched.h>

#include "crowding.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nanovllm {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Threads {
   public:
    // count: threads, the caller's among them. Throws std::system_error if the system starts no more.
    explicit Threads(int count) : crowding_(count), working_(count) {
        try {
            for (int i = 1; i < count; i++) workers_.emplace_back([this, i] { work(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Threads() { end(); }

    int count() const { return (int)workers_.size() + 1; }

    // fn(task) for every task from 0 to count - 1, in any order and thread. Not to be called within a task. While another
    // thread's job runs, the caller does all tasks. A task that finds no memory ends, and the caller throws std::bad_alloc when
    // the others are done.
    // is_long: the job takes a thread several milliseconds, as do those around it.
    template <typename Fn>
    void run(int64_t count, Fn&& fn, bool is_long = false) {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (count <= 1 || workers_.empty() || !turn.try_lock() || working_threads(is_long) == 1)
            return run_alone(count, fn);
        no_memory_.store(false, std::memory_order_relaxed);
        call_ = [](void* context, int64_t task) { (*(std::remove_reference_t<Fn>*)context)(task); };
        context_ = (void*)&fn;
        done_.store(0, std::memory_order_relaxed);
        tickets_.store((uint64_t)count << 32);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        take_tasks();
        for (int i = 0; done_.load(std::memory_order_acquire) < count; i++) i < SPINS ? pause_briefly() : (void)sched_yield();
        if (no_memory_.load(std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // The same. A thread begins with a range of tasks that follow each other, so what it reads can be fetched ahead across
    // tasks. Then it takes tasks from the others' ranges.
    template <typename Fn>
    void run_ranges(int64_t count, Fn&& fn, bool is_long = false) {
        struct alignas(64) Range {
            std::atomic<int64_t> next;
            int64_t end;
        };
        const int64_t size = std::min<int64_t>(this->count(), count);
        std::vector<Range> ranges(size);
        for (int64_t i = 0; i < size; i++) {
            ranges[i].next.store(count * i / size, std::memory_order_relaxed);
            ranges[i].end = count * (i + 1) / size;
        }
        run(size, [&](int64_t own) {
            for (int64_t i = 0; i < size; i++) {
                Range& range = ranges[(own + i) % size];
                for (int64_t task; (task = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) fn(task);
            }
        }, is_long);
    }

   private:
    static constexpr int SPINS = 2000;  // some 20 to 60 microseconds

    template <typename Fn>
    static void run_alone(int64_t count, Fn&& fn) {
        bool no_memory = false;
        for (int64_t task = 0; task < count; task++) {
            try {
                fn(task);
            } catch (const std::bad_alloc&) {
                no_memory = true;
            }
        }
        if (no_memory) throw std::bad_alloc();
    }

    // How many threads take the next tasks. Those that begin or end to work, or try their cores, hear of it.
    int working_threads(bool is_long) {
        const int now = crowding_.active(is_long), tries = crowding_.tries();
        if (now != working_ || tries != tries_) {
            std::lock_guard<std::mutex> lock(mutex_);
            working_ = now, tries_ = tries;
            wake_.notify_all();
            rest_.notify_all();
        }
        return now;
    }

    void end() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_.store(true);
        }
        wake_.notify_all();
        rest_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    // Take tasks while there are any; whether there was one.
    bool take_tasks() {
        bool any = false;
        for (;;) {
            uint64_t ticket = tickets_.load(std::memory_order_acquire);
            if ((uint32_t)ticket >= ticket >> 32) return any;
            // Between the load and this the job may have ended and another begun: the ticket names its own job's count.
            ticket = tickets_.fetch_add(1, std::memory_order_acq_rel);
            if ((uint32_t)ticket >= ticket >> 32) return any;
            try {
                call_(context_, (uint32_t)ticket);  // stays this job's until this task is done
            } catch (const std::bad_alloc&) {
                no_memory_.store(true, std::memory_order_relaxed);
            }
            done_.fetch_add(1, std::memory_order_release);
            any = true;
        }
    }

    void work(int thread) {
        crowding_.enter(thread);
        int tries = 0;
        bool rests = false;
        while (!stop_.load()) {
            bool any = false;
            for (int i = 0; i < SPINS && !any && crowding_.works(thread); i++) {
                any = take_tasks();
                if (!any) pause_briefly();
            }
            if (any) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            if (!crowding_.works(thread)) {
                if (!rests) tries = crowding_.tries();  // those of before are over
                rest_.wait(lock, [&] { return stop_.load() || crowding_.works(thread) || crowding_.tries() != tries; });
                lock.unlock();
                const auto end = Crowding::Clock::now() + Crowding::WINDOW;
                for (tries = crowding_.tries(); !stop_.load() && !crowding_.works(thread) && Crowding::Clock::now() < end;)
                    pause_briefly();
                rests = !crowding_.works(thread);
                continue;
            }
            asleep_.fetch_add(1);
            wake_.wait(lock, [&] {
                uint64_t ticket = tickets_.load();
                return stop_.load() || (uint32_t)ticket < ticket >> 32 || !crowding_.works(thread);
            });
            asleep_.fetch_sub(1);
        }
    }

    // The job's number of tasks in the upper half, the next task in the lower.
    alignas(64) std::atomic<uint64_t> tickets_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    void (*call_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::atomic<bool> no_memory_{false};  // for a task of the job
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex turn_;  // held by the caller whose job runs
    std::mutex mutex_;
    std::condition_variable wake_, rest_;
    Crowding crowding_;
    int working_, tries_ = 0;  // those that `working_threads` saw last; read and written by the caller whose turn it is
    std::vector<std::thread> workers_;
};

}  // namespace nanovllm
