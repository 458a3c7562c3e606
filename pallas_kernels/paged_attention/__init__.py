"""Attention over paged KV, for any mix of decode, verify and prefill."""

from .api import ragged_paged_attention
from .tiles import Tiles, TpuTiles, default_tiles, default_tpu_tiles

__all__ = ["Tiles", "TpuTiles", "default_tiles", "default_tpu_tiles", "ragged_paged_attention"]
