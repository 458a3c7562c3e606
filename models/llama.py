"""Llama (https://arxiv.org/abs/2302.13971, grouped queries as in Llama 2 and 3), used functionally.

Parameter paths equal Hugging Face's parameter names: model.layers.3.self_attn.q_proj.weight.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.attention import Attention, paged_attention
from models.config import ModelConfig
from models.layers import Embed, GatedMLP, Linear, RMSNorm, RopeTables, rope_tables
from models.types import ForwardBatch
from pallas_kernels import LayerPool, PoolLayout


class LlamaLayer(nnx.Module):
    """One pre-norm decoder layer, in two halves; the residual stream x is float32 whatever the weights are."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        self.input_layernorm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, dtype=dtype)

    def before_attention(self, x: Float[Array, "T E"], rope: RopeTables):
        return self.self_attn.project(self.input_layernorm(x), rope)

    def after_attention(self, x: Float[Array, "T E"], attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


@partial(jax.jit, static_argnums=(0, 1))
def _half_layer(half: Callable, graphdef, state, *args):
    """One half as a function of its own: all layers are alike, so jit traces it once and not once a layer."""
    return half(nnx.merge(graphdef, state), *args)


class LlamaModel(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype):
        self.embed_tokens = Embed(config.vocab_size, config.embed_dim, dtype=dtype)
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)


class Llama(nnx.Module):
    """(batch, pool) -> (logits of the sampled rows, pool). One pool holds all layers, one after the other.

    roll_layers makes the layers a loop on the device: attention is compiled once, and each turn picks its own weights
    by `lax.switch`, which copies none of them (a scan over stacked weights does). On XLA:CPU this is as fast as a
    program of all layers in a row and compiles in less than half the time. Elsewhere the layers are unrolled, so that
    the compiler can fetch the next layer's weights early.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: PoolLayout,
        *,
        dtype: jnp.dtype,
        mesh: Mesh,
        roll_layers: bool,
        implementation: str | None = None,
    ):
        self.config = config
        self.layout = layout
        self.roll_layers = roll_layers
        self.attention = partial(paged_attention, mesh=mesh, layout=layout, implementation=implementation)
        self.model = LlamaModel(config, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.embed_dim, config.vocab_size, dtype=dtype, shard="column")

    def __call__(self, batch: ForwardBatch, pool: LayerPool) -> tuple[Float[Array, "R V"], LayerPool]:
        config, num_blocks = self.config, pool.num_blocks // self.config.num_layers
        rope = rope_tables(batch.positions, config.head_dim, config.rope_theta, config.rope_scaling)
        layers = [nnx.split(layer) for layer in self.model.layers]

        def run(half, index, *args):
            halves = [partial(_half_layer, half, graphdef, state) for graphdef, state in layers]
            return jax.lax.switch(index, halves, *args) if self.roll_layers else halves[index](*args)

        def run_layer(index, carry):
            x, pool = carry
            meta = batch.attention.at_block(index * num_blocks, self.layout.block_size)
            q, k, v = run(LlamaLayer.before_attention, index, x, rope)
            attended, pool = self.attention(q, k, v, pool, meta)
            return run(LlamaLayer.after_attention, index, x, attended), pool

        carry = self.model.embed_tokens(batch.token_ids), pool
        if self.roll_layers:
            carry = jax.lax.fori_loop(0, config.num_layers, run_layer, carry)
        else:
            for index in range(config.num_layers):
                carry = run_layer(index, carry)
        x, pool = carry
        x = self.model.norm(x[batch.logits_indices])
        head = self.model.embed_tokens.attend if config.tie_word_embeddings else self.lm_head
        with jax.named_scope("head"):
            return head(x), pool
