"""ProgramCache: a second process runs what the first compiled without tracing it, and anything odd is compiled anew."""

import importlib
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged.program_cache
from jpaged.program_cache import ProgramCache, cache_dir, compile_counter, fingerprint

KEY = (8, 4)
STEP = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jpaged.program_cache import ProgramCache, compile_counter, fingerprint

num_traces = 0
def step(pool, x):
    global num_traces
    num_traces += 1
    return pool.at[2].add(x), {"total": (pool * x).sum()}

pool, x = jnp.arange(1024.0), jnp.float32(3)
num_before = compile_counter.num_compiled
cache = ProgramCache(Path(sys.argv[1]), fingerprint("test"))
program = cache.compile((8, 4), jax.jit(step, donate_argnums=0), (pool, x), jax.tree.structure((0, {"total": 0})))
num_compiled = compile_counter.num_compiled - num_before
before = pool.unsafe_buffer_pointer()
new, out = program(pool, x)
print(num_traces, num_compiled, pool.is_deleted(), new.unsafe_buffer_pointer() == before, float(new[2]), float(out["total"]))
"""


def run_process(script: str, *arguments, **environment) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_second_process_traces_and_compiles_nothing_and_still_donates_the_pool(tmp_path):
    answer = ["True", "True", "5.0", str(3.0 * 1023 * 512)]
    assert run_process(STEP, tmp_path) == ["1", "1", *answer]
    assert run_process(STEP, tmp_path) == ["0", "0", *answer]


def test_program_that_jax_had_cached_itself_is_not_kept_a_second_time(tmp_path):
    """XLA:CPU loses kernels when it serialises what it has deserialised."""
    jax_cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = run_process(STEP, tmp_path / "a", **jax_cache)
    second = run_process(STEP, tmp_path / "b", **jax_cache)
    assert first[:2] == ["1", "1"] and second[:2] == ["1", "0"] and first[2:] == second[2:]
    assert [len(list((tmp_path / name).glob("*/*"))) for name in "ab"] == [1, 0]
    assert run_process(STEP, tmp_path / "b") == first


def compile_times(cache: ProgramCache, factor: float, key=KEY):
    """A program that multiplies by factor, unless the cache has another under that key."""
    return cache.compile(
        key, jax.jit(lambda x: x * factor), (jax.ShapeDtypeStruct((4,), np.float32),), jax.tree.structure(0)
    )


def multiplies_by(program) -> float:
    return float(program(jnp.ones(4))[0])


def test_program_is_found_under_its_own_key_and_fingerprint_alone(tmp_path):
    assert multiplies_by(compile_times(ProgramCache(tmp_path, "f"), 2)) == 2
    assert multiplies_by(compile_times(ProgramCache(tmp_path, "f"), 3)) == 2  # the one on disk
    assert multiplies_by(compile_times(ProgramCache(tmp_path, "f"), 3, key=(8, 5))) == 3
    assert multiplies_by(compile_times(ProgramCache(tmp_path, "g"), 3)) == 3


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"junk" + b, lambda b: b"x" * 100]
)
def test_damaged_file_is_compiled_anew_with_a_warning_that_names_it(tmp_path, caplog, damage):
    cache = ProgramCache(tmp_path, "f")
    compile_times(cache, 2)
    (path,) = cache.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert multiplies_by(compile_times(cache, 3)) == 3
    assert str(path) in caplog.text and "compiled anew" in caplog.text
    caplog.clear()
    assert multiplies_by(compile_times(cache, 4)) == 3 and not caplog.text  # mended


def test_program_that_cannot_be_kept_leaves_nothing_behind_and_still_runs(tmp_path, caplog):
    cache = ProgramCache(tmp_path, "f")
    (cache.folder / "8-4").mkdir()  # where the file should go
    assert multiplies_by(compile_times(cache, 2)) == 2
    assert "is not kept on disk" in caplog.text and [p.name for p in cache.folder.iterdir()] == ["8-4"]


def test_the_latest_fingerprints_are_kept_as_far_as_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(jpaged.program_cache, "KEPT_BYTES", 50)
    for number in range(12):
        folder = tmp_path / f"old{number}"
        folder.mkdir()
        (folder / "8-4").write_bytes(bytes(10))
        os.utime(folder, (1000 + number, 1000 + number))
    (tmp_path / "a file").write_bytes(bytes(1000))
    ProgramCache(tmp_path, "old3")  # used again: now the newest
    assert {p.name for p in tmp_path.iterdir()} == {"a file", "old3", *(f"old{n}" for n in range(8, 12))}
    monkeypatch.setattr(jpaged.program_cache, "KEPT_BYTES", 5)
    ProgramCache(tmp_path, "old3")  # larger than the room, but in use
    assert {p.name for p in tmp_path.iterdir()} == {"a file", "old3"}


def test_fingerprint_follows_the_flags_and_whatever_it_is_given(monkeypatch):
    seen = {fingerprint(), fingerprint("a"), fingerprint("b"), fingerprint("a", "b"), fingerprint(8), fingerprint((8,))}
    assert len(seen) == 6 and fingerprint("a") in seen
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert fingerprint() not in seen
    monkeypatch.delenv("XLA_FLAGS")
    with jax.default_matmul_precision("float32"):
        assert fingerprint() not in seen


SOURCES = [
    "jpaged/step.py",
    "jpaged/sampler.py",
    "jpaged/sampling_batch.py",
    "jpaged/step_input.py",
    "jpaged/device_state.py",
    "jpaged/packing.py",  # makes the shapes that programs are compiled for
    "jpaged/sampling_params.py",  # MAX_STOP_TOKEN_IDS is one of those shapes
    "models/llama.py",
    "pallas_kernels/paged_attention/xla.py",
]


def test_fingerprint_follows_the_sources_that_decide_a_program(tmp_path, monkeypatch):
    root = Path(jpaged.program_cache.__file__).parent.parent
    for package in ("jpaged", "models", "pallas_kernels"):
        shutil.copytree(root / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jpaged.program_cache, "__file__", str(tmp_path / "jpaged" / "program_cache.py"))
    seen = {fingerprint()}
    for source in SOURCES:
        with open(tmp_path / source, "a") as file:
            file.write("\n# changed\n")
        assert fingerprint() not in seen, f"{source} decides a program"
        seen.add(fingerprint())


@pytest.mark.parametrize("library", ["jax", "jaxlib", "flax"])
def test_fingerprint_follows_the_versions_of_what_traces_and_compiles(library, monkeypatch):
    before = fingerprint()
    monkeypatch.setattr(importlib.import_module(library), "__version__", "0.0.1")
    assert fingerprint() != before


def test_counter_counts_each_compilation_once():
    before = compile_counter.num_compiled
    function = jax.jit(partial(jnp.multiply, 1.2345))
    for _ in range(3):
        function(np.float32(2))
    function(np.ones(3, np.float32))
    assert compile_counter.num_compiled == before + 2


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"JPAGED_CACHE": "/a"}, "/a/programs"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/jpaged/programs"),
        ({"JPAGED_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/programs"),
        ({"JPAGED_CACHE": "~/c", "HOME": "/home/me"}, "/home/me/c/programs"),
        ({"HOME": "/home/me"}, "/home/me/.cache/jpaged/programs"),
    ],
)
def test_programs_are_kept_where_the_environment_says_unless_the_user_says_otherwise(environment, folder, monkeypatch):
    for name in ("JPAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir(None) == Path(folder)
    assert cache_dir("/chosen") == Path("/chosen")
