"""A flat index of quantised vectors: `Index`, and several files of them: `search_shards`. NumPy only."""

from .index import Index
from .shards import search_shards, verify_shards, write_manifest

__all__ = ["Index", "search_shards", "verify_shards", "write_manifest"]
