"""Decoder models as pure functions over a paged KV cache, and the readers of their weights."""
