"""Ops, providers, and who is chosen."""

import pytest

from nanovllm.kernels import all_ops, op, resolve_kernels
from nanovllm.kernels.registry import NATIVE, Op, Provider


def double(x):
    """Twice x."""
    return 2 * x


@pytest.fixture
def rms_norm(monkeypatch):
    """The op rms_norm with two providers more: "fast" can run here, "elsewhere" cannot."""
    declared = all_ops()["rms_norm"]
    monkeypatch.setitem(declared.providers, "fast", Provider("fast", double, lambda: None))
    monkeypatch.setitem(declared.providers, "elsewhere", Provider("elsewhere", double, lambda: "it needs a GPU; plug one in"))
    return declared


def test_an_op_is_its_reference():
    declared = Op(double)
    assert declared(3) == 6 and declared.name == "double" and declared.__doc__ == "Twice x."
    assert list(declared.providers) == [NATIVE] and declared.providers[NATIVE].support() is None


def test_providers_register_beside_the_reference():
    declared = Op(double)

    @declared.provider("sum")
    def by_adding(x):
        return x + x

    @declared.provider("shift", support=lambda: "integers only")
    def by_shifting(x):
        return x << 1

    assert by_adding(3) == 6 and list(declared.providers) == [NATIVE, "sum", "shift"]
    assert declared.providers["sum"].fn is by_adding and declared.providers["sum"].support() is None
    assert declared.providers["shift"].support() == "integers only"
    assert declared(1.5) == 3.0  # calling the op itself is always the reference


def test_names_are_given_once():
    declared = Op(double)
    declared.provider("sum")(double)
    for name in ("sum", NATIVE):
        with pytest.raises(ValueError, match=f"'double' already has a provider '{name}'"):
            declared.provider(name)(double)

    def rms_norm():
        pass

    with pytest.raises(ValueError, match="'rms_norm' is declared twice"):
        all_ops()
        op(rms_norm)


def test_all_ops_are_declared_documented_and_read_only():
    ops = all_ops()
    assert set(ops) >= {
        "add_rms_norm", "attention_decode", "attention_prefill", "embedding", "rms_norm", "rotary_embedding", "sample",
        "silu_and_mul", "store_kvcache",
    }  # fmt: skip
    assert all(name == declared.name and declared.__doc__ for name, declared in ops.items())
    with pytest.raises(TypeError):
        ops["another"] = ops["sample"]


def test_native_is_always_a_provider():
    assert all(NATIVE in declared.providers for declared in all_ops().values())
    assert set(resolve_kernels(False).providers.values()) == {NATIVE}


def test_functions_are_bound_directly():
    kernels = resolve_kernels(False)
    for name, declared in all_ops().items():
        assert getattr(kernels, name) is declared.providers[NATIVE].fn


def test_a_named_provider_is_taken(rms_norm):
    kernels = resolve_kernels(True, {"rms_norm": ["fast"]})
    assert kernels.rms_norm is double and kernels.providers["rms_norm"] == "fast"
    assert kernels.silu_and_mul is resolve_kernels(True).silu_and_mul
    assert resolve_kernels(True, {"rms_norm": [NATIVE, "fast"]}).providers["rms_norm"] == NATIVE


def test_native_everywhere_without_custom_kernels(rms_norm):
    assert set(resolve_kernels(False, {"rms_norm": ["fast"]}).providers.values()) == {NATIVE}


def test_a_named_provider_that_is_not_available_is_an_error_with_its_reason(rms_norm):
    with pytest.raises(ValueError, match="'elsewhere'.*not available: it needs a GPU; plug one in"):
        resolve_kernels(True, {"rms_norm": ["elsewhere"]})


def test_unknown_names_list_the_known(rms_norm):
    with pytest.raises(ValueError, match="'rms_nrom'.*ops are .*rms_norm"):
        resolve_kernels(True, {"rms_nrom": ["fast"]})
    with pytest.raises(ValueError, match="'tritno'.*providers are native"):
        resolve_kernels(True, {"rms_norm": ["tritno"]})
    with pytest.raises(AttributeError, match="no op 'rms_nrom'; ops are .*rms_norm"):
        _ = resolve_kernels(True).rms_nrom


def test_summary(rms_norm):
    assert "native" in resolve_kernels(False).summary()
    summary = resolve_kernels(True, {"rms_norm": ["fast"]}).summary()
    assert "fast (1 op" in summary
