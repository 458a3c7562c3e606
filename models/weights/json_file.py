"""read_json: the small JSON files of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from models.weights.stand_ins import read_text


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is no such file; ValueError that names the file if it is damaged or a
    stand-in."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a JSON object was expected, not {type(content).__name__}")
    return content
