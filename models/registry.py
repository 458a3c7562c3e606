"""Architecture name -> model class."""

from models.llama import Llama

MODELS = {"llama": Llama}


def model_class(architecture: str):
    """The Flax module for an architecture.

    Raises ValueError that names the architecture and those that are known.
    """
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; known: {', '.join(sorted(MODELS))}")
    return MODELS[architecture]
