"""Writes a step's K and V into the pool."""

from .api import kv_write

__all__ = ["kv_write"]
