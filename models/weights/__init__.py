"""Weights on disk: where they are (`resolve_model`) and what is in them (`open_checkpoint`)."""

from models.weights.checkpoint import Checkpoint, GenerationDefaults
from models.weights.fetch import DEFAULT_MODEL, recommended_sampling, resolve_model
from models.weights.json_file import read_json
from models.weights.open import open_checkpoint
from models.weights.stand_ins import read_text, refuse_stand_in

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "GenerationDefaults",
    "open_checkpoint",
    "read_json",
    "read_text",
    "recommended_sampling",
    "refuse_stand_in",
    "resolve_model",
]
