"""Tuned configurations: files, precedence, what is stale or malformed, and that the launched kernel has them."""

import dataclasses
import functools
import json
import logging
import shutil

import pytest
import torch

triton = pytest.importorskip("triton")
from nanovllm.kernels import all_ops, configs, tunables  # noqa: E402
from nanovllm.kernels.configs import DIRECTORY_VARIABLE, SHIPPED, bucket, document, entries  # noqa: E402
from nanovllm.kernels.source_hash import is_kernel, source_hash  # noqa: E402
from nanovllm.kernels.triton_decode.plan import MatrixPlan  # noqa: E402
from nanovllm.kernels.triton_linear.plan import StreamPlan, TilePlan, plan_product  # noqa: E402
from nanovllm.kernels.triton_ops.plans import RowPlan  # noqa: E402
from nanovllm.kernels.versions import versions  # noqa: E402
from nanovllm.perf.autotune.launches import recorded  # noqa: E402
from nanovllm.perf.autotune.store import drop_changed  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("looks at launches, which the interpreter does not make", allow_module_level=True)

GPU, CPU, BF16 = "nvidia-test-9", torch.device("cpu"), torch.bfloat16
KEY = {"rows": 4, "size": 64, "dtype": "bfloat16"}


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """(shipped, the user's): files there are read for calls on the CPU, as if it were a GPU."""
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    shipped.mkdir()
    user.mkdir()
    monkeypatch.setattr(configs, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(configs, "SHIPPED", shipped)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(user))
    forget()
    yield shipped, user
    forget()


def forget():
    configs.forget_files()
    for tunable in tunables.ALL.values():
        tunable.forget()


def entry(tunable=tunables.RMS_NORM, key=KEY, config=None, **differ):
    config = {"rows": 2, "warps": 8} if config is None else config
    return {
        "tunable": tunable.name,
        "source": tunable.source,
        "versions": versions(),
        "key": key,
        "config": config,
        **differ,
    }


def write(folder, *found, **differ):
    path = folder / f"{GPU}.json"
    path.write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": list(found), **differ}))
    forget()
    return path


def rms_norm(rows=4, size=64, dtype=BF16):
    return tunables.RMS_NORM.find(CPU, bucket(rows), size, dtype)


def test_buckets():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 200, 1025)] == [1, 1, 2, 4, 4, 8, 256, 2048]
    assert [bucket(n, 4) for n in (200, 256, 257, 320, 321, 1000, 1024, 1025)] == [
        256,
        256,
        320,
        320,
        384,
        1024,
        1024,
        1280,
    ]
    for n in range(1, 5000):
        assert n <= bucket(n, 4) <= bucket(n) < 2 * n or n == 1
        assert bucket(bucket(n, 4), 4) == bucket(n, 4)


def test_without_files_nothing_is_found(folders):
    assert rms_norm() is None
    assert tunables.RMS_NORM._tables[CPU] == {}  # the next call asks no file


def test_a_file_is_read_once_and_for_its_keys_only(folders, monkeypatch):
    path = write(folders[1], entry())
    assert rms_norm() == rms_norm(rows=3) == RowPlan(2, 8)  # 3 rows are in the bucket of 4
    assert rms_norm(rows=5) is rms_norm(size=65) is rms_norm(dtype=torch.float16) is None
    path.unlink()
    assert rms_norm() == RowPlan(2, 8)
    monkeypatch.setattr(configs, "gpu_of", lambda device: None)
    forget()
    assert rms_norm() is None  # not a GPU


def test_the_users_directory_takes_precedence_entry_by_entry(folders, monkeypatch):
    shipped, user = folders
    other = {**KEY, "rows": 8}
    write(shipped, entry(config={"rows": 1, "warps": 1}), entry(key=other, config={"rows": 1, "warps": 2}))
    write(user, entry(config={"rows": 4, "warps": 4}))
    assert rms_norm() == RowPlan(4, 4) and rms_norm(rows=8) == RowPlan(1, 2)
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    forget()
    assert rms_norm() == RowPlan(1, 1)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(user / "absent"))
    forget()
    assert rms_norm() == RowPlan(1, 1)


