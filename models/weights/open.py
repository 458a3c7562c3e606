"""open_checkpoint: picks the reader that fits what lies at a path."""

from pathlib import Path

from models.weights.checkpoint import Checkpoint
from models.weights.gguf import GgufCheckpoint
from models.weights.hf import HfCheckpoint


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a .gguf file, or a Hugging Face folder with config.json and safetensors.

    Raises ValueError, one line that names the path, when there is nothing there or it cannot be used.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return HfCheckpoint(path)
        if path.is_file():
            return GgufCheckpoint(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    raise ValueError(f"{path}: no such file or folder")
