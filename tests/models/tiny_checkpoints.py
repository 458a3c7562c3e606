"""Small random Llamas on disk, as a GGUF file and as a Hugging Face folder, with any detail changed."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.weights.checkpoint import llama_tensor_shapes

TINY = ModelConfig(
    architecture="llama",
    name="tiny",
    vocab_size=96,
    embed_dim=64,
    mlp_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
)

_GGUF_STEMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(config: ModelConfig = TINY) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in llama_tensor_shapes(config).items()}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    top["lm_head.weight"] = "output.weight"
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    stem = rest.removesuffix(".weight")
    return f"blk.{layer}.{_GGUF_STEMS.get(stem, stem)}.weight"


def permute_like_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """metadata: more keys (without the architecture); None leaves a default key out. Matrices may be quantised."""
    keys = {
        "block_count": TINY.num_layers,
        "context_length": TINY.max_position,
        "embedding_length": TINY.embed_dim,
        "feed_forward_length": TINY.mlp_dim,
        "attention.head_count": TINY.num_heads,
        "attention.head_count_kv": TINY.num_kv_heads,
        "attention.layer_norm_rms_epsilon": TINY.rms_norm_eps,
    } | (metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor = permute_like_llama_cpp(tensor, TINY.num_heads)
        if "k_proj" in name:
            tensor = permute_like_llama_cpp(tensor, TINY.num_kv_heads)
        if quantization and tensor.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(
    folder: Path, tensors: dict[str, np.ndarray], changes: dict[str, Any] | None = None, num_shards: int = 1
) -> Path:
    """changes: keys of config.json; None takes one out."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.embed_dim,
        "intermediate_size": TINY.mlp_dim,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "max_position_embeddings": TINY.max_position,
        "rms_norm_eps": TINY.rms_norm_eps,
    } | (changes or {})
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {
        name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(tensors)
    }
    for file_name in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file_name}, folder / file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
