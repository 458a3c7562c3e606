"""How an api picks among the implementations of its op."""

from collections.abc import Callable, Mapping

import jax


def call_implementation(
    implementations: Mapping[str, Callable], default: Mapping[str, tuple[str, ...]], name: str | None, *args, **kwargs
):
    """Calls the implementation called `name` or, for None, the first in the backend's default order that can.

    `default` maps a backend ("cpu", "gpu", "tpu") to names, best first; "" stands for the backends not named.
    Raises `ValueError` for an unknown name, `NotImplementedError` where the named one, or every default, cannot.
    """
    if name is not None:
        if name not in implementations:
            raise ValueError(f"implementation must be one of {', '.join(implementations)}, got {name!r}")
        return implementations[name](*args, **kwargs)
    reasons = []
    for candidate in default.get(jax.default_backend(), default[""]):
        try:
            return implementations[candidate](*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{candidate}: {error}")
    raise NotImplementedError("; ".join(reasons))
