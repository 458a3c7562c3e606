"""CompletionClient and ChatClient: stream answers of an OpenAI-compatible server and note when their tokens come."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jpaged.bench.http import HttpClient, ProtocolError, error_message
from jpaged.bench.outcomes import Outcome
from jpaged.bench.workloads import BenchRequest

POLL_SECONDS = 0.2
DONE = b"[DONE]"


class CompletionClient:
    """fields: what every request's body has beside the prompt and its length; None leaves a field out."""

    WHAT = "token"

    def __init__(self, http: HttpClient, endpoint: str, fields: Mapping[str, object], timeout: float):
        self._http = http
        self._endpoint = endpoint
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._timeout = timeout

    def body(self, request: BenchRequest) -> bytes:
        """Made before the clock runs: encoding a long prompt takes a while."""
        fields = self.prompt_fields(request) | self._fields
        return json.dumps(fields, separators=(",", ":")).encode()

    def prompt_fields(self, request: BenchRequest) -> dict[str, Any]:
        return {"prompt": request.prompt, "max_tokens": request.output_len}

    def num_tokens(self, choice: Mapping[str, Any]) -> int:
        """How many came with a chunk's choice. A server that gives no ids sends a chunk a token, if it holds text."""
        token_ids = choice.get("token_ids")
        return len(token_ids) if token_ids is not None else 1 if choice.get("text") else 0

    async def complete(self, body: bytes, outcome: Outcome, clock: Callable[[], float]) -> None:
        """Sends a body and fills in what came of it. A request that fails is an outcome, no exception."""
        outcome.sent = clock()
        try:
            async with asyncio.timeout(self._timeout), self._http.request("POST", self._endpoint, body) as response:
                if response.status == 200:
                    await self._follow(response.body, outcome, clock)
                else:
                    outcome.error = await response.error()
        except TimeoutError as error:
            outcome.error = str(error) or f"no end after {self._timeout:g} s"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # the last: JSON of another form
            outcome.error = " ".join((str(error) or type(error).__name__).split())

    async def _follow(self, chunks, outcome: Outcome, clock: Callable[[], float]) -> None:
        lines = _DataLines()
        num_counted = None
        is_done = False
        async for chunk in chunks:
            now = clock()
            for data in lines.feed(chunk):
                if data == DONE:
                    is_done = True
                    continue
                answer = json.loads(data)
                if "error" in answer:
                    raise ProtocolError(error_message(answer))
                num_counted = (answer.get("usage") or {}).get("completion_tokens", num_counted)
                for choice in answer.get("choices") or ():
                    if num_tokens := self.num_tokens(choice):
                        outcome.token_times.append(now)
                        outcome.num_output_tokens += num_tokens
                    if choice.get("finish_reason") is not None:
                        outcome.ended = now
        if not is_done:
            raise ProtocolError("the stream ended before [DONE]")
        if not outcome.token_times:
            raise ProtocolError(f"no {self.WHAT} came")
        outcome.num_output_tokens = num_counted or outcome.num_output_tokens


class ChatClient(CompletionClient):
    """Chats of one message. Nothing counts as a token but text and reasoning: a delta with a role alone does not."""

    WHAT = "text"

    def prompt_fields(self, request: BenchRequest) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.text}]
        return {"messages": messages, "max_completion_tokens": request.output_len}

    def num_tokens(self, choice: Mapping[str, Any]) -> int:
        delta = choice.get("delta") or {}
        return 1 if any(delta.get(field) for field in ("content", "reasoning_content", "reasoning")) else 0


class _DataLines:
    """Cuts a byte stream into the data of its server-sent events, each of which is one line here."""

    def __init__(self):
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return (line[5:].strip() for line in lines if line.startswith(b"data:"))


async def wait_until_ready(http: HttpClient, timeout: float, tell: Callable[[str], None]) -> None:
    """Returns when the server has nothing left to load or compile; at once from one that has no /ready.

    tell: is given what there is to wait for, once a kind. Raises OSError where nobody listens, RuntimeError where it
    takes too long.
    """
    told: str | None = ""
    try:
        async with asyncio.timeout(timeout):
            while True:
                status, answer = await http.get_json("/ready")
                if status != 503:
                    return
                state, reason = answer.get("status"), answer.get("reason", "it does not say why")
                if state == "dead":
                    raise RuntimeError(f"the server cannot go on: {reason}")
                if state != told:
                    tell(f"the server is not ready yet: {reason}")
                    told = state
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise RuntimeError(f"the server is not ready after {timeout:g} s") from None


async def served_model(http: HttpClient, name: str | None) -> tuple[str, str]:
    """(name, where the server has it from) of a model, the first that the server lists where no name is given.

    Where the server does not tell, it is taken to have it from its name. Raises RuntimeError where it lists none.
    """
    status, answer = await http.get_json("/v1/models")
    models = answer.get("data") or []
    if name is None and (status != 200 or not models):
        raise RuntimeError(f"{http.base_url}/v1/models names no model (HTTP {status}): give one with --model")
    name = name or models[0]["id"]
    root = next((model.get("root") for model in models if model.get("id") == name), None)
    return name, root or name
