"""Whether a kernel runs on its chip here, or in an interpreter: decided once, by the backend that JAX has."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

# XLA:CPU alone promises equal bits whatever the shapes are: elsewhere the compiler picks its products by shape.
equal_bits_on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA promises equal bits on CPU alone")


def _has_matrix_tiles() -> bool:
    """AMX, with which XLA:CPU's library multiplies bfloat16 in other tiles: not seen, so nothing is known of its bits."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "amx_bf16" in cpu.read_text()


equal_bits_in_bfloat16 = pytest.mark.skipif(
    jax.default_backend() != "cpu" or _has_matrix_tiles(), reason="equal bits in bfloat16 are known of CPUs without AMX"
)


def on_chip(form: str) -> bool:
    """Whether a kernel for a pool of this form is compiled for the machine's own chip here."""
    return jax.default_backend() == form


@contextlib.contextmanager
def interpreted(form: str, **options) -> Iterator:
    """Where a kernel of `form` runs: gives what it takes as `interpret`. On the chip that is nothing, and nothing else
    happens; elsewhere it is the interpreter with `options`, into which kernels that are called through an op go too.
    """
    if on_chip(form):
        yield None if form == "gpu" else False
    elif form == "gpu":
        params = plgpu.InterpretGPUParams(**options)
        with plgpu.force_gpu_interpret_mode(params):
            yield params
    else:
        params = pltpu.InterpretParams(**options)
        try:
            with pltpu.force_tpu_interpret_mode(params):
                yield params
        finally:
            pltpu.reset_tpu_interpret_mode_state()  # after an exception the next kernel would find it


def float32_products():
    """The context in which XLA's products of float32 are of float32: on an accelerator they are of less unless asked."""
    return contextlib.nullcontext() if jax.default_backend() == "cpu" else jax.default_matmul_precision("highest")
