"""The scheduler under random load, against a simulated device."""

import random

from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.sampling_params import SamplingParams
from tests.engine.simulation import DOCUMENTS, Simulation

SMALL_SIZES = PiggybackSizes(totals=(4, 6), row_multiple=2, min_tokens=1, min_full_speed_tokens=2, max_pieces=2)


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


def random_case(rng):
    """A cache and limits, and what is done to a scheduler with them."""
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


def test_every_request_gets_its_own_tokens_and_gives_everything_back():
    seen = set()
    for seed in range(400):
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
