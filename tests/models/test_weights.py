"""Checkpoints: what is read equals what was written, and what cannot be used is refused in one line that says why."""

from dataclasses import replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import TINY, gguf_name, random_tensors, write_gguf, write_hf

from models.config import RopeScaling
from models.weights import DEFAULT_MODEL, GenerationDefaults, open_checkpoint, resolve_model
from models.weights.gguf import _llama3_factors
from models.weights.gguf_file import GgufFile

Q8_0, BF16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def assert_refused(path, *words):
    """Opening fails with one line that names the file and holds the words."""
    with pytest.raises(ValueError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def test_gguf_gives_back_the_tensors_in_hugging_face_layout(tmp_path):
    tensors = random_tensors()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert replace(checkpoint.config, name="tiny") == TINY
    assert checkpoint.names() == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor, err_msg=name)


@pytest.mark.parametrize("kind", [Q8_0, BF16], ids=lambda kind: kind.name)
def test_quantised_gguf_is_dequantised_in_chunks_as_gguf_does_it_whole(tmp_path, kind):
    tensors = random_tensors()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors, quantization=kind))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)


def test_gguf_without_an_output_matrix_ties_the_embedding(tmp_path):
    tensors = random_tensors()
    del tensors["lm_head.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert checkpoint.config.tie_word_embeddings
    with pytest.raises(ValueError, match=r"tiny\.gguf: tensor lm_head\.weight is missing"):
        checkpoint.tensor("lm_head.weight")


def test_gguf_without_kv_head_count_has_as_many_kv_heads_as_heads(tmp_path):
    config = replace(TINY, num_kv_heads=TINY.num_heads)
    path = write_gguf(tmp_path / "mha.gguf", random_tensors(config), metadata={"attention.head_count_kv": None})
    assert open_checkpoint(path).config.num_kv_heads == TINY.num_heads


def test_gguf_llama3_rope_factors_become_the_scaling_that_made_them(tmp_path):
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    factors = _llama3_factors(scaling, 500000.0, TINY.head_dim).astype(np.float32)
    assert factors.min() == 1.0 and factors.max() == 32.0
    tensors, metadata = random_tensors(), {"rope.freq_base": 500000.0}
    path = write_gguf(tmp_path / "llama3.gguf", tensors, metadata=metadata, rope_factors=factors)
    assert open_checkpoint(path).config.rope_scaling == scaling
    path = write_gguf(
        tmp_path / "other.gguf", tensors, metadata=metadata, rope_factors=np.linspace(1, 9, 8, dtype=np.float32)
    )
    assert_refused(path, "rope_freqs.weight", "not supported")


def test_gguf_that_is_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", random_tensors()).read_bytes()
    path = tmp_path / "cut.gguf"
    rng = np.random.default_rng(0)
    cuts = [4, 7, 12, 23, 24, 60, 200, 900, 2000, len(whole) - 1, *rng.integers(4, len(whole), 60)]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        assert_refused(path, "not a readable GGUF file: cut short", f"the file has {cut}")


def test_gguf_with_damaged_bytes_is_refused_or_opens_but_never_crashes(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", random_tensors()).read_bytes())
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(1)
    refused = 0
    for position in rng.integers(4, 1800, 300):
        damaged = whole.copy()
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 100


def test_file_that_is_not_gguf_is_refused(tmp_path):
    for content in (b"GG", b"PK\x03\x04 a zip file", b"\x00" * 100):
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
        assert_refused(path, "not a GGUF file")


def test_unknown_gguf_architecture_is_refused_by_name(tmp_path):
    assert_refused(write_gguf(tmp_path / "x.gguf", random_tensors(), architecture="mamba"), "'mamba'", "['llama']")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"block_count": None}, ["llama.block_count is missing"]),
        ({"block_count": 3}, ["model.layers.2.input_layernorm.weight is missing", "9 of 30"]),
        ({"feed_forward_length": 256}, ["mlp.gate_proj.weight has shape (128, 64)", "(256, 64)"]),
        ({"attention.head_count": [4, 4]}, ["attention.head_count is [4, 4]"]),
        ({"attention.head_count": 0}, ["must be positive, it is 0"]),
        ({"expert_count": 8}, ["experts (8 of them)"]),
        ({"attention.sliding_window": 4096}, ["sliding-window"]),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, ["'yarn'", "4.0"]),
        ({"rope.dimension_count": 8}, ["rope.dimension_count must equal the head dim 16, it is 8"]),
    ],
)
def test_gguf_that_contradicts_itself_or_needs_more_is_refused(tmp_path, metadata, words):
    assert_refused(write_gguf(tmp_path / "x.gguf", random_tensors(), metadata=metadata), *words)


def test_gguf_with_a_tensor_missing_or_too_many_is_refused_by_name(tmp_path):
    tensors = random_tensors()
    removed = {name: t for name, t in tensors.items() if "layers.1.mlp.up_proj" not in name}
    assert_refused(write_gguf(tmp_path / "a.gguf", removed), "model.layers.1.mlp.up_proj.weight is missing")
    added = tensors | {"model.layers.0.attn_q_norm.weight": np.ones(16, np.float32)}
    assert_refused(
        write_gguf(tmp_path / "b.gguf", added), gguf_name("model.layers.0.attn_q_norm.weight"), "not part of a Llama"
    )
    del tensors["model.embed_tokens.weight"]
    assert_refused(write_gguf(tmp_path / "c.gguf", tensors), "model.embed_tokens.weight")


