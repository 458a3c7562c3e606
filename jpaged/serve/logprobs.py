"""Log-probs in OpenAI's two shapes."""

from collections.abc import Sequence

from jpaged.outputs import Logprob, TokenLogprobs

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks


def completion_logprobs(
    positions: Sequence[TokenLogprobs], num_top: int, text_offsets: Sequence[int], first_token: str | None = None
) -> dict:
    """Columns over the positions; the chosen token is in top_logprobs even where it is not among the num_top best.

    text_offsets: of all tokens. first_token: of an echoed prompt, which has no log-prob.
    """
    first = [] if first_token is None else [first_token]
    none = [None] * len(first)
    chosen = [_chosen(position) for position in positions]
    return {
        "tokens": first + [logprob.decoded_token for logprob in chosen],
        "token_logprobs": none + [_number(logprob) for logprob in chosen],
        "top_logprobs": none + [_by_name(position, num_top) for position in positions],
        "text_offset": list(text_offsets),
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
        | {"top_logprobs": [_entry(best) for _, best in _ranked(position) if best.rank <= num_top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chosen(position: TokenLogprobs) -> Logprob:
    return next(iter(position.values()))


def _ranked(position: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: item[1].rank)


def _by_name(position: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The best and the chosen one, each under a name of its own: two tokens of one text differ in how they are spelt in
    the vocabulary, and the one that is not chosen, or less likely, is named by its id."""
    chosen = _chosen(position)
    result: dict[str, float] = {}
    for token_id, logprob in _ranked(position):
        if logprob.rank <= num_top or logprob is chosen:
            name = logprob.decoded_token
            if name in result or (name == chosen.decoded_token and logprob is not chosen):
                name = f"token_id:{token_id}"
            result[name] = _number(logprob)
    return result


def _entry(logprob: Logprob) -> dict:
    return {"token": logprob.decoded_token, "logprob": _number(logprob), "bytes": list(logprob.token_bytes)}


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
