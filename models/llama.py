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
from models.layers import MODEL_AXIS, Embed, GatedMLP, Linear, RMSNorm, RopeTables, rope_tables
from models.types import ForwardBatch, Pools
from pallas_kernels import PoolLayout


class LlamaLayer(nnx.Module):
    """One pre-norm decoder layer, in two halves; the residual stream x is float32 whatever the weights are."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, partial_sums: jnp.dtype):
        self.input_layernorm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, partial_sums=partial_sums)
        self.post_attention_layernorm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.embed_dim, config.mlp_dim, dtype=dtype, partial_sums=partial_sums)

    def before_attention(self, x: Float[Array, "T E"], rope: RopeTables):
        return self.self_attn.project(self.input_layernorm(x), rope)

    def after_attention(self, x: Float[Array, "T E"], attended: Float[Array, "T H D"]) -> Float[Array, "T E"]:
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


@partial(jax.jit, static_argnums=(0, 1))
def _of_layer(function: Callable, graphdef, state, *args):
    """A function of a layer as a function of its own: all layers are alike, so jit traces it once, not once a layer."""
    return function(nnx.merge(graphdef, state), *args)


class KVScales(nnx.Variable):
    """What K and V are divided by in a quantised pool, [L, 2, K]: learned from the model, in no checkpoint."""


class LlamaModel(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, partial_sums: jnp.dtype):
        self.embed_tokens = Embed(config.vocab_size, config.embed_dim, dtype=dtype)
        self.layers = nnx.List(
            [LlamaLayer(config, dtype=dtype, partial_sums=partial_sums) for _ in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.embed_dim, eps=config.rms_norm_eps, dtype=dtype)


class Llama(nnx.Module):
    """(batch, pools) -> (logits of the sampled rows, pools). There is a pool for each place of `AttentionGroups` (a layer,
    where all layers are alike), but with roll_layers.

    roll_layers makes the layers a loop on the device, over one pool that holds all places one after the other:
    attention is compiled once, and each turn picks its own weights by `lax.switch`, which copies none of them (a scan
    over stacked weights does). On XLA:CPU this is as fast as a program of all layers in a row and compiles in less than
    half the time. Elsewhere the layers are unrolled, so that the compiler can fetch the next layer's weights early.
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
        self.groups = config.attention_groups
        self.attention = partial(paged_attention, mesh=mesh, layout=layout, implementation=implementation)
        # A mesh adds up what its devices computed in the weights' dtype: float32 would be twice the bytes to send. On
        # XLA:CPU, where a mesh is for tests, matmuls are slow unless their results are float32.
        partial_sums = dtype if mesh.size > 1 and not roll_layers else jnp.dtype(jnp.float32)
        self.model = LlamaModel(config, dtype=dtype, partial_sums=partial_sums)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.embed_dim, config.vocab_size, dtype=dtype, shard="column")
        if layout.is_quantised:
            shape = config.num_layers, 2, config.num_kv_heads
            self.kv_scales = KVScales(jnp.ones(shape, jnp.float32), out_sharding=(None, None, MODEL_AXIS))

    def __call__(self, batch: ForwardBatch, pools: Pools) -> tuple[Float[Array, "R V"], Pools]:
        config = self.config
        rope = rope_tables(batch.positions, config.head_dim, config.rope_theta, config.rope_scaling)
        layers = [nnx.split(layer) for layer in self.model.layers]
        x = self.model.embed_tokens(batch.token_ids)

        def scales_of(index):
            return self.kv_scales[...][index] if self.layout.is_quantised else None

        def whole_layer(window, layer, x, pool, meta, scales):
            q, k, v = layer.before_attention(x, rope)
            attended, pool = self.attention(q, k, v, pool, meta, scales, windows=(window,))
            return layer.after_attention(x, attended), pool

        def switched(half, index, *args):
            return jax.lax.switch(index, [partial(_of_layer, half, *layer) for layer in layers], *args)

        def turn(index, carry):
            x, pool = carry
            group, place = group_of[index], place_of[index]
            meta, kind = batch.attention[0], None
            if len(batch.attention) > 1:
                meta = jax.tree.map(lambda *of_groups: jnp.stack(of_groups)[group], *batch.attention)
            if len(kinds) > 1:
                kind = kind_of[group]
            meta = meta.at_block(place * (pool.num_blocks // self.groups.num_places), self.layout.block_size)
            q, k, v = switched(LlamaLayer.before_attention, index, x, rope)
            attended, pool = self.attention(q, k, v, pool, meta, scales_of(index), kind, windows=kinds)
            return switched(LlamaLayer.after_attention, index, x, attended), pool

        if self.roll_layers:
            group_of, place_of = map(jnp.array, zip(*self.groups.of_layers))
            kinds = tuple(dict.fromkeys(self.groups.windows))
            kind_of = jnp.array([kinds.index(window) for window in self.groups.windows])
            x, *pools = jax.lax.fori_loop(0, config.num_layers, turn, (x, *pools))
        else:
            pools = list(pools)
            of_window = {window: partial(whole_layer, window) for window in self.groups.windows}
            for index, (layer, (group, place)) in enumerate(zip(layers, self.groups.of_layers)):
                run, meta = of_window[self.groups.windows[group]], batch.attention[group]
                x, pools[place] = _of_layer(run, *layer, x, pools[place], meta, scales_of(index))
        x = self.model.norm(x[batch.logits_indices])
        head = self.model.embed_tokens.attend if config.tie_word_embeddings else self.lm_head
        with jax.named_scope("head"):
            return head(x), tuple(pools)
