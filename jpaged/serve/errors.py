"""ApiError: an answer that says no, in OpenAI's envelope; and how a bad body becomes one line."""

import reprlib
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jpaged.errors import ContextLengthError
from jpaged.sampling_params import SamplingParams

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

EXPECTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
MAX_MESSAGE = 400  # characters: a template or a list of stop strings may quote everything it was given
_JSON_PROBLEMS = {  # where the parser's words would leave a reader guessing
    "invalid unicode code point": "invalid UTF-8",
    "unexpected end of hex escape": "a lone surrogate or an unfinished \\u escape",
    "lone leading surrogate in hex escape": "a lone surrogate in a \\u escape",
}

_short = reprlib.Repr(maxlevel=3, maxlist=8, maxdict=4, maxstring=80, maxlong=40, maxother=80)


class ApiError(Exception):
    """One line for the client with its status; param names the field at fault. code: the status, but where OpenAI has a
    name that clients test for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.code = code or status
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers

    def body(self) -> dict:
        kind = TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def context_length_exceeded(message: str, param: str | None) -> ApiError:
    """A prompt that does not fit. Agents recognise it, trim their history and try again."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


_FIELDS = frozenset(f.name for f in fields(SamplingParams)) | {"prompt"}


@contextmanager
def caller_errors(param: str | None = None) -> Iterator[None]:
    """A ValueError in here is the caller's fault: it becomes a 400.

    param names the field; without it the message's first word does, where it is one.
    """
    try:
        yield
    except ContextLengthError as error:
        raise context_length_exceeded(str(error), param) from error
    except ValueError as error:
        message = textwrap.shorten(str(error), MAX_MESSAGE, placeholder=" ...")
        first_word = message.split(" ", 1)[0]
        raise bad_request(message, param or (first_word if first_word in _FIELDS else None)) from error


def shown(value: object) -> str:
    """A value from a request, short enough for one line however large it is."""
    return _short.repr(value)


def from_validation(error: ValidationError) -> ApiError:
    """The one line that helps most: of a union's many complaints, those about the innermost value."""
    problems = error.errors(include_url=False)
    if problems[0]["type"] == "json_invalid":
        reason = problems[0]["ctx"]["error"]
        for theirs, ours in _JSON_PROBLEMS.items():
            reason = reason.replace(theirs, ours)
        return bad_request(f"the body is not valid JSON: {reason}")
    field = problems[0]["loc"][:1]
    rivals = [(_path(p["loc"]), p) for p in problems if p["loc"][:1] == field]
    path = max((path for path, _ in rivals), key=lambda path: (path.count("[") + path.count("."), path))
    finalists = [p for p_path, p in rivals if p_path == path]
    problem = finalists[0]
    param = str(field[0]) if field else None
    if problem["type"] == "missing":
        return bad_request(f"{path} is required", param)
    if problem["type"] == "value_error":
        return bad_request(str(problem["ctx"]["error"]), param)
    if problem["type"] == "model_type" and not path:
        return bad_request("the body must be a JSON object")
    expected = " or ".join(dict.fromkeys(_expected(p) for p in finalists))
    return bad_request(f"{path} must be {expected}, got {shown(problem['input'])}", param)


def _expected(problem: ErrorDetails) -> str:
    if problem["type"] == "literal_error":
        return problem["ctx"]["expected"]
    if problem["type"] == "string_too_short":
        return f"a string of at least {problem['ctx']['min_length']} characters"
    if problem["type"] == "string_too_long":
        return f"a string of at most {problem['ctx']['max_length']} characters"
    return EXPECTED.get(problem["type"], problem["msg"])


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for i, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif i == 0 or not (part == "str" or part.startswith("list[")):  # pydantic's names for members of a union
            path += f".{part}" if path else part
    return path
