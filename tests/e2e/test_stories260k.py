"""A real 260K-parameter Llama in float32, against golden ids made by an independent implementation."""

import json
import struct

import numpy as np
import pytest
from engines import Request, make_engine, run
from tiny_model import make_tiny_model

from jpaged.sampling_params import SamplingParams


def read_llama2c(path) -> tuple[dict, dict[str, np.ndarray]]:
    """llama2.c's legacy format: a header of 7 int32, then float32 tensors, rotary pairs interleaved."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = struct.unpack("7i", raw[:28])
    head = dim // heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "max_position_embeddings": seq_len,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    numbers = np.frombuffer(raw, np.float32, offset=28)

    def take(*shape):
        nonlocal numbers
        size = int(np.prod(shape))
        tensor, numbers = numbers[:size].reshape(shape), numbers[size:]
        return tensor

    def to_halves(weight, num_heads):  # pairs (0, 1), (2, 3) ... -> (0, head/2), (1, head/2 + 1) ...
        return weight.reshape(num_heads, head // 2, 2, dim).swapaxes(1, 2).reshape(-1, dim)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    stacks = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, heads * head, dim),
        "self_attn.k_proj": take(layers, kv_heads * head, dim),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, heads * head),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    weights["model.norm.weight"] = take(dim)
    for layer in range(layers):
        for name, stack in stacks.items():
            weight = stack[layer]
            if name.endswith(("q_proj", "k_proj")):
                weight = to_halves(weight, heads if "q_proj" in name else kv_heads)
            weights[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(weight)
    return config, weights


def test_greedy_ids_are_the_golden_ones(data_dir, tmp_path, programs_dir):
    folder = data_dir / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent (set JPAGED_DATA)")
    golden = json.loads((folder / "golden_greedy_ids.json").read_text())
    config, weights = read_llama2c(folder / "stories260K.bin")
    engine = make_engine(str(make_tiny_model(tmp_path, config, weights)), programs_dir)
    expected = golden["greedy_ids_after_bos"]
    greedy = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
    assert run(engine, [Request([golden["bos"]], greedy)])[0].token_ids == expected
    engine.close()
