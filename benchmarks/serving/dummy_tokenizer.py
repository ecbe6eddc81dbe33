"""Writes a tokenizer of any size, in which every token has a text: for servers with random weights.

python -m benchmarks.serving.dummy_tokenizer tokenizer --vocab-size 151936
nanovllm serve --model qwen3-0.6b --load-format dummy --tokenizer ./tokenizer
"""

from __future__ import annotations

import argparse
import base64
import random
from pathlib import Path

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


END_TOKEN = "<|end|>"


def write(directory: Path, vocab_size: int, eos_token_id: int | None = None, tiktoken: Path | None = None) -> None:
    """Byte-level BPE without merges: the 256 bytes, then a space and random letters for each token.

    Args:
        eos_token_id: the token that ends an output, which structured output needs; None: there is none.
        tiktoken: a file with a real vocabulary, such as `qwen.tiktoken` of the package dashscope: its tokens and merges
            in place of random words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(texts) < vocab_size:
        texts["\u0120" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))] = None
    tokens, merges = list(texts), []
    if tiktoken is not None:
        tokens, merges = _real(tiktoken)
        tokens += [f"<|unused {i}|>" for i in range(len(tokens), vocab_size)]
    if eos_token_id is not None:
        tokens = [*tokens[:eos_token_id], END_TOKEN, *tokens[eos_token_id:-1]]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    eos_token = None if eos_token_id is None else END_TOKEN
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, eos_token=eos_token)
    tokenizer.save_pretrained(directory)


def _real(tiktoken: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens in the order of their ids, merges in the order of their ranks), in the letters of byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    lines = (line.split() for line in tiktoken.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:  # merged as a token of a lower rank is, until the last merge
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            if pairs[i] >= rank:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((text(parts[0]), text(parts[1])))
    return [text(token) for token in ranks], merges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--eos-token-id", type=int, help="the model's end token, such as 151645 for qwen3-0.6b")
    parser.add_argument("--tiktoken", type=Path, help="a file with a real vocabulary, such as qwen.tiktoken")
    args = parser.parse_args()
    write(args.directory, args.vocab_size, args.eos_token_id, args.tiktoken)


if __name__ == "__main__":
    main()
