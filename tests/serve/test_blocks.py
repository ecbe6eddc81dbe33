"""Blocks do not depend on how an answer was cut into pieces."""

import pytest

from nanovllm.chat import AnswerParser, HermesToolParser
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
