"""From structured outputs to the grammar that llguidance compiles. Imports llguidance where it is used."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

from nanovllm.structured_outputs import JSON_STYLE, StructuredOutputs

_REASONING = {
    "open": "start: think gap @answer",
    "optional": 'start: ("<think>" think)? gap @answer',
}
_REASONING_RULES = r"""
think[lazy]: /(.|\n)*<\/think>/
gap: /\n{0,2}/
"""
_PLAIN = (
    (r"Invalid type: (.*)", r"there is no type '\1'; use string, number, integer, boolean, object, array or null"),
    (r"Unknown format: (.*)", r"the format '\1' is not known; leave it out, or use pattern"),
    (r"Unsatisfiable schema: (.*)", r"no value matches the schema: \1"),
    (r"Pointer '(.*)' does not exist", r"$ref: the schema has no '\1'; put it there, for example under $defs"),
    (r"Resource '(.*)' is not present", r"$ref: '\1' is not read; put that schema under $defs"),
    (r"invalid multiple of", "multipleOf: must be above 0"),
)
"""(What the library says of a JSON schema, what the user is told.)"""


def is_installed() -> bool:
    """Whether there is the library."""
    return importlib.util.find_spec("llguidance") is not None


def require_llguidance() -> None:
    """Raise a ValueError unless the library is installed."""
    if not is_installed():
        raise ValueError('structured outputs need the package llguidance: pip install "nanovllm[structured]"')


def parser_limits() -> Any:
    """What a grammar may cost: the library's limits, with a quarter of the work that a mask may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=12_500, max_lexer_states=50_000, verbose_errors=False)


def plain_error(said: str) -> str:
    """What the library says of a grammar, without its backtrace and its words for itself."""
    said = said.split("<backtrace>")[0].split("<non-verbose/>")[0].strip()
    if said.startswith("NoExtensionBias"):
        return "no text matches the grammar"
    if said.startswith("Unimplemented keys: ["):
        keys = json.loads(said.removeprefix("Unimplemented keys: "))
        them = f"keyword {keys[0]!r} is" if len(keys) == 1 else f"keywords {', '.join(map(repr, keys))} are"
        return f"the {them} not supported; leave {'it' if len(keys) == 1 else 'them'} out"
    for pattern, plain in _PLAIN:
        if (found := re.match(pattern, said)) is not None:
            return found.expand(plain)
    if said.startswith("panic:"):
        return f"the grammar is too large for llguidance ({said[6:].strip()}); simplify it"
    return said


def grammar_text(spec: StructuredOutputs) -> str:
    """The constraint in llguidance's format.

    Raises:
        ValueError: a GBNF grammar that cannot be read. Other errors are found when the text is compiled.
    """
    answer = _answer(spec)
    if spec.reasoning is None:
        return json.dumps({"grammars": [answer]})
    before = _REASONING[spec.reasoning] + _REASONING_RULES
    return json.dumps({"grammars": [{"lark_grammar": before}, {"name": "answer", **answer}]})


def _answer(spec: StructuredOutputs) -> dict[str, Any]:
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.json is not None or spec.json_object:
        schema = json.loads(str(spec.json)) if spec.json is not None else {"type": "object"}
        return {"json_schema": {**schema, "x-guidance": dict(JSON_STYLE)}}
    if spec.choice is not None:
        return {"lark_grammar": "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in spec.choice)}
    if spec.regex is not None:
        # The whole output matches in any case, and the library has no look-around, which anchors are.
        regex = spec.regex.removeprefix("^")
        if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2:
            regex = regex[:-1]
        return {"lark_grammar": f"start: /{regex_to_lark(regex)}/"}
    assert spec.grammar is not None
    try:
        return {"lark_grammar": any_to_lark(spec.grammar)}
    except (Exception, RecursionError) as error:
        raise ValueError(f"the grammar is neither Lark nor GBNF: {error}") from None
