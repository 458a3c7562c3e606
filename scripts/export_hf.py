"""Writes any checkpoint that jpaged reads as a Hugging Face folder, dequantised to float32.

    .venv/bin/python scripts/export_hf.py --model SmolLM2-135M-Instruct --output /tmp/smollm2_hf

For tools that know no GGUF, and for make_parity_fixture.py, whose reference must run on the very same weights.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jpaged.tokenizer import Tokenizer
from models.config import ModelConfig
from models.weights import DEFAULT_MODEL, open_checkpoint, resolve_model


def hf_config(config: ModelConfig) -> dict:
    """config.json of a Llama, as transformers writes it."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        scaling = asdict(config.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        rope |= scaling | {"rope_type": "llama3"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rope_parameters": rope,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def tokenizer_config(tokenizer: Tokenizer, metadata: dict | None) -> dict:
    """tokenizer_config.json; the chat template is there when the source is a GGUF file."""
    eos = sorted(tokenizer.eos_token_ids)
    bos = tokenizer.bos_token_id
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokenizer.id_to_token(bos),
        "eos_token": tokenizer.id_to_token(eos[0]) if eos else None,
        "clean_up_tokenization_spaces": False,
        "chat_template": (metadata or {}).get("tokenizer.chat_template"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, .gguf file, folder or hub id")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve_model(args.model))
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    args.output.mkdir(parents=True, exist_ok=True)
    names = tqdm(checkpoint.names(), desc="Dequantising", unit="tensor")
    tensors = {name: checkpoint.tensor(name).astype(np.float32) for name in names}
    save_file(tensors, args.output / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": hf_config(checkpoint.config),
        "generation_config.json": {"eos_token_id": sorted(tokenizer.eos_token_ids)},
        "tokenizer_config.json": tokenizer_config(tokenizer, checkpoint.gguf_metadata),
    }
    for name, content in files.items():
        (args.output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (args.output / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    print(f"{args.output}: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
