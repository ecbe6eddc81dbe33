"""`nanovllm kernels`: why, show, verify and bench, as a user runs them."""

import json
import re

import pytest
import torch
import typer

from nanovllm.console import StatusLine
from nanovllm.kernels import all_ops, triton_support
from nanovllm.kernels.cpu.build import cpu_support
from tests.commands import run_here
from tests.providers import registered


def test_kernels_why():
    done = run_here("kernels", "why", "softmax", "--shape", "32x1024", "--device", "cpu")
    assert "native runs, because on a CPU the reference runs" in done.stdout and "131,072 bytes" in done.stdout
    done = run_here("kernels", "why", "rms_norm", "--shape", "8192x4096", "--gpu", "h200", "--device", "cpu")
    assert "At the 4.4 TB/s of nvidia-h200, that takes at least 30.5 us." in done.stdout.replace("\n", " ")
    for args, said in [
        (("why", "rms_norm", "--gpu", "h200"), "add --shape"),
        (("why", "rms_norm", "--shape", "3"), "--shape 3: rms_norm takes ROWSxSIZE, not 1 number, such as 1x1024"),
        (("why", "rms_nrom"), "did you mean 'rms_norm'?"),
        (("why", "rms_norm", "--shape", "3xa"), "--shape 3xa: expected numbers"),
        (("bench", "rms_norm", "--shape", "1x2x3"), "rms_norm takes ROWSxSIZE"),
        (("bench", "rms_norm", "--dtype", "int8"), "expected one of bfloat16, float16, float32"),
        (("bench", "rms_norm", "--device", "cpu", "--save-table", "x"), "a table of kernels is measured on a GPU"),
        (("verify", "rms_norm", "--shape", "3x96"), "--shape 3x96: verify runs all shapes of the op; --quick takes"),
        (("show", "silu"), "unknown op 'silu'; did you mean 'silu_and_mul' or '"),
        (
            ("bench", "rms_norm", "--device", "cpu", "--provider", "triton"),
            "triton: Triton kernels are timed on a GPU only; `nanovllm kernels verify` checks them here\n",
        ),
    ]:
        done = run_here("kernels", *args)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(cpu_support(torch.device("cpu")) is not None, reason="the C++ kernels cannot run here")
def test_why_names_the_fused_ops_that_a_plugin_leaves_out(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from nanovllm.kernels import rms_norm\n\n"
        "@rms_norm.provider('mine', support=lambda device: None)\n"
        "def mine(x, weight, eps):\n    return rms_norm.native(x, weight, eps)\n"
    )
    here = "--device", "cpu"
    with_plugin = *here, "--kernel-plugin", str(tmp_path / "plugin.py")
    for op, options, left_out in (
        ("rms_norm", with_plugin, ["decoder_step (cpu)"]), ("softmax", with_plugin, []), ("rms_norm", here, []),
    ):  # fmt: skip
        assert json.loads(run_here("kernels", "why", op, *options, "--json", "-").stdout)["left_out"] == left_out
        shown = run_here("kernels", "why", op, *options).stdout.replace("\n", " ")
        assert ("do without these fused ops, which contain rms_norm: decoder_step (cpu)." in shown) == bool(left_out)


def test_kernels_show():
    shown = run_here("kernels", "show", "rms_norm").stdout
    assert shown.startswith("rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor")
    for said in (
        "arguments    x [..., size], weight [size]",
        "small        `verify` runs these everywhere: 1x1,",
        "torch.rsqrt(",
        "sm_80+  nanovllm.kernels.triton.rows\n",
    ):
        assert said in shown
    assert shown.count("Args:\n") == 1  # the docstring stands above, not again in the reference
    document = json.loads(run_here("kernels", "show", "store_kvcache", "--json", "-").stdout)
    assert document["mutates"] == "k_cache, v_cache" and "slot_mapping" in document["arguments"]
    assert [p["provider"] for p in document["providers"]][:2] == ["native", "triton"]
    shown = (
        run_here("kernels", "show", op).stdout for op in ("silu_and_mul", "layernorm_residual_dropout_gelu", "sample")
    )
    for text, said in zip(
        shown,
        (
            "cancels      a result may be near 0 where arguments are large: in rows of fewer",
            "magnitude    1, of",
            "compare      a function",
        ),
    ):
        assert f"\n{said}" in text
    assert "did you mean 'rms_norm'?" in run_here("kernels", "show", "rms_nrom").stderr
    assert "named by --kernel-plugin my.py" in run_here("kernels", "verify", "my.py").stderr
    for name in ("qk_norm_rope_attention", "linear_packed_add_rms_norm"):
        above, _, rest = run_here("kernels", "show", name).stdout.partition("\nThe reference, ")
        below = rest[rest.index("provider     GPUs") :]
        assert max(map(len, (above + below).splitlines())) <= 80 and "'" not in above.partition("\n\n")[0]
        if name == "qk_norm_rope_attention":
            signature = "qk_norm_rope_attention(\n    q: torch.Tensor,\n    new: NewTokens,\n    kv: PagedKV,"
            assert above.startswith(signature) and re.match(r"nanovllm/kernels/ops/\w+\.py:\d+:", rest)


