// How many threads work, by a clock and by waits that this program makes up.
#include "crowding.h"

#include <map>

using namespace nanovllm;
using std::chrono::milliseconds;

constexpr int64_t MS = 1'000'000, UNKNOWN = -1;

// Threads 1 to count - 1 have the ids 101, 102, ...
struct Made {
    explicit Made(int count) : count(count), crowding(count) {
        for (int i = 1; i < count; i++) crowding.enter(i, 100 + i);
    }

    // Every thread waits for its core during this share of `passed`; then a caller looks.
    int after(milliseconds passed, double share, int caller = 100) {
        now += passed;
        for (int i = 1; i < count; i++) wait(100 + i, passed, share);
        wait(caller, passed, share);
        return crowding.look(now, caller, [&](int id) { return waits.at(id); });
    }

    int long_job_after(milliseconds passed) { return crowding.all(now += passed); }

    int tries() const { return crowding.tries(); }

    void wait(int id, milliseconds passed, double share) {
        if (waits[id] != UNKNOWN) waits[id] += (int64_t)(share * passed.count() * MS);
    }

    int count;
    Crowding crowding;
    std::map<int, int64_t> waits;
    Crowding::Clock::time_point now{std::chrono::hours(1)};
};

static void expect(int got, int wanted, const char* what) {
    if (got == wanted) return;
    std::printf("%s: %d threads work, not %d\n", what, got, wanted);
    std::exit(1);
}

int main() {
    const milliseconds window(50);
    {
        Made made(8);
        expect(made.after(window, 0), 8, "first look");
        expect(made.after(window, 0.04), 8, "0.32 cores");
        expect(made.after(window, 0.0625), 7, "half a core");
        expect(made.after(milliseconds(100), 0), 7, "a try after a rest");
        expect(made.after(window, 0), 8, "after a try");
        expect(made.after(window, 0.125), 6, "one core");
        expect(made.after(milliseconds(100), 0), 6, "a try");
        expect(made.after(window, 0.125), 6, "one core in a try");
        expect(made.tries(), 2, "tries");
        expect(made.after(milliseconds(200), 0), 6, "a try after a longer rest");
        expect(made.after(window, 0.5), 4, "another program with as many threads");
        expect(made.after(milliseconds(400), 0.5), 4, "a try after a rest of 400 ms");
        expect(made.after(window, 0.0625), 7, "half a core in a try");
        expect(made.after(milliseconds(800), 0), 7, "a try after a rest of 800 ms");
        expect(made.after(window, 0), 8, "after another try");
        expect(made.after(milliseconds(200), 0.5), 8, "after a pause");
    }
    {
        Made made(2);
        made.after(window, 0);
        expect(made.after(window, 0.9), 1, "a neighbour");
        expect(made.after(milliseconds(5000), 0), 1, "a try after a pause");
        expect(made.after(milliseconds(5000), 0), 1, "another one, since the threads did not try all the time");
        expect(made.tries(), 2, "tries after pauses");
        expect(made.after(window, 0), 2, "after them");
    }
    {
        Made made(8);
        made.after(window, 0);
        expect(made.after(window, 0.5), 4, "another program with as many threads");
        expect(made.long_job_after(milliseconds(10)), 8, "a long job");
        expect(made.after(window, 0.5), 8, "after a long job, whose waits do not count");
        expect(made.after(window, 0.5), 4, "waits since");
        expect(made.tries(), 0, "no try");
    }
    for (auto [count, wanted] : {std::pair{2, 1}, {3, 2}, {5, 3}}) {
        Made made(count);
        made.after(window, 0);
        expect(made.after(window, 0.9), wanted, "half of the threads, rounded up");
    }
    {
        Made made(2);
        made.waits[200] = 3600'000 * MS;
        for (int i = 0; i < 6; i++)
            expect(made.after(window, 0, i % 2 ? 200 : 100), 2, "callers by turns, one of which waited for an hour");
        expect(made.after(window, 0.9, 200), 1, "its own wait and a worker's");
    }
    {
        Made made(2);
        made.waits[101] = 3600'000 * MS;
        made.after(window, 0);
        made.waits[101] = UNKNOWN;  // no file descriptor was left
        expect(made.after(window, 0), 2, "a wait that the system did not tell");
        made.waits[101] = 3600'000 * MS;
        expect(made.after(window, 0), 2, "told again");
        made.waits[100] = made.waits[101] = UNKNOWN;
        for (int i = 0; i < 4; i++) expect(made.after(window, 0.9), 2, "a system that never tells");
    }
    std::puts("as expected");
}
