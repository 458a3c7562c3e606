"""The tests and the benchmark that are worth running on a chip, by the interpreter that has its JAX: `make test-gpu`.

    python tests/support/on_chip.py gpu

Installs nothing, and so leaves out what the interpreter lacks packages for, one line each. The exit status is 0 where
the chip is there and all that ran has passed.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("jax", "numpy", "pytest", "jaxtyping")
SMOKE = ROOT / "tests/e2e/test_engine_on_backend.py"
OF_THE_ENGINE = ("flax", "tokenizers", "safetensors", "jinja2", "prometheus_client", "tqdm")
OTHER = {"gpu": "tpu", "tpu": "gpu"}
STAND_IN = "class GGUFReader:\n    pass\n"  # all that importing the engine asks of gguf


def main(form: str) -> int:
    if missing := absent(NEEDED):
        print(f"{sys.executable} lacks {', '.join(missing)}: nothing can be run")
        return 1
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # In a process of its own: JAX takes most of a GPU's memory for as long as it lives.
    found = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], capture_output=True, text=True)
    if found.stdout.strip() != form:
        print(f"JAX sees no {form} here, but {found.stdout.strip() or found.stderr.strip()[-300:]}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        files = kernel_tests(form)
        if missing := absent(OF_THE_ENGINE):
            print(f"left out: {SMOKE.relative_to(ROOT)}, for want of {', '.join(missing)}")
        else:
            files.append(SMOKE)
            if absent(["gguf"]):
                print("gguf is absent: a stand-in lets the engine be imported, which then cannot read such files")
                (Path(folder) / "gguf.py").write_text(STAND_IN)
                environment["PYTHONPATH"] += os.pathsep + folder
        sys.stdout.flush()
        # What is slow in an interpreter is not on the chip.
        tests = [sys.executable, "-m", "pytest", "-m", "not compile", *map(str, files)]
        results = [subprocess.run(tests, env=environment, cwd=ROOT).returncode]
    (ROOT / "build").mkdir(exist_ok=True)
    benchmark = [sys.executable, "scripts/bench_kernels.py", "--json", f"build/kernels-{form}.json"]
    results.append(subprocess.run(benchmark, env=environment, cwd=ROOT).returncode)
    return max(map(abs, results))


def kernel_tests(form: str) -> list[Path]:
    """The files of kernel tests for this chip that can be collected here."""
    files = []
    for path in sorted((ROOT / "tests/pallas_kernels").glob("test_*.py")):
        if f"mosaic_{OTHER[form]}" in path.name:
            continue
        if missing := absent(imports_of(path)):
            print(f"left out: {path.relative_to(ROOT)}, for want of {', '.join(missing)}")
        else:
            files.append(path)
    return files


def imports_of(path: Path) -> list[str]:
    """The packages that a test file names, our own and its neighbours left out."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named.add(node.module.split(".")[0])
    ours = {p.stem for folder in (path.parent, Path(__file__).parent, ROOT) for p in folder.iterdir()}
    return sorted(named - ours)


def absent(packages) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
