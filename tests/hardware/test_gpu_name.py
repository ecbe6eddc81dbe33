"""Names of devices."""

from pathlib import Path

import pytest

from nanovllm.hardware.gpu_name import cpu_name

BLOCK = "processor\t: {}\nvendor_id\t: x\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {}\nflags\t\t: fpu\n\n"


@pytest.mark.parametrize(
    "content, name",
    [
        (BLOCK.format(0, "AMD EPYC") + BLOCK.format(1, "AMD EPYC").replace("17", "18"), "AMD EPYC family 25 model 17"),
        (BLOCK.format(0, "Intel(R) Xeon(R) Gold 6430"), "Intel Xeon Gold 6430"),
        ("processor\t: 0\nmodel name\t: Some Processor\n", "Some Processor"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n", ""),
    ],
)
def test_a_processor_without_a_number_is_told_apart_by_its_family_and_model(monkeypatch, content, name):
    monkeypatch.setattr(Path, "read_text", lambda _: content)
    assert cpu_name() == name


def test_a_system_that_does_not_tell_has_no_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    assert cpu_name() == ""
