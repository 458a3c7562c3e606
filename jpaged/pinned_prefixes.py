"""PinnedPrefixes: prompts that an operator keeps in the prefix cache for good."""

import logging
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from jpaged.block_table import BlockTable
from jpaged.kv_cache_manager import KVCacheManager
from jpaged.outputs import TokenDelta
from jpaged.prefix_cache import BlockHash, hash_block, root_hash
from jpaged.sampling_params import SamplingParams
from jpaged.sequence import Sequence

logger = logging.getLogger(__name__)

PARAMS = SamplingParams(temperature=0, max_tokens=1)


class PinnedPrefixes:
    """Each is computed once, as a request of one token that nobody hears of; then its blocks are owned for good.

    promised_len: the context length that the operator has asked for, for which there must always be room. None for as
    many tokens as fit beside the prefixes.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        add_request: Callable[[str, list[int], SamplingParams], object],
        *,
        promised_len: int | None = None,
    ):
        self.kv, self._promised_len = kv, promised_len
        self._add_request = add_request
        self._numbers = count()
        self.prefixes: dict[str, list[int]] = {}  # by request id
        self._held: dict[str, set[tuple[int, BlockHash]]] = {}  # likewise: (group, content) of their blocks
        self.computing: set[str] = set()
        self._tables: dict[str, BlockTable] = {}  # of those being computed whose last token is in a step in flight

    @property
    def num_blocks(self) -> int:
        """Blocks that the prefixes take, those still to be computed included."""
        return len(set().union(*self._held.values()))

    def add(self, token_ids: list[int], sequences: Iterable[Sequence]) -> None:
        """Queues a prefix. Raises ValueError where it leaves no room for a request of the promised length, or else for one
        that goes on from the longest prefix, or for those of sequences, which have been taken."""
        kv, spec = self.kv, self.kv.spec
        if not kv.enable_prefix_caching:
            raise ValueError("pin_prefix needs enable_prefix_caching")
        if list(token_ids) in self.prefixes.values():
            return
        num_blocks, hashes = len(token_ids) // spec.block_size, []
        kv.prefix_cache.extend_hashes(hashes, token_ids, num_blocks)
        if tail := token_ids[num_blocks * spec.block_size :]:
            hashes.append(hash_block(hashes[-1] if hashes else root_hash(), tail))
        seen_from = spec.seen_from(num_blocks * spec.block_size)
        held = {(group, h) for group, first in enumerate(seen_from) for h in hashes[first:]}
        total, limit, needs = len(held.union(*self._held.values())), spec.num_usable_blocks, {}
        if self._promised_len is not None:
            needs[f"a request of max_model_len ({self._promised_len})"] = spec.num_blocks_for(self._promised_len)
        else:
            longest = 1 + max(map(len, [token_ids, *self.prefixes.values()]))
            needs[f"a request of {longest} tokens, which goes on from a pinned prefix,"] = spec.num_blocks_for(longest)
        for seq in sequences:
            num_samples = 1 if seq.group is None else len(seq.group.unfinished)
            samples = seq.num_prompt_tokens, max(seq.max_tokens, 1), num_samples
            needs[f"request {seq.request_id}"] = spec.num_blocks_for_samples(*samples)
        who = max(needs, key=needs.get)
        if total + needs[who] > limit:
            raise ValueError(
                f"pin_prefix needs {total} blocks in all, which leaves {limit - total} of the KV pool's {limit}; "
                f"{who} needs {needs[who]}: raise kv_cache_memory_bytes or lower max_model_len"
            )
        request_id = f"pinned prefix {next(self._numbers)}"
        self.prefixes[request_id], self._held[request_id] = list(token_ids), held
        try:
            self._queue(request_id, token_ids)
        except BaseException:
            self.give_up(request_id)
            raise

    def hold(self, sampled: Iterable[Sequence]) -> None:
        """Keeps the partly filled last blocks of prefixes whose last tokens a step was just planned to compute."""
        for seq in sampled:
            if seq.request_id in self.computing:
                self._tables[seq.request_id] = self.kv.pinned.hold_tail(seq)

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Pins what a step has completed; returns the deltas that are for others. To be called before the next step is
        planned, which might take the blocks. One that failed may be pinned again."""
        others = []
        for delta in deltas:
            if delta.request_id not in self.computing:
                others.append(delta)
            elif delta.finish_reason is not None:
                self._end(delta.request_id, delta.error)
        return others

    def _end(self, request_id: str, error: str | None) -> None:
        if error is not None:
            self.give_up(request_id)
            logger.error("%s could not be computed: %s", request_id, error)
            return
        self.computing.remove(request_id)
        self.kv.pinned.pin(self._tables.pop(request_id), self.prefixes[request_id])

    def give_up(self, request_id: str) -> None:
        """Forgets a prefix that is not pinned yet."""
        self.computing.discard(request_id)
        if (table := self._tables.pop(request_id, None)) is not None:
            self.kv.pinned.unpin(table)
        del self.prefixes[request_id], self._held[request_id]

    def let_go(self) -> None:
        """Of those being computed whose step is dropped: they are computed again."""
        for table in self._tables.values():
            self.kv.pinned.unpin(table)
        self._tables.clear()

    def start_over(self, kv: KVCacheManager) -> None:
        """None is pinned or being computed: kv knows of nothing. `recompute` follows."""
        self.kv = kv
        self.computing.clear()
        self._tables.clear()

    def recompute(self) -> None:
        """After the pool's content was lost."""
        self._tables.clear()
        for request_id, token_ids in self.prefixes.items():
            if request_id not in self.computing:
                self._queue(request_id, token_ids)

    def _queue(self, request_id: str, token_ids: list[int]) -> None:
        self.computing.add(request_id)
        self._add_request(request_id, token_ids, PARAMS)


def read_prefix(path: str, encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens of a text file, as of a prompt. Raises OSError, or ValueError that names the file."""
    try:
        return encode(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"pin_prefix: {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
