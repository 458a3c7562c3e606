"""Which model is compiled for which slice, in which sizes."""

import dataclasses
import functools
from dataclasses import dataclass

from chips import CHIPS, Chip
from engine_models import MODELS
from evidence import Evidence

from jpaged.buckets import Buckets
from jpaged.config import EngineConfig
from jpaged.memory_plan import MemoryPlan
from jpaged.model_runner import plan_step_memory
from jpaged.step import StepFunction

DECODE, MIXED = (256, 256), (2048, 256)  # (T, R)
CONFIG = EngineConfig(max_num_batched_tokens=MIXED[0], max_num_seqs=256, max_model_len=8192)
HEADROOM = 1 << 30  # left to temporaries and programs where the pool is not planned


@dataclass(frozen=True)
class Case:
    """A model on the first devices of a slice; `num_layers` None is all of them."""

    model: str
    chip: str
    num_devices: int
    num_layers: int | None = None
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        depth = "" if self.num_layers is None else f"-{self.num_layers}layers"
        pool = "" if self.kv_cache_dtype == "auto" else f"-{self.kv_cache_dtype}"
        return f"{self.model}-{self.chip}x{self.num_devices}{depth}{pool}"

    @property
    def on(self) -> Chip:
        return CHIPS[self.chip]

    @functools.cached_property
    def step(self) -> StepFunction:
        model = MODELS[self.model]
        model = dataclasses.replace(model, num_layers=self.num_layers or model.num_layers)
        config = dataclasses.replace(CONFIG, kv_cache_dtype=self.kv_cache_dtype)
        return StepFunction(config, model, self.on.mesh(self.num_devices))

    @functools.cached_property
    def whole(self) -> "Case":
        """The same with all layers."""
        return dataclasses.replace(self, num_layers=None)

    @property
    def num_blocks(self) -> int:
        """What the whole model leaves: of the engine's share of memory, less weights and headroom."""
        free = int(self.on.hbm * CONFIG.device_memory_utilization) - self.whole.step.weight_bytes - HEADROOM
        return free // self.whole.step.bytes_per_block

    def problems(self, evidence: Evidence) -> list[str]:
        """The gates that a step of this case fails, as if it had all layers."""
        weights = self.whole.step.weight_bytes - self.step.weight_bytes
        pools = self.num_blocks * (self.whole.step.bytes_per_block - self.step.bytes_per_block)
        return evidence.problems(self.on.hbm, left_out=weights + pools)

    def plan(self) -> MemoryPlan:
        """The engine's own plan for this device; compiles the largest bucket."""
        return plan_step_memory(
            self.step, Buckets(MIXED[0], CONFIG.max_num_seqs, (DECODE[0], MIXED[0])), self.on.device
        )

    def evidence(self, bucket: tuple[int, int], num_blocks: int | None = None, **how) -> Evidence:
        max_blocks = CONFIG.max_model_len // self.step.layout.block_size
        return Evidence.of(self.step, bucket, num_blocks or self.num_blocks, max_blocks, **how)
