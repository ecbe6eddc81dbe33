"""Masks near the end of JSON strings: the same as llguidance's, which walks over the vocabulary."""

import json
import random

import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher

from nanovllm import SamplingParams, StructuredOutputs
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.structured.grammar import grammar_text, parser_limits
from nanovllm.structured.mask_filler import MaskFiller
from nanovllm.structured.string_ends import literals
from nanovllm.weights.bare_tokenizer import whole_tokenizer
from tests import tiny

TOKENIZER = tiny.tokenizer()
SIZE, END = len(TOKENIZER), TOKENIZER.eos_token_id
WORDS = {i for i in range(SIZE) if TOKENIZER.decode([i]).isalnum()}
TEXT = {"type": "string", "maxLength": 14}


def many(item, **more):
    return {"type": "array", "minItems": 1000, "items": item, **more}


def obj(required, more=False, **properties):
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


CONSTANTS = ["a\nb", 'a"b', "\\n", "é è", "日本", "\U0001f600", "the ", "abc"]
SCHEMAS = {
    "short": many({"type": "string", "minLength": 2, "maxLength": 6}),
    "object": many(obj(["name", "n"], name={**TEXT, "minLength": 5}, n={"type": "number"}, t={"enum": ["the", "of"]})),
    "constants": many({"anyOf": [{"enum": CONSTANTS}, TEXT, {"type": "string", "minLength": 3, "maxLength": 7}]}),
    "names": many(obj(["the"], {"type": "string", "maxLength": 5}, the=TEXT, of={"type": ["string", "null"]})),
    "nested": many(
        {"$ref": "#/$defs/t"}, **{"$defs": {"t": obj(["v", "c"], v=TEXT, c={"type": "array", "items": {"$ref": "#"}})}}
    ),
    "one of": many({"oneOf": [TEXT, obj(["x"], x={"type": "string", "maxLength": 40}), {"type": "boolean"}]}),
    "one text": {"type": "string", "minLength": 60, "maxLength": 75},
}
OTHERS = {
    "pattern": many({"type": "string", "pattern": "^[a-f ]+$", "maxLength": 8}),
    "format": many(obj(["day", "x"], day={"type": "string", "format": "date"}, x=TEXT)),
    "number": many({"type": "number"}),
}


@pytest.fixture(scope="module")
def makers():
    """By vocabulary size: a maker, and llguidance's vocabulary without sets of tokens."""
    found = {}
    for size in (SIZE, SIZE + 45, SIZE + -SIZE % 32):
        plain = llguidance.hf.from_tokenizer(whole_tokenizer(TOKENIZER), n_vocab=size, eos_token=[END], slices=[])
        found[size] = ConstraintMaker(TOKENIZER, size, [END]), plain
    return found


def pair(makers, schema, size=SIZE):
    """A constraint, and llguidance's matcher."""
    maker, plain = makers[size]
    (constraint,) = maker.make(SamplingParams(structured_outputs={"json": schema}))
    text = grammar_text(StructuredOutputs(json=json.dumps(schema)))
    return constraint, LLMatcher(plain, text, log_level=0, limits=parser_limits())


def masks_of(constraint, matcher):
    mask = np.zeros(constraint.num_words, np.int32)
    constraint.fill(mask)
    if not constraint.is_plain:
        constraint.restrict([], mask)
    return mask, np.frombuffer(matcher.compute_bitmask(), np.int32, constraint.num_words)


