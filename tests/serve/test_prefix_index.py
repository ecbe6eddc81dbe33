"""Prompts go to the replica that has their beginning, unless it is much busier."""

import importlib
import json
import sys

import pytest

from nanovllm.cli.serve import serve
from nanovllm.config import EngineConfig
from nanovllm.serve.prefix_index import PrefixIndex, prompt_text
from nanovllm.serve.ray_options import ReplicaOptions

LONG = "".join(chr(97 + i % 26) for i in range(3000))


def test_equal_beginnings_share_a_replica():
    index = PrefixIndex(slack=4)
    loads = dict.fromkeys("abcd", 0)
    first = index.choose(LONG, loads)
    for load in (1, 4):
        assert index.choose(LONG + "x" * load, loads | {first: load}) == first
    other = index.choose(LONG, loads | {first: 5})
    assert other != first
    assert index.choose(LONG, loads | {first: 3}) == other  # both have it: the less busy one


def test_the_longest_match_wins():
    index = PrefixIndex()
    assert index.choose(LONG[:512], {"a": 0}) == "a"
    assert index.choose(LONG[:2048], {"b": 0}) == "b"
    loads = {"a": 0, "b": 1, "c": 0}
    assert index.choose(LONG[:2048] + "?", loads) == "b"
    assert index.choose(LONG[:512] + "?", loads) == "a"


def test_texts_without_a_match_go_to_the_least_busy():
    index = PrefixIndex()
    assert index.choose(None, {"a": 2, "b": 1}) == "b"
    spread = {index.choose(f"{i} tells", dict.fromkeys("abcd", 0)) for i in range(40)}
    assert spread == set("abcd")


def test_replicas_that_are_gone_are_forgotten_and_the_index_is_bounded():
    index = PrefixIndex(max_blocks=4)
    assert index.choose(LONG[:1024], {"a": 0}) == "a"
    index.keep_only({"b", "c"})
    assert index.choose(LONG[:1024], {"b": 1, "c": 0}) == "c"
    index.choose(LONG[::-1], {"b": 0})
    assert index.choose(LONG[:1024], {"b": 1, "c": 1, "d": 0}) == "d"


@pytest.mark.parametrize(
    "body, said",
    [
        (dict(prompt="abc"), "abc"),
        (dict(prompt=[1, 2]), "[1, 2]"),
        (dict(system="be brief", messages=[1]), "be brief\n[1]"),
        (dict(input="abc", instructions="x", cache_salt="s"), "s\nx\nabc"),
        (dict(model="m"), None),
        ([1], None),
    ],
)
def test_the_text_of_a_request(body, said):
    assert prompt_text(json.dumps(body).encode()) == said
    assert prompt_text(json.dumps(body).encode()[:-1]) is None


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(replicas=0), "replicas=0: must be at least 1"),
        (dict(log_level="loud"), "log_level='loud': must be debug, info, warning or error"),
        (dict(replicas=3, max_replicas=2), "max_replicas=2: must be at least replicas=3"),
        (dict(slack=-1), "slack=-1: must not be negative"),
        (dict(routing="turns"), "routing='turns': must be prefix or balanced"),
        (dict(upscale_delay=-1.0), "upscale_delay=-1.0: must not be negative"),
    ],
)
def test_bad_options(arguments, said):
    with pytest.raises(ValueError, match=said):
        ReplicaOptions(**arguments)


def test_each_rank_of_a_replica_has_a_bundle_of_one_machine():
    gpus = ReplicaOptions(num_cpus=4).placement(EngineConfig("model", device="cuda", tensor_parallel_size=4))
    assert gpus == {
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 1},
        "placement_group_bundles": [{"CPU": 1, "GPU": 1}] * 4, "placement_group_strategy": "STRICT_PACK",
    }  # fmt: skip
    cpus = ReplicaOptions().placement(EngineConfig("model", device="cpu", tensor_parallel_size=2))
    assert cpus["placement_group_bundles"] == [{"CPU": 0.5}] * 2
    alone = ReplicaOptions(replicas=3).placement(EngineConfig("model", device="cuda"))
    assert alone == {"ray_actor_options": {"num_cpus": 1, "num_gpus": 1}}
    assert ReplicaOptions(replicas=3).resources(EngineConfig("model", device="cuda", tensor_parallel_size=2)) == {
        "CPU": 3, "GPU": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(ray_address="auto"), "--ray-address needs --replicas"),
        (dict(routing="foo"), "--routing needs --replicas"),
        (dict(upscale_delay=3.0, max_replicas=2), "--max-replicas needs --replicas"),
        (dict(replicas=2, in_process=True), "--replicas goes with neither --in-process"),
        (dict(replicas=2, restart="never"), "--restart never is of one server: Ray replaces replicas"),
        (dict(replicas=2, max_per_key=3, api_key=["sk-12345678"]), "--max-per-key counts in one process"),
        (dict(replicas=2, max_connections=50), "--max-connections is of one server"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, said):
    with pytest.raises(ValueError, match=said):
        serve(**arguments)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nanovllm.serve.ray", raising=False)
    with pytest.raises(ImportError, match=r'pip install "nanovllm\[ray\]"'):
        importlib.import_module("nanovllm.serve.ray")


def test_arguments_of_the_application():
    pytest.importorskip("ray")
    from nanovllm.serve.ray import app

    with pytest.raises(ValueError, match="modle='x': there is no such argument"):
        app({"modle": "x"})
    with pytest.raises(ValueError, match="model: is missing"):
        app({"replicas": "2"})
    with pytest.raises(ValueError, match="routing='turns'"):
        app({"model": "path/to/model", "routing": "turns"})
    assert app({"model": "path/to/model", "tensor_parallel_size": "2", "max_replicas": "4"}) is not None
