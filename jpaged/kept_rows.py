"""Rows whose logits the host has kept back, to process them before their tokens are chosen."""

from jpaged.errors import NOT_PROCESSED
from jpaged.logits_processors import LogitsProcessorFailed, process_logits
from jpaged.model_runner import ModelRunner, StepResult
from jpaged.scheduler_output import SchedulerOutput
from jpaged.steps_in_flight import StepFailed


def finish_kept_rows(runner: ModelRunner, plan: SchedulerOutput, result: StepResult) -> None:
    """Runs their processors and puts the tokens that come of them in the step's result.

    A processor that fails gives its sequence an error. Raises StepFailed where the devices fail.
    """
    if not result.kept_logits:
        return
    rows = [(row, seq) for row, seq in zip(plan.first_rows, plan.sampled) if seq.params.logits_processors]
    for (row, seq), logits in zip(rows, result.kept_logits, strict=True):
        if seq.is_finished or result.token_ids[row][0] < 0:  # aborted, or there is nothing to process
            continue
        try:
            processed = process_logits(seq.params.logits_processors, seq.output_token_ids, logits)
        except LogitsProcessorFailed as failure:
            seq.error = str(failure)
            result.token_ids[row] = [NOT_PROCESSED]
            continue
        try:
            sampled = runner.choose_token(seq.row, seq.num_tokens, processed)
        except Exception as error:  # as where a step is read
            raise StepFailed(plan, error) from error
        result.token_ids[row] = sampled.token_ids.tolist()
        if result.logprobs is not None:
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
                getattr(result.logprobs, name)[row] = getattr(sampled, name)[0]
