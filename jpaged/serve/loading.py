"""EngineLoader: the engine comes up in a thread while HTTP already answers."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jpaged
from jpaged.serve.errors import ApiError


class EngineLoader:
    """Calls `load` at once, in a thread of its own. `future` ends with the engine, or with what went wrong."""

    def __init__(self, load: Callable[[], "jpaged.AsyncLLM"]):
        self.future: Future[jpaged.AsyncLLM] = ThreadPoolExecutor(1, "load").submit(load)

    def engine_or_none(self) -> "jpaged.AsyncLLM | None":
        is_loaded = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result() if is_loaded else None

    def engine(self) -> "jpaged.AsyncLLM":
        """Raises a 503 while the model loads."""
        engine = self.engine_or_none()
        if engine is None:
            raise ApiError(503, "the model is loading, try again in a moment", headers={"Retry-After": "5"})
        return engine
