"""Copies blocks within a pool: copy-on-write, and what else moves KV about."""

from .api import copy_blocks

__all__ = ["copy_blocks"]
