"""Functions in place of CUDA graphs, so that captured steps can be checked on any machine."""

from types import SimpleNamespace

import torch

from tests.providers import references


class ReplayedFunctions:
    """A `GraphBackend`: replaying calls the function again."""

    def __init__(self, device):
        pass

    def first_calls(self, fn):
        fn()

    def capture(self, fn):
        return SimpleNamespace(replay=fn)


# On a GPU the real graphs are used.
BACKEND = None if torch.cuda.is_available() else ReplayedFunctions


def lengths_on_the_device():
    """Within the block there is a provider "reads_lengths" of attention, which is said to depend on no host value."""
    return references("reads_lengths", "attention_decode", "attention_prefill")


def watch_replays(llm):
    """(shape, whether the graphs sampled as well) of every decode step from now on."""
    graphs, replayed = llm.engine.runner.fast.decoder.graphs, []
    run = graphs.run

    def watched(shape, launch):
        drawn = run(shape, launch)
        replayed.append((shape, drawn))
        return drawn

    graphs.run = watched
    return replayed
