"""NgramIndex: where the last few tokens of a sequence came before, and so what may come next (prompt lookup)."""


class NgramIndex:
    """The n-grams of one sequence's tokens, min_length to max_length long, each with the place where it came last.

    It is kept up to date as the tokens grow, and so a look-up costs the same however many there are. Between two calls
    tokens may be appended and nothing else.
    """

    __slots__ = ("_last", "_num_indexed")

    def __init__(self, min_length: int, max_length: int):
        # n-gram -> the index after it; the longest first
        self._last: dict[int, dict[tuple, int]] = {n: {} for n in range(max_length, min_length - 1, -1)}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The num_tokens tokens that followed the longest n-gram which also ends token_ids, where it came last; none
        where there is no such n-gram.

        Where they run into the end they go on with themselves: what has begun to repeat goes on repeating.
        """
        self._extend(token_ids)
        for n, last in self._last.items():
            place = last.get(tuple(token_ids[-n:]))
            if place is not None:
                followed = token_ids[place : place + num_tokens]
                period = len(token_ids) - place
                return [followed[i % period] for i in range(num_tokens)]
        return []

    def _extend(self, token_ids: list[int]) -> None:
        """Takes in the n-grams that have a token after them by now."""
        num_indexed, self._num_indexed = self._num_indexed, len(token_ids) - 1
        for n, last in self._last.items():
            for end in range(max(num_indexed + 1, n), len(token_ids)):
                last[tuple(token_ids[end - n : end])] = end
