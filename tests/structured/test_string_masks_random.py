"""Masks near the end of JSON strings, of random vocabularies and schemas: the same as llguidance's."""

import json
import random

import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import SamplingParams, StructuredOutputs
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.structured.grammar import grammar_text, parser_limits
from nanovllm.structured.string_ends import checked_string_masks
from nanovllm.weights.bare_tokenizer import whole_tokenizer
from tests.structured.test_string_masks import is_near, masks_of, tokens_of

KEPT = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {b: chr(b) for b in KEPT} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in KEPT)}
"""By byte: its letter in a byte-level vocabulary."""
PARTS = [
    "a", "b", "the", " ", "0", "u", "é", "日本", "\U0001f600", "\u2028", "\x7f", "\n", "\x00", '"', '", "', '": "',
    '"}', "\\", "\\n", '\\"', "\\u", "\\u00", "\\u0061", "\\ud83d", "\\ude00", "\\ud83d\\ude00", "\\u001f", "\\/",
    ",", "}",
]  # fmt: skip
NAMES = ["", "a", "ab", "abc", "the", "é", "éa", 'a"b', "a\\b", "a\nb", "日", "日本", "\U0001f600x", "/", "\x7f"]
BOUNDS = [0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 48]


def random_tokenizer(rng):
    """Single bytes, letters one to forty times, texts with quotes and escapes, and parts of characters."""
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(900):
        kind = rng.random()
        if kind < 0.4:
            token = "".join(
                rng.choice("abcdefgh 019-,:") for _ in range(rng.choice([1, 2, 3, 5, 8, 16, 17, 33]))
            ).encode()
        elif kind < 0.8:
            token = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 5))).encode()
        elif kind < 0.9:
            token = (rng.choice(["é", "日", "a"]) * rng.randint(1, 40)).encode()
        else:
            token = bytes(rng.randrange(256) for _ in range(rng.randint(1, 3)))
            token = rng.choice([token, "a\U0001f600é".encode()[rng.randrange(4) : rng.randint(5, 8)]])
        tokens.append(token)
    vocab = {"".join(LETTERS[b] for b in token): None for token in tokens}
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|end|>", '<|"|>')])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def text(rng):
    least, most = sorted((rng.choice(BOUNDS), rng.choice(BOUNDS)))
    return {"type": "string", "maxLength": most} | ({"minLength": least} if rng.random() < 0.4 else {})


def texts(rng):
    """Several kinds of strings in one place."""
    kinds = [text(rng), text(rng), {"enum": rng.sample(NAMES, 3)}, {"const": rng.choice(NAMES)}]
    return {rng.choice(["anyOf", "oneOf"]): [text(rng), *rng.sample(kinds, 2)]}


def random_schema(rng):
    properties = {name: texts(rng) for name in rng.sample(NAMES, 3)}
    kind = {
        "type": "object", "properties": properties, "required": [name for name in properties if rng.random() < 0.5],
        "additionalProperties": rng.choice([False, True, text(rng), texts(rng)]),
    }  # fmt: skip
    both = {"allOf": [text(rng), {"type": "string", "maxLength": 40}]}
    items = {
        "anyOf": [kind, text(rng), {"$ref": "#/$defs/both"}, rng.choice([{"type": "number"}, {"$ref": "#/$defs/x"}])]
    }
    items = rng.choice([items, kind, texts(rng)])
    return {"type": "array", "minItems": 50, "items": items, "$defs": {"both": both, "x": kind}}


def checked_walk(constraint, matcher, pieces, end, rng):
    """How many masks were those near the end of a string. Most walks prefer long strings, some escapes."""
    near, prefers = 0, rng.choice([b"", b"\\", b'"', None])
    for _ in range(60):
        near += is_near(constraint)
        mask, expected = masks_of(constraint, matcher)
        np.testing.assert_array_equal(mask, expected)
        ids = tokens_of(expected).tolist()
        if prefers is not None and rng.random() < 0.8:
            ids = [i for i in ids if b'"' not in pieces[i] and prefers in pieces[i]] or ids
        token = rng.choice(ids)
        if token == end:
            break
        assert matcher.consume_token(token), matcher.get_error()
        if rng.random() < 0.5:
            constraint.prepare()
        constraint.take([token])
        assert constraint.error is None
    return near


@pytest.mark.parametrize("seed", range(2))
def test_random_vocabularies_and_schemas(seed):
    rng = random.Random(seed)
    tokenizer = random_tokenizer(rng)
    end, size = tokenizer.eos_token_id, len(tokenizer) + rng.choice([0, 5, 40])
    maker = ConstraintMaker(tokenizer, size, [end])
    plain = llguidance.hf.from_tokenizer(whole_tokenizer(tokenizer), n_vocab=size, eos_token=[end], slices=[])
    pieces, near, refused = [plain.decode_bytes([i]) for i in range(size)], 0, 0
    for _ in range(14):
        spec = StructuredOutputs(json=json.dumps(random_schema(rng)))
        try:
            (constraint,) = maker.make(SamplingParams(structured_outputs=spec))
        except ValueError:  # no value matches both bounds of a length
            refused += 1
            continue
        matcher = LLMatcher(plain, grammar_text(spec), log_level=0, limits=parser_limits())
        near += checked_walk(constraint, matcher, pieces, end, rng)
    assert near > 100 and refused < 6


def test_characters_of_plain_tokens():
    """They are known of tokens of whole characters."""
    tokenizer = random_tokenizer(random.Random(0))
    tokenizer.backend_tokenizer.add_tokens(["ab日本é", "日本é" * 5 + "x", "日本é" * 6, 'a日"', "日\\", "日\x7f"])
    plain = llguidance.hf.from_tokenizer(whole_tokenizer(tokenizer), slices=[])
    made = checked_string_masks(plain, [tokenizer.eos_token_id])
    found = dict(zip(map(plain.decode_bytes, ([i] for i in range(len(tokenizer)))), made.lengths))
    assert [found[text.encode()] for text in ("ab日本é", "日本é" * 5 + "x", "日本é" * 6)] == [5, 16, 0]
    assert [found[text.encode()] for text in ("a", 'a日"', "日\\", "日\x7f", '"')] == [1, 0, 0, 0, 0]
    assert not any(found[bytes([byte])] for byte in range(128, 255))
