"""Tokenizers: a Hugging Face directory's own, or one built from the vocabulary inside a .gguf file.

transformers and tokenizers are imported inside the functions: transformers takes half a second to import, and only a
directory's tokenizer and a conversation need it; a model that is served token ids needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.quiet_import import quiet_imports
from nanovllm.weights.bare_tokenizer import BareTokenizer, check_template
from nanovllm.weights.gguf_file import GGUFFile, open_gguf
from nanovllm.weights.json_file import read_json
from nanovllm.wording import brief

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Any one of these makes a directory one that holds a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

# The regular expressions by which the published tokenizer.json files cut text before merging. GPT-2's is ByteLevel's
# own.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_NO_LOWER, _NO_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NO_LOWER}*{_NO_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NO_LOWER}+{_NO_UPPER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_SPLIT = (
    _TEKKEN_SPLIT.replace(f"{_NO_UPPER}+|", f"{_NO_UPPER}+{_SHORTENED}|")
    .replace(f"{_NO_UPPER}*|", f"{_NO_UPPER}*{_SHORTENED}|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
_SPLITS = {
    "llama3": _LLAMA3_SPLIT, "gpt-4": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT, "tekken": _TEKKEN_SPLIT,
    "gpt-4o": _GPT4O_SPLIT,
}  # fmt: skip

# tokenizer.ggml.pre -> family, as in llama.cpp's llama-vocab.cpp. Absent or "default" means GPT-2's.
_PRE_TOKENIZERS = {
    "default": "gpt-2", "gpt-2": "gpt-2", "mellum": "gpt-2", "smollm": "smollm", "llama-bpe": "llama3",
    "llama3": "llama3", "llama-v3": "llama3", "falcon3": "llama3", "pixtral": "llama3", "midm-2.0": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2", "dbrx": "gpt-4", "smaug-bpe": "gpt-4", "tekken": "tekken",
    "gpt-4o": "gpt-4o",
}  # fmt: skip
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type: plain, special, and merely never split


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase | BareTokenizer | None:
    """The tokenizer of a model, or None if `path` is a directory without one.

    Nothing is downloaded and no code of the checkpoint is run. Decoding never tidies spaces around punctuation, so that
    decoded pieces concatenate to the decoded whole.

    Args:
        path: a Hugging Face directory, or a .gguf file.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: the files are unusable (for a .gguf file its subclass GGUFError).
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer at {path}; name a Hugging Face directory or a .gguf file")
    if not path.is_dir():
        return _from_gguf(open_gguf(path))
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with quiet_imports():
        from transformers import AutoTokenizer

    try:
        # trust_remote_code=False: by default transformers asks on standard input whether to run a checkpoint's own
        # code.
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, clean_up_tokenization_spaces=False, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise many types, bare Exception among them
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer in {path} is code of the checkpoint, which is never run; name another directory with"
                " tokenizer=, or set skip_tokenizer_init=True"
            ) from error
        raise ValueError(
            f"cannot load the tokenizer in {path} ({type(error).__name__}: {error}); "
            "download its files again, name another directory with tokenizer=, or set skip_tokenizer_init=True"
        ) from error
    _check_chat_template(tokenizer, f"{path}: the tokenizer's chat_template")
    return tokenizer


def _check_chat_template(tokenizer: PreTrainedTokenizerBase | BareTokenizer, where: str) -> None:
    """A ValueError if a chat template is no Jinja template, rather than in the middle of the first conversation."""
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{where} is {brief(text, 60)}, which is no text; correct it or remove it")
        if text:
            check_template(text, where)


def eos_token_ids(source: Path | Mapping[str, Any], tokenizer: Any = None) -> tuple[int, ...]:
    """Every token id that ends a sequence, each once: generation_config.json's, the configuration's, the tokenizer's.

    Args:
        source: a Hugging Face directory, or a configuration.
        tokenizer: one with `eos_token_id`, or None.

    Raises:
        ValueError: a file holds something else than token ids.
    """
    configs = [source] if isinstance(source, Mapping) else []
    if isinstance(source, Path):
        files = [source / name for name in ("generation_config.json", "config.json")]
        configs = [read_json(file) for file in files if file.is_file()]
    found = [config.get("eos_token_id") for config in configs] + [getattr(tokenizer, "eos_token_id", None)]
    ids = [token for entry in found for token in (entry if isinstance(entry, (list, tuple)) else [entry])]
    for token in ids:
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            where = source if isinstance(source, Path) else "the configuration"
            raise ValueError(f"{where}: eos_token_id holds {token!r}, which is no token id; correct its .json files")
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _from_gguf(file: GGUFFile) -> BareTokenizer | None:
    model = file.field("tokenizer.ggml.model", str)
    if model is None:
        return None
    if model not in ("gpt2", "llama"):
        raise file.error(
            f"tokenizer.ggml.model is {model!r}", "supported: gpt2, llama; or set skip_tokenizer_init=True"
        )
    # Built here, not by transformers' own GGUF loader, which in some of the versions we support drops Llama 2's first
    # token, names the wrong end token, or cuts text by GPT-2's rule whatever the file says.
    tokenizer, add_bos = _byte_level_bpe(file) if model == "gpt2" else (_sentencepiece_bpe(file), True)
    _add_whole_tokens(file, tokenizer)
    _frame(file, tokenizer, add_bos)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    template = file.field("tokenizer.chat_template", str)
    special = {ours: _token(file, theirs) for ours, theirs in names.items()}
    wrapped = BareTokenizer(tokenizer, special, template, str(file.path))
    _check_chat_template(wrapped, f"{file.path}: metadata key 'tokenizer.chat_template'")
    return wrapped


