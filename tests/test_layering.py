"""The rules of the design: who may import whom, and what happens in one place only. By ast, and one real import.

Each exception stands in a table with its reason, and must be in use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STANDARD = sys.stdlib_module_names
ENGINE = ("jpaged", "models", "pallas_kernels")

HOST_HALF = [
    "jpaged", "jpaged.cache_spec", "jpaged.config", "jpaged.sampling_params", "jpaged.sequence", "jpaged.block_pool",
    "jpaged.block_table", "jpaged.prefix_cache", "jpaged.kv_cache_manager", "jpaged.scheduler", "jpaged.scheduler_output",
    "jpaged.prompts", "jpaged.conversations", "jpaged.channel", "jpaged.engine_client", "jpaged.step_metrics",
    "jpaged.sequence_group", "jpaged.sequence_queues", "jpaged.beam_search", "jpaged.serve.protocol", "jpaged.metrics",
    "jpaged.histogram",
    "jpaged.buckets", "jpaged.outputs", "jpaged.errors", "jpaged.detokenizer", "jpaged.rows", "jpaged.admission",
    "jpaged.pinned_prefixes", "jpaged.debug", "jpaged.swap_space", "jpaged.preemption",
    "jpaged.ngram", "jpaged.drafter", "jpaged.speculative_config", "jpaged.speculation", "jpaged.decode_run",
    "jpaged.interrupts",
]  # fmt: skip

MAY_IMPORT_INSIDE_A_FUNCTION = {
    ("jpaged/tokenizer.py", "transformers"): "seconds to import, and only a folder without tokenizer.json needs it",
    ("models/weights/fetch.py", "huggingface_hub"): "only a model from the hub needs it",
    ("jpaged/bench/plot.py", "matplotlib"): "an extra: only who draws a sweep needs it",
}
MAY_IMPORT_BY_NAME = {
    "jpaged/__init__.py": "`import jpaged` is fast and loads no jax",
    "pallas_kernels/dispatch.py": "a start on CPU need not import the front ends of other chips' compilers",
}
MAY_JIT = {
    "jpaged/edit_programs.py": "what happens to the sampler's state beside the steps",
    "jpaged/step.py": "the step",
    "jpaged/kernel_check.py": "attention a second time, in a debug mode",
    "jpaged/model_runner.py": "the pool's zeros, made in their sharding",
    "jpaged/block_swapper.py": "copies of blocks between steps",
    "jpaged/kv_scales.py": "the model over a few texts, once at start-up, where the pool is quantised",
    "models/llama.py": "one half of a layer inside the step, so that it is traced once and not once a layer",
}
MAY_PAD_ARRAYS = {
    "jpaged/sampler.py": "the vocabulary to whole runs of lanes, inside the step; the batch is padded in batch.py",
    "models/layers.py": "a few rows to whole tiles of the CPU's matmul, inside the step",
}
MAY_USE_TORCH = {
    "scripts/make_parity_fixture.py": "makes the fixture of Hugging Face's tokens; no part of the engine",
    "scripts/make_beam_fixture.py": "makes the fixture of Hugging Face's beams; no part of the engine",
    "scripts/make_window_fixture.py": "makes the fixture of Hugging Face's sliding windows; no part of the engine",
    "scripts/peers/worker_transformers.py": "runs in a peer's own environment",
    "scripts/peers/vllm_scheduler.py": "runs in a peer's own environment",
}
LONGER_THAN_THE_RULE = {}


def files(*packages: str) -> list[Path]:
    found = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) >= len(packages)
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, tree: ast.AST | None = None) -> list[tuple[str, list[str]]]:
    """(absolute module, names taken from it) of every import statement, wherever it stands."""
    found = []
    package = module_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree or tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((module, [alias.name for alias in node.names]))
    return found


def roots(path: Path) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(path)}


def uses_of(path: Path, *names: str) -> set[str]:
    """Which of the names the code mentions: as a name, an attribute, or an import."""
    mentioned = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            mentioned.add(node.id)
        elif isinstance(node, ast.Attribute):
            mentioned.add(node.attr)
        elif isinstance(node, ast.alias):
            mentioned.add(node.name.split(".")[-1])
    return mentioned & set(names)


def test_kernels_import_jax_numpy_jaxtyping_and_themselves_alone():
    for path in files("pallas_kernels"):
        assert roots(path) <= STANDARD | {"jax", "numpy", "jaxtyping", "pallas_kernels"}, name_of(path)


def test_arrows_between_packages_point_one_way():
    for path in files("models"):
        assert not roots(path) & {"jpaged", "scripts", "tests"}, name_of(path)
    for path in files("jpaged"):
        assert not roots(path) & {"scripts", "tests"}, name_of(path)


def test_kernels_are_used_through_their_public_names():
    (public,) = [
        {element.value for element in node.value.elts}
        for node in tree_of(ROOT / "pallas_kernels/__init__.py").body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    for path in files("models", "jpaged"):
        for module, names in imports(path):
            if module.split(".")[0] == "pallas_kernels":
                assert module == "pallas_kernels" and names and set(names) <= public, (
                    f"{name_of(path)}: {module} {names}"
                )


def module_path(module: str) -> Path | None:
    path = ROOT / Path(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def everything_imported_by(module: str) -> set[str]:
    """Modules of ours, and roots of others', that an import of module brings along."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = module_path(name)
        if path is None:
            continue
        if "." in name:
            todo.append(name.rpartition(".")[0])
        for imported, names in imports(path):
            ours = imported.split(".")[0] in ENGINE
            todo.append(imported if ours else imported.split(".")[0])
            if ours:
                todo += [f"{imported}.{part}" for part in names if module_path(f"{imported}.{part}")]
    return seen


