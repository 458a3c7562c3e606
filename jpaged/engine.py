"""LLMEngine: requests in, deltas of text out, one step at a time."""

from jpaged import debug
from jpaged.config import EngineConfig
from jpaged.engine_core import EngineCore
from jpaged.levels import Levels
from jpaged.metrics import EngineMetrics
from jpaged.model_files import warn_of_chat_template
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import OutputDelta, RequestMetrics, TokenDelta
from jpaged.sampling_params import SamplingParams


class LLMEngine(EngineCore):
    """An EngineCore whose tokens become text at once, in the thread that steps it."""

    def __init__(self, config: EngineConfig):
        self._readers: dict[str, OutputProcessor] = {}
        super().__init__(config, EngineMetrics.of(config))
        warn_of_chat_template(self.tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
    ) -> RequestMetrics:
        """As EngineCore's. Returns the request's times, which are filled in as they come."""
        super().add_request(request_id, prompt_token_ids, params)
        try:
            reader = OutputProcessor(
                request_id, len(prompt_token_ids), params, self.tokenizer, self.metrics,
                lambda index: self._stop(request_id, index), arrival_time,
            )  # fmt: skip
            self._readers[request_id] = reader
        except BaseException:
            super().abort(request_id)
            raise
        return reader.times

    def abort(self, request_id: str) -> list[OutputDelta]:
        try:
            return self.read(super().abort(request_id))
        finally:
            self._readers.pop(request_id, None)

    def _step(self) -> list[OutputDelta]:
        return self.read(super()._step())

    def give_up(self, request_id: str) -> None:
        self._readers.pop(request_id, None)
        super().give_up(request_id)

    def read(self, deltas: list[TokenDelta]) -> list[OutputDelta]:
        """Makes text of what a step has given out."""
        outputs = []
        for delta in deltas:
            if (reader := self._readers.get(delta.request_id)) is None:
                continue  # its other samples have come to stop strings, and this one's end is surplus
            outputs += reader.process(delta)
            if reader.is_finished:
                del self._readers[delta.request_id]
        return outputs

    def stats(self) -> dict[str, float]:
        """What is in the engine now, sequences and the blocks that they hold and share, of each attention group where
        there are several; and what came of all drafts."""
        groups = debug.num_blocks_of_groups(self.scheduler) if self.kv.num_groups > 1 else []
        return {
            **Levels.of(self.scheduler)._asdict(),
            **{f"num_blocks_of_group_{group}": count for group, count in enumerate(groups)},
            "spec_decode_num_draft_tokens": self.metrics.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.metrics.num_accepted_tokens,
        }
