"""How an api picks among the implementations of its op."""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .layout import Form

logger = logging.getLogger(__name__)


def call_implementation(
    implementations: Mapping[str, Callable], default: Mapping[Form, tuple[str, ...]], name: str | None, form: Form,
    *args, **kwargs,
):  # fmt: skip
    """Calls the implementation called `name` or, for None, the first of `default[form]` (best first) that can.

    The pool's form says which chip a program is for, whatever chip compiles it. A default that cannot is passed over
    with one log line a reason. Raises `ValueError` for an unknown name, `NotImplementedError` where the named one, or
    every default, cannot.
    """
    if name is not None:
        if name not in implementations:
            raise ValueError(f"implementation must be one of {', '.join(implementations)}, got {name!r}")
        return implementations[name](*args, **kwargs)
    reasons = []
    for candidate in default[form]:
        try:
            return implementations[candidate](*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{candidate}: {error}")
            _log_once(f"{candidate} cannot ({error}); the next implementation takes its place")
    raise NotImplementedError("; ".join(reasons))


@dataclass(frozen=True)
class lazily:
    """Function `name` of a module of this package that is imported at the first call.

    The compilers' front ends for other chips take more than a second to import, which a start on CPU need not pay.
    """

    module: str
    name: str

    def __call__(self, *args, **kwargs):
        return loaded(self)(*args, **kwargs)


def loaded(implementation: Callable) -> Callable:
    """The function itself, whether or not it is written down as `lazily`."""
    if isinstance(implementation, lazily):
        return getattr(importlib.import_module(implementation.module, __package__), implementation.name)
    return implementation


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)
