"""Attention over paged KV, for any mix of decode, verify and prefill."""

from .api import ragged_paged_attention
from .tiles import Tiles, default_tiles

__all__ = ["Tiles", "default_tiles", "ragged_paged_attention"]
