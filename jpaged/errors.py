"""Errors that callers of the engine tell apart from a bad request."""


class QueueFullError(Exception):
    """The queue has reached max_num_queued_requests; the caller may try later."""


class KernelCheckFailed(Exception):
    """`--check-kernels` has found a wrong kernel or block id. The engine stops: to go on would hide it."""


class ContextLengthError(ValueError):
    """A request that does not fit in the context. Clients recognise it by its name, trim their prompt and try again."""


NOT_FINITE, NOTHING_ALLOWED, NOT_PROCESSED = -1, -2, -3
TOKEN_ERRORS = {
    NOT_FINITE: "the model's logits are not finite numbers",
    NOTHING_ALLOWED: "no token is left to sample: what the request allows, bans and biases excludes all of them",
    NOT_PROCESSED: "a logits processor failed",
}
"""What the sampler says in place of a token id, and what it means. It ends that request alone."""
