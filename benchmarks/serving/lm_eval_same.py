"""lm-eval's scores of a model through `nanovllm serve` beside those of transformers, which must be the same.

python -m benchmarks.serving.lm_eval_same                          # the embedded SmolLM2
python -m benchmarks.serving.lm_eval_same --model path/to/Qwen3-0.6B --items 200

Needs `pip install "lm-eval[api]"`, and nothing of the hub: the tasks are made of the language reference that comes with
Python (`pydoc_data.topics`). One task is to find a paragraph's end among four (`acc`, `acc_norm`). The other is the
perplexity of the beginnings of topics. A .gguf file is first expanded to a float32 checkpoint, which both sides load.
The server is asked by lm-eval's `local-completions`, transformers runs as lm-eval's `hf`. The exit code is 1 if a score
differs by more than --tolerance, or if an item has another best answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving.server_process import ServerProcess

CHOICES, CONTEXT_WORDS, END_WORDS, TOPIC_WORDS = 4, 60, 16, 250
_TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
"""
_ENDS = """doc_to_text: '{{text}}'
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ' '
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_PERPLEXITY = """doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""


def write_tasks(folder: Path, items: int) -> list[str]:
    """Two tasks for lm-eval and their data. Returns: their names."""
    from pydoc_data.topics import topics

    words = [text.split() for _, text in sorted(topics.items())]
    spans = [w[at : at + CONTEXT_WORDS + END_WORDS] for w in words for at in range(0, len(w), 2 * CONTEXT_WORDS)]
    spans = [span for span in spans if len(span) == CONTEXT_WORDS + END_WORDS]
    rng = random.Random(0)
    if items > len(spans):
        raise ValueError(f"--items {items}: there are {len(spans)} paragraphs; ask for at most {len(spans)}")
    ends = []
    for index in rng.sample(range(len(spans)), items):
        others = rng.sample([s for i, s in enumerate(spans) if i != index], CHOICES - 1)
        choices = [" ".join(span[CONTEXT_WORDS:]) for span in (spans[index], *others)]
        order = rng.sample(range(CHOICES), CHOICES)
        ends.append({
            "text": " ".join(spans[index][:CONTEXT_WORDS]), "choices": [choices[i] for i in order],
            "answer": order.index(0),
        })  # fmt: skip
    long = [w[:TOPIC_WORDS] for w in words if len(w) >= TOPIC_WORDS]
    texts = [{"text": " ".join(w)} for w in rng.sample(long, max(1, items // 8))]
    for name, kind, rows, rest in (
        ("ends", "multiple_choice", ends, _ENDS),
        ("perplexity", "loglikelihood_rolling", texts, _PERPLEXITY),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)) + "\n")
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, file=data, kind=kind) + rest)
    return ["ends", "perplexity"]


def checkpoint(model: Path, folder: Path) -> Path:
    """The directory of a float32 checkpoint: `model` itself, or what a .gguf file is expanded to."""
    if model.suffix != ".gguf":
        return model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found, given = folder / "checkpoint", dict(gguf_file=model.name, local_files_only=True)
    AutoTokenizer.from_pretrained(model.parent, **given).save_pretrained(found)
    read = AutoModelForCausalLM.from_pretrained(model.parent, dtype="float32", **given)
    # transformers refuses to write what it has read from a .gguf file, although it is float32 now.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(found)
    return found


def scores(found: dict[str, Any]) -> dict[str, float]:
    """Of an evaluation by lm-eval, without errors of sampling and names."""
    return {
        f"{task} {metric.partition(',')[0]}": value
        for task, row in found["results"].items()
        for metric, value in row.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def loglikelihoods(found: dict[str, Any]) -> dict[tuple[str, int], list[float]]:
    """Of each item's choices, by task and item."""
    return {
        (task, sample["doc_id"]): [float(r[0] if isinstance(r, (list, tuple)) else r) for r in sample["filtered_resps"]]
        for task, samples in found["samples"].items()
        for sample in samples
    }


def compare(server: dict[str, Any], reference: dict[str, Any], tolerance: float) -> bool:
    """Print both sides' scores. Returns: whether they are the same."""
    ours, theirs = scores(server), scores(reference)
    same = ours.keys() == theirs.keys() and bool(ours)
    print(f"{'':28}  nanovllm serve    transformers")
    for name in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(name, float("nan")), theirs.get(name, float("nan"))
        same &= abs(pair[0] - pair[1]) <= tolerance * abs(pair[1])
        print(f"{name:28}  {pair[0]:14.6f}  {pair[1]:14.6f}")
    a, b = loglikelihoods(server), loglikelihoods(reference)
    pairs = [(x, y) for item in b for x, y in zip(a[item], b[item], strict=True)]
    chosen = sum(a[item].index(max(a[item])) == b[item].index(max(b[item])) for item in b)
    print(f"{len(pairs)} log-likelihoods, largest difference {max(abs(x - y) for x, y in pairs):.2g}; ", end="")
    print(f"{chosen} of {len(b)} items with the same best answer")
    return same and chosen == len(b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory or a .gguf file; by default SmolLM2-135M-Instruct")
    parser.add_argument("--items", type=int, default=40, help="paragraphs; one topic's perplexity for each eighth")
    parser.add_argument("--device", default="cpu", help="of both sides, one after the other")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="most relative difference of a score")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds in which the server must be ready")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f'lm_eval_same needs the package {error.name!r}; run pip install "lm-eval[api]"') from None
    if args.model is None:
        from nanovllm.weights.demo_model import demo_model_path

        args.model = demo_model_path()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
        model, tasks = checkpoint(args.model, folder), write_tasks(folder, args.items)
        common: dict[str, Any] = dict(
            tasks=tasks, task_manager=TaskManager(include_path=str(folder), include_defaults=False), log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
        command = [sys.executable, "-m", "nanovllm", "serve", "--model", str(model), "--served-model-name", "model"]
        command += ["--port", "{port}", "--dtype", "float32", "--device", args.device, "--max-model-len", "2048"]
        server = ServerProcess("the server", command, os.environ, folder / "log")
        try:
            server.wait(args.start_limit)
            asked = (
                f"model=model,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=4,max_length=2047"
            )
            ours = lm_eval.simple_evaluate("local-completions", model_args=asked, **common)
            server.check()
        finally:
            server.close()
        loaded = f"pretrained={model},dtype=float32,max_length=2047"
        theirs = lm_eval.simple_evaluate("hf", model_args=loaded, device=args.device, **common)
        return 0 if compare(ours, theirs, args.tolerance) else 1


if __name__ == "__main__":
    from nanovllm.console import run_program

    run_program("lm_eval_same", main)
