import gguf
import numpy as np
import pytest

from benchmarks import random_gguf
from nanovllm.models.model_presets import preset
from nanovllm.weights.gguf import iter_tensors, read_config


@pytest.mark.parametrize("form", random_gguf.FORMATS)
def test_random_weights_deviate_as_trained_ones(form):
    rows = random_gguf.random_rows(np.random.default_rng(0), form, 64, 4096)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[form])
    assert values.shape == (64, 4096)
    assert abs(values.mean()) < 0.1 * random_gguf.DEVIATION
    assert values.std() == pytest.approx(random_gguf.DEVIATION, rel=0.05)


def test_the_file_has_the_shape_of_the_preset(tmp_path):
    path = tmp_path / "m.gguf"
    random_gguf.write(path, "smollm2-135m", "Q8_0")
    config, wanted = read_config(path), preset("smollm2-135m")
    shared = set(config) & set(wanted)
    assert {"hidden_size", "num_hidden_layers", "vocab_size", "rope_theta", "tie_word_embeddings"} <= shared
    differ = {name for name in shared if config[name] != wanted[name]} - {"bos_token_id", "eos_token_id"}
    assert not differ
    _, embedding = next(iter(iter_tensors(path)))
    assert embedding.std().item() == pytest.approx(random_gguf.DEVIATION, rel=0.05)


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 columns, and a matrix has 576"):
        random_gguf.write(tmp_path / "m.gguf", "smollm2-135m", "Q4_K")
    with pytest.raises(ValueError, match="qwen3-30b-a3b is a Qwen3MoeForCausalLM"):
        random_gguf.write(tmp_path / "m.gguf", "qwen3-30b-a3b", "Q8_0")
    with pytest.raises(ValueError, match="'IQ1_S': expected one of BF16"):
        random_gguf.write(tmp_path / "m.gguf", "smollm2-135m", "IQ1_S")
    assert not (tmp_path / "m.gguf").exists()


def test_a_directory_that_does_not_exist_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["random_gguf", "smollm2-135m", "Q8_0", str(tmp_path / "none" / "m.gguf")])
    assert random_gguf.main() == 2
    assert capsys.readouterr().err.startswith("random_gguf: [Errno 2] No such file or directory")
