"""The files in deploy/ are well formed and use arguments that exist."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from nanovllm.cli.serve import serve
from nanovllm.config import EngineConfig
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.ray_options import ReplicaOptions

DEPLOY = Path(__file__).parents[2] / "deploy"


def manifest():
    return yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())


def containers(spec):
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield from group["template"]["spec"]["containers"]


def test_the_manifest_of_kuberay():
    found = manifest()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    spec = found["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "nanovllm.serve.ray:app"
    given = application["args"]
    classes = (EngineConfig, ServeOptions, ReplicaOptions)
    made = [cls(**{f.name: given.pop(f.name) for f in fields(cls) if f.name in given}) for cls in classes]
    assert not given, "arguments that no class has"
    (worker,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = worker["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == made[2].num_gpus(made[0])
    assert worker["maxReplicas"] >= made[2].max_replicas and worker["minReplicas"] >= made[2].replicas
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


def test_the_manifest_in_rays_words():
    pytest.importorskip("ray")
    from ray.serve.schema import ServeDeploySchema

    from nanovllm.serve.ray import ENVIRONMENT, app

    spec = manifest()["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    assert app(config.applications[0].args) is not None
    for container in containers(spec):
        environment = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert ENVIRONMENT.items() <= environment.items(), container["name"]


def test_replicas_on_kubernetes_ask_for_a_token_and_a_key():
    """The operator sets the variables of docs/scaling.md for `authOptions`; keys come from a Secret."""
    spec = manifest()["spec"]
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    made = re.search(
        r"kubectl create secret generic (\S+) --from-literal=(\S+?)=", (DEPLOY / "kuberay.yaml").read_text()
    )
    for container in containers(spec):
        (key,) = [v for v in container["env"] if v["name"] == "NANOVLLM_API_KEY"]
        assert key["valueFrom"] == {"secretKeyRef": {"name": made[1], "key": made[2]}}


@pytest.mark.parametrize(
    "given, keys", [({}, ("first-secret", "second-secret")), ({"api_keys": ["its-own-key"]}, ("its-own-key",))]
)
def test_keys_of_replicas(monkeypatch, given, keys):
    pytest.importorskip("ray")
    from nanovllm.serve import ray

    monkeypatch.setenv("NANOVLLM_API_KEY", "first-secret second-secret")
    monkeypatch.setattr(ray, "application", lambda config, options, replicas: options)
    assert ray.app({"model": "m", **given}).api_keys == keys


def test_the_compose_file():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    command = services["nanovllm"]["command"]
    options = [word for word in command if word.startswith("--")]
    known = {"--" + name.replace("_", "-") for name in inspect.signature(serve).parameters}
    assert options and set(options) <= known and len(command) == 2 * len(options)
    (devices,) = services["nanovllm"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == int(command[command.index("--tensor-parallel-size") + 1])
    grace = int(services["nanovllm"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServeOptions().drain
    assert (DEPLOY / services["nanovllm"]["build"]["context"] / services["nanovllm"]["build"]["dockerfile"]).is_file()


def test_the_containerfile_has_what_the_cuda_kernels_are_compiled_with():
    """As `nanovllm.kernels.cuda.build.toolchain_reason` asks for: nvcc, a C++ compiler, ninja and setuptools."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("FROM ")]
    assert re.search(r"nvidia/cuda:\S+-devel-", base)
    installed = " ".join(line for line in lines if not line.startswith("#")).split()
    assert {"g++", "ninja", "setuptools", "python3-dev"} <= set(installed)


def test_the_containerfile_installs_extras_that_exist():
    text = (DEPLOY / "Containerfile").read_text() + (DEPLOY / "kuberay.yaml").read_text()
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    named = {name for found in re.findall(r"EXTRAS=([\w,]+)", text) for name in found.split(",")}
    assert named >= {"serve", "ray"} and all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in named)
