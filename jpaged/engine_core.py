"""EngineCore: requests in, token deltas out, one step at a time. Single-threaded, and without text."""

import dataclasses
import logging
import random
import time

from jpaged import debug
from jpaged.bad_words import bad_word_tokens
from jpaged.batch import BatchBuilder
from jpaged.config import EngineConfig
from jpaged.kept_rows import finish_kept_rows
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.levels import Levels
from jpaged.model_files import ModelFiles
from jpaged.model_runner import ModelRunner
from jpaged.outputs import TokenDelta
from jpaged.pinned_prefixes import PARAMS, PinnedPrefixes, read_prefix
from jpaged.recovery import Recovery
from jpaged.request_check import RequestCheck
from jpaged.result_processor import RequestState, ResultProcessor
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler
from jpaged.sequence import FinishReason, Sequence
from jpaged.sequence_group import SequenceGroup
from jpaged.step_metrics import StepMetrics
from jpaged.steps_in_flight import StepFailed, StepsInFlight

logger = logging.getLogger(__name__)


class EngineCore:
    """The steps of docs/architecture.md up to tokens, joined."""

    def __init__(self, config: EngineConfig, metrics: StepMetrics):
        self.config, self.metrics = config, metrics
        checkpoint, self.tokenizer, self.generation_defaults = ModelFiles.open(config)
        self.runner = ModelRunner(config, checkpoint, self.tokenizer.encode, self.metrics.on_compile)
        self.model_config, self.spec = self.runner.model_config, self.runner.spec
        self.metrics.set_cache_config(
            block_size=self.spec.block_size,
            num_blocks=self.spec.num_blocks,
            cache_dtype=self.runner.layout.dtype,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        limits = {name: getattr(self.model_config, name) for name in ("vocab_size", "max_position")}
        self.validate = RequestCheck.of(config, self.spec, self.tokenizer, **limits)
        self._preemption = self.runner.preemption()
        self._open_books()
        self.batch_builder = BatchBuilder(config, self.spec, self.model_config.vocab_size)
        self.pins = PinnedPrefixes(self.kv, self._add, promised_len=config.max_model_len)
        self.results = ResultProcessor(self.scheduler)
        self.requests = self.results.requests
        self._seeds = random.Random(config.seed)
        self.in_flight = StepsInFlight(self.runner, depth=1 if config.async_scheduling else 0)
        self._recovery = Recovery(self)
        for path in config.pin_prefix:
            self.pin_prefix(read_prefix(path, self.tokenizer.encode))
        logger.info(self.runner.memory.table(self.pins.num_blocks, self.runner.num_host_blocks))

    @property
    def max_model_len(self) -> int:
        return self.validate.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self.in_flight) > 0

    def _open_books(self) -> None:
        """The scheduler and what it knows of the pool: nothing."""
        caches, num_host_blocks = self.config.enable_prefix_caching, self.runner.num_host_blocks
        self.kv = KVCacheManager(self.spec, enable_prefix_caching=caches, num_host_blocks=num_host_blocks)
        self.scheduler = Scheduler(self.config, self.kv, self._preemption)

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queues a request. Raises ValueError for one that cannot be served (see `validate`) or whose id is in use."""
        with self._recovery.whole():
            self._add(request_id, prompt_token_ids, params)

    def _add(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.validate(prompt_token_ids, params)
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        seq = Sequence(
            request_id,
            prompt_token_ids,
            params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            max_tokens=self.validate.max_tokens(len(prompt_token_ids), params),
            eos_token_ids=self.tokenizer.eos_token_ids,
            bad_words=bad_word_tokens(params.bad_words, self.tokenizer),
            drafter=self.scheduler.speculation.drafter_for(params),
        )
        seqs = SequenceGroup(seq, params.num_samples).sequences if params.num_samples > 1 else [seq]
        self._recovery.in_hand = seqs
        self.requests[request_id] = RequestState(seqs)
        for seq in seqs:
            self.scheduler.add(seq)

    def pin_prefix(self, token_ids: list[int]) -> None:
        """Queues a prefix to be computed once and never evicted. Raises ValueError for one that cannot be."""
        self.validate(token_ids, PARAMS)
        with self._recovery.whole():
            self.pins.add(token_ids, self.scheduler.sequences)
            self._set_room_beside_pins()

    def give_up_pin(self, token_ids: list[int]) -> None:
        """Takes back a `pin_prefix` that has not been computed yet."""
        for request_id in [i for i in self.pins.computing if self.pins.prefixes[i] == token_ids]:
            self.abort(request_id)
            with self._recovery.whole([]):
                self.pins.give_up(request_id)
                self._set_room_beside_pins()

    def _set_room_beside_pins(self) -> None:
        num_usable_blocks = self.spec.num_usable_blocks - self.pins.num_blocks
        self.validate = dataclasses.replace(self.validate, num_usable_blocks=num_usable_blocks)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Ends a request and frees its blocks at once; returns its last deltas, none of one that has ended."""
        state = self.requests.get(request_id)
        if state is None:
            return []
        with self._recovery.whole(state.seqs):
            deltas = self.results.give_up(state, FinishReason.ABORT)
            self.tell_levels()
        return deltas

    def stop(self, request_id: str, index: int) -> None:
        """Ends a sample whose text has come to a stop string, unless it has ended. No delta says so."""
        if (state := self.requests.get(request_id)) is not None:
            with self._recovery.whole(state.seqs):
                self._stop(request_id, index)

    def _stop(self, request_id: str, index: int) -> None:
        if (state := self.requests.get(request_id)) is not None:
            self.results.stop(state, index)
            self.tell_levels()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content that is not pinned; False, and nothing forgotten, while requests hold blocks."""
        with self._recovery.whole([]):
            return self.kv.reset_prefix_cache()

    def step(self) -> list[TokenDelta]:
        """Starts the next step, then returns what the oldest step in flight added to each request.

        With async scheduling the device is given step N + 1 before the host has seen the result of N. Returns nothing
        where there is no work. An interrupt comes when the step is done, and its deltas are lost; after any other
        exception the engine goes on with the requests that it has told everything of, and aborts the others.
        """
        with self._recovery.whole():
            return self._step()

    def _step(self) -> list[TokenDelta]:
        if self._recovery.check_failed is not None:
            raise self._recovery.check_failed
        deltas = []
        try:
            has_started = self._start_step()
            if self.in_flight.is_full or (len(self.in_flight) and not has_started):
                deltas = self._retire_step()
        except StepFailed as failure:
            deltas = self._settle(failure)
        except MemoryError as error:
            deltas = self._recovery.recover(error)
        return self._take_pins(deltas)

    def _start_step(self) -> bool:
        """Plans and dispatches a step; False where there is nothing to compute, or nothing that can be planned yet."""
        begin = time.monotonic()
        self._recovery.in_hand = []
        plan = self.scheduler.schedule()
        if plan is not None and self.pins.computing:
            self.pins.hold(plan.sampled)
        self._recovery.in_hand = None
        if plan is None or not plan.num_scheduled_tokens:
            return False
        host_step = self.batch_builder.build(plan)
        for seq in plan.admitted:
            state = self.requests[seq.request_id]
            state.first_scheduled_time = state.first_scheduled_time or begin
        self.in_flight.submit(plan, host_step, planned_since=begin)
        return True

    def _retire_step(self) -> list[TokenDelta]:
        """Waits for the oldest step in flight and processes its result."""
        step, result = self.in_flight.retire()
        self._recovery.num_failed_steps = 0
        finish_kept_rows(self.runner, step.plan, result)
        self._recovery.in_hand = step.plan.sampled
        appended = self.scheduler.update(step.plan, result.token_ids)
        self.results.take_prompt_logprobs(step.plan, result)
        deltas = self.results.process(appended, result)
        num_generated = sum(1 if seq.is_beam else len(token_ids) for _, seq, token_ids in appended)
        self.metrics.on_step(step.stats(self.scheduler, num_generated))
        if not self.has_work:
            self.in_flight.rest()
        return deltas

    def _take_pins(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Keeps the prefixes that a step has completed; returns the deltas that are for others."""
        if self.pins.computing:
            deltas = self.pins.take(deltas)
            self._set_room_beside_pins()  # one that failed takes none
        return deltas

    def _settle(self, failure: StepFailed) -> list[TokenDelta]:
        """After a failure: what an earlier step in flight still yields, and then a fresh start."""
        deltas = []
        if len(self.in_flight) and self.scheduler.in_flight[0] is not failure.plan:
            try:
                deltas = self._take_pins(self._retire_step())  # before `recover`, which recomputes what is pinned
                self._recovery.in_hand = None
            except StepFailed as earlier:
                failure = earlier
        return deltas + self._recovery.recover(failure.error, failure.plan)

    def open_new_books(self) -> None:
        """Has everybody wait, as the requests themselves say. Nothing is cached, pinned, or being pinned."""
        for request_id in self.pins.computing:
            self.requests.pop(request_id, None)
        self._open_books()
        self.pins.start_over(self.kv)
        self.results.start_over(self.scheduler)

    def give_up(self, request_id: str) -> None:
        """Ends a request of whom no more can be told."""
        if (state := self.requests.get(request_id)) is not None:
            self.results.give_up(state, FinishReason.ABORT)
        self.tell_levels()

    def tell_levels(self) -> None:
        """After something has ended that no step says anything of."""
        self.metrics.on_levels(Levels.of(self.scheduler))
        if not self.has_work:
            self.in_flight.rest()

    def snapshot(self) -> dict:
        """Every block, table and queue as plain data."""
        return debug.snapshot(self.scheduler)

    def memory_map(self) -> str:
        """The pool and who owns it, drawn in 100 columns."""
        return debug.memory_map(self.snapshot(), self.tokenizer.decode)

    def close(self) -> None:
        """Stops compiling ahead. The engine can be used no more."""
        self.runner.programs.close()