def test_kernels_show_of_an_op_within_a_block(tmp_path):
    """Its text is indented, which is no module that Python could parse."""
    (tmp_path / "plugin.py").write_text(
        "import torch\nfrom nanovllm.kernels import op\n\nif True:\n\n    @op(arguments={'x': '[n]'})\n"
        '    def doubled(x: torch.Tensor) -> torch.Tensor:\n        """Twice x."""\n        return 2 * x\n'
    )
    done = run_here("kernels", "show", "doubled", "--kernel-plugin", str(tmp_path / "plugin.py"))
    assert done.stdout.count("Twice x.") == 1 and "        return 2 * x\n" in done.stdout, done.stderr
    assert f" {tmp_path / 'plugin.py'}\n" in done.stdout  # where the user put it


def test_kernels_verify_finds_a_wrong_kernel(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from nanovllm.kernels import softmax\n\n"
        "@softmax.provider('right')\ndef right(x):\n    return x.softmax(-1)\n\n"
        "@softmax.provider('wrong')\ndef wrong(x):\n    return x.exp() / x.exp().sum(-1, keepdim=True)\n"
    )
    named = [word for name in ("native", "right", "wrong") for word in ("--provider", name)]
    options = "--json - --seed 0 --timeout 0".split()
    done = run_here("kernels", "verify", "softmax", "--kernel-plugin", str(plugin), *options, *named)
    rows = {r["provider"]: r for r in json.loads(done.stdout)}
    assert done.returncode == 1 and not rows["right"]["failures"] and rows["native"]["cases"] > 50
    assert any("scale 50" in f for f in rows["wrong"]["failures"])
    worst = {name: row["worst_error_over_tolerance"] for name, row in rows.items()}
    assert 0 < worst["right"] < 1 < worst["wrong"]


def test_kernels_verify_shows_the_largest_errors_first(tmp_path):
    """An infinite result is an infinite error, not the largest number there is."""
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from nanovllm.kernels import softmax\n\n"
        "@softmax.provider('wrong')\ndef wrong(x):\n"
        "    y = x.softmax(-1) * (1 + 0.1 * x.shape[-1])\n"
        "    return y / 0 if x.shape[-1] == 1025 else y\n"
    )
    options = "--provider wrong --quick --timeout 0 --seed 0".split()
    done = run_here("kernels", "verify", "softmax", "--kernel-plugin", str(plugin), *options)
    lines = done.stdout.splitlines()
    assert re.search(r"^softmax +wrong +\d+ +\d+ +inf +\d+ wrong$", lines[2]), done.stdout
    assert lines[3].startswith("  1x1025 ") and "inf instead of" in done.stdout
    shown = [float(e) for e in re.findall(r": error (\S+) times", " ".join(done.stdout.split()))]
    assert len(shown) > 2 and shown == sorted(shown, reverse=True)


def test_kernels_verify_says_which_cases_failed_without_a_result(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "import torch\nfrom nanovllm.kernels import softmax\n\n"
        "@softmax.provider('raises')\ndef raises(x):\n    return x.sofmax(-1)\n\n"
        "@softmax.provider('mixed')\ndef mixed(x):\n    return x.sofmax(-1) if len(x) == 1 else 2 * x\n"
    )
    options = "--kernel-plugin", str(tmp_path / "plugin.py"), "--provider", "raises", "--provider", "mixed", "--quick"
    for more in ((), ("--timeout", "0")):
        done = run_here("kernels", "verify", "softmax", *options, *more)
        assert re.search(r"^softmax +raises +21 +0 +- 21 failed$", done.stdout, re.M), done.stdout
        assert re.search(r"^softmax +mixed +21 +0 +\S+ 1\d wrong, \d failed$", done.stdout, re.M), done.stdout


