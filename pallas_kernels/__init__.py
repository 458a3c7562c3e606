"""Kernels over a paged KV pool. Public names only; everything else may change."""

from .kv_write import kv_write
from .layout import LayerPool, PoolLayout
from .metadata import AnyArray, AttentionMetadata
from .paged_attention import Tiles, default_tiles, ragged_paged_attention

__all__ = [
    "AnyArray",
    "AttentionMetadata",
    "LayerPool",
    "PoolLayout",
    "Tiles",
    "default_tiles",
    "kv_write",
    "ragged_paged_attention",
]
