"""ChatTemplate: a model's Jinja template, rendered in a sandbox."""

import datetime
import functools
import json
import secrets
import textwrap
import traceback
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
_TEMPLATE_FILE = "<template>"  # as tracebacks call a template that was compiled from a text
_MAX_REASON = 200  # characters


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training masks; for serving it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(jinja2.TemplateError):
    """What the template itself says of the messages."""


def _raise_exception(message: str):
    raise TemplateRefusal(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own tojson escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that transformers' apply_chat_template documents."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class ChatTemplate:
    """A template and the special tokens ("bos_token": "<s>", ...) that it may refer to.

    Compiled on first use, so that a model with a broken template still serves completions: `fault` says whether it is.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)

    @property
    def fault(self) -> str | None:
        """"broken at line 3: ...", one line; None for a template that compiles."""
        return self._compiled[1]

    @functools.cached_property
    def _compiled(self) -> tuple[jinja2.Template | None, str | None]:
        if not isinstance(self.source, str):
            return None, f"broken: it is no text but {type(self.source).__name__}"
        try:
            return _environment().from_string(self.source), None
        except jinja2.TemplateSyntaxError as error:
            return None, f"broken at line {error.lineno}: {_in_one_line(error.message)}"
        except (*_TEMPLATE_FAILURES, SyntaxError) as error:  # the last: of the Python that it was made into
            return None, f"broken: {_in_one_line(error)}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text for a conversation, special tokens included: encode it without adding them again.

        continue_final_message ends the prompt inside the last message, which the model then goes on with: after what
        the template shows of its text. add_generation_prompt left out is true but where a message is continued.
        Raises ValueError, one line, for messages that are not [{"role": ...}, ...] and for what the template refuses.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise ValueError(f"messages must be a non-empty list of messages, got {messages!r}")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{index}] must be an object with a role, got {message!r}")
        if not isinstance(continue_final_message, bool):  # transformers takes a field's name, too
            raise ValueError(f"continue_final_message must be true or false, got {continue_final_message!r}")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        now = datetime.datetime.now()  # one time for all renderings of a call
        variables = {"tools": None, "documents": None, "strftime_now": now.strftime, **self._special_tokens, **kwargs}
        variables |= {"add_generation_prompt": add_generation_prompt}
        render = self._render_final_message if continue_final_message else self._render
        return render(list(messages), variables)

    def _render(self, messages: list[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        template, fault = self._compiled
        if template is None:
            raise ValueError(f"the chat template is {fault}")
        try:
            return template.render({**variables, "messages": messages})
        except TemplateRefusal as error:
            raise ValueError(f"the chat template refused the messages: {_in_one_line(error)}") from error
        except _TEMPLATE_FAILURES as error:
            where = _where(error)
            raise ValueError(f"the chat template failed on the messages{where}: {_in_one_line(error)}") from error

    def _render_final_message(self, messages: list[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Cut at a mark that was put at the end of the text. The text itself may stand elsewhere in the rendering."""
        mark = f"{secrets.randbelow(10**40):040}"  # digits survive what filters do to text
        text, marked = _with_mark(messages[-1], mark)
        head, found, tail = self._render([*messages[:-1], marked], variables).rpartition(mark)
        if not found:
            raise ValueError("continue_final_message: the chat template does not show the last message as it is")
        head = head.replace(mark, "")  # of a template that shows it several times
        if text == text.rstrip():
            return head
        # before the mark blanks are safe; what the template takes away of them shows where there is no mark
        try:
            plain = self._render(messages, variables)
        except ValueError:  # of a template that refuses a blank message
            return head
        trimmed = plain.removesuffix(tail)
        is_all_but_blanks = plain.endswith(tail) and "".join(trimmed.split()) == "".join(head.split())
        return trimmed if is_all_but_blanks else head


def _in_one_line(reason: Exception | str | None) -> str:
    said = " ".join(str(reason or "").split())
    return textwrap.shorten(said, _MAX_REASON, placeholder=" ...") or type(reason).__name__


def _where(error: Exception) -> str:
    """The line of the template at which it failed, where Jinja knows."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == _TEMPLATE_FILE]
    return f" at line {lines[-1]}" if lines else ""


def _with_mark(message: Mapping[str, Any], mark: str) -> tuple[str, dict[str, Any]]:
    """The text that a message ends in, and the message with the mark after it. Of content in parts, the last text."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + mark}
    parts = list(content) if isinstance(content, (list, tuple)) else []
    for index, part in reversed(list(enumerate(parts))):
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            parts[index] = {**part, "text": text + mark} if isinstance(part, Mapping) else text + mark
            return text, {**message, "content": parts}
    raise ValueError(f"continue_final_message needs text in the last message, got {content!r:.100}")
