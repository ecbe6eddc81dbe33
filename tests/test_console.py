"""What programs print on a terminal: sentences, log lines and tables."""

import io
import logging
import re
import subprocess
import sys
import time

import pytest

from nanovllm import console
from nanovllm.cli.text_table import print_table
from tests.commands import Terminal, run_here

HEADINGS = ("#", "one kernel of", "us", "our op")
ROWS = [("1", "to, square, mean, add, rsqrt, mul, " * 4, "195.2", "part of linear_add_rms_norm")]
TEXT = ("one kernel of", "our op")


@pytest.fixture(params=[40, 80, 160])
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def test_sentences_end_between_words_on_a_terminal_and_stay_whole_elsewhere(width):
    text = "nanovllm: " + "it needs a CUDA device, " * 9 + "\n      this is an indented line " + "of words " * 20
    for file, most in ((Terminal(), width), (io.StringIO(), None)):
        console.say(text, file)
        printed = file.getvalue()
        assert printed.split() == text.split()
        assert most is None or max(map(len, printed.splitlines())) <= most
        assert most or printed == text + "\n"
        assert all(line.startswith("      ") for line in printed[printed.index("      this") :].splitlines())


def test_errors_of_usage_end_lines_between_words_on_a_terminal(width):
    given = ["serve", "--max-token", "5"]
    said = [run_here(*given, terminal=terminal).stderr for terminal in (True, False)]
    assert said[0].split() == said[1].split() and said[0].endswith("\n") and not said[0].endswith("\n\n")
    assert max(map(len, said[0].splitlines())) <= width
    (error,) = (line for line in said[1].splitlines() if line.startswith("Error: "))
    assert error.startswith("Error: No such option: --max-token (Possible options: --max-model-len, --max-")


@pytest.mark.parametrize("handlers", [True, False])
def test_a_warning_is_folded_only_in_a_program_without_a_log(handlers, width, monkeypatch):
    text = "kernel plugin it.py serves no op: " + "a reason, " * 20
    shown, logged = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    for level, said in ((logging.WARNING, text), (logging.ERROR, "not wanted")):
        logger = logging.Logger("its own", level)
        if handlers:
            logger.addHandler(logging.StreamHandler(logged))
        console.warn(logger, said)
    assert logged.getvalue() == (text + "\n" if handlers else "")
    erased, said = "\r\x1b[2K", shown.getvalue()  # a status line makes room
    assert said.startswith("" if handlers else erased)
    assert said.removeprefix(erased).split() == ([] if handlers else text.split())
    assert handlers or max(map(len, said.removeprefix(erased).splitlines())) <= width


