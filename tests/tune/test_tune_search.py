"""The logic of tuning: spaces with reasons, and a search whose timer says what it is told to."""

from dataclasses import dataclass

import pytest

from nanovllm.tune import Budget, Skipped, Space, search
from nanovllm.tune.search import FINAL, FULL, QUICK
from nanovllm.tune.space import distance, nearest, powers


@dataclass(frozen=True)
class Plan:
    n: int
    tma: bool = False


@dataclass(frozen=True)
class Other:
    n: int
    more: int = 1


def test_each_rule_says_why_and_is_counted():
    rules = {
        "too wide": lambda p: p.n > 64 and not p.tma,
        "refused": lambda p: f"{p.n} cannot be loaded so" if p.tma and p.n == 32 else None,
    }
    space = Space(Plan, {"n": powers(32, 128), "tma": (False, True)}, rules)
    kept, left_out = space.split()
    assert kept == [Plan(32), Plan(64), Plan(64, True), Plan(128, True)]
    assert left_out == {"too wide": 1, "32 cannot be loaded so": 1}
    # The first rule that refuses a plan is the reason.
    assert Space(Plan, space.values, rules | {"all": lambda p: True}).split()[1]["all"] == 4 and powers(2, 1) == ()


def test_the_nearest_come_first_and_classes_alternate():
    assert (
        distance(Plan(8), Plan(32, True)) == 3 and distance(Plan(8), Other(16)) == 1 and distance(Plan(0), Plan(4)) == 1
    )
    plans = [Plan(n) for n in powers(1, 64)] + [Other(n) for n in powers(1, 4)]
    order = nearest(plans, {}, Plan(32))
    assert order[:6] == [Plan(32), Other(4), Plan(16), Other(2), Plan(64), Other(1)] and order[6:8] == [
        Plan(8),
        Plan(4),
    ]
    # Later they are those near the fastest of each class.
    order = nearest(plans, {Plan(32): 3.0, Plan(2): 1.0, Other(1): 9.0}, Plan(32))
    assert order[:4] == [Plan(2), Other(1), Plan(1), Other(2)]


class Timer:
    """Seconds by n of the plan; notes every call. A plan with a text is skipped for that reason."""

    def __init__(self, seconds, wrong=(), tick=1.0):
        self.seconds = seconds if isinstance(seconds, dict) else dict(enumerate(seconds, 1))
        self.wrong, self.calls, self.verified, self.batches = wrong, [], [], []
        self.now, self.tick = 0.0, tick

    def measure(self, plan, rounds):
        self.calls.append((plan.n, rounds))
        self.now += self.tick
        if isinstance(self.seconds[plan.n], str):
            raise Skipped(self.seconds[plan.n])
        return self.seconds[plan.n]

    def verify(self, plan):
        self.verified.append(plan.n)
        if plan.n in self.wrong:
            raise Skipped(f"wrong result: {plan.n} is off")

    def run(self, default=None, **options):
        plans = [Plan(n) for n in self.seconds]
        default = None if default is None else Plan(default)
        return search(
            plans, self.measure, self.verify, default=default, prepare=self.prepare, clock=lambda: self.now, **options
        )

    def prepare(self, batch):
        self.batches.append([plan.n for plan in batch])

    def rounds(self, n):
        return [r for called, r in self.calls if called == n]


def test_the_fastest_right_plan_wins_and_the_second_is_kept():
    timer = Timer([3.0, 1.0, 1.1, 0.5], wrong={4})
    found = timer.run()
    assert (found.best.n, found.seconds, found.runner_up.n, found.runner_up_seconds) == (2, 1.0, 3, 1.1)
    assert found.tried == 4 and found.skipped == {"wrong result": 1} and found.untried == 0 and found.stopped is None
    assert {2, 3} <= set(timer.verified)  # both are right


def test_a_wrong_plan_does_not_set_the_pace():
    """It is fast because it does nothing: the others must not be given up for it."""
    found = Timer([0.001, 2.0, 1.0], wrong={1}).run()
    assert found.best == Plan(3) and found.slower == 0


def test_a_clearly_slower_plan_is_measured_no_further():
    timer = Timer([1.0, 1.3, 1.1])
    found = timer.run(budget=Budget(slower=1.2))
    assert timer.rounds(2) == [QUICK] and timer.rounds(3)[:2] == [QUICK, FULL] and found.slower == 1
    assert timer.rounds(1) == [QUICK, FULL, FINAL, FINAL]


