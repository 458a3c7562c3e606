"""The paged engine against attention without pages: a dense Llama in numpy float64."""

import numpy as np
import pytest
from engines import Request, make_engine, run
from tiny_model import CONFIG, WITH_WINDOW, make_tiny_model, random_weights

from jpaged.sampling_params import SamplingParams


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """x [T, heads, D], half-rotation layout."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
    )


def dense_logprobs(weights, config, ids, keep=lambda layer, k, v: (k, v)):
    """log P(next) after every prefix of ids: [T, V]. keep: what is kept of a layer's K and V, [T, K, D] each."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    x = w["model.embed_tokens.weight"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    types, window = config.get("layer_types"), config.get("sliding_window")
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], config["rms_norm_eps"])
        q, k, v = (
            (y @ w[f"{p}self_attn.{name}_proj.weight"].T).reshape(len(ids), n, dim)
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q, 10000.0), rotate(k, 10000.0)
        k, v = keep(layer, k, v)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        seen = causal & ~np.tril(causal, -window) if types and types[layer] == "sliding_attention" else causal
        scores = np.where(seen, np.einsum("thd,uhd->htu", q, k) / np.sqrt(dim), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("htu,uhd->thd", scores / scores.sum(-1, keepdims=True), v)
        x = x + attended.reshape(len(ids), -1) @ w[p + "self_attn.o_proj.weight"].T
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    logits = rms_norm(x, w["model.norm.weight"], config["rms_norm_eps"]) @ w["model.embed_tokens.weight"].T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("config", [CONFIG, WITH_WINDOW], ids=["all layers alike", "a window"])
def test_greedy_tokens_and_log_probs_equal_the_dense_model(config, tmp_path, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path, config)), programs_dir)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 2, 16, 31, 64, 100)]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    outputs = run(engine, [Request(prompt, greedy) for prompt in prompts])
    for prompt, output in zip(prompts, outputs):
        dense = dense_logprobs(random_weights(), config, prompt + output.token_ids)[len(prompt) - 1 : -1]
        order = np.argsort(-dense, axis=-1)
        for at, (token, entries) in enumerate(zip(output.token_ids, output.logprobs)):
            assert dense[at, order[at, 0]] - dense[at, token] < 1e-4
            for candidate, entry in entries.items():
                assert abs(entry.logprob - dense[at, candidate]) < 2e-4
    engine.close()
