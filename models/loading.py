"""Checkpoint -> parameters on the mesh, each put straight into its sharding."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx

from models.weights import Checkpoint


def load_state(checkpoint: Checkpoint, abstract_state: nnx.State) -> nnx.State:
    """The parameters of an abstract state, whose paths are the checkpoint's names, as arrays in its dtypes and shardings.

    Raises ValueError for a missing tensor (from the checkpoint) or one of another shape.
    """

    def load(entry: tuple[tuple, nnx.Variable]) -> tuple[tuple, nnx.Variable]:
        path, variable = entry
        name, leaf = ".".join(str(part) for part in path), variable.get_value()
        value = checkpoint.tensor(name)
        if value.shape != leaf.shape:
            raise ValueError(
                f"{checkpoint.source}: tensor {name} has shape {value.shape}, the model needs {leaf.shape}"
            )
        array = jax.device_put(np.asarray(value, dtype=leaf.dtype), leaf.sharding)
        return path, variable.replace(array)

    with ThreadPoolExecutor() as executor:  # reading and dequantising release the GIL
        return nnx.from_flat_state(
            list(executor.map(load, nnx.to_flat_state(nnx.filter_state(abstract_state, nnx.Param))))
        )
