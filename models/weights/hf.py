"""HfCheckpoint: a Hugging Face folder (config.json and safetensors) as a Checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig, RopeScaling
from models.weights.checkpoint import GenerationDefaults, check_tensors
from models.weights.json_file import read_json
from models.weights.stand_ins import refuse_stand_in

# Mistral and Ministral compute exactly what Llama does, but that layers may see a sliding window alone
KNOWN_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MinistralForCausalLM": "llama"}
WITH_WINDOWS = ("MistralForCausalLM", "MinistralForCausalLM")

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class HfCheckpoint:
    """See Checkpoint. Files are memory-mapped; bfloat16 stays bfloat16, other float types become float32.

    Raises ValueError, one line that names the file, for an unknown architecture or feature, a damaged or absent file, a
    missing or surplus tensor, or a shape that contradicts config.json.
    """

    gguf_metadata = None

    def __init__(self, folder: Path | str):
        self.source = Path(folder)
        self._raw = read_json(self.source / "config.json")
        if not self._raw:
            raise ValueError(f"{self.source}: no config.json in this folder")
        self.config = self._read_config()
        self.generation_defaults = self._read_generation_defaults()
        self._files = self._open_files()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        ignored = [name for name in shapes if name.endswith("rotary_emb.inv_freq")]  # old exports kept this constant
        if self.config.tie_word_embeddings:
            ignored.append("lm_head.weight")
        self._names = check_tensors(self.source, self.config, shapes, ignored)

    def names(self) -> list[str]:
        return self._names

    def tensor(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise ValueError(f"{self.source}: tensor {name} is missing")
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _FLOAT_DTYPES:
            raise ValueError(
                f"{self.source}: tensor {name} is stored as {dtype}, only {list(_FLOAT_DTYPES)} are supported"
            )
        tensor = self._files[name].get_tensor(name)
        return tensor if dtype == "BF16" else tensor.astype(np.float32, copy=False)

    def _open_files(self) -> dict[str, Any]:
        """Tensor name -> open safetensors file."""
        index = read_json(self.source / "model.safetensors.index.json").get("weight_map", {})
        files: dict[str, Any] = {}
        for file_name in sorted(set(index.values())) or ["model.safetensors"]:
            path = self.source / file_name
            if not path.is_file():
                raise ValueError(f"{path}: no such file (weights are read from safetensors only)")
            refuse_stand_in(path, is_binary=True)
            try:
                file = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a readable safetensors file: {_cut_short(path) or error}") from error
            files |= dict.fromkeys(file.keys(), file)
        if misplaced := [name for name in index if name not in files]:
            raise ValueError(
                f"{self.source / index[misplaced[0]]}: tensor {misplaced[0]}, which the index puts here, is missing"
            )
        return files

    def _refuse(self, what: str) -> ValueError:
        return ValueError(f"{self.source / 'config.json'}: {what}")

    def _positive(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self._refuse(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
            raise self._refuse(f"{key} must be a positive {kind.__name__}, it is {value!r}")
        return kind(value)

    def _read_config(self) -> ModelConfig:
        architectures = self._raw.get("architectures") or [None]
        if architectures[0] not in KNOWN_ARCHITECTURES:
            raise self._refuse(
                f"architecture {architectures[0]!r} is not supported, only {sorted(KNOWN_ARCHITECTURES)}"
            )
        for feature in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
            if self._raw.get(feature) and not (feature == "sliding_window" and architectures[0] in WITH_WINDOWS):
                raise self._refuse(f"{feature} = {self._raw[feature]!r} is not supported")
        if self._raw.get("hidden_act", "silu") != "silu":
            raise self._refuse(f"hidden_act must be 'silu', it is {self._raw['hidden_act']!r}")
        embed_dim, num_heads = self._positive("hidden_size", int), self._positive("num_attention_heads", int)
        rope_theta, rope_scaling = self._read_rope()
        return ModelConfig(
            architecture=KNOWN_ARCHITECTURES[architectures[0]],
            name=self.source.resolve().name,
            vocab_size=self._positive("vocab_size", int),
            embed_dim=embed_dim,
            mlp_dim=self._positive("intermediate_size", int),
            num_layers=self._positive("num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=self._positive("num_key_value_heads", int, num_heads),
            head_dim=self._positive("head_dim", int, embed_dim // num_heads),
            max_position=self._positive("max_position_embeddings", int),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=self._positive("rms_norm_eps", float, 1e-6),
            tie_word_embeddings=bool(self._raw.get("tie_word_embeddings", False)),
            layer_windows=self._read_windows(),
        )

    def _read_windows(self) -> tuple[int | None, ...]:
        """How many tokens each layer sees; () where all see all."""
        num_layers, kinds = self._positive("num_hidden_layers", int), ("full_attention", "sliding_attention")
        window = self._positive("sliding_window", int) if self._raw.get("sliding_window") is not None else None
        types = self._raw.get("layer_types") or [kinds[window is not None]] * num_layers
        if len(types) != num_layers:
            raise self._refuse(f"layer_types has {len(types)} entries for {num_layers} layers")
        if wrong := [kind for kind in types if kind not in kinds]:
            raise self._refuse(f"layer type {wrong[0]!r} is not supported, only {kinds}")
        if kinds[1] in types and window is None:
            raise self._refuse("sliding_attention layers need a sliding_window")
        if kinds[1] not in types or window >= self._positive("max_position_embeddings", int):
            return ()
        return tuple(window if kind == kinds[1] else None for kind in types)

    def _read_rope(self) -> tuple[float, RopeScaling | None]:
        """transformers 5 writes rope_parameters, which holds rope_theta too; before, it was rope_scaling."""
        rope = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        theta = float(rope.get("rope_theta") or self._positive("rope_theta", float, 10000.0))
        if rope.get("partial_rotary_factor", self._raw.get("partial_rotary_factor", 1.0)) != 1.0:
            raise self._refuse("a partial_rotary_factor under 1 is not supported")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self._refuse(f"rope scaling {kind!r} is not supported, only 'default' and 'llama3'")
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [key for key in keys if key not in rope]:
            raise self._refuse(f"llama3 rope scaling lacks {missing[0]}")
        factor, low, high, original = (rope[key] for key in keys)
        return theta, RopeScaling(float(factor), float(low), float(high), int(original))

    def _read_generation_defaults(self) -> GenerationDefaults:
        raw = read_json(self.source / "generation_config.json")
        eos = raw.get("eos_token_id", self._raw.get("eos_token_id"))
        sampled = raw.get("do_sample", False)  # without it Hugging Face ignores the numbers that shape a draw
        return GenerationDefaults(
            temperature=raw.get("temperature") if sampled else None,
            top_p=raw.get("top_p") if sampled else None,
            top_k=raw.get("top_k") if sampled else None,
            min_p=raw.get("min_p") if sampled else None,
            repetition_penalty=raw.get("repetition_penalty"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )


def _cut_short(path: Path) -> str | None:
    """Says so of a safetensors file that ends before what its beginning promises."""
    with path.open("rb") as file:
        num_header = int.from_bytes(file.read(8), "little")
        if num_header > MAX_HEADER_BYTES:
            return None
        header = file.read(num_header)
    num_bytes, num_promised = path.stat().st_size, 8 + num_header
    if len(header) == num_header:
        try:
            tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
            num_promised += max(tensor["data_offsets"][1] for tensor in tensors)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return f"cut short: {num_bytes} bytes of {num_promised}" if num_bytes < num_promised else None
