"""The padded sizes that programs are compiled for."""

from bisect import bisect_left

from jpaged.config import MIN_TOKEN_BUCKET


def bucket_ladder(largest: int, smallest: int = MIN_TOKEN_BUCKET) -> list[int]:
    """2, 3, 4, 6, then 8, 10, 12, 16, 20, 24, 32 ... up to exactly largest.

    Chosen by scripts/choose_buckets.py: on a trace like ShareGPT's these pad 7 to 9 % of the computed tokens, whatever the
    rate of requests. Without the fives they pad 9 to 13 %, and a ladder as good in the middle alone pads 11 % where
    that is not where the steps are. Below 8 tokens a step's time hardly depends on them.
    """
    sizes, power = [], smallest
    while power < largest:
        sizes += (power, power * 5 // 4, power * 3 // 2) if power >= 8 else (power, power * 3 // 2)
        power *= 2
    return [*(size for size in sizes if size < largest), largest]


def round_up(size: int, ladder: list[int]) -> int:
    """The smallest bucket that holds size."""
    assert size <= ladder[-1], f"{size} is over the largest bucket, {ladder[-1]}"
    return ladder[bisect_left(ladder, size)]


class Buckets:
    """(T, R) of every program: padded tokens, and padded sampling rows.

    R is as large as T when every token is a decode or a draft, and one of a few coarse sizes when chunks of prompts
    ride along: a padded row of the head costs a fifth of a token of the body. The largest step, which comes again and
    again while there are prompts to compute, has one size more. max_num_rows says how many there are where
    drafts need more than one a sequence.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, token_buckets: tuple[int, ...] = (), max_num_rows: int = 0
    ):
        self.tokens = list(token_buckets) or bucket_ladder(max_num_batched_tokens)
        self.max_num_seqs = max_num_seqs
        self.max_rows = max(max_num_rows, max_num_seqs, MIN_TOKEN_BUCKET)

    def rows(self, num_tokens: int) -> list[int]:
        """The row buckets of the token bucket num_tokens."""
        largest = min(num_tokens, self.max_rows)
        without_drafts = min(largest, max(self.max_num_seqs, MIN_TOKEN_BUCKET))
        coarse = (32, 64, 128) if num_tokens == self.tokens[-1] else (32, 128)
        return sorted({*(r for r in coarse if 2 * r < largest), without_drafts, largest})

    def choose(self, num_tokens: int, num_rows: int, *, decodes_on: bool = False) -> tuple[int, int]:
        """The smallest program that holds a step; that with all rows where the device is to decode several times."""
        tokens = round_up(max(num_tokens, num_rows), self.tokens)  # samples of one token may be several rows
        return tokens, round_up(min(tokens, self.max_rows) if decodes_on else num_rows, self.rows(tokens))

    def all(self) -> list[tuple[int, int]]:
        """Every program, in the order in which they are worth having: pure decodes and full prompts first."""
        programs = [(t, r) for t in self.tokens for r in self.rows(t)]
        return sorted(programs, key=lambda p: (p[1] != min(p[0], self.max_rows) and p[0] != self.tokens[-1], p))
