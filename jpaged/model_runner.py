"""ModelRunner: weights and pool on the devices, and the compiled steps that join them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.batch import HostStep
from jpaged.block_swapper import BlockSwapper
from jpaged.buckets import Buckets
from jpaged.config import EngineConfig
from jpaged.edit_programs import EditPrograms, ProcessedRow
from jpaged.host_memory import keep_freed_memory
from jpaged.kernel_check import KernelCheck
from jpaged.kv_scales import with_kv_scales
from jpaged.memory_plan import MemoryPlan, num_blocks_beside, plan_memory
from jpaged.preemption import Preemption
from jpaged.program_cache import ProgramCache, cache_dir, fingerprint
from jpaged.programs import Programs
from jpaged.sampling_batch import Sampled
from jpaged.step import DeviceState, StepFunction
from jpaged.swap_space import CHUNK
from models.layers import MODEL_AXIS
from models.loading import load_state
from models.weights import Checkpoint


@dataclass(frozen=True)
class StepResult:
    """A step's tokens on the host, for each sampled sequence those of the step's decodes, in order (the last of one that
    stops may be nonsense); the log-probs, of the first, only where some request asked for them."""

    token_ids: list[list[int]]
    logprobs: Sampled | None  # numpy arrays
    kept_logits: list[np.ndarray] = field(default_factory=list)  # of the sampled sequences with processors, in order


class PendingResult:
    """The result of a step that may still be running, on its way to the host."""

    def __init__(self, sampled: Sampled, num_sampled: int, wants_logprobs: bool, kept: list[jax.Array]):
        self._num_sampled = num_sampled
        self._arrays = (sampled if wants_logprobs else sampled.token_ids), kept
        for array in jax.tree.leaves(self._arrays):
            array.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        return all(array.is_ready() for array in jax.tree.leaves(self._arrays))

    def read(self) -> StepResult:
        """Waits for the step; raises what the device raised."""
        to_host = np.array if self._arrays[1] else np.asarray  # the host writes into what it chooses itself
        arrays, kept = jax.tree.map(to_host, self._arrays)
        logprobs = arrays if isinstance(arrays, Sampled) else None
        token_ids = arrays if logprobs is None else arrays.token_ids
        token_ids = token_ids if token_ids.ndim == 2 else token_ids[None]
        return StepResult(token_ids[:, : self._num_sampled].T.tolist(), logprobs, kept)


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """The first devices as (data, model). Raises ValueError where there are too few."""
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}, but JAX sees {len(devices)} device(s): {devices}"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]).reshape(1, -1), ("data", MODEL_AXIS))


def check_attention_backend(step: StepFunction) -> None:
    """Raises ValueError where the attention backend that is asked for cannot serve the model on this mesh.

    No other may take its place, so that is told now and not to every request.
    """
    if step.config.attention_backend is not None:
        smallest = 2, min(2, step.config.max_num_seqs)
        try:
            jax.eval_shape(step.jitted(smallest), *step.arguments(smallest, 2, 1))
        except NotImplementedError as error:
            raise ValueError(f"attention_backend {step.config.attention_backend!r} cannot serve here: {error}") from None


def plan_step_memory(step: StepFunction, buckets: Buckets, device: jax.Device | None = None) -> MemoryPlan:
    """Sizes the pool; compiles the largest bucket where that decides it. device: another than the mesh's first."""
    config, device = step.config, device or step.mesh.devices.flat[0]
    measured = None
    if device.platform != "cpu" and config.num_blocks_override is None and config.kv_cache_memory_bytes is None:
        # Against pools of about the size to come: XLA:TPU was seen to need a third more beside large ones than beside small.
        num_blocks = num_blocks_beside(step.weight_bytes + step.row_bytes, step.bytes_per_block, config, device)
        measured = step.measure((buckets.tokens[-1], buckets.max_rows), max(int(0.9 * num_blocks), 2))
    return plan_memory(
        config,
        max_position=step.model.max_position,
        block_size=step.layout.block_size,
        bytes_per_block=step.bytes_per_block,
        windows=step.groups.windows,
        cache_dtype=step.layout.dtype,
        weights=step.weight_bytes,
        rows=step.row_bytes,
        device=device,
        step=measured,
        num_programs=len(buckets.all()),
    )


