"""What was measured for a model, as one object and one file, and what follows from it. NumPy and files.

`moments` and `calibration` are the two parts of a `profile`; `choice` has the methods that spend a budget of bits,
`budget` solves one, `axes`, `distortion` and `kmeans` are their arithmetic.
"""

from .calibration import Calibration, allocate, layer_specs
from .choice import Trial
from .moments import LayerMoments, Moments
from .profile import Profile, shared_widths, used_by

__all__ = ["Calibration", "LayerMoments", "Moments", "Profile", "Trial", "allocate", "layer_specs", "shared_widths",
           "used_by"]  # fmt: skip
