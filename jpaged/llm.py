"""LLM: the offline door. Prompts in, finished outputs back, in order."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from tqdm.auto import tqdm

from jpaged.config import DEFAULT_MODEL, EngineConfig
from jpaged.conversations import read_conversations
from jpaged.engine import LLMEngine
from jpaged.interrupts import InterruptsHeldBack
from jpaged.output_processor import RequestOutputBuilder
from jpaged.outputs import RequestOutput
from jpaged.prompts import read_prompt, read_prompts, shown
from jpaged.sampling_params import SamplingParams
from jpaged.tokenizer import Tokenizer

SamplingParamsOfPrompts = SamplingParams | Iterable[SamplingParams | None] | None


class LLM:
    """An engine in this process, for notebooks and scripts.

    model is what --model takes; further arguments are EngineConfig's fields. Programs are compiled on first use and
    kept on disk; `warm_up` compiles all of them now. An interrupt ends a call between two of its steps, or while it waits
    for a program or a logits processor; what the call had asked for is given up, and the next one is served as ever.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_config: Any):
        self.engine = LLMEngine(EngineConfig(model=model, **engine_config))
        self._request_numbers = itertools.count()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParamsOfPrompts = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in input order: for one prompt, or for each of a list, an array or any iterable.

        A prompt is text, token ids (a list or an array), {"prompt": text} or {"prompt_token_ids": ids}; where an object
        has both, the ids count. sampling_params is one for all or one each; left out, it is the model's own defaults.
        Raises ValueError, before anything runs, for a request that cannot be served. One that fails later has
        finish_reason "error" and an error; the others go on.
        """
        found = read_prompts(prompts, self.engine.tokenizer.encode)
        return self._run(
            [prompt.text for prompt in found], [prompt.token_ids for prompt in found], sampling_params, use_tqdm
        )

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParamsOfPrompts = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, each a list of {"role", "content"}.

        A message may also be an object of OpenAI's client. continue_final_message has the model go on with each last
        message; see ChatTemplate.render.
        """
        tokenizer, texts = self.get_tokenizer(), []
        tokenizer.check_chat_template()
        for number, conversation in enumerate(read_conversations(messages)):
            try:
                text = tokenizer.apply_chat_template(
                    conversation, add_generation_prompt, continue_final_message, **template_args
                )
            except ValueError as error:
                raise ValueError(f"conversation {number}: {error}") from error
            texts.append(text)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(texts, ids, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Any,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        *,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The beam_width outputs of each prompt that have the best cumulative log-prob over length ** length_penalty.

        As Hugging Face's `generate(num_beams=beam_width)`; outputs come best first, with their cumulative_logprob.
        """
        params = SamplingParams(
            n=beam_width,
            max_tokens=max_tokens,
            temperature=0.0,
            use_beam_search=True,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
        )
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def pin_prefix(self, prompt: Any) -> None:
        """Computes a prefix, a prompt as `generate` takes it, which then stays in the KV pool.

        Raises ValueError where it would leave too little room; RuntimeError where the device fails.
        """
        engine, token_ids = self.engine, read_prompt(prompt, self.engine.tokenizer.encode).token_ids
        with InterruptsHeldBack() as interrupts:
            engine.pin_prefix(token_ids)
            try:
                while engine.pins.computing:
                    engine.step()
                    interrupts.deliver()
            except BaseException:
                engine.give_up_pin(token_ids)
                raise
        if token_ids not in engine.pins.prefixes.values():
            raise RuntimeError("the prefix could not be computed: see the log")

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes that are not pinned; False, and nothing forgotten, while requests hold blocks."""
        return self.engine.reset_prefix_cache()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_metrics(self) -> dict[str, float]:
        """Every metric of the engine by name."""
        return self.engine.metrics.snapshot()

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's own sampling defaults, with overrides."""
        return SamplingParams(**{**self.engine.generation_defaults, **overrides})

    def warm_up(self, *, use_tqdm: bool = True) -> None:
        """Compiles every program, so that nothing compiles later."""
        programs = self.engine.runner.programs
        size = len(programs.keys)
        for _ in tqdm(programs.prepare_all(), "compiling", size, unit="program", disable=not use_tqdm):
            pass

    def close(self) -> None:
        """Frees the engine's memory: weights, pool and programs."""
        self.engine.close()
        del self.engine

    def _params_of_each(self, num_prompts: int, sampling_params: SamplingParamsOfPrompts) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.default_sampling_params()] * num_prompts
        if isinstance(sampling_params, (str, Mapping)) or not isinstance(sampling_params, Iterable):
            raise ValueError(f"sampling_params must be SamplingParams, or one each, got {shown(sampling_params)}")
        params = [self.default_sampling_params() if one is None else one for one in sampling_params]
        for number, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params[{number}] must be SamplingParams, got {shown(one)}")
        if len(params) != num_prompts:
            raise ValueError(f"{num_prompts} prompts but {len(params)} sampling_params")
        return params

    def _run(self, texts, ids, sampling_params, use_tqdm: bool) -> list[RequestOutput]:
        params = self._params_of_each(len(ids), sampling_params)
        for number, (prompt_ids, one) in enumerate(zip(ids, params)):
            try:
                self.engine.validate(prompt_ids, one)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None

        builders = {}
        with InterruptsHeldBack() as interrupts:
            try:
                for text, prompt_ids, one in zip(texts, ids, params):
                    request_id = str(next(self._request_numbers))
                    builders[request_id] = builder = RequestOutputBuilder(request_id, text, prompt_ids, one.n)
                    builder.output.metrics = self.engine.add_request(request_id, prompt_ids, one)
                    interrupts.deliver()
                self._drain(builders, use_tqdm, interrupts)
            finally:
                for request_id in builders:
                    self.engine.abort(request_id)  # those left over by an error or an interrupt
        return [builder.output for builder in builders.values()]

    def _drain(self, builders: dict[str, RequestOutputBuilder], use_tqdm: bool, interrupts: InterruptsHeldBack) -> None:
        num_prompt = num_output = 0
        with tqdm(total=len(builders), desc="generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                num_finished = 0
                for delta in self.engine.step():
                    if delta.request_id not in builders:
                        continue  # of a former call that was cut short even as it aborted what it had asked for
                    output = builders[delta.request_id].add(delta)
                    num_output += len(delta.token_ids)
                    if output.finished:
                        num_finished += 1
                        num_prompt += len(output.prompt_token_ids)
                if num_finished:
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"in {num_prompt / elapsed:.0f} tok/s, out {num_output / elapsed:.0f} tok/s", refresh=False
                    )
                    bar.update(num_finished)
                interrupts.deliver()
