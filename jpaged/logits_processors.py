"""Logits processors: a user's own functions between the model and the sampler."""

from collections.abc import Callable, Sequence
from traceback import format_exception_only

import numpy as np

from jpaged.interrupts import interrupts_let_through

LogitsProcessor = Callable[[list[int], np.ndarray], np.ndarray]
"""(the output's token ids, logits float32[V], which it may change) -> logits[V]; minus infinity bans a token."""


class LogitsProcessorFailed(Exception):
    """One raised, or returned what is no row of logits. Its request ends with this message."""


def process_logits(
    processors: Sequence[LogitsProcessor], output_token_ids: list[int], logits: np.ndarray
) -> np.ndarray:
    """Logits after all processors, in order. Raises LogitsProcessorFailed, one line; an interrupt may end it, too."""
    shape = logits.shape
    for index, processor in enumerate(processors):
        name = f"logits_processors[{index}]"
        try:
            with interrupts_let_through():  # it may run for long
                logits = processor(list(output_token_ids), np.array(logits, np.float32))
        except Exception as error:  # a user's code: whatever it says, its request alone must fail
            what = format_exception_only(error)[0].splitlines()[0]  # str(error) may itself raise
            raise LogitsProcessorFailed(f"{name} raised {what}") from error
        try:
            logits = np.asarray(logits, np.float32)
        except Exception:  # of its type's own conversion, again a user's code
            raise LogitsProcessorFailed(
                f"{name} returned {type(logits).__name__}, which is no array of numbers"
            ) from None
        if logits.shape != shape:
            raise LogitsProcessorFailed(f"{name} returned an array of shape {logits.shape}; it must be {shape}")
        wrong = np.isnan(logits) | (logits == np.inf)
        if wrong.any():
            token = int(np.argmax(wrong))
            raise LogitsProcessorFailed(
                f"{name} returned {logits[token]} for token {token}; logits must be under infinity"
            )
    return logits
