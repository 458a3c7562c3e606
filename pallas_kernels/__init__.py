"""Kernels over a paged KV pool. Public names only; everything else may change."""

from .block_copy import copy_blocks, put_blocks, take_blocks
from .kv_write import kv_write
from .layout import PoolLayout
from .metadata import AnyArray, AttentionMetadata
from .paged_attention import (
    Tiles,
    TpuTiles,
    default_tiles,
    default_tpu_tiles,
    measured_tiles,
    ragged_paged_attention,
)
from .pool import LayerPool, kv_absmax, make_pool, pool_struct

__all__ = [
    "AnyArray",
    "AttentionMetadata",
    "LayerPool",
    "PoolLayout",
    "Tiles",
    "TpuTiles",
    "copy_blocks",
    "default_tiles",
    "default_tpu_tiles",
    "kv_absmax",
    "kv_write",
    "make_pool",
    "measured_tiles",
    "pool_struct",
    "put_blocks",
    "ragged_paged_attention",
    "take_blocks",
]
