"""The safetensors files of a checkpoint directory: which there are, what their headers say, and their tensors.

Pickle files are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from nanovllm.layers.linear import Part
from nanovllm.wording import brief

NO_PARTS: Mapping[str, Part] = MappingProxyType({})


SECOND_COPY = "consolidated*.safetensors"
"""Files in which Mistral publishes the same weights once more, under its own names."""

Rename = Callable[[str], "str | None"]
"""A tensor's name in the files -> its name in the model; None: the tensor is of a part that is left out."""


class WeightError(ValueError):
    """A checkpoint tensor that is missing, unexpected, of the wrong shape, not finite, or unreadable.

    Args:
        tensor: the name of the tensor in the model, if the message does not say which file holds it.
    """

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


_NOT_FLOATS = {"I": "int", "U": "uint", "C": "complex"}


class TensorHeader(NamedTuple):
    """What a file's header says of a tensor.

    Attributes:
        dtype: as the file names it.
        is_float: whether its values are the weights: floats of at least 16 bits. Smaller ones need scales.
        file: the file that holds it.
        stored_name: its name there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    file: Path | None = None
    stored_name: str = ""


def read_headers(path: Path, rename: Rename = str) -> list[TensorHeader]:
    """Every tensor of a checkpoint directory, from the headers alone: no tensor is read."""
    return [header for _, header in _tensors(path, rename)]


def iter_tensors(
    path: Path, parts: Mapping[str, Part] = NO_PARTS, rename: Rename = str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every tensor of a checkpoint directory, one at a time.

    A tensor is memory-mapped. One that is named in `parts` is that part alone, and no other byte of it is read.
    """
    for f, header in _tensors(path, rename):
        part = parts.get(header.name)
        if part is None:
            yield header.name, f.get_tensor(header.stored_name)
        else:
            index = (slice(None),) * part.dim + (slice(part.start, part.start + part.length),)
            yield header.name, f.get_slice(header.stored_name)[index]


def _tensors(path: Path, rename: Rename) -> Iterator[tuple[Any, TensorHeader]]:
    from safetensors import SafetensorError, safe_open

    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as f:
                for stored_name in f.keys():
                    name = rename(stored_name)
                    if name is not None:
                        entry = f.get_slice(stored_name)
                        dtype, is_float = _dtype(entry.get_dtype())
                        shape = tuple(entry.get_shape())
                        yield f, TensorHeader(name, shape, dtype, is_float, file, stored_name)
        except SafetensorError as e:
            raise WeightError(f"{file} is corrupt or truncated ({e}); download it again") from e
        except OSError as e:
            raise WeightError(f"{file} cannot be read ({e}); check that it is a file that you may read") from e


def _dtype(code: str) -> tuple[str, bool]:
    """A safetensors dtype such as "I8" as PyTorch names it, and whether it is a float of 16 bits or more."""
    if code.startswith(("F", "BF")):
        return code, not code.startswith(("F8", "F6", "F4"))
    return (_NOT_FLOATS[code[0]] + code[1:] if code[0] in _NOT_FLOATS else code.lower()), False


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(path, index)
    files = sorted(set(path.glob("*.safetensors")) - set(path.glob(SECOND_COPY)))
    if not files:
        pickled = [f.name for f in sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))]
        names = ", ".join(pickled)
        hint = f" ({names} are pickle files, which are never opened; convert them to safetensors)" if pickled else ""
        raise WeightError(f'{path} holds no .safetensors file{hint}; for random weights pass load_format="dummy"')
    return files


def _indexed_files(path: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise WeightError(
            f"{index} does not say which file holds which tensor ({brief(e, 200)}); download it again"
        ) from e
    if outside:
        raise WeightError(
            f"{index}: weight_map names {outside[0]!r}, which is outside of the model's directory; files must lie in"
            f" {path}"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise WeightError(f"{index} names {', '.join(missing)}, not found in {path}; download the model again")
    return [path / name for name in names]
