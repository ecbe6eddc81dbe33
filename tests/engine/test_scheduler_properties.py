"""The scheduler under random load, against a simulated device."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.sampling_params import SamplingParams
from tests.engine.simulation import DOCUMENTS, Simulation

SMALL_SIZES = PiggybackSizes(totals=(4, 6), row_multiple=2, min_tokens=1, min_tokens_at_once=2, max_pieces=2)


@st.composite
def setups(draw):
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(4, 24))
    return dict(
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 8)),
        max_num_seqs=draw(st.integers(1, 5)),
        budget=draw(st.integers(1, 12)),
        steps_ahead=draw(st.integers(0, 1)),
        caching=draw(st.booleans()),
        piggyback=draw(st.sampled_from((None, SMALL_SIZES))),
    )


@st.composite
def requests(draw):
    max_tokens = draw(st.integers(1, 14))
    return dict(
        length=draw(st.integers(1, 23)),
        document=draw(st.integers(0, len(DOCUMENTS) - 1)),
        own_end=draw(st.integers(0, 3)),
        copies=draw(st.sampled_from((1, 1, 1, 2, 3))),
        seed=draw(st.integers(0, 3)),
        stop_at=draw(st.none() | st.integers(1, 6)),
        offline=draw(st.sampled_from((True, True, True, False))),
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from(((), (), (3,)))),
            prompt_logprobs=draw(st.sampled_from((None, None, None, 1))),
        ),
    )


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("abort in flight"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=30,
)


def drive(setup, operations):
    sim = Simulation(**setup)
    for name, value in operations:
        if name == "add":
            length = min(value["length"], setup["max_model_len"] - 1)
            prompt = DOCUMENTS[value["document"]][:length]
            if value["own_end"]:
                prompt[-1] = value["own_end"]
            for copy in range(value["copies"]):
                sim.add(prompt, value["params"], value["seed"] + copy, value["stop_at"], value["offline"])
        elif name.startswith("abort"):
            if sim.added:
                seq = sim.added[value % len(sim.added)][0]
                sim.abort(seq) if name == "abort" else sim.step(abort=seq)
        else:
            for _ in range(value):
                sim.step()
    sim.drain()
    return sim


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups(), OPERATIONS)
def test_every_request_gets_its_own_tokens_and_gives_everything_back(setup, operations):
    drive(setup, operations)


def random_case(rng):
    """One case of the property above, denser than hypothesis makes them."""
    block_size, max_model_len = rng.randint(1, 4), rng.randint(4, 24)
    setup = dict(
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=-(-max_model_len // block_size) + rng.randint(0, 6),
        max_num_seqs=rng.randint(1, 5),
        budget=rng.randint(1, 12),
        steps_ahead=rng.randint(0, 1),
        caching=rng.random() < 0.8,
        piggyback=SMALL_SIZES if rng.random() < 0.5 else None,
    )
    operations = []
    for _ in range(rng.randint(5, 40)):
        kind = rng.choice(("add", "add", "add", "abort", "abort in flight", "step", "step"))
        value = rng.randint(1, 4)
        if kind == "add":
            max_tokens = rng.randint(1, 14)
            value = dict(
                length=rng.randint(1, 23),
                document=rng.randrange(2),
                own_end=rng.randint(0, 3),
                copies=rng.randint(1, 3),
                seed=rng.randrange(4),
                stop_at=rng.choice((None, 2, 5)),
                offline=rng.random() < 0.9,
                params=SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=rng.randint(0, max_tokens),
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=rng.choice(((), (3,))),
                    prompt_logprobs=rng.choice((None, None, 1)),
                ),
            )
        operations.append((kind, rng.randrange(30) if kind.startswith("abort") else value))
    return setup, operations


def test_random_load_reaches_every_situation():
    seen = set()
    for seed in range(250):
        seen |= drive(*random_case(random.Random(seed))).seen
    assert seen >= {
        "preempted", "preempted with a token in flight", "resumed", "prefix hit", "chunked", "mixed", "dropped a token",
        "input from the step before", "abort while waiting",
        "abort while running", "abort while running with a token in flight", "stop string while running",
        "stop string while running with a token in flight", "stop string while waiting",
        "continued", "continued while someone waits", "preempted in a run",
    }  # fmt: skip


def test_offline_load_is_piggybacked_in_every_situation():
    """Sequences that have all their output, the longest first, in caches that are too small for them."""
    seen = set()
    for seed in range(80):
        rng = random.Random(seed)
        block_size = rng.randint(1, 3)
        sim = Simulation(
            block_size=block_size, max_model_len=24, num_blocks=-(-24 // block_size) + rng.randint(0, 8),
            max_num_seqs=4,
            budget=12, steps_ahead=rng.randint(0, 1), caching=rng.random() < 0.5, piggyback=SMALL_SIZES,
            reserve_tokens_ahead=0,
        )  # fmt: skip
        outputs = sorted((rng.randint(1, 14) for _ in range(rng.randint(2, 6))), reverse=True)
        for i, output in enumerate(outputs):
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            sim.add(DOCUMENTS[i % 2][: rng.randint(1, 9)], params, seed=i, offline=True)
        sim.drain()
        seen |= sim.seen
    assert seen >= {"piggybacked", "piggybacked when resumed", "piggybacked with one token"}


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_tokens_do_not_depend_on_how_tight_things_are(steps_ahead):
    outputs = []
    for setup in (
        dict(num_blocks=200, max_num_seqs=8, budget=500),
        dict(num_blocks=8, max_num_seqs=3, budget=5),
        dict(num_blocks=8, max_num_seqs=1, budget=1, caching=False),
    ):
        sim = Simulation(**setup, max_model_len=16, steps_ahead=steps_ahead)
        seqs = [sim.add(DOCUMENTS[i % 2][: 3 + i], SamplingParams(max_tokens=10), seed=i) for i in range(8)]
        sim.drain()
        outputs.append([s.output_token_ids for s in seqs])
    assert outputs[0] == outputs[1] == outputs[2]
