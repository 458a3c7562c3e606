"""Sequence: one request's tokens and where their KV is."""

from bisect import bisect
from collections.abc import MutableSequence
from copy import copy
from enum import Enum, auto

from jpaged.block_table import BlockTable
from jpaged.drafter import Drafter
from jpaged.prefix_cache import BlockHash
from jpaged.sampling_params import SamplingParams
from jpaged.swap_space import SwappedOut


class SequenceStatus(Enum):
    WAITING = auto()  # holds no block of the pool and no row
    RUNNING = auto()
    FINISHED = auto()


class FinishReason:
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """The tokens of a request, prompt first, and the state that the scheduler keeps of it.

    num_computed_tokens: tokens whose KV is in the pool, or will be when the steps in flight have run. num_pending:
    tokens after token_ids that a step in flight samples; only the device knows them yet. row: the sequence's place in
    the batch builder's arrays while it runs. edit_slot: its place in the device's `LogitsEdits` while it runs, 0 for
    none. index: which of its request's samples it is. group: the `SequenceGroup` of a request that has several. drafter:
    guesses its next tokens, where that is wanted. num_drafted: draft tokens that a step in flight verifies; until its
    result is there, nobody knows where the sequence goes on. sits_out: no step is planned with it before the host has
    seen its last token, as of every beam. seed: 64 bits that, with index and position, decide every draw. max_tokens:
    output tokens allowed, already cut to the context. bad_words: as token ids. num_prompt_logprobs: how many tokens of
    the prompt have their log-probs, the steps in flight included. error: why the engine gave it up. order: its place
    among all others, by priority and then arrival.
    """

    __slots__ = (
        "request_id", "index", "group", "params", "token_ids", "num_prompt_tokens", "num_computed_tokens",
        "num_cached_tokens", "num_pending", "num_prompt_logprobs", "block_table", "block_hashes", "status", "row",
        "edit_slot", "is_beam", "sits_out", "seed", "max_tokens", "stop_token_ids", "bad_words", "finish_reason",
        "stop_reason", "error", "order", "swapped", "drafter", "num_drafted",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_words: list[list[int]] | None = None,
        drafter: Drafter | None = None,
    ):
        self.request_id = request_id
        self.index = 0
        self.group = None
        self.is_beam = params.use_beam_search
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.num_prompt_logprobs = 0
        self.num_drafted = 0
        self.drafter = drafter
        self.num_cached_tokens: int | None = None  # prefix-cache hit at first admission
        self.block_table = BlockTable()
        self.block_hashes: list[BlockHash] = []  # of the full blocks of token_ids, as far as anyone asked
        self.status = SequenceStatus.WAITING
        self.row: int | None = None
        self.order = (0, 0)
        self.swapped: SwappedOut | None = None  # while it waits to be swapped in
        self.edit_slot = 0
        self.sits_out = self.is_beam or bool(params.logits_processors)
        self.seed = int(seed) % 2**64  # int: of numpy integers no 64 bits are left over for the modulus
        self.max_tokens = max_tokens
        eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = eos | frozenset(params.stop_token_ids)
        self.bad_words = bad_words or []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    @property
    def cache_keys(self) -> tuple[str, ...]:
        """What its KV must agree in with another's, beside the tokens, to be shared."""
        return () if self.params.cache_salt is None else (self.params.cache_salt,)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def length(self) -> int:
        """Tokens, the pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be sampled after the pending ones: one at least of every sequence."""
        return self.num_prompt_tokens + max(self.max_tokens, 1) - self.length

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether some positions of the prompt must still be computed for their log-probs."""
        return self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def fork(self, index: int) -> "Sequence":
        """Another sample of the same request, with the same tokens so far; it waits, and holds no blocks."""
        child = copy(self)
        child.index = index
        child.token_ids = list(self.token_ids)
        child.block_hashes = list(self.block_hashes)
        child.num_computed_tokens = child.num_pending = 0
        child.num_prompt_logprobs = child.num_prompt_tokens  # the first sample's are the request's
        child.num_drafted = 0
        child.drafter = None if self.drafter is None else Drafter(self.drafter.config)
        child.block_table, child.row, child.status = BlockTable(), None, SequenceStatus.WAITING
        return child

    def start_over(self) -> None:
        """Waits as at first, with the tokens that it has, whatever its state was. Whoever kept books of it has none now."""
        self.num_computed_tokens = self.num_pending = self.num_drafted = 0
        self.block_table, self.block_hashes, self.swapped = BlockTable(), [], None
        self.row, self.edit_slot, self.status = None, 0, SequenceStatus.WAITING

    def append(self, token_id: int) -> str | None:
        """Adds a sampled token; returns the finish reason that it causes, and sets stop_reason. With max_tokens 0 the token
        is not added: only the prompt is wanted."""
        if self.max_tokens == 0:
            return FinishReason.LENGTH
        self.token_ids.append(token_id)
        num_output = self.num_output_tokens
        if token_id in self.stop_token_ids and num_output >= self.params.min_tokens:
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= self.max_tokens else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.block_table.blocks)})"
        )


def insert_in_order(queue: MutableSequence[Sequence], seq: Sequence) -> None:
    if not queue or queue[-1].order < seq.order:
        queue.append(seq)
    else:
        queue.insert(bisect(queue, seq.order, key=lambda other: other.order), seq)
