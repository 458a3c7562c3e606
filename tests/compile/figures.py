"""figures.json: the compiler's estimates, kept so that a step that becomes slower is seen where no chip is.

`make test-compile ARGS='-n 0 --update-figures'` keeps those of today.
"""

import importlib.metadata
import json
from pathlib import Path

PATH = Path(__file__).parent / "figures.json"
TOLERANCE = 0.02


class Figures:
    """Estimated cycles by name, of one libtpu; another one's estimates cannot be compared."""

    def __init__(self, path: Path = PATH, *, update: bool = False):
        self.path, self.update = path, update
        self.libtpu = importlib.metadata.version("libtpu")
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.cycles: dict[str, int] = kept.get("cycles", {}) if kept.get("libtpu") == self.libtpu else {}

    def check(self, name: str, cycles: int) -> str | None:
        """What is wrong with a figure; None where it is as before, within the tolerance, or has just been kept."""
        if self.update:
            self.cycles[name] = cycles
            self.path.write_text(
                json.dumps({"libtpu": self.libtpu, "cycles": dict(sorted(self.cycles.items()))}, indent=1) + "\n"
            )
            return None
        if name not in self.cycles:
            return f"no figure of {name} for libtpu {self.libtpu}: make test-compile ARGS='-n 0 --update-figures'"
        before = self.cycles[name]
        if abs(cycles - before) <= TOLERANCE * before:
            return None
        change = cycles / before - 1
        return f"{name}: {cycles} estimated cycles, {change:+.1%} against {before}; --update-figures accepts it"
