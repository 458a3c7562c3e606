"""On CPU every matmul with a weight has the form that is fast there, read off the compiled forward pass; and what a layer
computes of a token is the same to the bit whatever else is in the step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.buckets import bucket_ladder
from jpaged.model_runner import make_mesh
from models.config import ModelConfig
from models.layers import RMSNorm, matmul
from models.llama import Llama
from models.types import ForwardBatch
from kernel_backend import equal_bits_in_bfloat16
from pallas_kernels import AttentionMetadata, PoolLayout, pool_struct

CONFIG = ModelConfig("llama", "two of SmolLM2's layers", 4096, 576, 1536, 2, 9, 3, 64, 128, tie_word_embeddings=True)
NUM_WEIGHTS = 7 * CONFIG.num_layers + 1
WEIGHT_SHAPES = "576,576|192,576|1536,576|576,1536|4096,576"

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU's matmuls, and JAX runs on another backend")


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compiled_forward(num_tokens: int) -> str:
    layout = PoolLayout(CONFIG.num_kv_heads, CONFIG.head_dim, 16, "bfloat16")
    mesh = make_mesh(1)
    build = functools.partial(Llama, CONFIG, layout, dtype=jnp.dtype("bfloat16"), mesh=mesh, roll_layers=True)
    graphdef, state = nnx.get_abstract_model(build, mesh)
    meta = AttentionMetadata(int32(4), int32(5), int32(4, 8), int32(3), int32(num_tokens))
    batch = ForwardBatch(int32(num_tokens), int32(num_tokens), (meta,), int32(min(num_tokens, 4)))
    forward = jax.jit(lambda s, b, p: nnx.merge(graphdef, s)(b, p))
    return forward.lower(state, batch, (pool_struct(layout, 2 * 20),)).compile().as_text()


def fast_products(text: str) -> int:
    """Fusions for YNNPACK that multiply two bfloat16 arrays into float32."""
    bodies = dict(re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    called = re.findall(r"calls=%(\S+?),.*__ynn_fusion", text)
    return sum(bool(re.search(r"= f32\S+ dot\(", bodies[name])) and bodies[name].count("= bf16[") >= 2 for name in called)


def whole_weights_in_float32(text: str) -> list[str]:
    return re.findall(rf"= (f32\[(?:{WEIGHT_SHAPES})\])", text)


@pytest.mark.parametrize("num_tokens", [2, 20, 24, 32, 512])
def test_every_weight_is_multiplied_in_bfloat16_by_the_library_and_never_converted(num_tokens):
    text = compiled_forward(num_tokens)
    assert fast_products(text) == NUM_WEIGHTS
    assert whole_weights_in_float32(text) == []


def test_another_spelling_of_the_product_fails_both_gates():
    x, weight = jax.ShapeDtypeStruct((32, 576), jnp.bfloat16), jax.ShapeDtypeStruct((1536, 576), jnp.bfloat16)
    text = jax.jit(lambda x, w: x @ w.T).lower(x, weight).compile().as_text()
    assert fast_products(text) == 0
    assert whole_weights_in_float32(text)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [2, 12, 16, 20, 24, 32, 64, 80])
def test_the_product_is_right_whichever_operand_is_the_left_one(rows, dtype):
    rng = np.random.default_rng(rows)
    x, weight = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, 96), (160, 96)))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = np.asarray(jax.jit(matmul)(x, weight), np.float64)
    assert np.abs(got - exact).max() < 96 * 2**-24 * np.abs(exact).max() * 4


def assert_rows_stand_alone(layer, dim: int, sizes: list[int]) -> None:
    """Each row is the same, bit by bit, in steps of all sizes and anywhere in them."""
    rng = np.random.default_rng(dim)
    x, layer = rng.standard_normal((512, dim), np.float32), jax.jit(layer)
    expected = np.concatenate([layer(x[begin : begin + 64]) for begin in range(0, 512, 64)])
    for size in sizes:
        rows = rng.permutation(512)[:size]
        np.testing.assert_array_equal(np.asarray(layer(x[rows])), expected[rows], err_msg=f"{size} rows")


@equal_bits_in_bfloat16
@pytest.mark.parametrize("num_inputs", [64, 576, 1024, 1152, 1536, 4096])
@pytest.mark.parametrize("num_outputs", [64, 576, 1536])
def test_a_rows_product_is_the_same_to_the_bit_in_every_step(num_outputs, num_inputs):
    weight = np.random.default_rng(0).standard_normal((num_outputs, num_inputs), np.float32)
    weight = jnp.asarray(weight, jnp.bfloat16)
    assert_rows_stand_alone(lambda x: matmul(x, weight), num_inputs, bucket_ladder(512))


@equal_bits_in_bfloat16
def test_a_rows_logits_are_the_same_to_the_bit_in_every_step():
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((8192, 64), np.float32), jnp.bfloat16)
    assert_rows_stand_alone(lambda x: matmul(x, weight), 64, bucket_ladder(128))


@pytest.mark.parametrize("dim", [64, 576, 1536, 5000])
def test_a_rows_norm_is_the_same_to_the_bit_in_every_step(dim):
    norm = RMSNorm(dim, eps=1e-5, dtype=jnp.dtype("float32"))
    assert_rows_stand_alone(norm, dim, bucket_ladder(512))