@pytest.mark.parametrize(
    "differ, reason",
    [
        ({"source": "0" * 16}, "the kernels' source has changed since"),
        ({"versions": {**versions(), "triton": "1.0"}}, "measured with triton 1.0, here"),
        ({"versions": {}}, "measured with torch None, here"),
    ],
)
def test_a_stale_entry_is_not_used_and_said_once(folders, caplog, differ, reason):
    path = write(folders[1], entry(**differ))
    with caplog.at_level(logging.INFO):
        assert rms_norm() is None and rms_norm(rows=2) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and reason in record.getMessage() and str(path) in record.getMessage()
    assert reason in entries(tunables.RMS_NORM, GPU)[0].stale
    # What was shipped for others is no reason to warn.
    path.unlink()
    write(folders[0], entry(**differ))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert rms_norm() is None
    assert [r.levelno for r in caplog.records] == [logging.INFO]


def test_a_stale_entry_beside_a_good_one(folders):
    write(folders[1], entry(), entry(config={"rows": 1, "warps": 1}, versions={"triton": "1.0"}))
    assert rms_norm() == RowPlan(2, 8)


@pytest.mark.parametrize(
    "found, said",
    [
        (entry(config={"rows": 2}), r"entries\[0\].config.warps: missing"),
        (entry(config={"rows": 2, "warps": 4, "x": 1}), r"entries\[0\].config.x: unknown; known are rows, warps"),
        (entry(config={"rows": 3, "warps": 4}), r"entries\[0\].config.rows: expected a power of two, not 3"),
        (entry(config={"rows": 0, "warps": 4}), r"config.rows: expected a positive whole number, not 0"),
        (entry(config={"rows": 2.0, "warps": 4}), r"config.rows: expected a positive whole number, not 2.0"),
        (entry(config={"rows": True, "warps": 4}), r"config.rows: expected a positive whole number, not True"),
        (entry(config={"rows": 2, "warps": 3}), r"config.warps: expected 1, 2, 4, 8, 16 or 32, not 3"),
        (entry(config={"rows": 1 << 15, "warps": 4}), r"entries\[0\].config: rows: a program of 2097152 elements"),
        (entry(key={"rows": 4, "size": 64}), r"entries\[0\].key.dtype: missing"),
        (entry(key={**KEY, "dtype": "bf17"}), r"entries\[0\].key.dtype: expected the name of a dtype, not 'bf17'"),
        (entry(key={**KEY, "rows": "4"}), r"entries\[0\].key.rows: expected a whole number, not '4'"),
        (entry(config=[1]), r"entries\[0\].config: expected an object, not \[1\]"),
        ({"tunable": "rms_norm"}, r"entries\[0\].source: expected a text, not None"),
        ("x", r"entries\[0\]: expected an object, not 'x'"),
        (entry(tunables.PRODUCT, {"m": 64, "n": 8, "k": 64, "dtype": "bfloat16", "gated": False, "tma": False}, {"plan": "Plan"}),
         r"config.plan: expected one of StreamPlan, TilePlan, not 'Plan'"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_an_error_that_names_file_and_field(folders, found, said):
    path = write(folders[1], found)
    tunable = tunables.ALL[found["tunable"]] if isinstance(found, dict) else tunables.RMS_NORM
    with pytest.raises(ValueError, match=said) as e:
        tunable._read(CPU)
    assert str(e.value).startswith(str(path)) and "nanovllm tune" in str(e.value)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "not a file of kernel configurations"),
        ("[]", r"expected an object, not \[\]"),
        ('{"schema": 2, "gpu": "nvidia-test-9", "entries": []}', "schema: expected 1, not 2"),
        ('{"schema": 1, "gpu": "nvidia-h100", "entries": []}', "gpu: expected 'nvidia-test-9', which the file is named after"),
        ('{"schema": 1, "gpu": "nvidia-test-9"}', "entries: expected a list, not None"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_an_error_that_names_it(folders, text, said):
    path = folders[0] / f"{GPU}.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as e:
        rms_norm()
    assert str(path) in str(e.value)


def test_what_a_kernel_refuses_is_malformed_too(folders):
    key = {"m": 64, "n": 8, "k": 64, "dtype": "bfloat16", "gated": False, "tma": False}
    stream = {"plan": "StreamPlan", "tokens": 16, "rows": 64, "block_k": 64, "splits": 1, "warps": 4, "stages": 2}
    write(folders[1], entry(tunables.PRODUCT, key, stream))
    with pytest.raises(ValueError, match="tokens: fewer than m = 64"):
        tunables.PRODUCT.find(CPU, *key.values())


HOPPER = {"tokens": 128, "outputs": 4096, "size": 1024, "dtype": BF16, "gated": False, "split": True}


@pytest.mark.parametrize(
    "plan, differ, said",
    [
        ((1, 4, 1, 4), {}, "slots: one that is filled again needs another"),
        ((2, 4, 2, 1), {"split": False}, "splits: nothing adds the sums"),
        ((1, 4, 3, 1), {}, "splits, chunks, slots, rounds: 1 x 768 columns of 1024, the others are left out"),
        ((3, 1, 5, 1), {}, "3 x 320 columns of 1024"),
        ((3, 4, 2, 1), {}, "splits: programs without columns"),
        ((2, 2, 4, 2), {}, "splits: programs without columns"),
        ((1, 3, 2, 3), {}, "chunks: expected a power of two"),
        ((1, 2, 5, 2), {}, "chunks, slots: more than the 227 KiB of shared memory"),  # 240 KiB
        ((1, 1, 10, 2), {"tokens": 256}, "chunks, slots: more than the 227 KiB of shared memory"),
        ((1, 1, 6, 3, 256), {"tokens": 256}, "chunks, slots: more than the 227 KiB of shared memory"),
        ((1, 1, 4, 4, 64), {}, "block: expected 128 or 256 tokens, not 64"),
        ((1, 4, 4, 1), {"gated": True, "split": False, "outputs": 4100}, "outputs: 4100 are not groups of eight"),
        ((1, 4, 4, 1), {"dtype": torch.float32}, "dtype, size: only rows of whole tiles of 64 16-bit numbers"),
        ((1, 4, 4, 1), {"dtype": torch.int16}, "dtype, size: "),
        ((1, 4, 5, 1), {"size": 1080}, "dtype, size: "),
    ],
)  # fmt: skip
def test_a_product_for_hopper_refuses_what_cannot_work(plan, differ, said):
    tunable = tunables.HOPPER_PRODUCT
    key = tuple({**HOPPER, **differ}.values())
    with pytest.raises(ValueError, match=said):
        tunable.plan_from_json(dict(zip(("splits", "chunks", "slots", "rounds", "block"), (*plan, 128)[:5])), key)


@pytest.mark.parametrize(
    "plan, differ",
    [
        ((1, 4, 2, 2), {}), ((16, 1, 1, 1), {}), ((2, 1, 9, 1), {}), ((4, 4, 1, 1), {}), ((1, 1, 9, 2), {"tokens": 256}),
        ((1, 8, 3, 1), {"tokens": 8, "size": 1536}), ((1, 2, 4, 2), {"gated": True, "split": False, "outputs": 4104}),
        ((1, 1, 25, 1), {"tokens": 8, "dtype": torch.float16, "size": 1600, "split": False}),
    ],
)  # fmt: skip
def test_a_product_for_hopper_takes_what_can(plan, differ):
    """Up to 25 tiles of 8 tokens: 225 KiB."""
    tunable = tunables.HOPPER_PRODUCT
    made = tunable.classes["HopperPlan"](*plan)
    key = tuple({**HOPPER, **differ}.values())
    assert tunable.plan_from_json(tunable.plan_to_json(made), key) == made


HOPPER_DECODE = {
    "num_seqs": 64,
    "kv_heads": 8,
    "group": 2,
    "head_dim": 128,
    "dtype": BF16,
    "cache_dtype": BF16,
    "block_size": 64,
    "new": True,
}


def test_decode_attention_for_hopper_refuses_what_its_launch_does():
    tunable = tunables.ATTENTION_DECODE_HOPPER
    key, plan = (
        tuple(HOPPER_DECODE.values()),
        {"pieces": 33, "least": 2, "warps": 4, "slots": 3, "box": 16, "chunk": 4, "empty_last": True, "cluster": 8},
    )
    made = tunable.plan_from_json(plan, key)
    assert tunable.plan_to_json(made) == plan and made.refused(128, 64, 2, 2) is None
    for change, said in (
        ({"warps": 8}, "warps: expected 1, 2, 4 or 8"), ({"box": 128}, "box: expected 8, 16"), ({"slots": 7}, "slots: 229376 bytes"),
        ({"chunk": 16}, "chunk: expected 1, 2, 4 or 8"), ({"pieces": 1 << 14}, "pieces: expected 1 to 16383"), ({"least": 0}, "least"),
        ({"cluster": 3}, "cluster: expected 0, 2, 4, 8 or 16"), ({"cluster": -2}, "cluster: expected a whole number from 0 on"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            tunable.plan_from_json(plan | change, key)
    key = tuple((HOPPER_DECODE | {"group": 8}).values())
    with pytest.raises(ValueError, match="cluster: 33792 bytes of partial results, more than 20480"):
        tunable.plan_from_json(plan, key)


# ----------------------------------------------------------------------------------------------- declarations and hashes


def test_shipped_files_are_well_formed():
    assert {p.stem for p in SHIPPED.glob("*.json")} >= {"nvidia-h100", "nvidia-h200"}
    for path in SHIPPED.glob("*.json"):
        for data in document(path)["entries"]:
            tunable = tunables.ALL[data["tunable"]]
            tunable.plan_from_json(data["config"], tunable.key_from_json(data["key"]))
            assert data["us"] > 0 and data["date"] and data["tried"] > 0 and data["device"]


DROP = """python -c 'from nanovllm.perf.autotune.store import drop_changed; print(*drop_changed(), sep="\\n")'"""


def _changed(path):
    """What to say of each entry of a file whose kernels are not those that it was measured with; last, how to remove them."""
    found = []
    for data in document(path)["entries"]:
        tunable = tunables.ALL[data["tunable"]]
        if data["source"] != tunable.source:
            shapes = " ".join(f"--shape {'x'.join(map(str, shape))}" for shape in data["shapes"])
            found.append(
                f"{path.name}: {data['tunable']} {data['key']}: the kernels' source has changed ({data['source']} -> {tunable.source}), "
                f"so nobody gets it. Measure anew, on an {data['device']}:\n"
                f"    nanovllm tune {data['op']} {shapes} --dtype {data['dtype']} --out nanovllm/kernels/configs"
            )
    return [*found, f"or, without such a GPU, remove all such entries:\n    {DROP}"] if found else []


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_configurations_are_those_of_the_kernels_as_they_are(path):
    changed = _changed(path)
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_kernel_on_such_a_gpu_finds_what_is_shipped(path, monkeypatch):
    """With the versions that it was measured with; with others it is not used."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    device, current = torch.device("cuda", 0), []
    for data in document(path)["entries"]:
        tunable = tunables.ALL[data["tunable"]]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=data["device"]: name)
        key = tunable.key_from_json(data["key"])
        for measured_with, expected in ((data["versions"], data["config"]), ({"torch": "1.0"}, None)):
            monkeypatch.setattr(configs, "versions", lambda measured_with=measured_with: measured_with)
            tunable.forget()
            plan = tunable.find(device, *key)
            found = None if plan is None else tunable.plan_to_json(plan)
            current.append((data["tunable"], data["key"], found, expected))
    forget()
    wrong = [f"{path.name}: {name} {key}: found {found}, not {expected}" for name, key, found, expected in current if found != expected]
    assert not wrong, "\n".join([*wrong, *_changed(path)])


def test_entries_of_changed_kernels_are_named_and_can_be_removed(tmp_path):
    """The command that is named, done to a copy in which one kernel is another."""
    for path in SHIPPED.glob("*.json"):
        shutil.copy(path, tmp_path)
    path = tmp_path / "nvidia-h200.json"
    whole = json.loads(path.read_text())
    first = whole["entries"][0]
    first["source"] = "0" * 16
    path.write_text(json.dumps(whole))
    said, remedy = _changed(path)
    assert f"{first['tunable']} {first['key']}" in said and f"on an {first['device']}:" in said and DROP in remedy
    assert f"nanovllm tune {first['op']} --shape " in said and f"--dtype {first['dtype']} --out" in said
    assert drop_changed(tmp_path) == [f"nvidia-h200.json: {first['tunable']} {json.dumps(first['key'])}"]
    left = document(path)["entries"]
    assert sorted(map(str, left)) == sorted(map(str, whole["entries"][1:])) and drop_changed(tmp_path) == []
    assert DROP in (SHIPPED.parents[2] / "docs" / "tuning.md").read_text()


def test_the_hash_does_not_depend_on_tritons_own_source(tmp_path):
    text = "from triton.language import sum, cdiv\n@triton.jit\ndef kernel(x):\n    tl.store(x, sum(tl.arange(0, 8), 0) + cdiv(9, 2))\n"
    kernel = _kernel_of(text, tmp_path, "a")
    before = source_hash([kernel])
    own = kernel.fn.__globals__["sum"]
    assert is_kernel(own) and own.fn.__module__.startswith("triton.")
    kernel.fn.__globals__["sum"] = kernel.fn.__globals__["cdiv"]  # as if it were another function
    assert source_hash([kernel]) == before


def test_every_declaration_is_complete():
    for name, tunable in tunables.ALL.items():
        assert len(tunable.source) == 16 and tunable.name == name and set(tunable.batch) <= set(tunable.key)
        for plan in tunable.classes.values():
            assert plan.__dataclass_params__.frozen and all(f.type in ("int", "bool") for f in dataclasses.fields(plan))
        assert all(is_kernel(configs.imported(kernel)) for kernel in tunable.kernels)


def test_what_a_prefill_may_depend_on_counts_no_batch():
    """The code promises a sequence the same bits whatever is beside it."""
    counts = {"rows", "elements", "tokens", "m", "num_seqs", "num_tokens"}
    for tunable in (tunables.ATTENTION_PREFILL, tunables.ATTENTION_PREFILL_HOPPER):
        assert not tunable.batch and not counts & set(tunable.key)
    for tunable in tunables.ALL.values():
        assert counts & set(tunable.key) <= set(tunable.batch), tunable.name


def test_keys_and_plans_survive_json():
    for tunable in tunables.ALL.values():
        key = tuple({int: 64, bool: False, str: "silu", torch.dtype: BF16}[kind] for kind in tunable.key.values())
        assert tunable.key_from_json(json.loads(json.dumps(tunable.key_to_json(key)))) == key
    for plan in (StreamPlan(16, 64, 64, 2, 4, 3), TilePlan(64, 64, 64, 8, 1, 4, 3)):
        key = 8, 4096, 1024, BF16, False, False
        data = json.loads(json.dumps(tunables.PRODUCT.plan_to_json(plan)))
        assert tunables.PRODUCT.plan_from_json(data, key) == plan


def _kernel_of(text, tmp_path, name):
    import importlib.util

    path = tmp_path / f"{name}.py"
    path.write_text("import triton\nimport triton.language as tl\n" + text)
    spec = importlib.util.spec_from_file_location("hashed_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def test_the_hash_is_of_what_the_kernel_computes(tmp_path):
    base = "K = tl.constexpr(3)\n@triton.jit\ndef helper(v):\n    return v + 1\n@triton.jit\ndef kernel(x, B: tl.constexpr):\n    v = helper(tl.load(x))\n    tl.store(x, v * K)\n"
    same = base.replace("    v = ", '    """What it does."""\n    # why\n\n    v =    ').replace("tl.store(x, v * K)", "tl.store(\n        x, v * K\n    )")  # fmt: skip
    others = [
        base.replace("+ 1", "+ 2"),
        base.replace("(3)", "(4)"),
        base.replace("v * K", "v + K"),
        base.replace("B: tl", "C: tl"),
    ]
    first = source_hash([_kernel_of(base, tmp_path, "a")])
    assert source_hash([_kernel_of(same, tmp_path, "b")]) == first
    found = {source_hash([_kernel_of(text, tmp_path, f"c{i}")]) for i, text in enumerate(others)}
    assert len(found) == len(others) and first not in found


# --------------------------------------------------------------------------------------------------- reaching the launch


def launched(call):
    with recorded() as launches:
        call()
    return launches[0]


def tensors(*shapes, dtype=BF16):
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def attention(num_seqs=4, heads=8, kv_heads=4, dim=64, block=32, prefill=0):
    q, cache = (
        torch.empty((num_seqs * max(1, prefill), heads, dim), dtype=BF16),
        torch.empty((9, block, kv_heads, dim), dtype=BF16),
    )
    table, lens = torch.zeros((num_seqs, 4), dtype=torch.int32), torch.full((num_seqs,), 32, dtype=torch.int32)
    if prefill:
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * prefill
        return all_ops()["attention_prefill"].providers["triton"].fn(q, cache, cache, table, starts, lens, prefill, 1.0)
    return all_ops()["attention_decode"].providers["triton"].fn(q, cache, cache, table, lens, 64, 1.0)


def hopper_attention():
    """As on a Hopper GPU, up to the launch."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton_attention.decode_hopper import launch_hopper

    q, cache, table, lens = _kept_for_attention()
    return launch_hopper(q, cache, cache, table, lens, 64, 1.0, (None, None), None, None)


@functools.cache
def _kept_for_attention():
    lens = torch.full((4,), 32, dtype=torch.int32)
    return *tensors((4, 8, 64), (9, 64, 4, 64)), torch.zeros((4, 4), dtype=torch.int32), lens


def small_product(norm, tokens=2):
    x, residual, weight, scale = tensors((tokens, 64), (tokens, 64), (96, 64), (64,))
    providers = {name: all_ops()[name].providers["triton"].fn for name in ("linear", "add_rms_norm_linear")}
    return (
        providers["add_rms_norm_linear"](x, residual, scale, 1e-6, weight) if norm else providers["linear"](x, weight)
    )


def hopper_product(**options):
    """As on a Hopper GPU, up to the launch. The tensors stay, since descriptors of them are told apart by their addresses."""
    pytest.importorskip("triton.experimental.gluon")
    from nanovllm.kernels.triton_decode import hopper

    return hopper.product(*_kept(), **options)


@functools.cache
def _kept():
    return tensors((20, 1024), (96, 1024))


def op(name):
    return all_ops()[name].providers["triton"].fn


def rotary(store, tokens=4):
    q, k, v = tensors((tokens, 8, 64), (tokens, 2, 64), (tokens, 2, 64))
    table, positions, weight = torch.empty(16, 64), torch.zeros(tokens, dtype=torch.int64), torch.empty(64, dtype=BF16)
    if not store:
        return op("rotary_embedding")(positions, q, k, table)
    caches = tensors((4, 16, 2, 64), (4, 16, 2, 64))
    return op("qk_norm_rope_store")(positions, q, k, v, table, *caches, positions, weight, weight, 1e-6)


# tunable, a call, the plan's fields, and the same as constants of the kernel (num_warps, num_stages: options)
CALLS = [
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((4, 64), (64,)), 1e-6), {"rows": 2, "warps": 2}, {"ROWS": 2, "num_warps": 2}),
    (tunables.ADD_RMS_NORM, lambda: op("add_rms_norm")(*tensors((4, 64), (4, 64), (64,)), 1e-6), {"warps": 16}, {"num_warps": 16}),
    (tunables.LAYER_NORM, lambda: op("layer_norm")(*tensors((4, 64), (64,), (64,)), 1e-6), {"warps": 16}, {"num_warps": 16}),
    # Of many rows or tokens the kernel follows from the plan and the shape.
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((2048, 3072), (3072,)), 1e-6), {"rows": 1, "warps": 2}, {"PIECES": 6, "BLOCK": 512, "num_warps": 2}),
    (tunables.RMS_NORM, lambda: op("rms_norm")(*tensors((2048, 3072), (3072,)), 1e-6), {"rows": 2, "warps": 4}, {"ROWS": 2, "BLOCK": 4096, "num_warps": 4}),
    (tunables.LAYER_NORM, lambda: op("layer_norm")(*tensors((2048, 3072), (3072,), (3072,)), 1e-6), {"warps": 8}, {"BLOCK": 4096, "num_warps": 8}),
    (tunables.ROTARY, lambda: rotary(False, 2048), {"heads": 2, "warps": 8}, {"HEADS": 2, "TOKENS": 1, "num_warps": 8}),
    (tunables.ROTARY, lambda: rotary(False, 2048), {"heads": 4, "warps": 1}, {"HEADS": 4, "num_warps": 1}),
    (tunables.SOFTMAX, lambda: op("softmax")(*tensors((4, 64))), {"rows": 2, "warps": 2}, {"ROWS": 2, "num_warps": 2}),
    (tunables.ACTIVATE_AND_MUL, lambda: op("silu_and_mul")(*tensors((4, 128))), {"block": 32, "warps": 2}, {"BLOCK": 32, "num_warps": 2}),
    (tunables.ACTIVATION, lambda: op("fused_activation")(*tensors((4, 64)), "silu"), {"block": 64, "warps": 4}, {"BLOCK": 64, "num_warps": 4}),
    (tunables.ADD_ACTIVATION, lambda: op("fused_add_gelu")(*tensors((4, 64), (64,))), {"block": 32, "warps": 4}, {"BLOCK": 32, "num_warps": 4}),
    (tunables.MUL_ADD, lambda: op("element_wise_mul_add")(*tensors((4, 64), (64,), (4, 64))), {"block": 32, "warps": 4}, {"BLOCK": 32, "num_warps": 4}),
    (tunables.EMBEDDING, lambda: op("embedding")(torch.zeros(3, dtype=torch.int64), *tensors((9, 64))), {"block": 32, "warps": 4}, {"BLOCK": 32, "num_warps": 4}),
    (tunables.ROTARY, lambda: rotary(False), {"heads": 2, "warps": 8}, {"HEADS": 2, "num_warps": 8}),
    (tunables.ROTARY_STORE, lambda: rotary(True), {"heads": 2, "warps": 8}, {"HEADS": 2, "num_warps": 8}),
    (tunables.PRODUCT, lambda: op("linear_bias_act")(*tensors((40, 64), (96, 64))),
     {"plan": "StreamPlan", "tokens": 64, "rows": 32, "block_k": 16, "splits": 2, "warps": 2, "stages": 5},
     {"TOKENS": 64, "ROWS": 32, "BLOCK_K": 16, "SPLIT": True, "num_warps": 2, "num_stages": 5}),
    (tunables.PRODUCT, lambda: op("gated_mlp")(*tensors((300, 64), (256, 64), (64, 128))),
     {"plan": "TilePlan", "block_m": 32, "block_n": 16, "block_k": 32, "group_m": 3, "splits": 1, "warps": 2, "stages": 5, "tma": False, "flatten": False},
     {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 3, "GATED": True, "num_warps": 2, "num_stages": 5}),
    (tunables.SMALL_PRODUCT, lambda: small_product(True), {"plan": "VectorPlan", "rows": 2, "block": 16, "warps": 1},
     {"ROWS": 2, "BLOCK": 16, "TOKENS": 2, "num_warps": 1}),
    (tunables.SMALL_PRODUCT, lambda: small_product(False), tunables.SMALL_PRODUCT.plan_to_json(MatrixPlan(64, 2, 32)),
     {"ROWS": 64, "SPLIT": 2, "DEPTH": 32, "num_warps": 2}),
    (tunables.HOPPER_PRODUCT, hopper_product, {"splits": 1, "chunks": 2, "slots": 3, "rounds": 3, "block": 128},
     {"CHUNKS": 2, "SLOTS": 3, "ROUNDS": 3, "SPLITS": 1, "TOKENS": 32, "MORE": 0}),
    (tunables.HOPPER_PRODUCT, lambda: hopper_product(split=True), {"splits": 3, "chunks": 1, "slots": 6, "rounds": 1, "block": 256},
     {"CHUNKS": 1, "SLOTS": 6, "ROUNDS": 1, "SPLITS": 3}),
    (tunables.ATTENTION_DECODE, attention, {"pieces": 5, "tile": 16, "warps": 8, "stages": 5, "merge_registers": 2, "early": False, "least": 2},
     {"PIECES": 5, "TILE": 16, "STAGES": 5, "num_warps": 8, "num_stages": 5}),
    (tunables.ATTENTION_DECODE_HOPPER, hopper_attention, {"pieces": 7, "least": 3, "warps": 2, "slots": 5, "box": 8, "chunk": 2, "empty_last": True, "cluster": 4},
     {"WARPS": 2, "SLOTS": 5, "BOX": 8, "CHUNK": 2, "EMPTY_LAST": True, "CLUSTER": 4, "most_pieces": 7, "least": 3, "num_warps": 2}),
    (tunables.ATTENTION_PREFILL, lambda: attention(prefill=8), {"rows": 32, "tile": 16, "warps": 2, "stages": 4},
     {"ROWS": 32, "TILE": 16, "STAGES": 4, "num_warps": 2, "num_stages": 4}),
]  # fmt: skip


@pytest.mark.parametrize("tunable, call, config, expected", CALLS, ids=lambda v: getattr(v, "name", ""))
def test_a_tuned_configuration_reaches_the_launched_kernel(folders, tunable, call, config, expected):
    """And without its file the launch is as before."""
    before = launched(call)
    with tunable.using(CPU, (), None) as asked:
        launched(call)
    key = asked[0]
    tuned = entry(tunable, tunable.key_to_json(key), config)
    write(folders[1], tuned)
    after = launched(call)

    def constants(launch):
        return {k: v for k, v in {**launch.arguments, **launch.options}.items() if not isinstance(v, torch.Tensor)}

    assert constants(after) | expected == constants(after)
    assert any(constants(before).get(name) != value for name, value in expected.items())
    # An entry for other versions changes nothing.
    write(folders[1], tuned | {"versions": {}})
    again = launched(call)
    assert again.kernel is before.kernel and constants(again) == constants(before)


def test_using_is_for_its_block_and_its_key(folders):
    key = 4, 64, BF16
    with tunables.RMS_NORM.using(CPU, key, RowPlan(4, 4)) as asked:
        assert rms_norm() == RowPlan(4, 4) and rms_norm(size=128) is None
    assert asked == [key, (4, 128, BF16)] and rms_norm() is None


def test_products_that_cannot_be_configured_do_not_ask(folders):
    with tunables.PRODUCT.using(CPU, (), None) as asked:
        launched(lambda: op("linear_bias_act")(*tensors((4, 64), (96, 64), dtype=torch.float32)))
        launched(lambda: op("linear_bias_act")(torch.empty(4, 64, dtype=BF16), torch.empty(64, 96, dtype=BF16).T))
    assert not asked
    assert plan_product(4, 96, 64, 4, False, True, False, 132).tokens == 16  # as ever


@pytest.mark.parametrize(
    "tunable, name, wrong, right",
    [
        (tunables.RMS_NORM, "rows", 100, 128), (tunables.RMS_NORM, "rows", 0, 1), (tunables.ACTIVATION, "width", 3000, 4096),
        (tunables.ROTARY, "tokens", 5, 8), (tunables.PRODUCT, "m", 300, 320), (tunables.HOPPER_PRODUCT, "tokens", 4, 8),
        (tunables.ATTENTION_DECODE, "num_seqs", 3, 4), (tunables.ATTENTION_PREFILL, "few_rows", 8, 16),
    ],
)  # fmt: skip
def test_a_key_that_no_call_asks_for_is_refused(tunable, name, wrong, right):
    data = {n: {int: 64, bool: False, str: "silu", torch.dtype: "bfloat16"}[kind] for n, kind in tunable.key.items()}
    assert tunable.key_from_json({**data, name: right})
    with pytest.raises(
        ValueError, match=f"key.{name}: expected {right}, to which kernels round {wrong} before they ask"
    ):
        tunable.key_from_json({**data, name: wrong})
    assert set(tunable.rounded) <= set(tunable.key)


def test_rounding_twice_is_rounding_once():
    for tunable in tunables.ALL.values():
        for name, rounded in tunable.rounded.items():
            most = 64 if name == "few_rows" else 256 if tunable is tunables.HOPPER_PRODUCT else 5000
            assert all(rounded(rounded(n)) == rounded(n) for n in range(1, most + 1)), (tunable.name, name)
    # Few rows are counted from 16 on; 0 is any other run.
    assert {tunables.ATTENTION_PREFILL.rounded["few_rows"](n) for n in range(65)} == {0, 16, 32, 64}


def test_an_unknown_tunable_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(configs.DIRECTORY_VARIABLE, str(tmp_path))
    entry = {"source": "x", "versions": versions(), "key": {}, "config": {}}
    found = [{**entry, "tunable": "rms_nrom"}, {**entry, "tunable": "rms_nrom"}]
    (tmp_path / f"{GPU}.json").write_text(json.dumps({"schema": 1, "gpu": GPU, "entries": found}))
    configs.forget_files()
    for tunable in (tunables.RMS_NORM, tunables.SOFTMAX):
        assert entries(tunable, GPU) == []
    (record,) = caplog.records
    assert (
        "2 configurations are not used: there is no tunable 'rms_nrom'; did you mean 'rms_norm'?" in record.getMessage()
    )
    configs.forget_files()


@pytest.mark.parametrize("make, said", [(None, "does not exist"), ("file", "is no directory")])
def test_a_directory_that_is_none_is_said_once(tmp_path, monkeypatch, caplog, make, said):
    path = tmp_path / "typo"
    if make:
        path.write_text("")
    monkeypatch.setenv(configs.DIRECTORY_VARIABLE, str(path))
    configs.forget_files()
    for tunable in (tunables.RMS_NORM, tunables.SOFTMAX):
        entries(tunable, GPU)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{configs.DIRECTORY_VARIABLE}={path}: it {said}" in record.getMessage()
    configs.forget_files()
