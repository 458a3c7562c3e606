"""Kernels over a paged KV pool. Public names only; everything else may change."""

from .kv_write import kv_write
from .layout import PoolLayout
from .metadata import AnyArray, AttentionMetadata
from .paged_attention import Tiles, default_tiles, measured_tiles, ragged_paged_attention
from .pool import LayerPool, make_pool, pool_struct

__all__ = [
    "AnyArray",
    "AttentionMetadata",
    "LayerPool",
    "PoolLayout",
    "Tiles",
    "default_tiles",
    "kv_write",
    "make_pool",
    "measured_tiles",
    "pool_struct",
    "ragged_paged_attention",
]
