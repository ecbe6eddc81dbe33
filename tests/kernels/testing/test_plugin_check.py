"""A plugin that ends the process that loads it is an error, and this process goes on."""

import pytest
from typer.testing import CliRunner

from nanovllm.cli import app
from nanovllm.kernels.testing.plugin_check import reject_crashing


@pytest.fixture
def plugin(tmp_path):
    def write(text):
        path = tmp_path / "plugin.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    "text, said",
    [
        ("import os\nos._exit(7)\n", "loading it crashed: it ended the process with code 7"),
        ("import os\nos._exit(0)\n", "loading it crashed: it ended the process with code 0"),
        (
            "import ctypes\n\n\nctypes.string_at(0)\n",
            r"loading it crashed \(SIGSEGV\) at plugin.py:4, `ctypes.string_at",
        ),
        ("import os\nos.kill(os.getpid(), 9)\n", r"loading it crashed \(SIGKILL\)"),
    ],
)
def test_a_plugin_that_ends_the_process(plugin, text, said):
    with pytest.raises(ValueError, match=f"kernel plugin .*plugin.py: {said}"):
        reject_crashing([plugin(text)])


def test_a_plugin_that_does_not_end(plugin):
    with pytest.raises(
        ValueError, match="loading it hung, or its process was paused: it took longer than 0.5 s at plugin.py:"
    ):
        reject_crashing([plugin("while True:\n    pass\n")], limit=0.5)


@pytest.mark.parametrize("text", ["", "raise OSError('not here')\n", "raise SystemExit(3)\n", "print('hello')\n"])
def test_other_plugins_pass(plugin, text, capfd):
    reject_crashing([plugin(text)])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["list"], ["verify", "rms_norm"], ["bench", "rms_norm"], ["why", "rms_norm"]])
def test_commands_end_with_the_reason(plugin, command):
    path = plugin("import os\nos._exit(7)\n")
    error = CliRunner().invoke(app, ["kernels", *command, "--kernel-plugin", path, "--device", "cpu"]).exception
    assert isinstance(error, ValueError) and "it ended the process with code 7" in str(error)
