"""The specification of `copy_blocks`, in numpy."""

import jax
import numpy as np

from ..metadata import AnyArray
from ..pool import LayerPool


def copy_blocks_reference(
    pools: tuple[LayerPool, ...], src: AnyArray, dst: AnyArray, num: int, blocks_per_layer: int | None = None
) -> tuple[LayerPool, ...]:
    """New pools with blocks `dst[:num]` of every layer equal to blocks `src[:num]`."""
    src, dst = (np.asarray(ids)[: int(num)] for ids in (src, dst))

    def copied(array: AnyArray) -> np.ndarray:
        layers = np.array(array).reshape(-1, blocks_per_layer or len(array), *array.shape[1:])
        layers[:, dst] = layers[:, src]
        return layers.reshape(array.shape)

    return jax.tree.map(copied, pools)
