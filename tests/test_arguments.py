"""Arguments as users write them."""

import pytest

from nanovllm.arguments import name_options, whole_number, with_option

OPTIONS = {"max_model_len": "--max-model-len", "kernel_plugin": "--kernel-plugin", "seed": "--seed", "dtype": "--dtype"}


@pytest.mark.parametrize(
    "message, said",
    [
        ("max_model_len=0: must be", "--max-model-len=0: must be"),
        ("kernel_plugin: x", "--kernel-plugin: x"),
        ("prompts: expected a file", "prompts: expected a file"),
        ("no preset 'dtype: x'", "no preset 'dtype: x'"),
        ("dtype of the cache: x", "dtype of the cache: x"),
        ("other: x", "other: x"),
        ("it is too long; raise max_model_len.", "it is too long; raise --max-model-len."),
        ("dtype: x, with max_model_len=4, seed", "--dtype: x, with --max-model-len=4, seed"),
        ("no file './kernel_plugin', kernel_plugin.py", "no file './kernel_plugin', kernel_plugin.py"),
        ("seed=-1: must be at least 0, or None for any", "--seed=-1: must be at least 0; leave it out for any"),
        ("max_model_len=0: must be at least 1, or None for all", "--max-model-len=0: must be at least 1"),
        ("other=0: must be at least 1, or None for all", "other=0: must be at least 1, or None for all"),
    ],
)
def test_a_message_names_the_option_in_place_of_pythons_argument(message, said):
    assert with_option(message, OPTIONS, without_default=["seed"]) == said
    error = ValueError(message)
    name_options(error, OPTIONS, ["seed"])
    assert str(error) == said


def test_an_error_that_is_not_one_text_stays_as_it_is():
    error = FileNotFoundError(2, "dtype: x")
    name_options(error, OPTIONS)
    assert error.args == (2, "dtype: x")


@pytest.mark.parametrize(
    "text, number",
    [
        ("8192", 8192), ("8k", 8000), ("8K", 8192), (" 1m ", 10**6), ("2M", 2 << 20), ("25.6k", 25600), ("0.001k", 1),
        ("-1", -1), ("+3", 3), ("1.1m", 1_100_000), ("0", 0), ("4.35k", 4350),
    ],
)  # fmt: skip
def test_a_number_may_have_a_suffix(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "8x", "8kk", "8 k", "1e4", "8.5", "8_000", "8g", "٨", "auto", "0x10"])
def test_what_is_no_number_is_said(text):
    with pytest.raises(ValueError, match=r"^expected a whole number; write such as 8192, 8K \(8192\), 8k \(8000\)$"):
        whole_number(text)


def test_a_binary_suffix_has_no_decimals():
    with pytest.raises(ValueError, match="^no decimals before K and M; write such as"):
        whole_number("25.6K")