def _byte_level_bpe(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """GPT-2's kind, as the family's tokenizer.json has it; and whether texts begin with BOS by default."""
    from tokenizers import Regex, decoders, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    pre = file.field("tokenizer.ggml.pre", str, "default")
    family = _PRE_TOKENIZERS.get(pre)
    if family is None:
        supported = ", ".join(sorted(_PRE_TOKENIZERS))
        raise file.error(f"tokenizer.ggml.pre is {pre!r}", f"supported: {supported}; or set skip_tokenizer_init=True")
    # Some take a word that is in the vocabulary whole, even where the merges would not arrive at it.
    takes_words = family in ("llama3", "tekken")
    tokenizer = _bpe(file, _merges(file), ignore_merges=takes_words)
    tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if family == "gpt-2":
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    elif family == "smollm":
        tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    else:
        split = Split(Regex(_SPLITS[family]), "isolated")
        tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer, takes_words


def _sentencepiece_bpe(file: GGUFFile) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2's published tokenizer.json has it: a space before the text and after each special
    token, spaces written as U+2581, unknown characters as bytes."""
    from tokenizers import decoders, normalizers

    merges = _merges(file) if "tokenizer.ggml.merges" in file.metadata else _merges_by_score(file)
    tokenizer = _bpe(file, merges, byte_fallback=True, fuse_unk=True, unk_token=_token(file, "unknown"))
    prefix = file.field("tokenizer.ggml.add_space_prefix", bool, True)
    tokenizer.normalizer = normalizers.Sequence(
        ([normalizers.Prepend("\u2581")] if prefix else []) + [normalizers.Replace(" ", "\u2581")]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(file: GGUFFile, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    from tokenizers import Tokenizer, models

    vocab = {token: index for index, token in enumerate(_strings(file, "tokens"))}
    for left, right in merges:  # tokenizers panics on some that do not fit
        if not (left in vocab and right in vocab and left + right in vocab):
            raise file.error(
                f"holds a vocabulary and merges that do not fit together: {brief(left, 30)} {brief(right, 30)}"
            )
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # tokenizers raises bare Exception
        raise file.error(f"holds a vocabulary and merges that do not fit together ({error})") from error


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    # "left right"; neither side holds a space, which these vocabularies spell as another character.
    parts = [merge.partition(" ") for merge in _strings(file, "merges")]
    return [(left, right) for left, _, right in parts]


def _merges_by_score(file: GGUFFile) -> list[tuple[str, str]]:
    """Every way to split every token in two, by the token's score: SentencePiece joins the best-scored pair first."""
    tokens, scores = _strings(file, "tokens"), file.field("tokenizer.ggml.scores", list, [])
    if len(scores) != len(tokens) or not all(isinstance(score, (int, float)) for score in scores):
        raise file.error("metadata key 'tokenizer.ggml.scores' is missing or not as long as the vocabulary")
    kinds = file.field("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, kinds):
        if kind == _NORMAL:
            pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            found = sorted((ids[left], ids[right]) for left, right in pairs if left in ids and right in ids)
            merges += [(-score, tokens[left], tokens[right]) for left, right in found]
    merges.sort(key=lambda merge: merge[0])  # stable: equal scores keep the vocabulary's order
    return [(left, right) for _, left, right in merges]


def _add_whole_tokens(file: GGUFFile, tokenizer: Tokenizer) -> None:
    """Tokens that are found in text as they are, before anything is split. They keep the ids of the vocabulary."""
    from tokenizers import AddedToken

    tokens, kinds = _strings(file, "tokens"), file.field("tokenizer.ggml.token_type", list, [])
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, kinds) if kind == wanted and token]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in found])


def _frame(file: GGUFFile, tokenizer: Tokenizer, add_bos_by_default: bool) -> None:
    """Put BOS before and EOS after a text, as the file asks."""
    from tokenizers.processors import TemplateProcessing

    frame: dict[str, list[str]] = {}
    for name, default in (("bos", add_bos_by_default), ("eos", False)):
        token = _token(file, name)
        wanted = file.field(f"tokenizer.ggml.add_{name}_token", bool, default)
        frame[name] = [token] if wanted and token is not None else []
    bos, eos = frame["bos"], frame["eos"]
    single = [*bos, "$A", *eos]
    tokenizer.post_processor = TemplateProcessing(
        single=single,
        pair=single + [part.replace("$A", "$B") + ":1" for part in single],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(bos + eos)],
    )


def _strings(file: GGUFFile, key: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not {*map(type, values)} <= {str}:
        raise file.error(f"metadata key 'tokenizer.ggml.{key}' is missing or no list of strings")
    return values


def _token(file: GGUFFile, name: str) -> str | None:
    index = file.field(f"tokenizer.ggml.{name}_token_id", int)
    if index is None:
        return None
    tokens = _strings(file, "tokens")
    if not 0 <= index < len(tokens):
        raise file.error(f"tokenizer.ggml.{name}_token_id is {index}, outside the vocabulary of {len(tokens)}")
    return tokens[index]
