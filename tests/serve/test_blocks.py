"""Blocks do not depend on how an answer was cut into pieces."""

import pytest

from nanovllm.chat import AnswerParser, HermesToolParser, ReasoningParser
from nanovllm.outputs import CompletionOutput
from nanovllm.serve.blocks import Blocks


def piece(text, finish_reason=None):
    return CompletionOutput(0, text, [], finish_reason, None, None)


@pytest.mark.parametrize("parser", [AnswerParser, lambda: AnswerParser(None, HermesToolParser())])
@pytest.mark.parametrize("pieces", [["  \n a b "], ["  ", "\n", " a", " b", " "], [" ", " \n a b", " "]])
def test_white_space_at_the_beginning(pieces, parser):
    blocks = Blocks(parser())
    for text in pieces:
        list(blocks.feed(piece(text)))
    list(blocks.feed(piece("", "stop")))
    assert [(b.kind, b.text) for b in blocks.all] == [("text", "  \n a b ")]


TEXT, CALL = ["It", " is", " so", "."], ["<tool_call>", '{"name": "f",', ' "arguments": {}}', "</tool_call>"]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("tokens", [["<think>", "I", " mean", "</think>", "\n\n", *TEXT], [*TEXT, *CALL]])
def test_a_text_has_the_log_probabilities_of_its_tokens_alone(tokens, size):
    """However the tokens come in pieces."""
    made = []
    parser = AnswerParser(ReasoningParser(False), HermesToolParser())
    blocks = Blocks(parser, lambda piece: [{"token": t, "bytes": list(t.encode())} for t in made])
    for at in range(0, len(tokens), size):
        made[:] = tokens[at : at + size]
        for _ in blocks.feed(piece("".join(made), "stop" if at + size >= len(tokens) else None)):
            pass
    (text,) = (block for block in blocks.all if block.kind == "text")
    assert len(blocks.all) == 2 and text.text == "It is so."
    assert [row["token"] for row in text.logprobs] == TEXT
    assert all(block is text or not block.logprobs for block in blocks.all)