@pytest.mark.parametrize("module", HOST_HALF)
def test_host_half_names_no_jax_directly_or_through_others(module):
    assert module_path(module) is not None
    assert not everything_imported_by(module) & {"jax", "flax", "models", "pallas_kernels"}


def test_host_half_and_the_servers_own_process_load_no_jax():
    modules = [*HOST_HALF, "jpaged.async_llm", "jpaged.serve.app"]
    script = (
        f"import sys, importlib\nfor m in {modules!r}:\n"
        "    importlib.import_module(m)\n    assert 'jax' not in sys.modules, m"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_model_is_jitted_in_one_place():
    for path in files("jpaged", "models"):
        assert not uses_of(path, "jit", "pjit", "pmap") or name_of(path) in MAY_JIT, name_of(path)
        assert "nnx.jit" not in path.read_text(encoding="utf-8"), f"{name_of(path)}: tens of milliseconds a step"
    assert all(uses_of(ROOT / name, "jit") for name in MAY_JIT), "an exception that nobody needs"


def test_batch_is_padded_in_one_place():
    for path in files("jpaged", "models"):
        name = name_of(path)
        if name != "jpaged/buckets.py":
            assert not uses_of(path, "choose", "round_up") or name == "jpaged/batch.py", f"{name} rounds up to a bucket"
        assert not uses_of(path, "pad") or name in MAY_PAD_ARRAYS, f"{name} pads"
    assert all(uses_of(ROOT / name, "pad") for name in MAY_PAD_ARRAYS), "an exception that nobody needs"
    assert uses_of(ROOT / "jpaged/batch.py", "choose")


def test_nobody_imports_the_server():
    for path in files(*ENGINE, "scripts"):
        if not name_of(path).startswith("jpaged/serve/"):
            assert not any(f"{module}.".startswith("jpaged.serve.") for module, _ in imports(path)), name_of(path)
            assert not any(module == "jpaged" and "serve" in names for module, names in imports(path)), name_of(path)


def test_engine_and_server_know_no_benchmark():
    for path in files(*ENGINE):
        if not name_of(path).startswith("jpaged/bench/"):
            assert not any(f"{module}.".startswith("jpaged.bench.") for module, _ in imports(path)), name_of(path)
            assert not any(module == "jpaged" and "bench" in names for module, names in imports(path)), name_of(path)


def test_no_import_is_for_the_type_checker_alone():
    for path in files(*ENGINE, "scripts"):
        assert not uses_of(path, "TYPE_CHECKING"), name_of(path)


def test_imports_stand_at_the_top_except_of_optional_heavy_packages():
    used = set()
    for path in files(*ENGINE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                used |= {(name_of(path), module.split(".")[0]) for module, _ in imports(path, node)}
    assert used == set(MAY_IMPORT_INSIDE_A_FUNCTION)


def test_modules_are_imported_by_statements_and_not_by_name():
    for path in files(*ENGINE):
        if uses_of(path, "import_module", "__import__"):
            assert name_of(path) in MAY_IMPORT_BY_NAME, name_of(path)


def test_engine_knows_no_torch():
    for path in files(*ENGINE, "scripts"):
        assert "torch" not in roots(path) or name_of(path) in MAY_USE_TORCH, name_of(path)


@pytest.mark.parametrize("package, limit", [("jpaged", 250), ("models", 250), ("pallas_kernels", 400)])
def test_files_are_short_enough_to_be_one_noun(package, limit):
    for path in files(package):
        num_lines, name = len(path.read_text(encoding="utf-8").splitlines()), name_of(path)
        allowed, _ = LONGER_THAN_THE_RULE.get(name, (limit, ""))
        assert num_lines <= allowed, f"{name} has {num_lines} lines: a second noun is hiding in it"
        assert name not in LONGER_THAN_THE_RULE or num_lines > limit, f"{name} needs no exception any more"
