"""Masks of single sequences, and grammars that must not be compiled."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from nanovllm import SamplingParams, StructuredOutputs
from nanovllm.structured import constraint_maker
from nanovllm.structured.constraint_maker import ConstraintMaker, _Grammar
from nanovllm.structured.grammar import plain_error
from nanovllm.structured.grammar_check import GrammarChecker
from nanovllm.structured_outputs import GrammarsBusyError
from tests import tiny

TOKENIZER = tiny.tokenizer()
SIZE, END = len(TOKENIZER), TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def maker():
    return ConstraintMaker(TOKENIZER, SIZE, [END])


def allowed(constraint, output, banned=()):
    mask = np.zeros(constraint.num_words, np.int32)
    constraint.take(output[constraint.num_taken :])
    constraint.fill(mask)
    constraint.restrict(banned, mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:SIZE]).tolist())


def one(maker, **params):
    (constraint,) = maker.make(SamplingParams(**params))
    return constraint


def ids(text):
    return {TOKENIZER.convert_tokens_to_ids(c) for c in text}


def test_a_grammar_allows_what_it_says_and_the_end_token_at_its_end(maker):
    constraint = one(maker, structured_outputs={"regex": "x[01]?"})
    assert allowed(constraint, []) == ids("x")
    (x,), (zero,) = ids("x"), ids("0")
    assert allowed(constraint, [x]) == ids("01") | {END}
    assert allowed(constraint, [x, zero]) == {END} and constraint.error is None
    assert allowed(constraint, [x, zero, x]) == {END} and "does not allow" in constraint.error
    assert not constraint.ended_by_force(3) and constraint.ended_by_force(4)


def test_bans_leave_at_least_one_token(maker):
    constraint = one(maker, structured_outputs={"regex": "[abc]+"})
    assert allowed(constraint, [], banned=sorted(ids("a"))) & ids("abc") == ids("bc")
    lone = one(maker, structured_outputs={"choice": ["x"]})
    assert allowed(lone, [], banned=sorted(ids("x"))) == ids("x")


def test_allowed_tokens_and_a_grammar_apply_together(maker):
    assert allowed(one(maker, allowed_token_ids=[3, 40, 64]), []) == {3, 40, 64}
    both = dict(structured_outputs={"regex": "[abc]"}, allowed_token_ids=[*sorted(ids("az")), END])
    assert allowed(one(maker, **both), []) == ids("a")
    none = one(maker, structured_outputs={"regex": "[abc]"}, allowed_token_ids=sorted(ids("z")))
    assert allowed(none, []) == {END}
    assert "no token in common" in none.error and none.ended_by_force(1)


@pytest.mark.parametrize(
    "said, error",
    [
        (
            'Parser Error: token " too many" doesn\'t satisfy the grammar; forced bytes: ""',
            "the grammar does not allow",
        ),
        ("lexer error: too many states", "the grammar is too complex"),
    ],
)
def test_a_refused_text_is_not_taken_for_llguidances_own_words(maker, said, error):
    constraint = one(maker, structured_outputs={"regex": "[ab]{3}"})
    constraint.matcher = SimpleNamespace(consume_tokens=lambda tokens: False, get_error=lambda: said)
    constraint.take([1])
    assert constraint.error.startswith(error)


def test_an_error_counts_from_a_token_on(maker):
    """It does not matter when a thread finds it: with the last token, or with the mask of the next one."""
    (x,), (a,) = ids("x"), ids("a")
    wrong = one(maker, structured_outputs={"regex": "[ab]{3}"})
    wrong.take([a, x])
    assert wrong.error_at(1) is None and "does not allow" in wrong.error_at(2) == wrong.error
    assert [wrong.is_broken_at(n) for n in (1, 2, 3)] == [False, True, True]
    assert [wrong.ended_by_force(n) for n in (1, 2, 3)] == [False, False, True]
    empty = one(maker, structured_outputs={"regex": "[ab]{3}"}, allowed_token_ids=[x])
    allowed(empty, [a])
    assert empty.error_at(1) is None and "no token in common" in empty.error_at(2) == empty.error
    assert [empty.is_broken_at(n) for n in (1, 2)] == [False, True]
    assert [empty.ended_by_force(n) for n in (1, 2)] == [False, True]


def test_errors_of_the_library_have_no_backtrace():
    said = plain_error("panic: assertion failed: symbols.len() < 65525\n<backtrace>\n   0: /home/x.rs\n")
    assert said == "the grammar is too large for llguidance (assertion failed: symbols.len() < 65525); simplify it"
    with pytest.raises(ValueError, match="structured_outputs: no text matches the grammar$"):
        GrammarChecker().check(StructuredOutputs(json={"$ref": "#"}))


def test_a_grammar_whose_first_mask_is_too_complex_is_refused(maker):
    """Not ended by its first step, with an empty answer."""
    count = 4500
    rules = [f'x{i}: "a" x{i} | "b"' for i in range(count)]
    start = "start: " + "|".join(f'"{chr(97 + i % 26)}" x{i}' for i in range(count))
    with pytest.raises(ValueError, match="structured_outputs: its first mask is too complex: .*Too many items"):
        one(maker, structured_outputs={"grammar": "\n".join([start, *rules])})


def test_a_grammar_waits_for_others_for_a_while():
    checker, errors, at_once = GrammarChecker(seconds=0.5), [], threading.Barrier(3)

    def check(factor):
        at_once.wait()
        try:
            checker.check(StructuredOutputs(json={"type": "integer", "multipleOf": factor}))
        except ValueError as error:
            errors.append(type(error))

    threads = [threading.Thread(target=check, args=(factor,)) for factor in (9999991, 9999973, 9999971)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and GrammarsBusyError in errors and ValueError in errors


def test_completions_have_states_of_their_own(maker):
    first, second = maker.make(SamplingParams(n=2, structured_outputs={"choice": ["xy", "z"]}))
    assert allowed(first, sorted(ids("x"))) == ids("y") and allowed(second, []) >= ids("z")


def test_sequences_get_matchers_of_their_own(maker, monkeypatch):
    """Copies of one matcher share a lock, so that threads would fill their masks one after the other."""
    # A busy machine may make one compilation long, after which no further matcher is made.
    monkeypatch.setattr(constraint_maker, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    constraints = maker.make(SamplingParams(n=40, structured_outputs={"regex": "[ab]{5}"}))
    groups = [constraint.group for constraint in constraints]
    assert len(set(groups)) == 32 and all(groups[i] == groups[i % 32] for i in range(40))


def test_a_matcher_whose_sequence_has_ended_is_used_again(maker):
    params = SamplingParams(structured_outputs={"regex": "[ab]{9}"})
    (first,) = maker.make(params)
    group, before = first.group, maker.num_matchers
    del first
    gc.collect()
    assert maker.make(params)[0].group == group and maker.num_matchers == before


@pytest.mark.parametrize("seconds, most", [(0.03, 4), (0.2, 1)])
def test_a_grammar_that_compiles_slowly_gets_fewer_matchers(seconds, most):
    made = []

    def compile_():
        time.sleep(seconds)
        made.append(LLMatcher(LLTokenizer("byte"), "start: /[ab]*/"))
        return made[-1]

    grammar = _Grammar(compile_, lambda: True)
    users = [grammar.constraint(None, 1, ()) for _ in range(8)]
    assert 1 <= len(made) == len({user.group for user in users}) <= most


def test_all_grammars_together_have_a_bound(monkeypatch):
    monkeypatch.setattr(constraint_maker, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    room = [True, True, False]
    grammar = _Grammar(lambda: LLMatcher(LLTokenizer("byte"), "start: /[ab]*/"), lambda: room.pop(0))
    users = [grammar.constraint(None, 1, ()) for _ in range(4)]
    assert len(grammar) == 3 == len({user.group for user in users})
    maker = ConstraintMaker(TOKENIZER, SIZE, [END])
    kept = [maker.make(SamplingParams(n=16, structured_outputs={"regex": f"[ab]{{{n}}}"})) for n in range(1, 41)]
    assert len(kept) == 40 and maker.num_matchers <= 256 + 40


def test_masks_near_the_end_of_a_string_are_exact(maker):
    """The sets of tokens that llguidance takes as a whole change no mask."""
    constraint = one(maker, structured_outputs={"json": {"type": "string", "maxLength": 20}})
    output = TOKENIZER.encode('"', add_special_tokens=False)
    (a,) = ids("a")
    for left in range(20, -1, -1):
        found = allowed(constraint, output)
        for token in range(SIZE):
            text = TOKENIZER.decode([token])
            if text.isascii() and text.isalpha() and token not in TOKENIZER.all_special_ids:
                assert (token in found) == (len(text) <= left), (left, text)
        output.append(a)


@pytest.mark.parametrize("size", [SIZE - 100, SIZE + 100, SIZE + -SIZE % 32])
def test_a_model_with_more_or_fewer_logits_than_tokens(size):
    constraint = one(ConstraintMaker(TOKENIZER, size, [END, SIZE + 5]), structured_outputs={"choice": ["x"]})
    assert constraint.num_words >= size / 32 and allowed(constraint, []) == ids("x")
    assert allowed(constraint, sorted(ids("x"))) == {END}


CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(10_000)) + '\nr10000: "a"'


@pytest.mark.parametrize(
    "spec, words",
    [
        (dict(grammar=CHAIN), "nests too deeply"),
        (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (dict(json={"type": "strange"}), "strange"),
        (dict(json={"$ref": "#/nowhere"}), "nowhere"),
        (dict(regex="("), "unclosed group"),
        (dict(regex="(?=a)b"), "look-around|lookaround"),
        (dict(grammar="root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "neither Lark nor GBNF"),
        (dict(grammar='start: "a" missing'), "missing"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_hostile_and_wrong_grammars_are_errors(checker, spec, words):
    with pytest.raises(ValueError, match=words):
        checker.check(StructuredOutputs(**spec))


def test_a_grammar_that_takes_too_long_is_an_error_and_the_next_one_is_served():
    checker = GrammarChecker(seconds=1.5)
    with pytest.raises(ValueError, match="takes more than 1.5 seconds"):
        checker.check(StructuredOutputs(json={"multipleOf": 9999991, "type": "integer"}))
    checker.check(StructuredOutputs(json_object=True))


@pytest.fixture(scope="module")
def checker():
    checker = GrammarChecker(seconds=120)  # a busy machine takes long, too
    yield checker
    checker.check(StructuredOutputs(json_object=True))  # whatever came before, the next one is served


def test_reasoning_comes_before_the_constraint(maker):
    text = "<think>a</think>\n\nyes"
    for prefix, reasoning in (("", "optional"), ("<think>", "open")):
        constraint = one(maker, structured_outputs={"choice": ["yes"], "reasoning": reasoning})
        tokens = TOKENIZER.encode(text.removeprefix(prefix))
        assert allowed(constraint, tokens) == {END} and constraint.error is None
    constraint = one(maker, structured_outputs={"choice": ["yes"], "reasoning": "optional"})
    assert allowed(constraint, TOKENIZER.encode("yes")) == {END}


def test_models_that_cannot_be_constrained_are_named():
    params = SamplingParams(structured_outputs={"json_object": True})
    with pytest.raises(ValueError, match="need a tokenizer"):
        ConstraintMaker(None, SIZE, [END]).make(params)
    with pytest.raises(ValueError, match="has no end token"):
        ConstraintMaker(TOKENIZER, SIZE, []).make(params)
