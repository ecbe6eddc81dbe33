"""Arguments as users write them."""

import pytest

from nanovllm.arguments import name_options, with_option

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