class ModelRunner:
    """Loads a checkpoint, sizes and owns the pool, compiles the step for every bucket, and runs it.

    encode turns text into token ids: a quantised pool's scales come from texts. Raises ValueError for a model that this
    mesh cannot hold.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        encode: Callable[[str], list[int]],
        on_compiled=lambda phase: None,
    ):
        self.config = config
        keep_freed_memory()
        self.mesh = make_mesh(config.tensor_parallel_size)
        self.model_config = checkpoint.config
        self.step = StepFunction(config, self.model_config, self.mesh)
        check_attention_backend(self.step)
        self.layout = self.step.layout
        weights = load_state(checkpoint, self.step.abstract_state)
        self.buckets = Buckets(
            config.max_num_batched_tokens, config.max_num_seqs, config.token_buckets, config.max_num_rows
        )
        self.memory = plan_step_memory(self.step, self.buckets)
        self.spec = self.memory.spec
        self._program_cache = ProgramCache(cache_dir(config.compilation_cache_dir), self._fingerprint())

        if self.layout.is_quantised:
            weights = with_kv_scales(self.step, weights, encode, self._program_cache)
        self.leaves, treedef = jax.tree.flatten(weights)
        assert treedef == self.step.treedef, "weights are not those of the step"

        def on_prepared(phase: str) -> None:
            if self._program_cache.has_compiled:
                on_compiled(phase)

        self.programs = Programs(self._compile, [*self.buckets.all(), *EditPrograms.KEYS], on_prepared)
        table_width = self.spec.table_width
        load, arguments = self.step.jitted_load(table_width), self.step.load_arguments(table_width)
        self._load_rows = self._program_cache.compile(("rows",), load, arguments, jax.tree.structure(arguments[0]))
        can_swap = config.preemption_mode != "recompute"
        self._swapper = BlockSwapper(self.step, self.spec, self._program_cache) if can_swap else None
        self._edit_programs = EditPrograms(self.step, table_width, self._program_cache)
        self._make_state = self._compile_make_state()
        self.state = self._make_state()
        scales = weights["kv_scales"].get_value() if self.layout.is_quantised else None
        self._check = KernelCheck(self.step, self.spec, scales) if config.check_kernels else None

    def submit(self, step: HostStep) -> PendingResult:
        """Gives a step to the devices and returns at once, where its program is compiled. Steps run in order."""
        program = self.programs[step.bucket]  # first: whoever is interrupted as he waits for it has lost nothing
        if step.swapped_out or step.swapped_in:
            self._swap(step)
        rows = self.state.rows
        for buffer in step.row_loads:
            rows = self._load_rows(rows, buffer)
        edits = self.state.edits
        for buffer in step.edit_loads:
            edits = self._edit_programs.load(edits, buffer)
        self.state, sampled = program(self.leaves, DeviceState(self.state.pools, rows, edits), step.buffer)
        if self._check is not None:
            self._check(step, self.state)
        kept = [self.programs["kept"](self.state.edits, np.array([slot], np.int32)) for slot in step.kept_slots]
        return PendingResult(sampled, step.num_sampled, step.wants_logprobs, kept)

    def choose_token(self, seq_row: int, position: int, logits: np.ndarray) -> Sampled:
        """The token that a running sequence has at position, from its processed logits; waits for it."""
        state = self.state
        buffer, row = ProcessedRow.packing(self.model_config.vocab_size).empty()
        row.row_id[:], row.position[:], row.logits[:] = seq_row, position, logits
        edits, sampled = self.programs["processed"](state.rows, state.edits, buffer)
        self.state = replace(state, edits=edits)
        return jax.tree.map(np.asarray, sampled)

    def _swap(self, step: HostStep) -> None:
        pools = self.state.pools
        for swapped in step.swapped_out:
            swapped.content = self._swapper.swap_out(pools, swapped.block_ids)
        for swapped in step.swapped_in:
            pools = self._swapper.swap_in(pools, swapped.block_ids, swapped.content)
        self.state = replace(self.state, pools=pools)

    def preemption(self) -> Preemption:
        """What the two ways back from preemption cost here."""
        bytes_per_block, num_weights = self.step.bytes_per_block, self.step.weight_bytes // self.step.dtype.itemsize
        platform = self.mesh.devices.flat[0].platform
        return Preemption.of(self.config, platform=platform, bytes_per_block=bytes_per_block, num_weights=num_weights)

    @property
    def num_host_blocks(self) -> int:
        """How many blocks of swapped-out sequences host memory may hold. Raises ValueError for less than can be used."""
        if self._swapper is None:
            return 0
        num_blocks = int(self.config.swap_space * 2**30) // (self.step.bytes_per_block * self.mesh.size)
        if self.config.preemption_mode == "swap" and num_blocks < CHUNK:
            raise ValueError(
                f"swap_space ({self.config.swap_space} GiB) holds {num_blocks} blocks; preemption_mode swap needs at "
                f"least {CHUNK}"
            )
        return num_blocks

    @property
    def programs_folder(self) -> Path:
        """Where this engine's compiled programs are kept."""
        return self._program_cache.folder

    def has_state(self) -> bool:
        """Whether the state is there, whole. Waits for the steps that the devices were given."""
        with contextlib.suppress(Exception):  # that an array was donated, or what the devices say of a step
            return self.state is not None and jax.block_until_ready(self.state) is not None
        return False

    def reset_state(self) -> None:
        """Replaces a state that a failed step may have consumed."""
        self.state = None
        self.state = self._make_state()

    def _compile_make_state(self) -> Callable[[], DeviceState]:
        """Compiled once and kept: after a failed step there must be nothing to compile."""
        size = self.spec.num_blocks, self.spec.table_width
        make = jax.jit(partial(self.step.make_state, *size), out_shardings=self.step.state_shardings)
        return self._program_cache.compile(("state",), make, (), jax.tree.structure(self.step.state(*size)))

    def _fingerprint(self) -> str:
        config = self.config
        model = replace(self.model_config, name="")  # a model that is called otherwise has the same programs
        return fingerprint(
            model, self.layout, self.step.dtype, self.spec, self.mesh.devices.shape,
            config.max_num_seqs, config.max_logprobs, config.attention_backend, config.num_scheduler_steps,
            config.max_num_edited_seqs,
        )  # fmt: skip

    def _compile(self, key: tuple[int, int] | str):
        if key in EditPrograms.KEYS:
            return self._edit_programs.compile(key)
        arguments = self.step.arguments(key, self.spec.num_blocks, self.spec.table_width)
        return self._program_cache.compile(key, self.step.jitted(key), arguments, self.step.result_structure)
