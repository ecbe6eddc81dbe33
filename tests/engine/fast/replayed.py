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
    replay = graphs.replay

    def watched(key):
        found = replay(key)
        if found and key.context:
            replayed.append((key, key.mode is not None))
        elif found:
            replayed[-1] = replayed[-1][0]._replace(mode=key.mode), True
        return found

    graphs.replay = watched
    return replayed
