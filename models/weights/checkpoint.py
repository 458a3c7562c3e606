"""Checkpoint: a model on disk, seen as a config and tensors with canonical names, whatever the file format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.config import ModelConfig


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's authors recommend; None where they say nothing. eos_token_ids also end a generation."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


class Checkpoint(Protocol):
    """A model's files, opened but not read: opening maps them, and `tensor` reads what it is asked for.

    Tensors go by Hugging Face's names ("model.layers.3.self_attn.q_proj.weight", a matrix is [out, in]) and Hugging
    Face's layout (rotary halves, not interleaved pairs). Opening has already compared every name and shape that the
    config implies with the files.
    """

    config: ModelConfig
    source: Path  # the .gguf file or the Hugging Face folder
    generation_defaults: GenerationDefaults
    gguf_metadata: Mapping[str, Any] | None  # a GGUF's key/value pairs: its tokenizer is in them; None for a folder

    def names(self) -> list[str]:
        """The canonical names of all tensors that the model uses."""

    def tensor(self, name: str) -> np.ndarray:
        """One tensor, dequantised: float32, or ml_dtypes.bfloat16 where the file holds bfloat16.

        Safe to call from several threads at once, which is how a loader keeps more than one core busy.
        Raises ValueError that names the tensor and the file when there is no such tensor or it cannot be read.
        """


def llama_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Llama of this config consists of, with its shape."""
    embed, mlp = config.embed_dim, config.mlp_dim
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, embed)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (embed,),
            prefix + "self_attn.q_proj.weight": (q_dim, embed),
            prefix + "self_attn.k_proj.weight": (kv_dim, embed),
            prefix + "self_attn.v_proj.weight": (kv_dim, embed),
            prefix + "self_attn.o_proj.weight": (embed, q_dim),
            prefix + "post_attention_layernorm.weight": (embed,),
            prefix + "mlp.gate_proj.weight": (mlp, embed),
            prefix + "mlp.up_proj.weight": (mlp, embed),
            prefix + "mlp.down_proj.weight": (embed, mlp),
        }
    shapes["model.norm.weight"] = (embed,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, embed)
    return shapes


def check_tensors(
    source: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]], ignored: Iterable[str] = ()
) -> list[str]:
    """The names of the model's tensors, when `found` (name -> shape) is what the config implies.

    Raises ValueError that names the first that is not. A tensor too many, unless it may be `ignored`, is refused too:
    a bias or an expert that nobody multiplies by gives fluent nonsense.
    """
    if config.num_layers > len(found):  # before a damaged count makes a list of a billion names
        raise ValueError(f"{source}: {config.num_layers} layers are promised, but there are only {len(found)} tensors")
    expected = llama_tensor_shapes(config)
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{source}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} are)")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{source}: tensor {name} has shape {found[name]}, the config implies {shape}")
    if extra := sorted(found.keys() - expected.keys() - set(ignored)):
        raise ValueError(f"{source}: tensor {extra[0]!r} is not part of a Llama ({len(extra)} such tensors)")
    return list(expected)