def test_kernels_verify_says_why_cases_were_skipped(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from nanovllm.kernels import softmax\n\n"
        "def few(x):\n    return 'more than one row; give it one' if x.numel() > x.shape[-1] else None\n\n"
        "def by_size(x):\n    return few(x) and f'{x.numel()} elements'\n\n"
        "@softmax.provider('few', accepts=few)\ndef one(x):\n    return x.softmax(-1)\n\n"
        "@softmax.provider('by_size', accepts=by_size)\ndef sized(x):\n    return x.softmax(-1)\n"
    )
    named = [word for name in ("few", "by_size", "native") for word in ("--provider", name)]
    written = "--quick", "--timeout", "0", "--json", str(tmp_path / "rows.json")
    done = run_here("kernels", "verify", "softmax", "--kernel-plugin", str(tmp_path / "plugin.py"), *named, *written)
    rows = {row["provider"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    skipped, because = rows["few"]["skipped"], rows["by_size"]["skipped_because"]
    assert 0 < skipped and 1 < len(because) and sum(because.values()) == skipped
    assert rows["few"]["skipped_because"] == {"more than one row; give it one": skipped}
    assert rows["native"]["skipped_because"] == {}
    assert re.search(rf"^softmax +few +\d+ +{skipped} \[1\] +\S+ right$", done.stdout, re.M), done.stdout
    assert re.search(r"^softmax +native +\d+ +0 +\S+ right$", done.stdout, re.M), done.stdout
    said, others = " ".join(done.stdout.split()), len(because) - 1
    assert f"[1] {skipped} skipped: more than one row; give it one" in said
    assert f"[2] {skipped} skipped: " in said and f" elements; and {others} other reason" in said


def test_kernels_verify_says_nothing_of_the_interpreter_where_no_triton_kernel_runs(monkeypatch):
    """Where one does, the course shows the line."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton_support.cache_clear()
    done = run_here("kernels", "verify", "softmax", "--provider", "native", "--quick", "--timeout", "0", "--seed", "0")
    triton_support.cache_clear()
    assert done.returncode == 0 and "interpreter" not in done.stderr


def test_kernels_verify_counts_the_seconds_of_a_case_on_a_terminal(monkeypatch):
    shown = []
    monkeypatch.setattr(StatusLine, "show", lambda self, text, timed=False: shown.append((text, timed)))
    done = run_here("kernels", "verify", "softmax", "--provider", "native", "--quick")
    assert done.returncode == 0
    of_cases = [timed for text, timed in shown if text.startswith("softmax, native: ")]
    assert len(of_cases) == 21 and all(of_cases)
    assert ("starting a process for the cases ...", True) in shown and ("loading the kernels ...", True) in shown


def test_kernels_verify_says_a_wrong_shape_once_and_with_how_many_shapes(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from nanovllm.kernels import softmax\n\n@softmax.provider('mine')\ndef mine(x):\n"
        "    return x.softmax(-1)[..., :1] if x.shape[-1] > 1 else 2 * x.softmax(-1)\n"
    )
    options = "--kernel-plugin", str(tmp_path / "plugin.py"), "--provider", "mine", "--quick", "--timeout", "0"
    done = run_here("kernels", "verify", "softmax", *options, "--json", str(tmp_path / "rows.json"))
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    of_shape = [failure.partition(": ")[2] for failure in row["failures"] if " has shape " in failure]
    said = " ".join(done.stdout.split())
    more, others = len(of_shape) - 1, len(set(of_shape)) - 1
    assert others > 1 and len(row["failures"]) > len(of_shape)
    assert f" and {more} more cases: {of_shape[0]}; likewise with {others} other shapes" in said, said
    assert said.count(" has shape ") == 1 and said.count("times the tolerance") >= 1


NO_MASK = """
import torch, triton
import triton.language as tl
from nanovllm.kernels import softmax, triton_support

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, BLOCK)
    row = tl.load(x + i, tl.arange(0, BLOCK) < n, float("-inf"))
    e = tl.exp(row - tl.max(row))
    tl.store(y + i, e / tl.sum(e))

@softmax.provider("no_mask", support=triton_support)
def no_mask(x):
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        kernel[(x.numel() // x.shape[-1],)](x, y, x.shape[-1], triton.next_power_of_2(x.shape[-1]))
    return y
"""


@pytest.mark.slow
def test_kernels_verify_finds_a_store_without_a_mask(tmp_path, warm_python):
    pytest.importorskip("triton")
    (tmp_path / "plugin.py").write_text(NO_MASK)
    command = "-m", "nanovllm", "kernels", "verify", "softmax", "--provider", "no_mask", "--kernel-plugin"
    done = warm_python.run(*command, tmp_path / "plugin.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"^softmax +no_mask +\d+ +\d+ +- crashed$", done.stdout, re.M), done.stdout
    said = " ".join(done.stdout.split())
    assert "crashed (SIGSEGV) at plugin.py:11, `tl.store(y + i, e / tl.sum(e))`: a store with a wrong" in said


def test_kernels_verify_prints_the_seed_it_drew():
    """And with it draws the same inputs again; in this process too, without a time limit."""
    command = "kernels", "verify", "softmax", "--provider", "native", "--quick", "--json", "-"
    first, second = run_here(*command), run_here(*command, "--timeout", "0")
    (seed,), (other,) = (
        re.findall(r"^--seed (\d+) repeats these inputs$", done.stderr, re.M) for done in (first, second)
    )
    assert seed != other and first.stdout != second.stdout
    (row,) = json.loads(first.stdout)
    assert row["seed"] == int(seed) and row["cases"] == 21 and not row["failures"]
    assert run_here(*command, "--seed", seed, "--timeout", "0").stdout == first.stdout
    assert "repeats these inputs" not in run_here(*command, "--seed", "7", "--timeout", "0").stderr
    done = run_here(*command, "--jobs", "0")
    assert done.returncode and "--jobs" in done.stderr


def test_kernels_bench_keeps_what_was_measured_before_it_is_interrupted(tmp_path, capsys):
    from nanovllm.cli import kernels_bench

    def interrupted(x, weight, eps):
        raise KeyboardInterrupt

    options = dict(device="cpu", dtype="float32", shape=["4x64"], provider=["native", "mine"])
    with registered("rms_norm", interrupted), pytest.raises(typer.Exit) as end:
        kernels_bench.bench(op="rms_norm", save=tmp_path / "it.json", **options)
    out, err = capsys.readouterr()
    assert end.value.exit_code == 130 and err.endswith("stopped early, with what was measured so far\n")
    assert "native" in out and "4x64 float32" in out
    assert len(json.loads((tmp_path / "it.json").read_text())["measurements"]) == 1


def test_kernels_bench_and_table(tmp_path):
    saved, command = tmp_path / "sub" / "bench.json", "kernels bench rms_norm --shape 4x64 --dtype float32 --device cpu"
    done = run_here(*command.split(), "--save", str(saved))
    assert done.returncode == 0 and "4x64 float32" in done.stdout
    document = json.loads(saved.read_text())
    assert document["versions"]["torch"] and document["measurements"][0]["us"] > 0
    assert document["command"] == f"nanovllm {command}"
    table = run_here("kernels", "table").stdout
    assert all(f"| `{name}` |" in table for name in all_ops())


def test_bench_says_on_a_terminal_what_it_times():
    given = ("rms_norm", "--shape", "4x64", "--dtype", "float32", "--device", "cpu", "--provider", "native")
    done = run_here("kernels", "bench", *given, terminal=True)
    assert done.returncode == 0 and "rms_norm, 4x64 float32: timing native ..." in done.stderr
    assert "timing native" not in run_here("kernels", "bench", *given).stderr


def test_bench_says_on_a_terminal_that_it_imports_torch_compile(monkeypatch):
    monkeypatch.setattr("nanovllm.kernels.testing.compare.compiled", lambda declared: declared.providers["native"])
    given = ("rms_norm", "--shape", "4x64", "--device", "cpu", "--provider", "native", "--compile")
    assert "importing torch.compile ..." in run_here("kernels", "bench", *given, terminal=True).stderr
    assert "importing torch.compile" not in run_here("kernels", "bench", *given[:-1], terminal=True).stderr


@pytest.mark.parametrize(
    "line, said",
    [
        ("generate x --kernels rms_norm", "--kernels: 'rms_norm' is not of the form op=provider"),
        ("tune list", "did you mean `nanovllm tune --list`?"),
        ("generate x --device cuda:99", "is built without CUDA" if torch.version.cuda is None else "CUDA device"),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(line, said):
    done = run_here(*line.split())
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["generate x", "chat"])
def test_a_gpu_that_is_not_here_is_said_before_anything_is_loaded(line):
    done = run_here(*line.split(), "--device", "cuda:99", terminal=True)
    assert done.returncode == 1 and "--device='cuda:99'" in done.stderr and "Loading" not in done.stderr


def test_device_says_that_no_gpu_is_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_here("device").stdout.startswith("No GPU is here")
