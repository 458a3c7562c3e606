"""Copies blocks within a pool: copy-on-write, and what else moves KV about."""

from .api import copy_blocks
from .transfer import put_blocks, take_blocks

__all__ = ["copy_blocks", "put_blocks", "take_blocks"]
