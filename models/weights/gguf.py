"""GgufCheckpoint: a GGUF file of the llama architecture as a Checkpoint."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from models.config import ModelConfig, RopeScaling
from models.weights.checkpoint import GenerationDefaults, check_tensors
from models.weights.gguf_file import GgufFile

KNOWN_ARCHITECTURES = {"llama": "llama"}  # general.architecture -> ModelConfig.architecture

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"


def _canonical_name(gguf_name: str) -> str:
    """Hugging Face's name for a GGUF tensor; a name that has none is returned as it is (and then refused)."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name):
        layer, stem, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{kind}" if stem in _LAYER_NAMES else gguf_name
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else gguf_name


class GgufCheckpoint:
    """See Checkpoint. Tensors are dequantised on each call: keep what you read.

    Raises ValueError, one line that names the file, for a damaged file, an unknown architecture or feature, a missing
    or surplus tensor, or a shape that contradicts the metadata.
    """

    def __init__(self, path: Path | str):
        self.source = Path(path)
        self._file = GgufFile(self.source)
        self.gguf_metadata: dict[str, Any] = self._file.metadata
        self._gguf_names = {_canonical_name(name): name for name in self._file.shapes()}
        shapes = {name: self._file.shapes()[gguf_name] for name, gguf_name in self._gguf_names.items()}
        self.config = self._read_config(shapes)
        self.generation_defaults = self._read_generation_defaults()
        self._names = check_tensors(self.source, self.config, shapes, ignored=[_ROPE_FACTORS])

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise ValueError(f"{self.source}: tensor {name} is missing")
        tensor = self._file.tensor(self._gguf_names[name])
        if name.endswith("self_attn.q_proj.weight"):
            return self._to_half_rotation(tensor, self.config.num_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return self._to_half_rotation(tensor, self.config.num_kv_heads)
        return tensor

    @staticmethod
    def _to_half_rotation(weight: np.ndarray, num_heads: int) -> np.ndarray:
        """Undoes llama.cpp's row order: it interleaves the two halves that rotary embedding pairs up."""
        pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{self.source}: {what}")

    def _read_config(self, shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
        metadata = self.gguf_metadata
        architecture = metadata.get("general.architecture")
        if architecture not in KNOWN_ARCHITECTURES:
            raise self._refuse(f"architecture {architecture!r} is not supported, only {sorted(KNOWN_ARCHITECTURES)}")

        def get(key: str, kind: type, default: Any = None) -> Any:
            value = metadata.get(f"{architecture}.{key}", default)
            if value is None:
                raise self._refuse(f"metadata {architecture}.{key} is missing")
            if not isinstance(value, kind):
                raise self._refuse(f"metadata {architecture}.{key} is {value!r}, not one {kind.__name__}")
            if kind in (int, float) and not value > 0:
                raise self._refuse(f"metadata {architecture}.{key} must be positive, it is {value!r}")
            return value

        if metadata.get(f"{architecture}.expert_count"):
            raise self._refuse(f"experts ({metadata[f'{architecture}.expert_count']} of them) are not supported")
        if metadata.get(f"{architecture}.attention.sliding_window"):
            raise self._refuse("sliding-window attention is not supported")
        embed_dim, num_heads = get("embedding_length", int), get("attention.head_count", int)
        head_dim = get("attention.key_length", int, embed_dim // num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if get(key, int, head_dim) != head_dim:
                raise self._refuse(f"{architecture}.{key} must equal the head dim {head_dim}, it is {get(key, int)}")
        rope_theta = get("rope.freq_base", float, 10000.0)
        if "model.embed_tokens.weight" not in shapes:
            raise self._refuse("tensor model.embed_tokens.weight (token_embd.weight) is missing")
        return ModelConfig(
            architecture=KNOWN_ARCHITECTURES[architecture],
            name=metadata.get("general.name", self.source.stem),
            vocab_size=shapes["model.embed_tokens.weight"][0],
            embed_dim=embed_dim,
            mlp_dim=get("feed_forward_length", int),
            num_layers=get("block_count", int),
            num_heads=num_heads,
            num_kv_heads=get("attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            max_position=get("context_length", int),
            rope_theta=rope_theta,
            rope_scaling=self._read_rope_scaling(architecture, rope_theta, head_dim),
            # GGUF stores it as float32; the shortest decimal is what the model's authors wrote
            rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon", float)))),
            tie_word_embeddings="lm_head.weight" not in shapes,
        )

    def _read_rope_scaling(self, architecture: str, rope_theta: float, head_dim: int) -> RopeScaling | None:
        """A GGUF holds Llama 3's scaling as its result, a factor for each frequency: the parameters are recovered."""
        kind = self.gguf_metadata.get(f"{architecture}.rope.scaling.type", "none")
        factor = self.gguf_metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
        if kind != "none" or factor != 1.0 or f"{architecture}.rope.scale_linear" in self.gguf_metadata:
            raise self._refuse(f"rope scaling {kind!r} (factor {factor}) is not supported, only llama3's")
        if _ROPE_FACTORS not in self._gguf_names:
            return None
        factors = self._file.tensor(_ROPE_FACTORS)
        # every Llama 3.x release has these three numbers, and only the factor differs
        scaling = RopeScaling(
            float(factors.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        )
        if factors.shape != (head_dim // 2,) or not np.allclose(
            factors, _llama3_factors(scaling, rope_theta, head_dim), 1e-3
        ):
            raise self._refuse(f"the factors in {_ROPE_FACTORS} are not llama3's rope scaling: not supported")
        return scaling

    def _read_generation_defaults(self) -> GenerationDefaults:
        metadata = self.gguf_metadata
        eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return GenerationDefaults(
            temperature=metadata.get("general.sampling.temp"),
            top_p=metadata.get("general.sampling.top_p"),
            top_k=metadata.get("general.sampling.top_k"),
            min_p=metadata.get("general.sampling.min_p"),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        )


def _llama3_factors(scaling: RopeScaling, rope_theta: float, head_dim: int) -> np.ndarray:
    """What Llama 3's rope scaling divides each frequency by (Hugging Face's _compute_llama3_parameters)."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
