"""Errors that callers of the engine tell apart from a bad request."""


class QueueFullError(Exception):
    """The queue has reached max_num_queued_requests; the caller may try later."""


class KernelCheckFailed(Exception):
    """`--check-kernels` has found a wrong kernel or block id. The engine stops: to go on would hide it."""
