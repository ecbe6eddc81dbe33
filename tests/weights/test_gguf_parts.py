"""Models that are published as several GGUF files."""

import os
import shutil
import struct

import pytest
import torch

from nanovllm import LLM
from nanovllm.weights import gguf as ours
from nanovllm.weights.gguf_file import GGUFError, GGUFFile, open_gguf
from nanovllm.weights.safetensors_files import WeightError
from tests.weights.checkpoints import load
from tests.weights.gguf_files import hf_weights, quantised, to_gguf, write
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, PACKED

PROMPTS = [[5, 7, 11], list(range(30))]


def cut(directory, quant="Q8_0", tensors_a_part=7, **keys):
    """The paths of the parts, which the gguf package writes."""
    tensors = to_gguf("llama", hf_weights("llama", tied=False))
    write(directory / "x.gguf", "llama", tensors, quant, tensors_a_part=tensors_a_part, **keys)
    return sorted(directory.glob("x-*.gguf"))


def tokens(path, **options):
    outputs = LLM(str(path), **OPTIONS, **options).generate(PROMPTS, GREEDY, use_tqdm=False)
    return [o["token_ids"] for o in outputs]


@pytest.mark.parametrize("quant", ["Q8_0", "F32"])
def test_parts_are_one_model(tmp_path, quant):
    parts = cut(tmp_path, quant)
    assert [part.name for part in parts] == [f"x-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    whole = quantised(tmp_path / "whole.gguf", "llama", quant, tied=False)
    want = dict(ours.iter_tensors(whole))
    found = dict(ours.iter_tensors(parts[0]))
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    assert {info.path for info in GGUFFile(parts[0]).tensors.values()} == set(parts)
    for options in ({}, PACKED):
        assert tokens(parts[0], **options) == tokens(whole, **options)


@pytest.mark.parametrize("number", range(3))
def test_a_header_is_read_again_if_any_part_has_changed(tmp_path, number):
    parts = cut(tmp_path)
    first = open_gguf(parts[0])
    assert open_gguf(parts[0]) is first and set(first.states) == set(parts)
    stat = parts[number].stat()
    os.utime(parts[number], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = open_gguf(parts[0])
    assert second is not first and open_gguf(parts[0]) is second
    os.replace(shutil.copy2(parts[number], tmp_path / "copy"), parts[number])  # another file with the same times
    third = open_gguf(parts[0])
    assert third is not second
    parts[number].unlink()
    with pytest.raises(GGUFError if number else FileNotFoundError, match=parts[number].name):
        open_gguf(parts[0])


def test_another_part_than_the_first(tmp_path):
    parts = cut(tmp_path)
    with pytest.raises(
        GGUFError, match=r"x-00002-of-00003.gguf: is part 2 of 3; pass the first part, x-00001-of-00003"
    ):
        ours.read_config(parts[1])


def test_a_missing_part(tmp_path):
    parts = cut(tmp_path)
    parts[2].unlink()
    with pytest.raises(
        GGUFError, match=r"first of 3 parts, and x-00003-of-00003.gguf is missing beside it; download it"
    ):
        ours.read_config(parts[0])


def test_a_part_that_was_renamed(tmp_path):
    parts = cut(tmp_path)
    with pytest.raises(
        GGUFError, match=r"y.gguf: is the first of 3 parts, but its name does not end in -00001-of-00003"
    ):
        ours.read_config(parts[0].rename(tmp_path / "y.gguf"))


def test_parts_of_different_models(tmp_path):
    parts = cut(tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(GGUFError, match=r"x-00002-of-00003.gguf: is part 3 of 3; download the parts again"):
        ours.read_config(parts[0])
    for tensors_a_part, said in (
        (11, "x-00002-of-00003.gguf: is no part of x-00001-of-00003.gguf, which has 3"),
        (9, "x-00003-of-00003.gguf: tensor '.*' is in an earlier part as well"),
        (8, "parts hold 20 tensors, split.tensors.count is 21"),
    ):
        (tmp_path / "more").mkdir(exist_ok=True)
        for other in (tmp_path / "more").glob("*"):
            other.unlink()
        others = cut(tmp_path / "more", tensors_a_part=tensors_a_part)
        parts[1].write_bytes(others[1].read_bytes())
        if tensors_a_part == 8:
            parts[2].write_bytes(others[2].read_bytes())
        with pytest.raises(GGUFError, match=said):
            ours.read_config(parts[0])


def test_damage_names_the_part(tmp_path):
    parts = cut(tmp_path, "F32")
    content, infos = parts[1].read_bytes(), GGUFFile(parts[0]).tensors.values()
    parts[1].write_bytes(content[:-64])
    with pytest.raises(GGUFError, match=r"x-00002-of-00003.gguf: is truncated: tensor"):
        ours.read_config(parts[0])
    info = next(info for info in infos if info.path == parts[1] and len(info.shape) == 2)
    spoilt = bytearray(content)
    spoilt[info.offset : info.offset + 4] = struct.pack("<f", float("nan"))
    parts[1].write_bytes(spoilt)
    with pytest.raises(WeightError, match=rf"x-00002-of-00003.gguf: '{info.name}': tensor .* holds NaN or infinity"):
        load(parts[0])
