"""Neither the pool nor what the sampler keeps of each vocabulary is ever copied: read off the compiled step."""

import re

import jax
import pytest
from engines import make_engine
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def lowered(tmp_path_factory, programs_dir):
    engine = make_engine(str(make_tiny_model(tmp_path_factory.mktemp("tiny"))), programs_dir, num_blocks_override=4096)
    runner = engine.runner
    arguments = runner.step.arguments((8, 8), runner.spec.num_blocks, runner.spec.table_width)
    yield runner, runner.step.jitted((8, 8)), arguments
    engine.close()


def pool_bytes(runner) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state.pools))


def pool_copies(runner, compiled) -> list[str]:
    kept = jax.tree.leaves((runner.state.pools, runner.state.edits.seen, runner.state.edits.bad_words))
    shapes = {",".join(map(str, leaf.shape)) for leaf in kept}
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    return [shape for shape in copies if shape in shapes]


def test_the_step_updates_the_pool_in_place(lowered):
    runner, jitted, arguments = lowered
    compiled = jitted.lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    assert memory.temp_size_in_bytes < 0.05 * pool_bytes(runner)
    assert pool_copies(runner, compiled) == []


def test_a_step_without_donation_fails_that_gate(lowered):
    runner, jitted, arguments = lowered
    undonated = jax.jit(jitted.__wrapped__)
    compiled = undonated.lower(*arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert pool_copies(runner, compiled) or compiled.memory_analysis().temp_size_in_bytes >= 0.05 * pool_bytes(runner)
