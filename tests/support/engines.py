"""Running requests through a real engine, and comparing what came."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jpaged.async_llm import AsyncLLM
from jpaged.batch import HostStep
from jpaged.config import EngineConfig
from jpaged.engine import LLMEngine
from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_batch import SamplingBatch
from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedOut

CLOSE = 1e-3  # log-probs of float32
AMBIGUOUS = CLOSE  # two best log-probs this close: either token counts


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams


def run(engine: LLMEngine, requests: list[Request], *, check_every_step: bool = False) -> list[CompletionOutput]:
    """All requests at once, to their end; the pool must be empty after it. The samples of one follow one another."""
    outputs = run_whole(engine, requests, check_every_step=check_every_step)
    return [completion for output in outputs for completion in output.outputs]


def run_whole(engine: LLMEngine, requests: list[Request], *, check_every_step: bool = False) -> list[RequestOutput]:
    """The same, with what is known of the prompts."""
    builders = {}
    for i, request in enumerate(requests):
        builders[str(i)] = RequestOutputBuilder(str(i), None, request.prompt, request.params.n)
        engine.add_request(str(i), request.prompt, request.params)
    while engine.has_work:
        for delta in engine.step():
            builders[delta.request_id].add(delta)
        if check_every_step:
            engine.kv.check_invariants(engine.scheduler.sequences)
    engine.kv.check_invariants([])
    assert engine.kv.pool.num_used == 0 and not engine.requests
    return [builder.output for builder in builders.values()]


def separately(engine: LLMEngine, requests: list[Request], monkeypatch) -> list[CompletionOutput]:
    """Each request alone, and each sample as the only one of a request; the sampler alone is told which it would be."""
    set_row, outputs = SamplingBatch.set_row, []
    for request in requests:
        if request.params.use_beam_search:
            outputs += run(engine, [request])
            continue
        for index in range(request.params.n):

            def as_sample(self, row, *args, index=index, **named):
                set_row(self, row, *args, **named | {"sample_index": index})

            monkeypatch.setattr(SamplingBatch, "set_row", as_sample)
            outputs += run(engine, [Request(request.prompt, replace(request.params, n=1))])
        monkeypatch.setattr(SamplingBatch, "set_row", set_row)
    return outputs


def assert_same(first: list[CompletionOutput], second: list[CompletionOutput]) -> None:
    """Token for token, but where `first` (with logprobs=2) says that two tokens are as good as equal."""
    assert len(first) == len(second)
    for number, (a, b) in enumerate(zip(first, second)):
        if a.token_ids == b.token_ids:
            continue
        at = next(i for i, pair in enumerate(zip(a.token_ids, b.token_ids)) if pair[0] != pair[1])
        assert a.logprobs is not None, f"output {number} differs at {at}: {a.token_ids} {b.token_ids}"
        best, next_best = sorted((entry.logprob for entry in a.logprobs[at].values()), reverse=True)[:2]
        assert best - next_best < AMBIGUOUS, f"request {number} differs at {at}: {a.token_ids} {b.token_ids}"


def assert_equal(first: list[CompletionOutput], second: list[CompletionOutput]) -> None:
    """The same, log-probs too: of each token, and their sums, which is all that beams have."""
    assert_same(first, second)
    for a, b in zip(first, second):
        if a.token_ids == b.token_ids and a.cumulative_logprob is not None:
            assert b.cumulative_logprob == pytest.approx(a.cumulative_logprob, abs=CLOSE)
        for token, mine, its in zip(a.token_ids, a.logprobs or (), b.logprobs or ()):
            if token not in its:
                break  # from an ambiguous token on, which assert_same has looked at
            assert mine[token].logprob == pytest.approx(its[token].logprob, abs=CLOSE)


def assert_identical(first: list[CompletionOutput], second: list[CompletionOutput]) -> None:
    """To the bit: tokens, log-probs and their sums."""
    assert len(first) == len(second)
    for number, (a, b) in enumerate(zip(first, second)):
        assert a.token_ids == b.token_ids, f"output {number}"
        assert (a.cumulative_logprob, a.logprobs) == (b.cumulative_logprob, b.logprobs), f"output {number}"


def make_engine(model: str, programs_dir: str, **config) -> LLMEngine:
    """A float32 engine with two programs: a small step and the largest.

    num_blocks_override is for a model with one attention group: one with several gets as many blocks for each, enough for
    as many samples. max_model_len None makes it as long as the pool allows.
    """
    config.setdefault("max_num_batched_tokens", 64)
    config.setdefault("token_buckets", (8, config["max_num_batched_tokens"]))
    defaults = {
        "dtype": "float32", "block_size": 16, "max_num_seqs": 8, "num_blocks_override": 128,
        "max_model_len": 512, "compilation_cache_dir": programs_dir,
    }  # fmt: skip
    config = EngineConfig(model=model, **{**defaults, **config})
    num_blocks, num_groups = config.num_blocks_override, len(set(layer_types(model)))
    return LLMEngine(replace(config, num_blocks_override=1 + (num_blocks - 1) * num_groups))


def config_of(model: str) -> dict:
    """A folder's config.json; nothing of a model that goes by a name."""
    path = Path(model) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def layer_types(model: str) -> list[str]:
    return config_of(model).get("layer_types", ["full_attention"])