def test_a_log_line_takes_the_place_of_the_status_line(width, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    record = logging.LogRecord("nanovllm.x", logging.WARNING, __file__, 1, "fused ops are not used " * 9, None, None)
    console.StatusLine().show("Loading the default model ...")
    print(console.LogFormatter().format(record), file=shown)
    _, status, lines = shown.getvalue().split("\r\x1b[2K")
    assert status == "Loading the default model ..." and lines.startswith("WARNING nanovllm.x: fused ops")
    assert max(map(len, lines.splitlines())) <= width


def test_a_status_line_is_taken_away_even_if_the_work_fails(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    with pytest.raises(ZeroDivisionError), console.working("importing PyTorch ..."):
        raise ZeroDivisionError
    assert shown.getvalue() == "\r\x1b[2Kimporting PyTorch ...\r\x1b[2K"


def test_a_timed_status_line_counts_its_seconds_until_it_is_taken_away(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    status = console.StatusLine()
    status.show("importing PyTorch ...", timed=True)
    begun = time.monotonic()
    while shown.getvalue().count(" s") < 2 and time.monotonic() < begun + 60:
        time.sleep(0.1)
    status.clear()
    first, second = map(int, re.findall(r"\x1b\[2Kimporting PyTorch \.\.\. (\d+) s", shown.getvalue())[:2])
    assert 3 <= first < second <= time.monotonic() - begun + 1  # whole seconds, more than that on a busy machine
    after = shown.getvalue()
    time.sleep(1.5)
    assert shown.getvalue() == after and after.endswith("\r\x1b[2K")


def test_the_seconds_stay_where_the_text_of_a_status_line_is_cut(width, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    status = console.StatusLine()
    status.show("op, provider: 3x96 bfloat16 " * 9, timed=True)
    begun = time.monotonic()
    while " s" not in shown.getvalue() and time.monotonic() < begun + 60:
        time.sleep(0.1)
    status.clear()
    counted = shown.getvalue().split("\r\x1b[2K")[2]
    assert re.search(r"^op, provider: .* \d+ s$", counted) and len(counted) == width - 1


def test_a_status_line_names_what_is_loaded(monkeypatch):
    from nanovllm.cli.kernels_common import prepare

    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    prepare("cpu", None)
    texts = [text for text in shown.getvalue().split("\r\x1b[2K") if text]
    assert "loading the kernels ..." in texts and all(text.endswith(" ...") for text in texts)


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_what_takes_long_is_announced_once_and_not_as_a_warning(level, caplog, capsys):
    logger = logging.getLogger("nanovllm.kernels.cpu.build")
    caplog.set_level(level, logger.name)
    console.announce(logger, "compiling the C++ kernels")
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == ([("INFO", "compiling the C++ kernels")] if level == logging.INFO else [])
    assert capsys.readouterr().err == ("" if logged else "compiling the C++ kernels\n")


def test_an_announcement_takes_the_place_of_the_status_line(width, monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    logger = logging.Logger("silent", logging.WARNING)
    console.announce(logger, "compiling the C++ kernels for this processor " * 5)
    text = shown.getvalue()
    assert text.startswith("\r\x1b[2Kcompiling") and max(map(len, text[5:].splitlines())) <= width


def test_a_status_line_says_what_is_done_meanwhile_and_then_what_it_said(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    logger = logging.Logger("silent", logging.WARNING)
    with console.working("Loading ...", timed=True):
        with console.announced(logger, "compiling the C++ kernels", "Compiling ..."):
            pass
    assert [text for text in shown.getvalue().split("\r\x1b[2K") if text] == [
        "Loading ...",
        "Compiling ...",
        "Loading ...",
    ]
    with console.announced(logger, "compiling the C++ kernels", "Compiling ..."):  # no line is shown any more
        pass
    assert shown.getvalue().endswith("compiling the C++ kernels\n") and console.StatusLine.current is None


def test_an_error_is_said_with_what_was_added_to_it(capsys):
    def main():
        error = ValueError("x: expected a matrix")
        error.__notes__ = ["op 'linear', provider 'mine'"]  # as add_note does, from Python 3.11 on
        raise error

    with pytest.raises(SystemExit):
        console.run_program("program", main, quick_exit=False)
    assert capsys.readouterr().err == "program: x: expected a matrix\nop 'linear', provider 'mine'\n"


def test_no_word_or_number_of_a_table_is_cut(width, capsys):
    print_table(HEADINGS, ROWS, TEXT)
    lines = capsys.readouterr().out.splitlines()
    words = {word for line in lines for word in line.split()}
    assert {word for cell in (*HEADINGS, *ROWS[0]) for word in cell.split()} <= words
    least = len("1 rsqrt, 195.2 linear_add_rms_norm")
    assert max(map(len, lines)) <= max(width, least)


def test_a_text_of_a_table_on_a_terminal_is_at_most_60_wide(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    print_table(HEADINGS, ROWS, TEXT)
    assert max(line.find("195.2") for line in capsys.readouterr().out.splitlines()) <= 70


def test_a_wide_table_in_a_pipe_has_a_line_a_row_and_on_a_terminal_its_width(width, capsys, monkeypatch):
    print_table(HEADINGS, ROWS, TEXT, wide=True)
    assert " ".join(ROWS[0]).split() == capsys.readouterr().out.splitlines()[-1].split()
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the output for a terminal
    print_table(HEADINGS, ROWS, TEXT, wide=True)
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may not tell")
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("code", ["main()", "typer.run(main)"])
def test_only_a_closed_pipe_of_the_output_is_no_failure(code, closed):
    """A BrokenPipeError may also be of a process of the engine that has died."""
    program = (
        "import typer\nfrom nanovllm.console import run_program\n"
        "def main(): input(); print('x', flush=True); raise BrokenPipeError(32, 'another pipe')\n"
        f"run_program('test', lambda: {code})"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
    if closed:
        process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.flush()
    error = process.stderr.read()
    assert process.wait() == (0 if closed else 1) and ("another pipe" in error) != closed
