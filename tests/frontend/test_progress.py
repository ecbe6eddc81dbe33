"""The progress bar on a terminal."""

import io
import re
from types import SimpleNamespace

import pytest

from nanovllm.frontend.progress import ProgressBar, per_second


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_there_is_room_for_what_a_terminal_shows_of_ctrl_c(monkeypatch):
    """In a full line "^C" begins a new one, and the bar is there twice."""
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    requests = [SimpleNamespace(first_token_time=0.0, prompt_token_ids=[1] * 10**6, num_output_tokens=10**6)]
    with pytest.raises(KeyboardInterrupt), ProgressBar(requests, SimpleNamespace(unfinished=requests)) as bar:
        bar.show()
        while "output" not in shown.getvalue():
            bar.update()
        raise KeyboardInterrupt
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.getvalue()).split("\r")
    assert max(len(line.rstrip("\n")) for line in lines) == 78


@pytest.mark.parametrize("rate, shown", [(0.42, "0.4"), (9.94, "9.9"), (9.96, "10"), (289.4, "289")])
def test_a_slow_rate_is_not_shown_as_zero(rate, shown):
    assert per_second(rate) == shown
