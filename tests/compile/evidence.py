"""Evidence: what a compiled step says of itself, and the gates that it must pass."""

import math
import re
import time
from dataclasses import dataclass

import jax

from jpaged.step import StepFunction

UNKNOWN_CYCLES = 2**60  # the compiler writes 2**63 - 1 where it does not know
MOST_TEMP = 0.05  # of the device's memory
# (of each layer, beside): write and attention, and one for all copies of blocks; decode, combine and prefill: XLA does
# the rest on GPU.
KERNELS = {"tpu": (2, 1), "gpu": (3, 0)}


def bytes_a_device(tree) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


@dataclass(frozen=True)
class Evidence:
    """Bytes are those of one device. `state` and what is `due` are what the gates want, the rest what is."""

    state: int
    beside_pools: int  # of the state
    alias: int
    temp: int
    needed: int  # arguments, temporaries, results that alias nothing, and the program
    pool_copies: int
    all_reduces: int  # of the residual stream
    all_reduces_due: int
    kernels: int  # calls of ours
    kernels_due: int
    cycles: int  # the compiler's own estimate, of what it estimates: no kernels, collectives or copies; 0 on GPU
    seconds: float

    @classmethod
    def of(cls, step: StepFunction, bucket: tuple[int, int], num_blocks: int, max_blocks: int, change=lambda f: f):
        """Compiles the step of a bucket. `change` makes a worse function of it: gates must be able to fail."""
        arguments = step.arguments(bucket, num_blocks, max_blocks)
        start = time.monotonic()
        compiled = change(step.jitted(bucket)).lower(*arguments).compile()
        seconds = time.monotonic() - start
        memory, text = compiled.memory_analysis(), compiled.as_text()
        kernels_a_layer, more_kernels = KERNELS[step.layout.form]
        shapes = {_hlo_shape(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(arguments[1].pools)}
        stream = _hlo_shape((bucket[0], step.model.embed_dim))
        cycles = [int(count) for count in re.findall(r'"estimated_cycles":"(\d+)"', text)]
        return cls(
            state=bytes_a_device(arguments[1]),
            beside_pools=bytes_a_device(arguments[1]) - bytes_a_device(arguments[1].pools),
            alias=memory.alias_size_in_bytes,
            temp=memory.temp_size_in_bytes,
            needed=memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
            + memory.output_size_in_bytes - memory.alias_size_in_bytes,
            pool_copies=sum(shape in shapes for shape in re.findall(r"\w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)),
            all_reduces=sum(f"[{stream}]" in types for types in re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)),
            all_reduces_due=2 * step.model.num_layers + 1 if step.mesh.size > 1 else 0,
            kernels=len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', text)),
            kernels_due=kernels_a_layer * step.model.num_layers + more_kernels,
            cycles=sum(count for count in cycles if count < UNKNOWN_CYCLES),
            seconds=seconds,
        )  # fmt: skip

    def problems(self, hbm: int, left_out: int = 0) -> list[str]:
        """The gates that this step fails; none where it is as it should be.

        left_out: bytes of weights and pools of layers that the whole model has and this step has not.
        """
        found = []
        if not self.state <= self.alias <= self.state + self.beside_pools:  # what is not a pool is padded to a TPU's tiles
            found.append(f"alias: {self.alias} bytes are updated in place, the state has {self.state}")
        if self.temp > MOST_TEMP * hbm:
            found.append(f"temp: {self.temp} bytes, over {MOST_TEMP:.0%} of {hbm}")
        if self.pool_copies:
            found.append(f"copies: {self.pool_copies} of a pool's shape")
        if self.needed + left_out > hbm:
            found.append(f"memory: {self.needed + left_out} bytes needed, the device has {hbm}")
        if self.all_reduces != self.all_reduces_due:
            found.append(f"all-reduces: {self.all_reduces} of the residual stream, {self.all_reduces_due} are due")
        if self.kernels != self.kernels_due:
            found.append(f"kernels: {self.kernels} are called, {self.kernels_due} are due: something fell back to XLA")
        return found


def _hlo_shape(shape) -> str:
    return ",".join(map(str, shape))
