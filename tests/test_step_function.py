"""What a model, a mesh and a configuration together cannot do is told when the engine starts, naming value and limit."""

from types import SimpleNamespace

import jax
import pytest

from jpaged.config import EngineConfig
from jpaged.model_runner import check_attention_backend, make_mesh
from jpaged.step import StepFunction
from models.config import ModelConfig

MODEL = ModelConfig("llama", "tiny", 64, 32, 48, 3, 4, 2, 64, 8192)


@pytest.mark.parametrize("name, form", [("mosaic_tpu", "tpu"), ("mosaic_gpu", "gpu")])
def test_attention_backend_of_another_chip_is_refused_before_any_request(name, form):
    if jax.default_backend() == form:
        pytest.skip(f"this is a {form}, where {name} serves")
    refusal = rf"attention_backend '{name}' cannot serve here: .*{form}.*, got {jax.default_backend()}"
    with pytest.raises(ValueError, match=refusal):
        check_attention_backend(StepFunction(EngineConfig(attention_backend=name), MODEL, make_mesh(1)))


@pytest.mark.parametrize("name", ["xla", "reference", None])
def test_attention_backend_of_every_chip_is_taken(name):
    check_attention_backend(StepFunction(EngineConfig(attention_backend=name), MODEL, make_mesh(1)))


def test_mesh_that_does_not_divide_the_kv_heads_is_refused():
    mesh = SimpleNamespace(devices=make_mesh(1).devices, size=3)
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(3\) must divide the model's 2 KV heads"):
        StepFunction(EngineConfig(), MODEL, mesh)


def test_more_logprobs_than_there_are_tokens_are_refused():
    with pytest.raises(ValueError, match=r"max_logprobs \(65\) is over the vocabulary of 64 tokens"):
        StepFunction(EngineConfig(max_logprobs=65), MODEL, make_mesh(1))
