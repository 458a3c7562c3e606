"""A random Llama on disk, small enough to compile in seconds."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 258, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
WITH_WINDOW = CONFIG | {  # the last layer sees 24 tokens alone, and has blocks of its own
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face Llama config with tied embeddings."""
    embed, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], embed), "model.norm.weight": (embed,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (embed,) for norm in ("input", "post_attention")}
        shapes[f"{prefix}self_attn.q_proj.weight"] = (q, embed)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (embed, q)
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (kv, embed) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (mlp, embed) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (embed, mlp)
    return shapes


def random_weights(config: dict = CONFIG) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) * 0.2 for name, shape in tensor_shapes(config).items()}


def make_tiny_model(folder: Path, config: dict = CONFIG, weights: dict[str, np.ndarray] | None = None) -> Path:
    """A Hugging Face folder: random weights where none are given, and a tokenizer with a token for each byte."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights or random_weights(config), folder / "model.safetensors")
    return folder
