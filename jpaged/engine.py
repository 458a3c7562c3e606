"""LLMEngine: requests in, deltas out, one step at a time. Single-threaded: AsyncLLM gives it a thread of its own."""

import dataclasses
import logging
import random
import time
from collections import Counter

from jpaged.batch import BatchBuilder
from jpaged.config import EngineConfig
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.metrics import EngineMetrics, StepStats
from jpaged.model_runner import ModelRunner, StepResult
from jpaged.output_processor import RequestState, token_logprobs
from jpaged.outputs import OutputDelta, RequestMetrics
from jpaged.sampling_params import SamplingParams
from jpaged.scheduler import Scheduler, SchedulerOutput
from jpaged.sequence import FinishReason, Sequence
from jpaged.tokenizer import Tokenizer
from models.weights import Checkpoint, open_checkpoint, recommended_sampling, resolve_model

logger = logging.getLogger(__name__)


def sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, float]:
    """What the model's authors recommend, unless the user prefers OpenAI's defaults."""
    if config.generation_config == "none":
        return {}
    own = dataclasses.asdict(checkpoint.generation_defaults)
    own.pop("eos_token_ids")
    return recommended_sampling(config.model) | {name: value for name, value in own.items() if value is not None}


class LLMEngine:
    """The seven steps of docs/architecture.md, joined."""

    def __init__(self, config: EngineConfig):
        self.config = config
        checkpoint = open_checkpoint(resolve_model(config.model, config.download_dir, config.revision))
        template = None
        if config.chat_template is not None:
            with open(config.chat_template, encoding="utf-8") as file:
                template = file.read()
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint, template)
        self.generation_defaults = sampling_defaults(config, checkpoint)
        self.metrics = EngineMetrics((config.served_model_name or (config.model,))[0])
        self.runner = ModelRunner(config, checkpoint, self.metrics.on_compile)
        self.model_config = self.runner.model_config
        self.spec = self.runner.spec
        logger.info(self.runner.memory.table())
        self.metrics.set_cache_config(
            block_size=self.spec.block_size,
            num_blocks=self.spec.num_blocks,
            cache_dtype=self.runner.layout.dtype,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.kv = KVCacheManager(self.spec, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.kv)
        self.batch_builder = BatchBuilder(config, self.spec)
        self.requests: dict[str, RequestState] = {}
        self._seeds = random.Random(config.seed)
        self._last_result_time: float | None = None
        self._num_failed_steps = 0  # in a row

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises ValueError, one line with the value and the limit, for a request that can never be served."""
        if not prompt_token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        vocab_size = self.model_config.vocab_size
        for name, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            worst = max(ids, default=0)
            worst = worst if worst >= vocab_size else min(ids, default=0)
            if not 0 <= worst < vocab_size:
                raise ValueError(f"{name} holds token id {worst}; the vocabulary ends at {vocab_size - 1}")
        num_prompt, limit = len(prompt_token_ids), self.max_model_len
        why = "" if limit == self.model_config.max_position else f" (the KV pool holds {self.spec.num_usable_tokens})"
        if num_prompt >= limit:
            raise ValueError(f"the prompt has {num_prompt} tokens; the context is {limit} tokens{why}, output included")
        if params.max_tokens is not None and num_prompt + params.max_tokens > limit:
            raise ValueError(
                f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, together "
                f"{num_prompt + params.max_tokens}; the context is {limit} tokens{why}"
            )
        if params.min_tokens > limit - num_prompt:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but only {limit - num_prompt} tokens fit after the prompt"
            )
        if params.logprobs is not None and params.logprobs > self.config.max_logprobs:
            raise ValueError(f"logprobs is {params.logprobs}; the limit is {self.config.max_logprobs} (max_logprobs)")

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestMetrics:
        """Queues a request; returns its times, which are filled in as they come.

        Raises ValueError for one that cannot be served (see `validate`) or whose id is in use.
        """
        self.validate(prompt_token_ids, params)
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        seq = Sequence(
            request_id,
            prompt_token_ids,
            params,
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed,
            max_tokens=params.max_tokens or self.max_model_len - len(prompt_token_ids),
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.requests[request_id] = RequestState(seq, self.tokenizer, prompt, arrival_time or time.monotonic())
        self.scheduler.add(seq)
        return self.requests[request_id].metrics

    def abort(self, request_id: str) -> OutputDelta | None:
        """Ends a request and frees its blocks at once; None where it is unknown or has ended."""
        state = self.requests.get(request_id)
        if state is None:
            return None
        self.scheduler.finish(state.seq, FinishReason.ABORT)
        delta = state.give_up(FinishReason.ABORT)
        self._close(state)
        self.metrics.set_levels(len(self.scheduler.running), len(self.scheduler.waiting), self.kv.usage)
        return delta

    def step(self) -> list[OutputDelta]:
        """Computes one step and returns what it added to each request; nothing where there is no work."""
        plan = self.scheduler.schedule()
        if not plan.num_scheduled_tokens:
            return []
        batch, sampling = self.batch_builder.build(plan)
        start = time.monotonic()
        try:
            result = self.runner.run(batch, sampling, len(plan.sampled))
        except Exception as error:  # whatever the device says: see `_recover`
            return self._recover(plan, error)
        now = time.monotonic()
        self._num_failed_steps = 0
        appended = self.scheduler.update(plan, result.token_ids)
        for seq in plan.admitted:
            metrics = self.requests[seq.request_id].metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or start
        deltas = self._process(appended, result, now)
        num_padding = batch.token_ids.shape[0] - plan.num_tokens
        self._record_step(plan, num_padding, len(appended), start - (self._last_result_time or start))
        self._last_result_time = now if self.has_work else None
        return deltas

    def _process(self, appended: list[tuple[Sequence, int]], result: StepResult, now: float) -> list[OutputDelta]:
        deltas = []
        gaps = Counter()  # most rows of a step waited equally long
        for row, (seq, token_id) in enumerate(appended):
            state = self.requests[seq.request_id]
            if state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
            else:
                gaps[now - state.last_token_time] += 1
            state.last_token_time = now
            delta = state.advance(token_id, token_logprobs(seq.params, token_id, result, row, self.tokenizer))
            deltas.append(delta)
            if delta.finish_reason is not None:
                self.scheduler.finish(seq, delta.finish_reason)  # does nothing where the scheduler has ended it
                seq.finish_reason, seq.stop_reason = delta.finish_reason, delta.stop_reason
                self._close(state)
        for gap, num_tokens in gaps.items():
            self.metrics.on_inter_token_latency(gap, num_tokens)
        return deltas

    def _close(self, state: RequestState) -> None:
        seq = state.seq
        del self.requests[seq.request_id]
        state.metrics.finished_time = time.monotonic()
        self.metrics.on_finished(state.metrics, seq.num_prompt_tokens, seq.num_output_tokens, seq.finish_reason)

    def _recover(self, plan: SchedulerOutput, error: Exception) -> list[OutputDelta]:
        """A failed step may have consumed the donated pool: everyone is recomputed in a new one.

        A second failure in a row ends the newest request of the step, so that one that breaks the step cannot take the
        others with it for ever.
        """
        logger.exception("a step of %d tokens failed; its requests are recomputed", plan.num_tokens)
        self._num_failed_steps += 1
        newest = next(s for s in reversed(self.scheduler.running) if s in plan.num_scheduled_tokens)
        self.scheduler.preempt_all()
        self.kv.reset_prefix_cache()
        self.runner.reset_pool()
        if self._num_failed_steps < 2:
            return []
        state = self.requests[newest.request_id]
        self.scheduler.finish(newest, FinishReason.ERROR)
        reason = str(error).strip() or type(error).__name__
        delta = state.give_up(
            FinishReason.ERROR, f"the engine failed to compute this request: {reason.splitlines()[0]}"
        )
        self._close(state)
        return [delta]

    def _record_step(self, plan: SchedulerOutput, num_padding: int, num_generated: int, gap: float) -> None:
        self.metrics.on_step(
            StepStats(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                kv_cache_usage=self.kv.usage,
                num_scheduled_tokens=plan.num_tokens,
                num_padding_tokens=num_padding,
                num_prompt_tokens=plan.num_new_prompt_tokens,
                num_generation_tokens=num_generated,
                num_preemptions=plan.num_preempted,
                prefix_cache_queries=plan.num_prefix_queries,
                prefix_cache_hits=plan.num_prefix_hits,
                host_gap_seconds=gap,
            )
        )

    def close(self) -> None:
        """Stops compiling ahead. The engine can be used no more."""
        self.runner.programs.close()
