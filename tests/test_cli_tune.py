"""`nanovllm tune` as a user runs it; without a GPU that is the dry run, the list, and what is said to bad input."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

from nanovllm.cli import tune as module
from nanovllm.cli.kernels_bench import bench
from nanovllm.hardware.gpu_presets import device_model
from nanovllm.kernels.op import config_files
from nanovllm.kernels.triton import tunables
from nanovllm.tune import Budget
from nanovllm.tune.jobs import TUNABLES, jobs
from tests.docs.runnable_markdown import blocks
from tests.kernels.config_files import GPU, forget
from tests.tune.test_tune_run import FakeTimer, Impossible
from tests.tune.test_tune_store import an_entry

DOCS = Path(__file__).parents[1] / "docs"


def run(*args: str):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.tune)
    return CliRunner().invoke(app, list(args), catch_exceptions=True)


def ok(*args: str) -> str:
    done = run(*args)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.fixture
def files(monkeypatch, tmp_path):
    """A user's directory."""
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    forget()
    yield tmp_path
    forget()


def test_a_dry_run_shows_the_space_and_what_is_left_out_and_why():
    args = "rms_norm", "--shape", "1x1024", "--shape", "64x1024", "--dry-run"
    text = ok(*args)
    assert "rms_norm: rms_norm rows=64 size=1024 dtype=bfloat16" in text and "built in: rows=1 warps=4" in text
    assert "30 left out: more rows than there are" in text
    assert "10 left out: more than 64 values a thread: registers spill" in text
    assert "=    26 to try, near the" in text and "nothing was timed or written" in text
    assert "planned for h100" in run(*args).stderr
    document = json.loads(ok("rms_norm", "--shape", "1x256", "--dry-run", "--gpu", "a100", "--json", "-"))
    assert document["gpu"] == "nvidia-a100"
    (job,) = document["jobs"]
    assert job["key"] == {"rows": 1, "size": 256, "dtype": "bfloat16"} and job["builtin"] == {"rows": 1, "warps": 1}
    assert job["shapes"] == [[1, 256]] and job["candidates"][0] == job["builtin"]
    assert job["combinations"] == len(job["candidates"]) + sum(job["left_out"].values())
    assert job["left_out"]["more rows than there are"] == 30


@pytest.mark.slow
def test_a_dry_run_of_a_model_has_all_its_ops():
    document = json.loads(ok("--preset", "qwen3-0.6b", "--dry-run", "--gpu", "h200", "--json", "-"))
    ops = {job["op"] for job in document["jobs"]}
    some = {"attention_decode", "attention_prefill", "add_rms_norm_linear", "linear", "linear_bias_act"}
    assert some < ops <= set(TUNABLES)
    assert len(document["jobs"]) > 70 and all(job["candidates"] for job in document["jobs"])
    assert sum(job["tunable"] == "attention_decode_hopper" for job in document["jobs"]) == 8
    only = json.loads(ok("silu_and_mul", "--preset", "qwen3-0.6b", "--dry-run", "--gpu", "h200", "--json", "-"))
    assert {job["op"] for job in only["jobs"]} == {"silu_and_mul"}


def listed(*args):
    """The rows of the list for an H200, by tunable, and the document that they are of."""
    document = json.loads(ok(*args, "--list", "--gpu", "h200", "--json", "-"))
    return {row["tunable"]: row for row in document["tunables"]}, document


def write(folder, *entries):
    path = folder / "nvidia-h200.json"
    path.write_text(json.dumps({"schema": 1, "gpu": "nvidia-h200", "entries": list(entries)}))
    config_files.forget_files()
    return path


def test_the_list_says_what_is_in_force_and_from_where(files):
    good, stale = an_entry(us=2.5), an_entry(source="0" * 16, key={"rows": 8, "size": 64, "dtype": "float16"})
    # What cannot be read, since its kernels had other parameters then, is said as well.
    other = an_entry(source="0" * 16, config={"rows": 1, "warps": 4, "lanes": 2})
    path = write(files, good, stale, other)
    rows, document = listed("rms_norm")
    assert document["gpu"] == "nvidia-h200" and document["directory"] == str(files) and str(path) in document["files"]
    row = rows["rms_norm"]
    assert row["in_force"] == {str(path): 1} and row["ops"] == ["rms_norm"]
    assert row["stale"]["the kernels' source has changed since"] == 1
    assert row["stale"]["measured with kernels that had other parameters"] == 1
    (config,) = row["configs"]
    assert config["config"] == good["config"] and config["us"] == 2.5 and config["file"] == str(path)
    text = ok("--list", "--gpu", "h200")
    assert all(re.search(rf"^{name} ", text, re.M) for name in tunables.ALL) and "built in" in text
    assert re.search(r"^rms_norm +rms_norm +1 of yours; \d+ not used (\[\d\])+$", text, re.M) and str(path) in text
    assert all(len(line) <= 80 for line in text.partition("were read:")[0].splitlines())
    wide = ok("--list", "--wide", "--gpu", "h200")
    assert "HopperDecodePlan(pieces, least," in wide
    reasons = [line.split("] ", 1)[1] for line in wide.splitlines() if line.startswith("[")]
    assert reasons and all(wide.count(reason) == 1 for reason in reasons)  # each once, below the table