def count_swaps(engine: LLMEngine) -> list[SwappedOut]:
    """Everything that is swapped out from here on."""
    swaps, take = [], engine.kv.swap_space.take

    def counted(swapped):
        has_room = take(swapped)
        swaps.extend([swapped] if has_room else [])
        return has_room

    engine.kv.swap_space.take = counted
    return swaps


def watch_decodes_in_a_row(engine: LLMEngine) -> list[int]:
    """How many tokens each step from here on yields of a sequence, at most."""
    seen, update = [], engine.scheduler.update

    def watched(plan, token_ids):
        seen.append(max(plan.limits, default=1))
        return update(plan, token_ids)

    engine.scheduler.update = watched
    return seen


def make_small_async_engine(model: str, **config) -> AsyncLLM:
    """One for a server: it compiles a single program, and two sequences run at once."""
    defaults = {
        "served_model_name": ("tiny",), "dtype": "float32", "block_size": 16, "max_num_batched_tokens": 2,
        "max_num_seqs": 2,
    }  # fmt: skip
    return AsyncLLM.from_config(EngineConfig(model=model, **{**defaults, **config}))


class BrokenResult:
    """The result of a step that fails when somebody reads it."""

    is_ready = True

    def read(self):
        raise RuntimeError("out of luck")


def break_steps(
    engine: LLMEngine, monkeypatch, breaks: Callable[[int, HostStep], bool], *, when_read: bool = False
) -> None:
    """Makes a step fail after it has consumed the pool, wherever breaks(step's number, step) says so: at once, or late,
    when its result is read and the next step may be in flight."""
    submit, count = engine.runner.submit, iter(range(10**6))

    def broken(step):
        number = next(count)
        result = submit(step)
        if not breaks(number, step):
            return result
        if when_read:
            return BrokenResult()
        result.read()
        engine.runner.state.pools[0].arrays[0].delete()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine.runner, "submit", broken)


def abort_after_each_number_of_steps(engine: LLMEngine, stays: Request, goes: Request) -> int:
    """Runs both again and again and aborts one a step later each time, until it has ended before; samples that end
    earlier are left alone, and the pool must be empty each time. Returns how often."""
    num_steps, is_over = 0, False
    while not is_over:
        engine.add_request("stays", stays.prompt, stays.params)
        engine.add_request("goes", goes.prompt, goes.params)
        deltas = [delta for _ in range(num_steps) for delta in engine.step()]
        ended = {delta.index for delta in deltas if delta.request_id == "goes" and delta.finish_reason is not None}
        is_over = "goes" not in engine.requests
        aborted = {(delta.index, delta.finish_reason) for delta in engine.abort("goes")}
        assert aborted == {(i, "abort") for i in range(goes.params.n) if i not in ended} and is_over == (not aborted)
        assert {seq.request_id for seq in engine.scheduler.sequences} <= {"stays"}
        engine.kv.check_invariants(engine.scheduler.sequences)
        while engine.has_work:
            engine.step()
            engine.kv.check_invariants(engine.scheduler.sequences)
        assert engine.kv.pool.num_used == 0 and not engine.requests
        num_steps += 1
    return num_steps
