"""Log-probs in OpenAI's two shapes."""

from collections.abc import Sequence
from itertools import accumulate

from jpaged.outputs import Logprob, TokenLogprobs

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


def completion_logprobs(
    positions: Sequence[TokenLogprobs], num_top: int, text_offset: int, first_token: str | None = None
) -> dict:
    """Columns over the positions; the chosen token is in top_logprobs even where it is not among the num_top best.

    text_offset: characters of the tokens before these. first_token: of an echoed prompt, which has no log-prob.
    """
    first = [] if first_token is None else [first_token]
    none = [None] * len(first)
    chosen = [_chosen(position) for position in positions]
    tokens = first + [logprob.decoded_token for logprob in chosen]
    return {
        "tokens": tokens,
        "token_logprobs": none + [_number(logprob) for logprob in chosen],
        "top_logprobs": none + [_by_text(position, num_top) for position in positions],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=text_offset)) if tokens else [],
    }


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> list[dict | None]:
    """vLLM's shape: token id -> entry at each position of the prompt; None for the first."""
    return [
        None if position is None else {
            str(token_id): {"logprob": _number(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in position.items()
        }
        for position in positions
    ]  # fmt: skip


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int) -> dict:
    """One object a position, its top_logprobs exactly the num_top best."""
    content = [
        _entry(_chosen(position))
        | {"top_logprobs": [_entry(best) for best in _ranked(position) if best.rank <= num_top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chosen(position: TokenLogprobs) -> Logprob:
    return next(iter(position.values()))


def _ranked(position: TokenLogprobs) -> list[Logprob]:
    return sorted(position.values(), key=lambda logprob: logprob.rank)


def _by_text(position: TokenLogprobs, num_top: int) -> dict[str, float]:
    chosen = _chosen(position)
    result: dict[str, float] = {}
    for logprob in _ranked(position):
        if logprob.rank <= num_top or logprob is chosen:
            result.setdefault(logprob.decoded_token, _number(logprob))  # of two with one text, the likelier
    return result


def _entry(logprob: Logprob) -> dict:
    text = logprob.decoded_token
    # a piece of a character decodes to the replacement character: its bytes are not known here
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": _number(logprob),
        "bytes": list(text.encode("utf-8", "replace")) if known else None,
    }


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
