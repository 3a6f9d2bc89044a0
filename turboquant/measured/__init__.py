"""What is measured once for a model, as one object and one file. NumPy."""

from .profile import Profile, used_by

__all__ = ["Profile", "used_by"]
