"""Workload: requests of equal lengths, all at once, and the steps in which they all decode."""

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from jpaged.engine import LLMEngine
from jpaged.sampling_params import SamplingParams

_NUM_SETTLING = 2  # steady steps that are let go by: the step in flight before them was none


def _option(default, help):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What is run, and where the result goes. Raises ValueError for counts under the least that shows a step."""

    num_requests: int = _option(32, "requests, all at once")
    prompt_len: int = _option(128, "tokens of each prompt, random")
    output_len: int = _option(32, "tokens of each answer")
    temperature: float = _option(0.0, "of sampling; 0 is greedy")
    num_steps: int = _option(12, "decode steps that are profiled")
    output: str = _option("build/profile", "the folder for table, picture and trace")

    def __post_init__(self):
        for name, least in (("num_requests", 1), ("prompt_len", 1), ("output_len", 2), ("num_steps", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class Workload:
    """Fresh prompts each time, so that nothing is found in the prefix cache; EOS is ignored."""

    def __init__(self, engine: LLMEngine, config: ProfileConfig):
        self.engine, self.config = engine, config
        self._rng = random.Random(0)

    def run(self, watch: AbstractContextManager | None = None) -> None:
        """All requests to their end, `num_steps` steady steps of them inside watch.

        Raises ValueError where there are not so many.
        """
        engine, config = self.engine, self.config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.output_len, ignore_eos=True, seed=0)
        for number in range(config.num_requests):
            prompt = [self._rng.randrange(engine.model_config.vocab_size) for _ in range(config.prompt_len)]
            engine.add_request(f"profile-{number}", prompt, params)
        num_settled = 0
        while engine.has_work:
            num_settled += self._is_steady()
            if watch is None or num_settled <= _NUM_SETTLING:
                engine.step()
                continue
            with watch:
                num_seen = 0
                while num_seen < config.num_steps and self._is_steady():
                    engine.step()
                    num_seen += 1
            watch = None
            if num_seen < config.num_steps:
                self._drain()
                raise ValueError(
                    f"only {num_seen} of num_steps ({config.num_steps}) decode steps are alike in a run of "
                    f"{config.num_requests} x ({config.prompt_len} + {config.output_len}): raise output_len"
                )
        if watch is not None:
            raise ValueError(
                f"{config.num_requests} requests of {config.prompt_len} + {config.output_len} tokens never decode all "
                "at once: raise output_len, max_num_seqs or the pool, or lower num_requests"
            )

    def _drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def _is_steady(self) -> bool:
        """Whether all requests decode in the next step, and none of them for the last time."""
        running = self.engine.scheduler.running
        return len(running) == self.config.num_requests and all(
            seq.length - seq.num_computed_tokens == 1 and seq.length - seq.num_prompt_tokens + 1 < seq.max_tokens
            for seq in running
        )
