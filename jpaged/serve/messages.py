"""Message: one turn of a chat, as clients send it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from jpaged.serve.errors import bad_request, shown
from jpaged.serve.unsupported import MESSAGE, refuse_unsupported


class Message(BaseModel):
    """One turn. The content may come in parts, of which only text is known."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None

    def for_template(self, where: str) -> dict[str, str]:
        refuse_unsupported(self.model_extra, MESSAGE, where)
        content = self.content
        if content is None and self.role == "assistant":  # as agents send it beside tool calls
            content = ""
        if content is None:
            raise bad_request(f"{where}.content is required", "messages")
        parts = [content] if isinstance(content, str) else [
            _text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        ]  # fmt: skip
        message = {"role": self.role, "content": "\n".join(parts)}  # vLLM joins parts by a line break too
        return message if self.name is None else message | {"name": self.name}


def _text_of(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise bad_request(f"{where}.type {shown(kind)} is not supported, only 'text' is", "messages")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text must be a string, got {shown(text)}", "messages")
    refuse_unsupported({name: value for name, value in part.items() if name not in ("type", "text")}, {}, where)
    return text