@pytest.mark.parametrize("path", sorted(config_files.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_the_list_shows_what_is_shipped(path, monkeypatch):
    """In force with the versions that it was measured with, else not used, and why."""
    monkeypatch.delenv(config_files.DIRECTORY_VARIABLE, raising=False)
    written = config_files.read_document(path)["entries"]
    counts = Counter(data["tunable"] for data in written)
    document = json.loads(ok("--list", "--gpu", path.stem, "--json", "-"))
    assert document["gpu"] == path.stem and document["files"] == [str(path)]
    for row in document["tunables"]:
        assert sum(row["in_force"].values()) + sum(row["stale"].values()) == counts[row["tunable"]]
        assert all(why.startswith("measured with ") for why in row["stale"])
    text = ok("--list", "--gpu", path.stem)
    assert f"kernel configurations on {path.stem}" in text and f"were read: {path}" in text.replace("\n", "")


def test_the_list_says_that_a_directory_is_none(files, monkeypatch):
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(files / "typo"))
    assert f"{files / 'typo'}, which does not exist" in ok("--list")
    (files / "typo").write_text("")
    config_files.forget_files()
    assert f"{files / 'typo'}, which is no directory" in ok("--list")


def tune(capsys, out, *shapes, timer=FakeTimer, json_file=None, seconds=None, resume=False):
    """(exit code, standard output, standard error) of a run that is timed by what a test says."""
    found, h200 = jobs("rms_norm", shapes, torch.bfloat16, device_model("h200"))[0], device_model("h200")
    cpu, budget = torch.device("cpu"), Budget(seconds=seconds)
    try:
        module.tune_jobs(found, cpu, h200, GPU, out, budget, resume, json_file, timer=timer)
        code = 0
    except typer.Exit as e:
        code = e.exit_code
    return code, *capsys.readouterr()


def test_tuning_writes_prints_and_says_how_to_use_it(tmp_path, capsys):
    out, numbers = tmp_path / "new" / "folder", tmp_path / "numbers.json"
    code, text, _ = tune(capsys, out, (64, 1024), seconds=60, json_file=str(numbers))
    assert code == 0 and "2.25 us  rows=1 warps=8" in text and "built in: 3.50 us  rows=1 warps=4" in text
    assert "6 out of registers" in text and f"NANOVLLM_KERNEL_CONFIGS={out}" in text
    (entry,) = json.loads((out / f"{GPU}.json").read_text())["entries"]
    assert entry["config"] == {"rows": 1, "warps": 8} and json.loads(numbers.read_text())["entries"] == [entry]
    document = json.loads(tune(capsys, out, (64, 1024), json_file="-")[1])
    assert document["directory"] == str(out) and document["entries"][0]["us"] == 2.25
    code, text, _ = tune(capsys, out, (64, 1024), (1, 1024), resume=True)
    assert "1 of 2 jobs were measured before" in text and "rows=64" not in text and "wrote 1 configuration" in text
    code, text, errors = tune(capsys, out, (64, 1024), resume=True, seconds=1)
    assert code == 0 and "1 of 1 jobs were measured before" in text
    assert "--limit 1: 1.0 s for each of 1 jobs, of which one takes some 3 s" in errors
    code, text, _ = tune(capsys, out, (64, 1024), timer=Impossible)
    assert code == 1 and "nothing found: does not compile (26)" in text


def test_ctrl_c_prints_what_there_is(tmp_path, capsys):
    class Interrupted(FakeTimer):
        def prepare(self, plans):
            if self.job.key[0] == 64:
                raise KeyboardInterrupt

    code, text, errors = tune(capsys, tmp_path, (1, 1024), (64, 1024), timer=Interrupted)
    assert code == 130 and "wrote 1 configuration" in text and "interrupted after 1 of 2 jobs" in errors
    assert not list(tmp_path.glob("*.under-way"))


def test_the_documentation_names_what_can_be_tuned_and_what_a_file_holds():
    text = (DOCS / "tuning.md").read_text()
    assert all(f"`{name}`" in text for name in tunables.ALL) and all(f"`{op}`" in text for op in TUNABLES)
    assert all(f"`{field}`" in text for field in an_entry(device="", commit="", dirty=False, search=""))


def test_the_documentation_shows_what_a_dry_run_prints():
    found = [c for b in blocks((DOCS / "tuning.md").read_text()) if b.text.startswith("$ ") for c in b.commands()]
    assert found
    for command, shown in found:
        printed = iter(ok(*command.removeprefix("nanovllm tune ").split()).splitlines())
        for line in shown:
            assert line == "  ..." or line in printed, f"$ {command}\ndoes not print, in this order,\n{line}"


def test_the_documentation_counts_what_is_shipped():
    text = (DOCS / "tuning.md").read_text()
    said = re.search(r"ships (\d+) configurations for the H200 and (\d+) for the H100", text)
    files = [config_files.SHIPPED / f"nvidia-{gpu}.json" for gpu in ("h200", "h100")]
    assert set(files) == set(config_files.SHIPPED.glob("*.json"))
    entries = [config_files.read_document(path)["entries"] for path in files]
    assert said and [int(n) for n in said.groups()] == list(map(len, entries))
    for data in sum(entries, []):  # as docs/tuning.md says
        assert data["builtin_us"] >= 1.02 * data["us"], f"{data['tunable']} {data['key']}"


@pytest.mark.parametrize(
    "args, said",
    [
        ("rms_nrom --dry-run", "unknown op 'rms_nrom'; did you mean 'rms_norm'? ops to tune are rms_norm,"),
        ("nope --list", "unknown op 'nope'; ops to tune are rms_norm, add_rms_norm"),
        ("store_kvcache --dry-run", "store_kvcache: its kernels choose nothing that can be tuned; ops to"),
        ("rms_norm --dry-run --shape 3xa", "--shape 3xa: expected numbers with x between them, ROWSxSIZE"),
        ("rms_norm --dry-run --shape 0x4", "--shape 0x4: expected at least 1 of the first"),
        ("linear --dry-run --shape 4x64x0", "--shape 4x64x0: linear needs SIZE of at least 1, not 0"),
        ("rms_norm --dry-run --shape 100000000x100000000", "--shape 100000000x100000000: tensors of rms_norm of"),
        ("rms_norm --dry-run --shape 9000000000x9000000000", "--shape 9000000000x9000000000: tensors of rms_norm of"),
        ("rms_norm --dry-run --gpu h101", "no preset for 'h101'"),
        ("rms_norm --dry-run --dtype int8", "--dtype int8: expected one of bfloat16, float16, float32"),
        ("rms_norm --dry-run --preset qwen3-0.6b --shape 1x2", "--preset, --shape: expected one of them"),
        ("softmax --dry-run --preset qwen3-0.6b", "softmax: --preset has shapes for attention_decode"),
        ("--dry-run --preset qwen9", "no preset 'qwen9'"),
        ("--dry-run", "expected an op to tune, or --preset with a model's name, or --list"),
        ("rms_norm --out x --patience 0", "--patience 0: expected at least 1 candidate"),
        ("--list --dry-run --preset x", "--list, --preset, --dry-run: expected one of them"),
        ("rms_norm --dry-run --limit nan", "--limit nan: expected a positive number of seconds"),
        ("rms_norm --dry-run --device cuda:99", "device='cuda:99': "),
        ("rms_norm --dry-run --resume", "--resume, --dry-run: expected one of them"),
        ("rms_norm --out x --gpu h200", "--gpu: only with --dry-run"),
        ("rms_norm --out x --device cpu", "configurations are timed on a GPU, this is cpu; --dry-run"),
    ],
)
def test_bad_input(args, said, monkeypatch):
    monkeypatch.delenv(config_files.DIRECTORY_VARIABLE, raising=False)
    done = run(*args.split())
    assert isinstance(done.exception, ValueError) and said in str(done.exception), done.exception


@pytest.mark.parametrize(
    "op, shape, said",
    [
        ("attention_decode", "4x100x7x2x64", "takes NUM_SEQSxLEASTxMOST"),
        ("qk_norm_rope_attention", "4x5000x1000x2x2x64x16", "needs LEAST up to MOST, the shortest and the longest run"),
        ("attention_prefill", "4x64x8x0x2x2x64x16", "needs LEAST up to MOST, the shortest and the longest run"),
    ],
)
def test_a_wrong_shape_of_attention_is_said_as_it_was_given_and_as_bench_says_it(op, shape, said):
    """Launches are recorded for short contexts and few sequences: what is wrong is said of the numbers of the user."""
    said = f"--shape {shape}: {op} {said}"
    done = run(op, "--shape", shape, "--dry-run", "--gpu", "h100")
    assert isinstance(done.exception, ValueError) and str(done.exception).startswith(said), done.exception
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    benched = CliRunner().invoke(app, [op, "--shape", shape, "--device", "cpu"])
    assert str(benched.exception) == str(done.exception)
    with pytest.raises(ValueError, match=re.escape(said.replace("--shape", "shape"))):
        jobs(op, [tuple(map(int, shape.split("x")))], torch.bfloat16, device_model("h100"))


def test_where_to_write(tmp_path, monkeypatch):
    monkeypatch.delenv(config_files.DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="^--out: expected a directory to write to, here or in NANOVLLM_KERNEL_CONFIG"):
        module.output_directory(None)
    (tmp_path / "file").write_text("")
    for name in ("file", "file/deeper/still"):
        said = f"--out {tmp_path / name}: expected a directory, and {tmp_path / 'file'} is a file"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            module.output_directory(tmp_path / name)
    assert module.output_directory(tmp_path / "new" / "one") == tmp_path / "new" / "one"