def test_what_cannot_run_is_counted_by_reason():
    found = Timer(["out of shared memory: 300 KiB", "out of shared memory: 400 KiB", "does not compile: x", 1.0]).run()
    assert found.best == Plan(4) and found.tried == 1 and found.runner_up is None
    assert found.skipped == {"out of shared memory": 2, "does not compile": 1}
    found = Timer([1.0, "does not compile: x"], wrong={1}).run()
    assert found.best is None and found.seconds is None and found.skipped.total() == 2
    assert search([], lambda c, r: 1.0, lambda c: None).best is None


@pytest.mark.parametrize(
    "seconds, wrong, best, runner_up, default_seconds",
    [
        ([0.995, 2.0, 1.0], (), 3, 1, 1.0),  # less than 2 % faster
        ([0.9, 2.0, 1.0], (), 1, 3, 1.0),
        ([*(0.1 + i / 1000 for i in range(9)), 5.0], (), 1, 2, 5.0),  # far behind, and measured in the end all the same
        ([1.0, 0.5], {2}, 1, None, None),
    ],
)
def test_the_built_in_choice_is_kept_unless_another_is_faster_by_the_margin(
    seconds, wrong, best, runner_up, default_seconds
):
    timer = Timer(seconds, wrong)
    found = timer.run(default=len(seconds))
    assert found.best == Plan(best) and found.runner_up == (runner_up and Plan(runner_up))
    assert found.default_seconds == default_seconds
    assert timer.calls[0] == (len(seconds), QUICK)  # first, so that a limit cannot leave it out


def test_the_search_follows_the_fastest_plan():
    """From 64, whose neighbours are faster and faster down to 2, it gets there without trying what lies above."""
    timer = Timer({n: float(n) if n >= 2 else 9.0 for n in powers(1, 1 << 20)})
    found = timer.run(default=64, budget=Budget(batch=3, patience=5))
    assert found.best == Plan(2) and found.stopped == "no improvement in 5 candidates" and found.tried < 16
    assert timer.batches[0] == [64, 32, 128] and timer.batches[1] == [16, 8, 4]


def test_plans_are_prepared_in_batches_and_once():
    timer = Timer([1.0] * 10)
    timer.run(budget=Budget(batch=4), default=8)
    assert [len(b) for b in timer.batches] == [4, 4, 2] and timer.batches[0][0] == 8
    assert sorted(sum(timer.batches, [])) == list(range(1, 11)) and timer.rounds(8).count(QUICK) == 1


def test_limits_end_the_search():
    timer = Timer([1.0] * 100)  # two measurements each; the time is looked at every 4 plans
    found = timer.run(budget=Budget(seconds=10, batch=4), default=1)
    assert found.stopped == "time limit of 10 s" and found.tried == 8 and found.untried == 92 and found.best == Plan(1)
    # Also where nothing is right yet.
    found = Timer(["does not compile: x"] * 20).run(budget=Budget(seconds=5, batch=1))
    assert found.best is None and found.stopped == "time limit of 5 s" and found.untried == 15
    found = Timer([1.0] * 50, wrong=set(range(51))).run(budget=Budget(patience=7))
    assert found.best is None and found.untried == 43 and found.stopped == "no improvement in 7 candidates"
    found = Timer([1.0] * 50).run(budget=Budget(most=20))
    assert found.tried == 20 and found.untried == 30 and found.stopped == "limit of 20 candidates"
    assert Timer([1.0] * 20).run(budget=Budget(most=20)).stopped is None


@pytest.mark.parametrize("at", [1, 2])
def test_a_finalist_that_cannot_be_measured_again_makes_room(at):
    timer, finals = Timer([3.0, 1.0, 1.1, 2.0]), []
    measure = timer.measure

    def failing(plan, rounds):
        if rounds == FINAL and plan.n == 2:
            finals.append(plan)
            if len(finals) == at:
                raise Skipped("out of memory: 3 GiB")
        return measure(plan, rounds)

    timer.measure = failing
    found = timer.run(default=4, budget=Budget(slower=9))
    assert (found.best.n, found.runner_up.n, found.default_seconds) == (3, 4, 2.0) and len(finals) == at
    assert found.skipped == {"out of memory": 1}


def test_other_errors_are_not_swallowed():
    def broken(plan, rounds):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        search([Plan(1)], broken, lambda c: None)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"seconds": 0}, "--limit 0: expected"),
        ({"patience": 0}, "patience: expected"),
        ({"slower": 0.5}, "slower, margin"),
    ],
)
def test_bad_budgets(options, said):
    with pytest.raises(ValueError, match=said):
        Budget(**options)
