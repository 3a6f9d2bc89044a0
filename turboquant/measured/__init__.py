"""What is measured once for a model, as one object and one file. NumPy."""

from .profile import Profile, shared_widths, used_by

__all__ = ["Profile", "shared_widths", "used_by"]
