"""A stand-in for a notebook: what is displayed, and what replaces it."""

import sys
import types

import pytest
import rich.console


def outputs_of_cell(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """rich and IPython behave as in a notebook from here on. Of each output of the cell its texts, in order."""
    shown: list[list[str]] = []

    def display(data, raw, display_id):
        states = [data["text/plain"]]
        shown.append(states)
        return types.SimpleNamespace(update=lambda data, raw: states.append(data["text/plain"]))

    shell = types.ModuleType("IPython.display")
    shell.display = display  # type: ignore[attr-defined]
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", shell)
    return shown
