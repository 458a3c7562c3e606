"""Running requests through a real engine, and comparing what came."""

from dataclasses import dataclass

from jpaged.async_llm import AsyncLLM
from jpaged.config import EngineConfig
from jpaged.engine import LLMEngine
from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import CompletionOutput
from jpaged.sampling_params import SamplingParams

AMBIGUOUS = 1e-3  # two best log-probs this close: either token counts (float32 rounding)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams


def run(engine: LLMEngine, requests: list[Request], *, check_every_step: bool = False) -> list[CompletionOutput]:
    """All requests at once, to their end; the pool must be empty after it. The samples of one follow one another."""
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
    return [completion for builder in builders.values() for completion in builder.output.outputs]


def assert_same(first: list[CompletionOutput], second: list[CompletionOutput]) -> None:
    """Token for token, but where `first` (with logprobs=2) says that two tokens are as good as equal."""
    assert len(first) == len(second)
    for number, (a, b) in enumerate(zip(first, second)):
        if a.token_ids == b.token_ids:
            continue
        at = next(i for i, pair in enumerate(zip(a.token_ids, b.token_ids)) if pair[0] != pair[1])
        best, next_best = sorted((entry.logprob for entry in a.logprobs[at].values()), reverse=True)[:2]
        assert best - next_best < AMBIGUOUS, f"request {number} differs at {at}: {a.token_ids} {b.token_ids}"


def make_engine(model: str, programs_dir: str, **config) -> LLMEngine:
    """A float32 engine with two programs: a small step and the largest."""
    config.setdefault("max_num_batched_tokens", 64)
    config.setdefault("token_buckets", (8, config["max_num_batched_tokens"]))
    defaults = {
        "dtype": "float32", "block_size": 16, "max_num_seqs": 8, "num_blocks_override": 128,
        "max_model_len": 512, "compilation_cache_dir": programs_dir,
    }  # fmt: skip
    return LLMEngine(EngineConfig(model=model, **{**defaults, **config}))


def make_small_async_engine(model: str, **config) -> AsyncLLM:
    """One for a server: it compiles a single program, and two sequences run at once."""
    defaults = {
        "served_model_name": ("tiny",), "dtype": "float32", "block_size": 16, "max_num_batched_tokens": 2,
        "max_num_seqs": 2,
    }  # fmt: skip
    return AsyncLLM.from_config(EngineConfig(model=model, **{**defaults, **config}))
