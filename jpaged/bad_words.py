"""From words that must not be said to the token sequences that say them."""

from collections.abc import Iterable

from jpaged.sampling_params import MAX_BAD_WORD_TOKENS
from jpaged.tokenizer import Tokenizer


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it begins a text, and as it follows a space where that is not caught by the former. Spaces before a word
    are left out; line breaks are part of it.

    Raises ValueError for a word of too many tokens, or of none.
    """
    sequences = []
    for word in words:
        word = word.lstrip(" ") or word
        bare, spaced = (tokenizer.encode(space + word, add_special_tokens=False) for space in ("", " "))
        for token_ids in [bare] if spaced[-len(bare) :] == bare else [bare, spaced]:
            if not 0 < len(token_ids) <= MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words holds {word!r}, which has {len(token_ids)} tokens; it must be 1 to "
                    f"{MAX_BAD_WORD_TOKENS}"
                )
            sequences.append(token_ids)
    return sequences
