"""What a program's terminal or a notebook shows while `LLM(...)` loads a model."""

import logging
import re
import sys
import time

import pytest

from nanovllm import AsyncLLM, console
from nanovllm.loading_line import LoadingLine, loading_stage
from tests import tiny
from tests.commands import Terminal
from tests.devices import DEVICE
from tests.llm.small_llm import make
from tests.notebook import outputs_of_cell

ERASED = "\r\x1b[2K"
LOGGER = logging.getLogger("nanovllm.loading_line")


@pytest.fixture
def directory(tmp_path):
    tiny.save(tmp_path / "small-model")
    return tmp_path / "small-model"


def load(directory, **arguments):
    make(directory, skip_tokenizer_init=True, **arguments).close()


@pytest.fixture
def open_terminal(monkeypatch):
    """Called in a test, since pytest replaces standard error between a fixture and its test."""

    def make_it() -> Terminal:
        monkeypatch.setattr("sys.stderr", Terminal())
        return sys.stderr

    return make_it


def test_a_terminal_shows_model_device_dtype_and_what_is_done_and_then_nothing(directory, open_terminal):
    terminal = open_terminal()
    load(directory)
    texts = [text for text in terminal.getvalue().split(ERASED) if text]
    assert texts[0] == "Loading small-model ..."
    assert re.fullmatch(r"Loading small-model on .*, float32: reading weights \.\.\.", texts[1])
    assert texts[-1].endswith(" ...") and terminal.getvalue().endswith(ERASED) and console.StatusLine.current is None


def test_an_engine_for_an_event_loop_shows_the_same(directory, open_terminal):
    terminal = open_terminal()
    AsyncLLM(directory, skip_tokenizer_init=True, max_model_len=64, num_kvcache_blocks=4, device=DEVICE).close()
    assert "Loading small-model on " in terminal.getvalue() and console.StatusLine.current is None


def test_the_line_is_taken_away_where_loading_fails(directory, open_terminal):
    terminal = open_terminal()
    with pytest.raises(ValueError, match="rms_nrom"):
        load(directory, kernel_priority={"rms_nrom": ["triton"]})
    assert terminal.getvalue().endswith(ERASED) and console.StatusLine.current is None


def test_a_device_that_is_not_there_is_refused_before_anything_is_said_to_be_loaded(open_terminal):
    terminal = open_terminal()
    with pytest.raises(ValueError, match="device='cuda:77'"):  # nor is the model looked for
        make("a/model-that-is-nowhere", device="cuda:77")
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("why", ["argument", "no terminal", "the log tells", "silent log", "a line is there"])
def test_nothing_is_shown_where_it_is_not_wanted(why, directory, monkeypatch, open_terminal):
    terminal, status = open_terminal(), console.StatusLine()
    if why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif why == "a line is there":
        status.show("starting ...")
    elif why != "argument":
        monkeypatch.setattr(LOGGER, "level", logging.INFO if why == "the log tells" else logging.ERROR)
        LOGGER.manager._clear_cache()
    try:
        load(directory, use_tqdm_on_load=why != "argument")
    finally:
        status.clear()
        monkeypatch.undo()
        LOGGER.manager._clear_cache()
    assert "oading" not in terminal.getvalue()


def test_the_seconds_tick_and_begin_again_with_each_stage(open_terminal):
    terminal = open_terminal()
    with LoadingLine("qwen3-0.6b"):
        loading_stage("reading weights", "cpu, float32")
        begun = time.monotonic()
        while terminal.getvalue().count(" s") < 2 and time.monotonic() < begun + 60:
            time.sleep(0.1)
        loading_stage("capturing CUDA graphs")
    assert re.findall(r"Loading qwen3-0.6b on cpu, float32: reading weights \.\.\. \d+ s", terminal.getvalue())[1:]
    texts = [text for text in terminal.getvalue().split(ERASED) if text]
    assert texts[-1] == "Loading qwen3-0.6b on cpu, float32: capturing CUDA graphs ..."


def test_the_seconds_tick_in_a_notebook(monkeypatch):
    shown = outputs_of_cell(monkeypatch)
    with LoadingLine("qwen3-0.6b"):
        begun = time.monotonic()
        while not any(state.endswith(" s") for states in shown for state in states) and time.monotonic() < begun + 60:
            time.sleep(0.1)
    (states,) = shown
    assert any(re.fullmatch(r"Loading qwen3-0.6b \.\.\. \d+ s", state) for state in states), states


@pytest.mark.parametrize("fails", [False, True])
def test_in_a_notebook_the_line_is_one_output_of_the_cell(fails, directory, monkeypatch, capsys):
    shown = outputs_of_cell(monkeypatch)
    if fails:
        with pytest.raises(ValueError, match="rms_nrom"):
            load(directory, kernel_priority={"rms_nrom": ["triton"]})
    else:
        load(directory)
    (states,) = shown
    assert states[0] == "Loading small-model ..."
    last = r"Failed to load small-model in \d+ s" if fails else r"Loaded small-model on .*, float32 in \d+ s"
    assert re.fullmatch(last, states[-1])
    assert capsys.readouterr() == ("", "") and console.StatusLine.current is None
