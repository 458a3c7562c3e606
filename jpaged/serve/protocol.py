"""The bodies of requests: names and types. What a value may be, SamplingParams and the engine know."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from jpaged.sampling_params import SamplingParams
from jpaged.serve.errors import bad_request, caller_errors, shown
from jpaged.serve.json_body import Body, Whole, whole
from jpaged.serve.messages import Message
from jpaged.serve.unsupported import CHAT, COMPLETION, STREAM_OPTIONS, TOKENIZE, refuse_unsupported

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for completions
MAX_PROMPTS = 2048  # in one completion request
MAX_TOP_LOGPROBS_OF_CHAT = 20


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chat have in common. prompt_field: where the prompt stands."""

    prompt_field: ClassVar[str]

    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: list[str] | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Whole | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: str | None = None
    priority: Whole | None = None

    def check(self) -> None:
        if (name := self.request_id) and not (name.isascii() and name.isprintable() and " " not in name):
            # it goes into a header and into the log
            raise bad_request(f"request_id must be ASCII without spaces, got {shown(name)}", "request_id")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs is not supported with stream", "prompt_logprobs")
        if self.stream_options is not None:
            if not self.stream:
                raise bad_request("stream_options needs stream to be true", "stream_options")
            refuse_unsupported(self.stream_options.model_extra, STREAM_OPTIONS, "stream_options")

    def num_logprobs(self) -> int | None:
        """How many alternatives are asked for at each position; None for no log-probs at all."""
        raise NotImplementedError

    def sampling_params(self, defaults: Mapping[str, Any], *, max_tokens: int | None) -> SamplingParams:
        """The request's values, then the model's defaults, then OpenAI's. Raises a 400 for a value out of range.

        max_tokens: the default where neither the request nor the model says.
        """
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.use_beam_search:
            defaults = {}  # they are for sampling
            given.setdefault("temperature", 0.0)
        given["logprobs"] = self.num_logprobs()
        with caller_errors():
            return SamplingParams(**{"max_tokens": max_tokens} | dict(defaults) | given | self.special_params())

    def special_params(self) -> dict[str, Any]:
        """Of SamplingParams, what the body says in its own way."""
        return {}


class CompletionBody(GenerationBody):
    neutral, prompt_field = COMPLETION, "prompt"

    prompt: Any = None
    best_of: Whole | None = None
    logprobs: Whole | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.stream and self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                f"best_of ({self.best_of}) over n ({self.n or 1}) cannot be streamed: which are best shows at the end",
                "best_of",
            )
        self.prompts()

    def special_params(self) -> dict[str, Any]:
        if not self.echo or self.prompt_logprobs is not None:
            return {}
        is_echo_alone = self.max_tokens == 0
        return {"prompt_logprobs": 0 if is_echo_alone and self.logprobs is None else self.logprobs}

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry a choice. Raises a 400 for anything but the four shapes of OpenAI."""
        prompt = self.prompt
        if prompt is None:
            raise bad_request("prompt is required", "prompt")
        if isinstance(prompt, str):
            return [prompt]
        if (ids := _token_ids(prompt)) is not None:
            return [ids]
        if isinstance(prompt, list) and prompt:
            if len(prompt) > MAX_PROMPTS:
                raise bad_request(f"prompt holds {len(prompt)} prompts, the limit is {MAX_PROMPTS}", "prompt")
            if len(prompt) * (self.n or 1) > MAX_PROMPTS:
                raise bad_request(
                    f"{len(prompt)} prompts with n = {self.n} are {len(prompt) * self.n} choices, the limit is {MAX_PROMPTS}",
                    "n",
                )
            if all(isinstance(p, str) for p in prompt):
                return prompt
            prompts = list(map(_token_ids, prompt))
            if None not in prompts:
                return prompts
        raise bad_request(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, none of "
            f"them empty, got {shown(prompt)}",
            "prompt",
        )


class ChatFields(Body):
    """How messages become a prompt."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
            )

    def messages_for_template(self) -> list[dict[str, str]]:
        if not self.messages:
            raise bad_request("messages must not be empty", "messages")
        return [message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)]


class ChatBody(ChatFields, GenerationBody):
    neutral, prompt_field = CHAT, "messages"

    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None

    def check(self) -> None:
        super().check()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise bad_request(
                    f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) are one "
                    "limit: give one of them",
                    "max_completion_tokens",
                )
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS_OF_CHAT:
            raise bad_request(
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS_OF_CHAT}], got {self.top_logprobs}", "top_logprobs"
            )

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(ChatFields):
    """Either a prompt or messages."""

    neutral = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Whole]


def _token_ids(value: object) -> list[int] | None:
    """The ids of a list of whole numbers that is not empty; None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    ids = list(map(whole, value))
    return ids if all(type(token) is int for token in ids) else None
