"""What moves blocks to host memory and back, compiled for chips that are not here: in place, and no pool is copied."""

import re

import jax
import pytest
from cases import Case
from evidence import bytes_a_device

from jpaged.block_swapper import swap_programs

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(
    "case",
    [
        Case("135m", "v5e", 1, 2),
        Case("135m", "h200", 1, 2),
        Case("8b", "v5e", 8, 2),
        Case("8b", "v6e", 4, 2),
        Case("8b", "h200", 8, 2),
        Case("70b", "tpu7x", 8, 2),
    ],
    ids=str,
)
def test_blocks_are_taken_and_put_without_a_copy_of_the_pool(case):
    for jitted, arguments in swap_programs(case.step, case.num_blocks):
        pools = arguments[0]
        compiled = jitted.lower(*arguments).compile()
        memory, is_put = compiled.memory_analysis(), len(arguments) == 3
        assert memory.alias_size_in_bytes == (bytes_a_device(pools) if is_put else 0)
        assert memory.temp_size_in_bytes <= 2 * 8 * case.step.bytes_per_block
        shapes = {",".join(map(str, x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(pools)}
        copies = re.findall(r"\w+\[([\d,]+)\]\S* copy(?:-start)?\(", compiled.as_text())
        assert not shapes.intersection(copies)
