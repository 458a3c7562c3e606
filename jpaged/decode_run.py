"""Several decodes in one step: how many of them a plan allows."""

from jpaged.kv_cache_manager import KVCacheManager
from jpaged.scheduler_output import SchedulerOutput


def num_decodes_in_a_row(plan: SchedulerOutput, kv: KVCacheManager, at_most: int) -> int:
    """How often the device may decode before the host is asked: more than once only where everyone decodes, every
    sequence is judged by its tokens alone, and there are blocks for all of it."""
    if plan.num_decodes < len(plan.num_scheduled_tokens):
        return 1
    most = min(at_most, max(seq.num_tokens_left for seq in plan.num_scheduled_tokens))
    for seq in plan.num_scheduled_tokens:
        if seq.params.stop or seq.params.needs_logprobs or seq.sits_out:
            return 1
        if kv.allocate_slots(seq, min(most, seq.num_tokens_left)) is None:
            return 1
    return most
