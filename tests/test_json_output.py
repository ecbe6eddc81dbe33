"""`--json` means the same in every command: a file, or - for the standard output."""

import json

import pytest
import typer
from typer.core import TyperGroup

from nanovllm.cli import app
from nanovllm.json_output import HELP, check_target, compact_json, write_json


def commands(command):
    yield command
    if isinstance(command, TyperGroup):
        for name in command.list_commands(None):
            yield from commands(command.get_command(None, name))


def test_every_command_has_the_same_option():
    found = [p for command in commands(typer.main.get_command(app)) for p in command.params if "--json" in p.opts]
    assert len(found) >= 15 and {(p.metavar, p.help) for p in found} == {("FILE|-", HELP)}


def test_a_file_or_standard_output(tmp_path, capsys):
    path = tmp_path / "new" / "d.json"
    assert check_target(str(path)) == str(path) and write_json(str(path), [1]) is False
    assert json.loads(path.read_text()) == [1] and capsys.readouterr().out == ""
    assert write_json(check_target("-"), [2]) is True and json.loads(capsys.readouterr().out) == [2]
    assert write_json(None, [3]) is False and capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="^--json .*new: it is a folder, expected a file"):
        check_target(str(path.parent))
    with pytest.raises(ValueError, match="^--json .*d.json/x: .*d.json is a file, expected a folder"):
        check_target(str(path / "x"))
    with pytest.raises(ValueError, match="^--json .*new: Is a directory; expected a file that can be written, or -"):
        write_json(str(path.parent), [4])


def test_what_cannot_be_written_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write everywhere
    for target in (tmp_path / "d.json", tmp_path / "new" / "d.json"):
        with pytest.raises(
            ValueError, match=f"^--json {target}: {tmp_path} cannot be written; name another file, or -$"
        ):
            check_target(str(target))


def test_kept_files_have_filled_lines():
    value = {"gpu": "h200", "none": [], "entries": [{"key": {"rows": i}, "text": "a\n\u00e9" * 9} for i in range(4)]}
    text = compact_json(value, width=60)
    assert json.loads(text) == value
    assert text.splitlines()[:4] == ["{", ' "gpu": "h200", "none": [],', ' "entries": [', "  {"]
    assert compact_json([10, 11, 12, {"a": 1}], width=12) == '[\n 10, 11, 12,\n {"a": 1}\n]'
    assert compact_json(value, width=5000) == json.dumps(value) and compact_json("x" * 70, width=60) == f'"{"x" * 70}"'