@pytest.mark.parametrize("num_shards", [1, 3])
def test_hf_folder_gives_back_the_tensors(tmp_path, num_shards):
    tensors = random_tensors()
    checkpoint = open_checkpoint(write_hf(tmp_path / "tiny", tensors, num_shards=num_shards))
    assert checkpoint.config == TINY
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor, err_msg=name)


def test_hf_bfloat16_stays_and_float16_becomes_float32(tmp_path):
    tensors = random_tensors()
    tensors = {n: t.astype(ml_dtypes.bfloat16 if "mlp" in n else np.float16) for n, t in tensors.items()}
    checkpoint = open_checkpoint(write_hf(tmp_path / "tiny", tensors))
    assert checkpoint.tensor("model.layers.0.mlp.up_proj.weight").dtype == ml_dtypes.bfloat16
    norm = checkpoint.tensor("model.norm.weight")
    assert norm.dtype == np.float32
    np.testing.assert_array_equal(norm, tensors["model.norm.weight"].astype(np.float32))


def test_hf_rope_is_read_from_old_and_new_configs(tmp_path):
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    for key, extra in (("rope_scaling", {}), ("rope_parameters", {"rope_theta": 500000.0})):
        changes = {key: LLAMA3_ROPE | extra, "rope_theta": 500000.0 if not extra else None}
        config = open_checkpoint(write_hf(tmp_path / key, random_tensors(), changes)).config
        assert (config.rope_theta, config.rope_scaling) == (500000.0, scaling)


def test_hf_generation_config_gives_every_eos_id_and_the_sampling_defaults(tmp_path):
    folder = write_hf(tmp_path / "tiny", random_tensors(), {"eos_token_id": 2})
    assert open_checkpoint(folder).generation_defaults.eos_token_ids == (2,)
    text = '{"eos_token_id": [2, 7], "do_sample": true, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}'
    (folder / "generation_config.json").write_text(text)
    defaults = open_checkpoint(folder).generation_defaults
    assert defaults == GenerationDefaults(0.6, 0.9, repetition_penalty=1.1, eos_token_ids=(2, 7))


MISTRAL = {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["'GPT2LMHeadModel'", "'LlamaForCausalLM'"]),
        ({"architectures": None}, ["architecture None"]),
        ({"attention_bias": True}, ["attention_bias = True"]),
        ({"mlp_bias": True}, ["mlp_bias = True"]),
        ({"sliding_window": 4096}, ["sliding_window = 4096"]),
        ({**MISTRAL, "sliding_window": -3}, ["sliding_window must be a positive int, it is -3"]),
        (
            {**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention"]},
            ["layer_types has 1 entries for 2 layers"],
        ),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["full_attention", "dim"]}, ["layer type 'dim'"]),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, ["need a sliding_window"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ({"hidden_act": "gelu"}, ["hidden_act must be 'silu', it is 'gelu'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["'linear'", "'llama3'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["llama3 rope scaling lacks low_freq_factor"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"vocab_size": "many"}, ["vocab_size must be a positive int, it is 'many'"]),
    ],
)
def test_hf_config_that_needs_more_is_refused_by_name(tmp_path, changes, words):
    folder = write_hf(tmp_path / "tiny", random_tensors(), changes)
    assert_refused(folder, "config.json", *words)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, ()),
        ({"sliding_window": 10_000}, ()),  # as long as the context
        ({"sliding_window": 8}, (8, 8)),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ({"sliding_window": 8, "layer_types": ["full_attention", "full_attention"]}, ()),
    ],
)
def test_hf_mistral_is_a_llama_whose_layers_may_see_a_window(tmp_path, changes, windows):
    config = open_checkpoint(write_hf(tmp_path / "tiny", random_tensors(), MISTRAL | changes)).config
    assert (config.architecture, config.layer_windows) == ("llama", windows)


def test_hf_folder_with_files_missing_or_damaged_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "no such file or folder")
    assert_refused(tmp_path, "no config.json")
    folder = write_hf(tmp_path / "tiny", random_tensors())
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (3, 8, 200, len(whole) - 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert_refused(folder, "model.safetensors: not a readable safetensors file: cut short", f"{cut} bytes of")
    assert_refused(folder, f"of {len(whole)}")
    weights.write_bytes(b"\0\xff" * 100)
    assert_refused(folder, "not a readable safetensors file")
    weights.unlink()
    assert_refused(folder, "model.safetensors: no such file")
    (folder / "config.json").write_text("{")
    assert_refused(folder, "config.json: not valid JSON")


def test_hf_shard_that_lacks_its_tensor_is_named(tmp_path):
    tensors = random_tensors()
    folder = write_hf(tmp_path / "tiny", tensors, num_shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.norm.weights"))
    assert_refused(folder, "model.norm.weights", "is missing")


def test_default_model_is_the_one_that_the_fixture_was_made_from():
    checkpoint = open_checkpoint(resolve_model(DEFAULT_MODEL))
    config = checkpoint.config
    shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size)
    assert shape == (30, 9, 3, 64, 49152)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)
    query = checkpoint.tensor("model.layers.3.self_attn.q_proj.weight")
    interleaved = GgufFile(checkpoint.source).tensor("blk.3.attn_q.weight")
    np.testing.assert_array_equal(query[64 + 1], interleaved[64 + 2])  # head 1: row 1 of the first half is pair 1
    np.testing.assert_array_equal(query[64 + 33], interleaved[64 + 3])
