"""Stands for a gate of a CUDA stream: launches run at once on a CPU, so the caller waits in the stream's place."""

import signal
import time

import numpy as np

SECONDS = 120
"""A wait that lasts longer is a hang."""


class WaitingGate:
    """Attributes:
    waited: the values that were waited for.
    wait_hook: called with a value before it is waited for.
    """

    def __init__(self, word, device):
        self.word = word.numpy()
        self.waited = []
        self.wait_hook = None

    def is_open(self, value):
        return np.subtract(self.word[0], np.uint32(value).astype(np.int32), dtype=np.int32) >= 0

    def open(self, value):
        assert not self.is_open(value) or self.word[0] == np.uint32(value).astype(np.int32), "it opens in order"
        self.word[0] = np.uint32(value).astype(np.int32)

    def launch_wait(self, value):
        if self.wait_hook is not None:
            self.wait_hook(value)
        self.waited.append(value)
        end = time.monotonic() + SECONDS
        while not self.is_open(value):
            assert time.monotonic() < end, f"the gate stays shut for {value}"
            time.sleep(1e-4)


class RecordingGate(WaitingGate):
    """A stream that is far behind: its waits are only noted."""

    def launch_wait(self, value):
        self.waited.append(value)


def gates(kind=WaitingGate):
    """(what makes the gates, the gates that it made)"""
    made = []

    def make_gate(word, device):
        made.append(kind(word, device))
        return made[-1]

    return make_gate, made


def fill_slowly(llm, wait):
    """From now on, filling the masks of a step takes as long as `wait()`."""
    filler = llm.engine.runner.sampler.masks.filler
    prepare = filler.prepare

    def prepare_slow(constraints, masks, in_thread, first, last, end):
        return prepare(constraints, masks, in_thread, first, lambda *args: (wait(), last(*args)), end)

    filler.prepare = prepare_slow


def interrupt_while_it_generates(llm, prompts, params, delays):
    """Ctrl-C after each of these times. Returns how many of these came in time."""
    interrupted = 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in delays:
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                try:
                    llm.generate(prompts, params, use_tqdm=False)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:  # perhaps just before the timer was stopped
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, handler)
    return interrupted
