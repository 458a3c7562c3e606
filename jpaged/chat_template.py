"""ChatTemplate: a model's Jinja template, rendered in a sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

# A template is foreign code, and these are what its expressions can raise on messages that it did not expect.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training masks; for serving it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own tojson escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that transformers' apply_chat_template documents."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ChatTemplate:
    """A template and the special tokens ("bos_token": "<s>", ...) that it may refer to.

    Compiled on first use, so that a model with a broken template still serves completions.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text for a conversation, special tokens included: encode it without adding them again.

        continue_final_message ends the prompt inside the last message, which the model then goes on with.
        Raises ValueError, one line, for messages that are not [{"role": ...}, ...] and for what the template refuses.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise ValueError(f"messages must be a non-empty list of messages, got {messages!r}")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{index}] must be an object with a role, got {message!r}")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(variables)
        except _TEMPLATE_FAILURES as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refused the messages: {reason}") from error
        return self._cut_after(text, messages[-1].get("content")) if continue_final_message else text

    @staticmethod
    def _cut_after(text: str, content: Any) -> str:
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"continue_final_message needs text in the last message, got {content!r}")
        for final in (content, content.strip()):  # many templates trim
            if (at := text.rfind(final)) >= 0:
                return text[: at + len(final)]
        raise ValueError("continue_final_message: the chat template does not show the last message as it is")
