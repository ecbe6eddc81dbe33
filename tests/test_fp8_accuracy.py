"""The text that docs/attention.md states the accuracy of float8 caches on: its figures hold as long as it stays the
same.
"""

import hashlib
from pathlib import Path

from nanovllm.weights.tokenizer import load_tokenizer
from tests.commands import run_here
from tests.fp8_accuracy import NUM_TOKENS, TEXT

SHA256 = "ad0a6d12f9266bbe90496969943deaf464ec53a996d81e29328f9a6f652afcc6"


def test_the_text_is_the_one_of_the_documented_figures():
    assert TEXT.parent == Path(__file__).parent / "data"
    # In whatever line ends a checkout has.
    assert hashlib.sha256(TEXT.read_text(encoding="utf-8").encode()).hexdigest() == SHA256
    assert f"tests/data/{TEXT.name}" in (Path(__file__).parents[1] / "docs/attention.md").read_text(encoding="utf-8")


def test_the_text_is_long_enough(smollm2_path):
    assert len(load_tokenizer(str(smollm2_path))(TEXT.read_text(encoding="utf-8"))["input_ids"]) >= NUM_TOKENS


def test_the_scripts_of_accuracies_have_a_help_that_measures_nothing():
    for script in ("fp8_accuracy", "quantised_accuracy"):
        done = run_here("--help", script=f"tests/{script}.py")
        assert (
            done.returncode == 0
            and done.stdout.startswith("usage: ")
            and "perplexity" not in done.stdout.split("options:")[1]
        )
