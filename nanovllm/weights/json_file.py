"""Reading a checkpoint's .json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file holds something else; the message names it.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{file} is not valid JSON ({e}); correct the file, or download the model again") from e
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply to be a model's; download the model again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object; is it the configuration of a model?")
    return config
