"""ProgramCache: compiled programs on disk, ready to run without being traced again.

JAX's own persistent cache saves the compiler's work, but its key is the lowered program, which takes longer to make
than a small model's program takes to load. This one is keyed by what the program is made from.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable

from pallas_kernels import measured_tiles

logger = logging.getLogger(__name__)

_SOURCES = (  # what decides a program; the last ones its arguments' shapes
    "models", "pallas_kernels", "jpaged/step.py", "jpaged/sampler.py", "jpaged/logits_edits.py",
    "jpaged/edit_programs.py", "jpaged/errors.py", "jpaged/sampling_batch.py", "jpaged/block_swapper.py",
    "jpaged/step_input.py", "jpaged/device_state.py", "jpaged/packing.py", "jpaged/sampling_params.py",
    "jpaged/kv_scales.py", "jpaged/prefill_batch.py", "jpaged/wanted_rows.py",
)  # fmt: skip
KEPT_BYTES = 2 << 30  # of all fingerprints; older ones belong to code or flags of the past


def _host_cpu() -> str:
    """What code for this host's CPU depends on: a home directory may be shared by unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def fingerprint(*parts: object) -> str:
    """Hashes parts together with all else that decides a program: JAX, XLA, the devices, flags and our own sources."""
    device = jax.devices()[0]
    digest = hashlib.sha256()
    for part in (
        *(library.__version__ for library in (jax, jaxlib, flax)),
        device.client.platform_version,
        device.device_kind,
        _host_cpu() if device.platform == "cpu" else "",
        *(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
        jax.config.jax_default_matmul_precision,
        sorted(measured_tiles().items()),
        *parts,
    ):
        digest.update(repr(part).encode())
    root = Path(__file__).parent.parent
    for source in (root / name for name in _SOURCES):
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class CompileCounter:
    """Counts this process's XLA compilations.

    JAX's backend-compile event also fires where its persistent cache (the user's affair: we do not switch it on) had
    the program, so those hits are counted too and taken off.
    """

    def __init__(self):
        self.num_events = 0
        self.num_hits = 0
        self._here = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def num_compiled(self) -> int:
        """Programs that XLA really compiled."""
        return self.num_events - self.num_hits

    @property
    def num_hits_here(self) -> int:
        """Hits of JAX's persistent cache in the calling thread."""
        return getattr(self._here, "hits", 0)

    def _on_duration(self, event: str, seconds: float, **_) -> None:
        self.num_events += event == "/jax/core/compile/backend_compile_duration"

    def _on_event(self, event: str, **_) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.num_hits += 1
            self._here.hits = self.num_hits_here + 1


compile_counter = CompileCounter()  # one a process, as the compiler is; listeners cannot be taken back


def cache_dir(configured: str | None) -> Path:
    """Where compiled programs are kept: the flag, or the user's cache."""
    if configured:
        return Path(configured).expanduser()
    root = os.environ.get("JPAGED_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "jpaged"
    return Path(root).expanduser() / "programs"


def _use_of(folder: Path) -> tuple[float, int]:
    """When a folder was last used, and its bytes; other processes write into it, and may remove it."""
    last_used = num_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        last_used = folder.stat().st_mtime
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                num_bytes += file.stat().st_size
    return last_used, num_bytes


class ProgramCache:
    """One folder of programs of the same fingerprint. Files that cannot be read count as absent."""

    def __init__(self, root: Path, fingerprint: str):
        self._here = threading.local()
        self.folder = root / fingerprint
        self.folder.mkdir(parents=True, exist_ok=True)
        os.utime(self.folder)
        uses = {folder: _use_of(folder) for folder in root.iterdir() if folder.is_dir()}
        room = KEPT_BYTES
        for folder in sorted(uses, key=uses.get, reverse=True):
            room -= uses[folder][1]
            if room < 0 and folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)  # another process may be doing the same

    @property
    def has_compiled(self) -> bool:
        """Whether this thread's last `compile` found nothing on disk."""
        return self._here.has_compiled

    def compile(self, key: Hashable, function, arguments: tuple, out_tree) -> Callable:
        """The program of a jitted function for these arguments (arrays or shapes), from disk where it is there.

        out_tree: the structure of its result, which loading needs to know beforehand.
        """
        program = self._load(key, jax.tree.structure((arguments, {})), out_tree)
        self._here.has_compiled = program is None
        if program is None:
            num_hits = compile_counter.num_hits_here
            program = function.lower(*arguments).compile()
            if compile_counter.num_hits_here == num_hits:
                self._store(key, program)
            # else JAX's own cache had it, and XLA:CPU loses kernels when it serialises what it has deserialised
        return program

    def _load(self, key: Hashable, in_tree, out_tree) -> Callable | None:
        """The program stored under key, loaded onto the devices; None where there is none."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return serialize_executable.deserialize_and_load(path.read_bytes(), in_tree, out_tree)
        except Exception as error:  # damaged bytes can raise anything, and compiling anew always mends it
            logger.warning("%s cannot be loaded and is compiled anew: %r", path, error)
            return None

    def _store(self, key: Hashable, program: jax.stages.Compiled) -> None:
        """Writes a program, whole or not at all. A backend that cannot serialise, or a full disk, is only logged."""
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            payload, _, _ = serialize_executable.serialize(program)
            partial.write_bytes(payload)
            partial.replace(path)
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            partial.unlink(missing_ok=True)
            logger.warning("program %s is not kept on disk: %s", key, error)

    def _path(self, key: Hashable) -> Path:
        return self.folder / "-".join(map(str, key))
