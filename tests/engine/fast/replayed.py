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
    run_whole, run_model, sample = graphs.run_whole, graphs.run_model, graphs.sample

    def watched_whole(shape):
        found = run_whole(shape)
        if found:
            replayed.append((shape, True))
        return found

    def watched_model(shape, launch):
        run_model(shape, launch)
        replayed.append((shape, False))

    def watched_sample(shape):
        drawn = sample(shape)
        replayed[-1] = shape, drawn
        return drawn

    graphs.run_whole, graphs.run_model, graphs.sample = watched_whole, watched_model, watched_sample
    return replayed
