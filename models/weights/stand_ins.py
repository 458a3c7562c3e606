"""Stand-ins: what lies in a file's place when the file itself was never fetched."""

import re
from pathlib import Path

_LFS = b"version https://git-lfs.github.com/spec/v1"
_PAGES = (b"<!doctype html", b"<html", b"<?xml", b"<error>")
_NUM_BYTES = 2048  # of a file's beginning: a pointer has 130, a page has its title early


def refuse_stand_in(path: Path, *, is_binary: bool = False) -> None:
    """Raises ValueError, one line, for a file that is there and is a Git LFS pointer, a web page or empty.

    is_binary: it is to hold weights, so any text is refused. Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_NUM_BYTES)
    if not head:
        raise ValueError(f"{path}: the file is empty: fetch it again")
    if head.startswith(_LFS):
        size = re.search(rb"^size (\d+)$", head, re.MULTILINE)
        of_what = f"a file of {_in_words(int(size[1]))}" if size else "a file"
        raise ValueError(
            f"{path}: a Git LFS pointer to {of_what}, not the file itself: run `git lfs pull` in its folder"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        title = re.search(rb"<title[^>]*>(.*?)</title>|<message>(.*?)</message>", head, re.DOTALL | re.IGNORECASE)
        said = f" ({_one_line(title[1] or title[2] or b'')!r})" if title else ""
        raise ValueError(f"{path}: a web page{said}, not the file itself: what was downloaded is a server's answer")
    if is_binary and _is_text(head):
        raise ValueError(f"{path}: text, not weights: it begins with {_one_line(head)[:60]!r}")


def read_text(path: Path) -> str:
    """A text file of a model. Raises ValueError, one line that names it, for a stand-in and for what is not UTF-8."""
    refuse_stand_in(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def _is_text(head: bytes) -> bool:
    """Weights begin with a length or a version, which have bytes of zero."""
    try:
        return head.decode("utf-8").replace("\n", " ").replace("\r", " ").replace("\t", " ").isprintable()
    except UnicodeDecodeError:
        return False


def _one_line(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())


def _in_words(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
