"""What a process said last of why it ended, read from its log."""

import re
from pathlib import Path

END_BYTES = 1 << 16  # logs of an installation are long
# As Python, pip and compilers begin the line that names what is wrong; vLLM puts its process before it.
NAMES_AN_ERROR = re.compile(r"(\(.*?\) )?([\w.]*(Error|Exception|Interrupt|Exit)\b|(?i:error|fatal)\b.*?:)")


def last_line(log: Path) -> str:
    """The last line that is not blank; "nothing in its log" where there is none."""
    return next(reversed(_lines(log)), "nothing in its log")


def last_error(log: Path) -> str:
    """The last line that names an error, since warnings and hints may follow it; the last line where none does."""
    return next(filter(NAMES_AN_ERROR.match, reversed(_lines(log))), None) or last_line(log)


def _lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - END_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
