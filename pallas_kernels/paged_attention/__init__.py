"""Attention over paged KV, for any mix of decode, verify and prefill."""

from .api import attention_implementations, ragged_paged_attention
from .tile_table import measured_tiles
from .tiles import Tiles, TpuTiles, default_tiles, default_tpu_tiles

__all__ = [
    "Tiles",
    "TpuTiles",
    "attention_implementations",
    "default_tiles",
    "default_tpu_tiles",
    "measured_tiles",
    "ragged_paged_attention",
]
