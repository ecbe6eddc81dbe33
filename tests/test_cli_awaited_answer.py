"""Until an answer begins, a terminal shows what is waited for."""

import io

import pytest

from nanovllm.cli.awaited_answer import awaited


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_is_gone_before_the_first_piece_is_printed(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    seen_while_computing = []

    def pieces():
        seen_while_computing.append(shown.getvalue())
        yield " Paris"
        yield "."

    received = []
    for piece in awaited(pieces()):
        received.append(piece)
        assert shown.getvalue().endswith("...\r\x1b[2K")
    assert received == [" Paris", "."]
    assert seen_while_computing == ["\r\x1b[2KComputing the first token ..."]


def test_an_answer_without_text_is_an_empty_piece(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert list(awaited(iter(()))) == [""]


def test_an_error_or_an_interrupt_takes_the_line_away(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)

    def pieces():
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        next(awaited(pieces()))
    assert shown.getvalue() == "\r\x1b[2KComputing the first token ...\r\x1b[2K"
