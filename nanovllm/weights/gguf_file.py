"""The GGUF container: its metadata, and where each tensor lies.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, not by the `gguf` package,
because every length in it must be checked against the file before it is believed, and because a vocabulary of 150,000
strings takes that package seconds.

A GGUF file holds numbers and strings only: nothing in it is ever executed or unpickled.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from nanovllm.wording import brief

# ggml type id -> (name, elements per block, bytes per block). A block never spans two rows.
# Types that no kernel reads are expanded by the `gguf` package.
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip

# Metadata value types; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """A GGUF file that is damaged, or holds something that this package does not support."""


class TensorInfo(NamedTuple):
    """Where a tensor lies: `shape` in torch order, `offset` in bytes from the start of the file `path`."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


class GGUFFile:
    """A parsed header, and the tensors' bytes mapped on demand.

    path: the file; of a model in several files the first. metadata: every key and value, arrays as lists. tensors: by
    GGUF name, in file order, of all files of the model. states: of each file when it was read.
    Raises GGUFError for anything wrong with the file, FileNotFoundError if there is none.
    """

    def __init__(self, path: str | os.PathLike[str], part: int = 0) -> None:
        """part: which of the model's files it is, counted from 0; those after the first are read alone."""
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        with open(self.path, "rb") as file:
            self.states = {self.path: _state(os.fstat(file.fileno()))}
            if file.read(4) != b"GGUF":
                raise self.error(
                    "does not start with the magic bytes 'GGUF'", "pass a .gguf file, or download it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                self._parse(_Cursor(self, view))
        count, number = self.field("split.count", int, 1), self.field("split.no", int, 0)
        if count > 1 and number != part:
            first = re.sub(r"-\d{5}-of-", "-00001-of-", self.path.name)
            remedy = f"pass the first part, {first}" if part == 0 else "download the parts again"
            raise self.error(f"is part {number + 1} of {count}", remedy)
        if count > 1 and part == 0:
            self._add_parts(count)

    def _add_parts(self, count: int) -> None:
        """The tensors of the other files of a model that `llama-gguf-split` cut."""
        stem, matched = self.path.name.removesuffix(f"-00001-of-{count:05}.gguf"), self.path.name
        if stem == matched:
            raise self.error(
                f"is the first of {count} parts, but its name does not end in -00001-of-{count:05}.gguf",
                "give the parts the names that they were published with",
            )
        for part in range(1, count):
            path = self.path.with_name(f"{stem}-{part + 1:05}-of-{count:05}.gguf")
            if not path.is_file():
                raise self.error(f"is the first of {count} parts, and {path.name} is missing beside it", "download it")
            other = GGUFFile(path, part)
            if other.field("split.count", int, 1) != count:
                raise other.error(f"is no part of {self.path.name}, which has {count}", "download the parts again")
            if twice := self.tensors.keys() & other.tensors.keys():
                raise other.error(f"tensor {min(twice)!r} is in an earlier part as well", "download the parts again")
            self.tensors |= other.tensors
            self.states |= other.states
        total = self.field("split.tensors.count", int, len(self.tensors))
        if total != len(self.tensors):
            raise self.error(f"its {count} parts hold {len(self.tensors)} tensors, split.tensors.count is {total}")

    def error(self, problem: str, remedy: str = "the file is damaged or incomplete: download it again") -> GGUFError:
        return GGUFError(f"{self.path}: {problem}; {remedy}")

    def field(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata under a key, or `default` if there is none.

        Raises GGUFError if the value is not a `kind`: str, int, float (an int will do), bool, or list.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        right = isinstance(value, (int, float) if kind is float else kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            raise self.error(
                f"metadata key {key!r} is {brief(value, 60)}, which is no {kind.__name__}", "convert the model again"
            )
        return value

    def _parse(self, cursor: _Cursor) -> None:
        (version,) = cursor.unpack("I", "the version")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            raise self.error(
                "is big-endian" if swapped else f"is GGUF version {version}, only 2 and 3 are supported",
                "convert the model again with a current convert_hf_to_gguf.py",
            )
        num_tensors, num_keys = cursor.unpack("QQ", "the counts of tensors and keys")
        for index in range(num_keys):
            key = cursor.string(f"metadata key {index}")
            (value_type,) = cursor.unpack("I", f"the type of {key!r}")
            if key in self.metadata:
                raise self.error(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(value_type, f"metadata {key!r}")
        entries = [self._tensor_entry(cursor, index) for index in range(num_tensors)]
        alignment = self.field("general.alignment", int, 32)
        if alignment <= 0 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-cursor.position // alignment) * alignment
        for name, type_id, shape, offset in entries:
            self._add_tensor(name, type_id, shape, data_start + offset, len(cursor.view))

    def _tensor_entry(self, cursor: _Cursor, index: int) -> tuple[str, int, tuple[int, ...], int]:
        name = cursor.string(f"the name of tensor {index}")
        (num_dims,) = cursor.unpack("I", f"tensor {name!r}")
        if num_dims > 4:
            raise self.error(f"tensor {name!r} has {num_dims} dimensions, at most 4 are possible")
        dims = cursor.unpack(f"{num_dims}Q", f"tensor {name!r}")
        type_id, offset = cursor.unpack("IQ", f"tensor {name!r}")
        return name, type_id, tuple(reversed(dims)), offset  # ggml names the fastest-moving dimension first

    def _add_tensor(self, name: str, type_id: int, shape: tuple[int, ...], offset: int, file_size: int) -> None:
        if name in self.tensors:
            raise self.error(f"tensor {name!r} occurs twice")
        if type_id not in TENSOR_TYPES:
            supported = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
            raise self.error(
                f"tensor {name!r} has ggml type {type_id}{_type_name(type_id)}, which is not supported",
                f"use a file quantised as one of {supported}",
            )
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if not shape or shape[-1] % block:
            raise self.error(
                f"tensor {name!r} of shape {list(shape)} cannot be {type_name}, whose blocks are {block} long"
            )
        nbytes = math.prod(shape) // block * block_bytes
        if offset + nbytes > file_size:
            raise self.error(
                f"is truncated: tensor {name!r} ({type_name}, {list(shape)}) ends at byte {offset + nbytes}, "
                f"the file has {file_size}",
                "download it again",
            )
        self.tensors[name] = TensorInfo(name, type_name, shape, offset, nbytes, self.path)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """The parsed header of a file. As long as somebody holds it, the file is not parsed again, unless it or another
    file of the model has changed.

    Raises:
        As `GGUFFile`.
    """
    key = os.path.realpath(path)
    file = _OPEN.get(key)
    if file is None or file.path != Path(path) or _changed(file):  # messages name the path as it was given
        file = _OPEN[key] = GGUFFile(path)
    return file


_OPEN: WeakValueDictionary[str, GGUFFile] = WeakValueDictionary()


def _changed(file: GGUFFile) -> bool:
    """Whether one of the files is another one now, or cannot be found."""
    try:
        return any(_state(os.stat(path)) != state for path, state in file.states.items())
    except OSError:
        return True


def _state(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class _Cursor:
    """A position in the header. Every read is checked against the end of the file first."""

    def __init__(self, file: GGUFFile, view: mmap.mmap) -> None:
        self.file, self.view, self.position = file, view, 4

    def take(self, size: int, what: str) -> int:
        start, end = self.position, self.position + size
        if end > len(self.view):
            raise self.file.error(
                f"is truncated: {what} ends at byte {end}, the file has {len(self.view)}", "download it again"
            )
        self.position = end
        return start

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        layout = "<" + layout  # little-endian, no padding
        return struct.unpack_from(layout, self.view, self.take(struct.calcsize(layout), what))

    def string(self, what: str) -> str:
        (size,) = self.unpack("Q", what)
        start = self.take(size, what)
        try:
            return self.view[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.file.error(f"{what} is not UTF-8 ({error})") from None

    def strings(self, count: int, what: str) -> list[str]:
        """As many times `string`, faster: a vocabulary has 150,000."""
        view, position, end = self.view, self.position, len(self.view)
        size_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = position + 8
                stop = start + size_at(view, position)[0]
                if stop > end:
                    break
                found.append(view[start:stop].decode())
                position = stop
        except (struct.error, UnicodeDecodeError):
            pass
        self.position = position
        # `string` says what is wrong with the next one.
        return found + [self.string(what) for _ in range(count - len(found))]

    def value(self, value_type: int, what: str) -> Any:
        if value_type in _SCALARS:
            return self.unpack(_SCALARS[value_type], what)[0]
        if value_type == _STRING:
            return self.string(what)
        if value_type == _ARRAY:
            item_type, count = self.unpack("IQ", what)
            if item_type in _SCALARS:
                # The size is checked before struct sees the count, which may be anything in a damaged file.
                layout = "<" + _SCALARS[item_type]
                start = self.take(count * struct.calcsize(layout), what)
                return list(struct.unpack_from(f"<{count}{_SCALARS[item_type]}", self.view, start))
            if item_type == _STRING:
                return self.strings(count, what)
            value_type = item_type
        raise self.file.error(f"{what} has the value type {value_type}, which the format does not define")


def _type_name(type_id: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return f" ({GGMLQuantizationType(type_id).name})"
    except (ImportError, ValueError):
        return ""
