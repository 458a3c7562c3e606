"""ResultsFile: a JSONL file of results that an interrupted run leaves whole, and a later run goes on with."""

import json
from pathlib import Path
from types import TracebackType


class ResultsFile:
    """One line a result, with its index and the settings that it was made with, written as soon as it is there.

    `results` holds what the file has by index. A last line that was cut off while it was written is removed. Raises
    ValueError, one line, for a file that is something else or was made with other settings; OSError where it cannot be
    written.
    """

    def __init__(self, path: Path, settings: dict):
        self._settings = json.loads(json.dumps(settings))  # as they will be read
        self.results: dict[int, dict] = {}
        self._file = path.open("a+", encoding="utf-8")
        try:
            self._read(path)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                result = json.loads(line)
                index, settings = result["index"], result["settings"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{path}, line {number}, is not a result of this script: give another --output"
                ) from None
            if settings != self._settings:
                raise ValueError(
                    f"{path} was made with other settings ({self._difference(settings)}): use those, or another --output"
                )
            self.results[index] = result
        if len(whole) < len(text):
            self._file.truncate(len(whole))

    def _difference(self, theirs: dict) -> str:
        ours = self._settings
        names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        return ", ".join(f"{name} {theirs.get(name)!r}, now {ours.get(name)!r}" for name in names)

    def add(self, index: int, result: dict) -> None:
        """Appends a result and hands it to the operating system."""
        line = {"index": index, **result, "settings": self._settings}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
        self.results[index] = line

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()
