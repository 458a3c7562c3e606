"""SpeculativeConfig: whether and how the engine guesses tokens ahead."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral

MAX_SPECULATIVE_TOKENS = 64
MAX_LOOKUP = 32


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Prompt lookup: what followed the last prompt_lookup_max to prompt_lookup_min tokens when they came before is a
    draft of at most num_speculative_tokens tokens.

    Raises ValueError that names the field, the value and the limit.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self):
        if self.method != "ngram":
            raise ValueError(f"speculative_config: method must be ngram, got {self.method!r}")
        limits = {
            "num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
            "prompt_lookup_min": MAX_LOOKUP,
            "prompt_lookup_max": MAX_LOOKUP,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"speculative_config: {name} must be an integer from 1 to {most}, got {value!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) must not be over prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )

    @classmethod
    def of(cls, given: object) -> "SpeculativeConfig":
        """From a mapping of field names, or the JSON text of one. Raises ValueError."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"speculative_config is not JSON: {error}") from None
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config must be a JSON object, got {given!r}")
        names = [f.name for f in fields(cls)]
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise ValueError(f"speculative_config has no field {unknown!r}; it has {', '.join(names)}")
        return cls(**given)
