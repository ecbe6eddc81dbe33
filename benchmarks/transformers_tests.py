"""Runs transformers' own tests of its models, as they are and with the ops of nanovllm put in, and compares.

    git clone --depth 1 https://github.com/huggingface/transformers; pip install parameterized
    python -m benchmarks.transformers_tests transformers/tests --models llama,qwen3 -- -k "not test_flex"

The ops are put into every model whose `eval()` is called, with their PyTorch reference on a CPU, and taken for
training as they are: then the model's own code runs. A folder `tests` of a source distribution (`pip download
--no-binary :all: transformers`) has the tests that all models share, without those of a model's own. They run too, on a
tiny model of each kind. Arguments after `--` go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

SWITCH = "NANOVLLM_PATCHES_MODELS"
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "phi3": "Phi3", "gemma": "Gemma"}

# What the shared tests ask of a model's own test file.
OWN_TESTS = """
import unittest
import torch
from transformers import {name}Config, {name}ForCausalLM, {name}ForSequenceClassification, {name}Model
from transformers.testing_utils import torch_device
from .test_modeling_common import ModelTesterMixin, ids_tensor


class Tester:
    batch_size, seq_length, num_hidden_layers, hidden_size, is_training = 5, 7, 2, 32, True
    num_attention_heads, vocab_size, base_model_class = 4, 99, {name}Model

    def get_config(self):
        return {name}Config(
            vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([5, 7], 96) + 3
        return self.get_config(), {{"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}}


class {name}Test(ModelTesterMixin, unittest.TestCase):
    all_model_classes = ({name}Model, {name}ForCausalLM, {name}ForSequenceClassification)
    all_generative_model_classes = ({name}ForCausalLM,)

    def setUp(self):
        self.model_tester = Tester()
"""
STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
}


def pytest_configure() -> None:
    """As a plugin of pytest: put the ops into models."""
    if os.environ.get(SWITCH) != "1":
        return
    from transformers import PreTrainedModel

    from nanovllm.adapters.transformers import OPS, apply

    def evaluated(model: Any) -> Any:
        result = super(PreTrainedModel, model).eval()
        try:
            apply(model, ops=OPS)
        except ValueError:  # on the device meta, or a part of a model that has the ops already
            pass
        return result

    PreTrainedModel.eval = evaluated  # type: ignore[method-assign]


def test_files(tests: Path, models: list[str], folder: Path) -> tuple[Path, list[str]]:
    """The folder to run in, and the files of a checkout, or those made for the shared tests."""
    own = [f"tests/models/{model}/test_modeling_{model}.py" for model in models]
    if all((tests.parent / file).exists() for file in own):
        return tests.parent, own
    package = folder / "tests"
    package.mkdir()
    texts = {path.name: path.read_text() for path in tests.glob("*.py")}
    texts |= {file: text for file, text in STAND_INS.items() if not (tests / file).exists()}
    texts |= {f"test_modeling_{model}.py": OWN_TESTS.format(name=CLASSES[model]) for model in models}
    for file, text in texts.items():
        path = package / file
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (package / "__init__.py").touch()
    return folder, [f"tests/test_modeling_{model}.py" for model in models]


def results(where: Path, files: list[str], patched: bool, pytest_args: list[str]) -> dict[str, str]:
    """Test -> "passed", "failed" or "skipped"."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        here = Path(__file__).resolve().parents[1]
        environment = os.environ | {
            SWITCH: str(int(patched)),
            "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "benchmarks.transformers_tests",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--junit-xml={report}", "--tb=line", *files, *pytest_args]
        done = subprocess.run(command, cwd=where, env=environment)
        if not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode} and wrote no report")
        cases = ET.parse(report).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="the folder tests of transformers")
    parser.add_argument("--models", default="llama,qwen3", help=f"of {', '.join(CLASSES)}")
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    if not (args.tests / "test_modeling_common.py").exists():
        parser.error(f"{args.tests} has no test_modeling_common.py; name the folder tests of transformers")
    models = args.models.split(",")
    if unknown := [model for model in models if model not in CLASSES]:
        parser.error(f"--models: unknown {unknown[0]!r}; known are {', '.join(CLASSES)}")
    with tempfile.TemporaryDirectory() as folder:
        where, files = test_files(args.tests.resolve(), models, Path(folder))
        before = results(where, files, False, argv[cut + 1 :])
        if "passed" not in before.values():
            print("no test passes as they are, so there is nothing to compare: see above", file=sys.stderr)
            return 1
        after = results(where, files, True, argv[cut + 1 :])
    for label, outcome in (("as they are", before), ("with the ops", after)):
        print(f"{label}: {', '.join(f'{n} {kind}' for kind, n in sorted(Counter(outcome.values()).items()))}")
    lost = [test for test, outcome in before.items() if outcome == "passed" and after.get(test) != "passed"]
    for test in lost:
        print(f"passes no more: {test}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
