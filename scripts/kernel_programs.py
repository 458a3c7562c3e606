"""The programs that are timed: one op, launched over the layers of one pool as an engine's step does."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from kernel_steps import Case, full_pool, make_metadata, make_new_kv, make_queries, scales_of
from kernel_timing import Yardsticks, repeat, rounds_of

import pallas_kernels
from pallas_kernels import PoolLayout, kv_write
from pallas_kernels.paged_attention import attention_implementations

CALL_SECONDS = 2e-3  # of a call, were it as fast as the yardsticks: some twenty dispatches
LEAST_SECONDS = 3e-6  # of a launch, however little it does
MAX_LAUNCHES = 512
POOL_BYTES = 2**30  # of all layers: a layer comes round again only after many times a cache's size
LIMITS = (256, 8192)  # sequences, and tokens of each, that an engine would allow: the tables are so large
TINY_LIMITS = (4, 64)
PLAIN = dict(
    sliding_window=None, soft_cap=None, sinks=None, k_scale=None, v_scale=None, return_lse=False, tiles=None
)  # fmt: skip


def is_interpreted(form: str) -> bool:
    return form != "cpu" and form != jax.default_backend()


def takes(implementation: str, form: str, parameter: str) -> bool:
    return parameter in inspect.signature(attention_implementations(form)[implementation]).parameters


class Bench:
    """A case's programs and their times. Where `tiny`, neither time nor size matters: one launch of one layer."""

    def __init__(self, case: Case, form: str, block_size: int, yardsticks: Yardsticks, tiny: bool):
        self.case, self.form, self.block_size, self.tiny = case, form, block_size, tiny
        self.layout = case.layout(form, block_size)
        self.blocks = case.blocks(block_size)
        self._yardsticks = yardsticks

    def attention(self, implementation: str, tables: tuple[str, ...]) -> dict[str, list[float]]:
        """Seconds a launch, for each of "identity", "random", and "contiguous": the identity, known to the kernel.

        Raises `NotImplementedError` where the implementation cannot do the case.
        """
        layers, launches = self._plan(self.case.needed_bytes, self.case.flops)
        q, scales = make_queries(self.case), scales_of(self.case)
        variants = [(q, self._metadata(table), scales, table == "contiguous") for table in tables]
        program = attention_program(
            implementation, self.layout, self.case.heads.group, self.blocks, layers, launches,
            self.case.queries > 1 and launches > 1,
        )  # fmt: skip
        state = full_pool(self.layout, layers * self.blocks), jnp.copy(q)
        rounds, (_, out) = rounds_of(program, state, variants, self.tiny)
        if not bool(jnp.isfinite(out).all()):
            raise FloatingPointError(f"{implementation} returned numbers that are not finite")
        return {table: [seconds / launches for seconds in times] for table, times in zip(tables, rounds)}

    def write(self) -> tuple[list[float], int]:
        """Seconds a launch of `kv_write`, and the bytes that it must move."""
        k, v = make_new_kv(self.case)
        num_bytes = k.nbytes + v.nbytes + (k.size + v.size) * self.layout.storage_dtype.itemsize
        layers, launches = self._plan(num_bytes)
        stride = self.blocks * self.block_size

        def launch(index, pool, k, v, slots, scales):
            return kv_write(pool, k, v, slots + index % layers * stride, **scales)

        arguments = k, v, self._metadata("random").slot_mapping, scales_of(self.case)
        return self._times(launch, layers, launches, arguments), num_bytes

    def copy(self) -> tuple[list[float], int]:
        """Seconds of a `copy_blocks` of half of the blocks of every layer to the other half, and its bytes.

        Raises `NotImplementedError` where there is no such op.
        """
        copy_blocks = getattr(pallas_kernels, "copy_blocks", None)
        if copy_blocks is None:
            raise NotImplementedError("copy_blocks is not there")
        half = (self.blocks - 1) // 2
        num_bytes = 2 * half * self.layout.bytes_per_block
        layers, launches = self._plan(num_bytes)
        num_calls = -(-launches // layers)

        def launch(_, pool, src, dst):
            return copy_blocks((pool,), src, dst, half, blocks_per_layer=self.blocks)[0]

        ids = 1 + np.random.default_rng(0).permutation(2 * half).astype(np.int32)
        return self._times(
            launch, layers, num_calls, (jnp.asarray(ids[:half]), jnp.asarray(ids[half:]))
        ), num_bytes * layers

    def _plan(self, num_bytes: int, flops: int = 0) -> tuple[int, int]:
        """(layers of the pool, launches in a call)."""
        if self.tiny:
            return 1, 1
        least = max(num_bytes / self._yardsticks.bandwidth, flops / self._yardsticks.matmul_rate, LEAST_SECONDS)
        launches = min(MAX_LAUNCHES, math.ceil(CALL_SECONDS / least))
        layers = max(1, min(launches, POOL_BYTES // (self.blocks * self.layout.bytes_per_block)))
        return layers, -(-launches // layers) * layers

    def _metadata(self, table: str):
        limits = TINY_LIMITS if self.tiny else LIMITS
        return make_metadata(self.case, self.block_size, limits, is_random=table == "random")

    def _times(self, launch: Callable, layers: int, launches: int, arguments: tuple) -> list[float]:
        """Of an op that takes and returns the pool."""

        @functools.partial(jax.jit, donate_argnums=0)
        def program(pool, *arguments):
            return repeat(lambda index, pool: launch(index, pool, *arguments), launches, pool)

        with _interpreter_of(self.form) if is_interpreted(self.form) else contextlib.nullcontext():
            (times,), _ = rounds_of(program, full_pool(self.layout, layers * self.blocks), [arguments], self.tiny)
        return [seconds / launches for seconds in times]


def _interpreter_of(form: str):
    """The context in which an absent chip's kernels run here."""
    return plgpu.force_gpu_interpret_mode() if form == "gpu" else pltpu.force_tpu_interpret_mode()


def _options_of_interpreter(layout: PoolLayout, group: int) -> dict:
    """What makes an attention kernel run in its interpreter. Not JAX's context alone: the kernels have stand-ins for
    what the interpreters lack."""
    if layout.form == "tpu":
        return {"interpret": pltpu.InterpretParams()}
    # Only asked for where there is a kernel. One CTA of each kind: an interpreter starts threads for every one.
    tiles = importlib.import_module("pallas_kernels.paged_attention.tiles_gpu").default_gpu_tiles(layout, group, None)
    return {"interpret": plgpu.InterpretGPUParams(), "tiles": dataclasses.replace(tiles, ctas=1, prefill_ctas=1)}


@functools.cache  # cases of the same shapes meet the same program
def attention_program(
    implementation: str, layout: PoolLayout, group: int, blocks: int, layers: int, launches: int, keeps_queries: bool
) -> Callable:
    """`(pool, q), q0, meta, scales, is_contiguous -> (pool, out)`, the first donated.

    The queries of a launch depend on the output of the one before: they are that output, which costs nothing
    (decode), or where values matter to the matrix units' power and one more sum does not (prefill), q0 and a little.
    """
    attend = attention_implementations(layout.form)[implementation]
    options = dict(PLAIN, sm_scale=layout.head_dim**-0.5)
    if is_interpreted(layout.form) and takes(implementation, layout.form, "interpret"):
        options |= _options_of_interpreter(layout, group)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="is_contiguous")
    def program(state, q0, meta, scales, is_contiguous):
        known = {"contiguous": True} if is_contiguous else {}

        def launch(index, state):
            pool, q = state
            here = meta.at_block(index % layers * blocks, layout.block_size)
            out = attend(q, pool, here, **(options | scales | known))
            return pool, q0 + 0.01 * out if keeps_queries else out

        return repeat(launch, launches, state)

    return program
