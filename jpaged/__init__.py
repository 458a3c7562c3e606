"""jpaged: an LLM inference engine in JAX, with PagedAttention and continuous batching.

from jpaged import LLM, SamplingParams
LLM().chat([{"role": "user", "content": "What is the capital of France?"}])
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "LLM": "jpaged.llm",
    "AsyncLLM": "jpaged.async_llm",
    "EngineConfig": "jpaged.config",
    "SamplingParams": "jpaged.sampling_params",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    """Imports on first use: `import jpaged` loads no jax."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
