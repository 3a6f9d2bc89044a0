"""A flat index of quantised vectors: `Index`. NumPy only."""

from .index import Index

__all__ = ["Index"]