def tokens_of(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def is_near(constraint):
    return constraint.filler is not constraint.matcher


def walk(constraint, matcher, seed, num_tokens):
    """Random tokens; how many masks were those near the end of a string. Every third token is not a plain text."""
    rng, near = random.Random(seed), 0
    for _ in range(num_tokens):
        near += is_near(constraint)
        mask, expected = masks_of(constraint, matcher)
        np.testing.assert_array_equal(mask, expected)
        ids = tokens_of(expected)
        special = [i for i in ids if i not in WORDS]
        choice = special if special and rng.random() < 0.3 else ids
        token = int(choice[rng.randrange(len(choice))])
        if token == END:
            break
        if rng.random() < 0.5:
            constraint.prepare()
        constraint.take([token])
        assert matcher.consume_token(token) and constraint.error is None
    return near


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("extra", [0, 45, -SIZE % 32])
def test_masks_are_those_of_llguidance(makers, name, extra):
    near = sum(walk(*pair(makers, SCHEMAS[name], SIZE + extra), seed, 150) for seed in range(2))
    assert near >= 5


@pytest.mark.parametrize("name", OTHERS)
def test_strings_of_another_form_are_llguidances_alone(makers, name):
    assert walk(*pair(makers, OTHERS[name]), 0, 60) == 0


def follow(makers, schema, text):
    """The constraint behind a text, one token for each byte, with the right mask."""
    constraint, matcher = pair(makers, schema)
    tokens = [t for byte in text.encode() for t in makers[SIZE][1].tokenize_bytes(bytes([byte]))]
    for token in tokens:
        constraint.take([token])
        assert matcher.consume_token(token)
    mask, expected = masks_of(constraint, matcher)
    np.testing.assert_array_equal(mask, expected)
    return constraint


@pytest.mark.parametrize(
    "text, near",
    [
        ('["', False),  # any constant may follow
        ('["th', False),
        ('["tx', True),
        ('["é', False),
        ('["è', True),
        (r'["a\n', False),  # a constant with a line feed
        (r'["a\n"', False),
        (r'["a\t', True),
        (r'["x\n', True),
        (r'["x\u00', False),
        (r'["x\u001f', True),
        ('["x", "', False),
        ('["x", "y', True),
        ('["\\"x', True),
    ],
)
def test_which_strings_are_near_their_end(makers, text, near):
    assert is_near(follow(makers, SCHEMAS["constants"], text)) == near


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_string_to_its_end(makers, at_once):
    """More characters are left at first than are looked for."""
    constraint, matcher = pair(makers, many({"type": "string", "maxLength": 60}))
    begin, (x,) = (makers[SIZE][1].tokenize_bytes(text) for text in (b'["', b"x"))
    constraint.take(begin)
    assert matcher.consume_tokens(begin)
    for left in range(60, 0, -at_once):
        assert is_near(constraint) == (left <= 16 and left < 60)
        np.testing.assert_array_equal(*masks_of(constraint, matcher))
        constraint.take([x] * at_once)
        assert matcher.consume_tokens([x] * at_once)
    assert not is_near(constraint)


def test_a_character_that_is_not_whole_is_llguidances(makers):
    constraint, matcher = pair(makers, many(TEXT))
    for byte, near in zip('["é'.encode(), (False, False, False, True)):
        (token,) = makers[SIZE][1].tokenize_bytes(bytes([byte]))
        constraint.take([token])
        assert matcher.consume_token(token) and is_near(constraint) == near
        np.testing.assert_array_equal(*masks_of(constraint, matcher))


def test_looking_for_the_end_of_a_string_ends_no_sequence(makers):
    """A mask of this schema is within llguidance's limits, and the matcher of the request cannot look further too."""
    rng = random.Random(17)
    texts = [{"type": "string", "minLength": rng.randint(0, 50), "maxLength": rng.randint(50, 400)} for _ in range(116)]
    maker, plain = makers[SIZE]
    (constraint,) = maker.make(SamplingParams(structured_outputs={"json": many({"anyOf": texts})}))
    mask = np.zeros(constraint.num_words, np.int32)
    for token in plain.greedy_tokenize('["the next one'):
        constraint.take([token])
        constraint.fill(mask)
        constraint.restrict([], mask)
        assert constraint.error is None
    assert WORDS <= set(tokens_of(mask).tolist())


def test_a_filler_takes_the_matchers_of_the_moment(makers):
    """The tokens come when the filling was prepared."""
    pairs = [pair(makers, schema) for schema in (SCHEMAS["short"], SCHEMAS["object"], OTHERS["pattern"]) * 2]
    constraints, filler, rng = [c for c, _ in pairs], MaskFiller(), random.Random(1)
    masks = np.zeros((len(pairs), constraints[0].num_words), np.int32)
    tokens, near = [[] for _ in pairs], 0

    def move_on():
        for (constraint, matcher), new in zip(pairs, tokens):
            constraint.take(new)
            assert not new or matcher.consume_tokens(new)

    for step in range(60):
        filling = filler.prepare(constraints, masks, step % 2 == 0, move_on)
        filling.run()
        filling.wait_until_filled()
        near += sum(map(is_near, constraints))
        for i, (constraint, matcher) in enumerate(pairs):
            if not constraint.is_plain:
                constraint.restrict([], masks[i])
            expected = np.frombuffer(matcher.compute_bitmask(), np.int32, constraint.num_words)
            np.testing.assert_array_equal(masks[i], expected)
            ids = tokens_of(expected)
            tokens[i] = [int(ids[rng.randrange(len(ids))])]
    assert near > 20


@pytest.mark.parametrize(
    "schema, found",
    [
        (True, []),
        (obj(["b"], a={"const": {"x": ["y", 1]}}), [b"a", b"b", b"x", b"y"]),
        ({"items": [{"enum": ["é"]}, False], "additionalItems": TEXT}, ["é".encode()]),
        ({"properties": {"pattern": TEXT}, "default": {"pattern": 1}}, [b"pattern"]),
        ({"$defs": {"p": {"const": "v"}}, "anyOf": [{"$ref": "#/$defs/p"}, {"$ref": "#"}]}, [b"p", b"v"]),
        ({"const": "\ud800"}, [b"\xed\xa0\x80"]),
        ({"$ref": "#/properties/x"}, None),
        ({"$ref": "#/$defs/x/examples/0"}, None),
        ({"anyOf": [TEXT, {"format": "date"}]}, None),
        ({"additionalProperties": {"pattern": "x"}}, None),
        ({"patternProperties": {}}, None),
        ({"anyOf": {"x": TEXT}}, None),
        ({"properties": {"x": 3}}, None),
        ({"$id": "x"}, None),
    ],
)
def test_what_else_may_be_in_a_string(schema, found):
    assert literals(schema) == found


def test_a_schema_that_nests_deeply_has_no_such_masks():
    schema = TEXT
    for _ in range(5000):
        schema = {"items": schema}
    assert literals(schema) is None


def test_a_vocabulary_without_texts_has_no_such_masks(monkeypatch, makers, caplog):
    """Nor has one for which llguidance does not agree."""
    from nanovllm.structured import string_ends

    plain = makers[SIZE][1]
    assert string_ends.checked_string_masks(plain, [END]) is not None
    assert string_ends.checked_string_masks(llguidance.LLTokenizer("byte"), [0]) is None
    made = string_ends.string_masks(plain, [END])
    monkeypatch.setattr(string_ends, "string_masks", lambda *_: made)
    monkeypatch.setattr(made, "complete", lambda mask, left: None)
    assert not caplog.records
    assert string_ends.checked_string_masks(plain, [END]) is None
    assert "masks of strings near maxLength are computed by llguidance" in caplog.text
