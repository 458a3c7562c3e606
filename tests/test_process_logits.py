"""Logits processors: whatever one does or returns, it fails with one line, which its request alone ends with."""

import numpy as np
import pytest

from jpaged.logits_processors import LogitsProcessorFailed, process_logits


class NoArray:
    """As torch's tensors that want a gradient, and jax's arrays that are deleted."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on this")


class NoMessage(Exception):
    def __str__(self):
        raise RuntimeError("no message either")


def raises(error: Exception):
    def processor(ids, row):
        raise error

    return processor


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        (lambda ids, row: NoArray(), "returned NoArray, which is no array of numbers"),
        (lambda ids, row: [10**400] * 3, "returned list, which is no array of numbers"),
        (lambda ids, row: None, "returned an array of shape (); it must be (3,)"),
        (raises(KeyError("a\nb")), r"raised KeyError: 'a\nb'"),
        (raises(ValueError("a\nb")), "raised ValueError: a"),
        (raises(ValueError()), "raised ValueError"),
        (raises(NoMessage()), f"raised {__name__}.NoMessage: <exception str() failed>"),
    ],
)
def test_a_failure_is_one_line(processor, says):
    with pytest.raises(LogitsProcessorFailed) as failure:
        process_logits([lambda ids, row: row, processor], [], np.zeros(3, np.float32))
    assert str(failure.value) == f"logits_processors[1] {says}"
