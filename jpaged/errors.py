"""Errors that callers of the engine tell apart from a bad request."""


class QueueFullError(Exception):
    """The queue has reached max_num_queued_requests; the caller may try later."""
