"""The GGUF container: damage anywhere, and values of the wrong type, are errors that name file and field."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as V

from nanovllm.model_config import ModelConfig
from nanovllm.weights import gguf as ours
from nanovllm.weights.gguf_file import GGUFError, GGUFFile
from nanovllm.weights.tokenizer import load_tokenizer
from tests.weights.gguf_files import HIDDEN, LAYERS, VOCAB, finish, tiny, write


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"\x00" * 64])
def test_wrong_magic(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=r"x\.gguf: does not start with the magic bytes 'GGUF'"):
        GGUFFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        ours.read_config(tmp_path / "none.gguf")


def test_version_and_byte_order(tmp_path: Path) -> None:
    content = bytearray(tiny(tmp_path).read_bytes())
    for version, message in ((struct.pack("<I", 1), "version 1"), (struct.pack(">I", 3), "big-endian")):
        content[4:8] = version
        (tmp_path / "v.gguf").write_bytes(content)
        with pytest.raises(GGUFError, match=message):
            GGUFFile(tmp_path / "v.gguf")


def test_truncation_anywhere_is_noticed(tmp_path: Path) -> None:
    content = tiny(tmp_path).read_bytes()
    end_of_header = content.index(b"blk.1.ffn_down") + 64
    path = tmp_path / "t.gguf"
    for size in [*range(4, end_of_header, 13), len(content) // 2, len(content) - 64]:
        path.write_bytes(content[:size])
        with pytest.raises(GGUFError, match="truncated"):
            GGUFFile(path)


@pytest.mark.parametrize(
    "last, said",
    [
        (struct.pack("<Q", 100) + b"short", r"is truncated: metadata 'a' ends at byte 165, the file has 70"),
        (struct.pack("<I", 3), r"is truncated: metadata 'a' ends at byte 65, the file has 61"),
        (struct.pack("<Q", 2) + b"\xff\xfe", r"metadata 'a' is not UTF-8"),
    ],
)
def test_damaged_strings_of_an_array(tmp_path: Path, last: bytes, said: str) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 2)
    path = tmp_path / "s.gguf"
    path.write_bytes(header + struct.pack("<Q", 0) + last)
    with pytest.raises(GGUFError, match=said):
        GGUFFile(path)


def test_truncation_names_tensor_and_sizes(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    content = path.read_bytes()
    info = list(GGUFFile(path).tensors.values())[-1]
    path.write_bytes(content[: info.offset + 4])
    end, size = info.offset + info.nbytes, info.offset + 4
    with pytest.raises(GGUFError, match=rf"{info.name}.*ends at byte {end}, the file has {size}; download it again"):
        ours.iter_tensors(path)


def test_no_damaged_byte_escapes_as_another_error(tmp_path: Path) -> None:
    """A single wrong byte is either harmless or a GGUFError: no crash, no hang, no huge allocation."""
    weights = {"token_embd.weight": np.ones((4, 8), np.float32), "blk.0.attn_q.weight": np.ones((256, 2), np.float32)}
    content = write(
        tmp_path / "x.gguf", "llama", weights, **{"rope.scaling.type": "linear", "split.count": 1}
    ).read_bytes()
    path = tmp_path / "d.gguf"
    refused = 0
    for position in range(4, len(content) - 2048):
        damaged = bytearray(content)
        damaged[position] ^= (0xFF, 0x01, 0x0C)[position % 3]
        path.write_bytes(damaged)
        try:
            ours.read_config(path)
            for _ in ours.iter_tensors(path):
                pass
        except GGUFError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"byte {position}") from error
    assert refused > 300, refused


def test_blocks_that_do_not_divide_the_row(tmp_path: Path) -> None:
    path = tiny(tmp_path, quant="Q8_0")
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    assert struct.unpack_from("<QQ", content, at) == (HIDDEN, VOCAB)
    struct.pack_into("<Q", content, at, 100)
    path.write_bytes(content)
    with pytest.raises(
        GGUFError, match=r"'token_embd.weight' of shape \[96, 100\] cannot be Q8_0, whose blocks are 32"
    ):
        GGUFFile(path)


WRONG = [
    (7, V.UINT32), (2**63, V.UINT64), (-3, V.INT32), (0.5, V.FLOAT32), (float("nan"), V.FLOAT32), (True, V.BOOL),
    ("x", V.STRING), ("{% for", V.STRING), ([1, 2], V.ARRAY), (["a", "b"], V.ARRAY), ([[1], [2]], V.ARRAY),
]  # fmt: skip


KEYS = [
    "general.architecture", "general.alignment", "split.count", "llama.block_count", "llama.context_length",
    "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count",
    "llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.dimension_count",
    "llama.expert_count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.rope.scaling.attn_factor", "llama.rope.scaling.original_context_length", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
]  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_the_wrong_type_is_an_error_that_names_file_and_key(tmp_path: Path, key: str, model: str) -> None:
    """Whatever stands under a key, reading gives a configuration and a tokenizer, or one ValueError."""
    for number, (value, kind) in enumerate(WRONG):
        path = tmp_path / f"{number}.gguf"
        write_with_tokenizer(path, model, key, value, kind)
        try:
            ModelConfig.from_dict(ours.read_config(path))
        except ValueError as error:
            assert str(path) in str(error) or "config.json" in str(error), f"{key}={value!r}: {error}"
        try:
            load_tokenizer(path)
        except ValueError as error:
            assert str(path) in str(error), f"{key}={value!r}: {error}"


def write_with_tokenizer(path: Path, model: str, key: str, value: object, kind: V) -> None:
    """A file without layers that could be read, but for one key."""
    pieces = ["<unk>", "a", "b", "ab"]
    keys: dict[str, tuple[object, V]] = {
        "llama.block_count": (LAYERS, V.UINT32), "llama.context_length": (128, V.UINT32),
        "llama.embedding_length": (8, V.UINT32), "llama.feed_forward_length": (16, V.UINT32),
        "llama.attention.head_count": (2, V.UINT32), "llama.attention.layer_norm_rms_epsilon": (1e-5, V.FLOAT32),
        "tokenizer.ggml.model": (model, V.STRING), "tokenizer.ggml.tokens": (pieces, V.ARRAY),
        "tokenizer.ggml.merges": (["a b"], V.ARRAY), "tokenizer.ggml.unknown_token_id": (0, V.UINT32),
    }  # fmt: skip
    keys[key] = value, kind
    writer = gguf.GGUFWriter(path, "llama")
    if key == "general.architecture":
        writer.kv_data[0].pop("general.architecture")
    for name, (content, value_type) in keys.items():
        writer.add_key_value(name, content, value_type)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    finish(writer)
