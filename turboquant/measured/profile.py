"""`Profile`: what `turboquant.measure` and `turboquant.calibrate` found about a model, as one object and one file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import quoted
from ..files import file_name, path_called, read_arrays, write_arrays
from ..fingerprints import differences
from ..spec import CacheSpec
from .calibration import Calibration, layer_specs
from .choice import side_widths
from .moments import LayerMoments, Moments

__all__ = ["FORMAT", "Profile", "shared_widths", "used_by"]

FORMAT = "turboquant-profile-1"
# In a folder or a repository of the hub. Not .safetensors: vLLM loads every such file of a model as weights.
FILE = "turboquant.profile"


@dataclass(frozen=True, eq=False)
class Profile:
    """What was measured on one model; two are equal if they are the same object.

    moments      where keys lie and queries look, of each layer (`turboquant.measure`).
    calibration  what errors cost, widths, and trials of methods (`turboquant.calibrate`); None: not calibrated.
    checkpoint   the digest of the model's files (`turboquant.models.checkpoint`), which `turboquant measure` and
                 `turboquant calibrate` write; "": not known.

    Raises TypeError for other objects, ValueError for a calibration of another model than the moments.
    """

    moments: Moments
    calibration: Calibration | None = None
    checkpoint: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.moments, Moments):
            raise TypeError(f"`moments` must be Moments, got {type(self.moments).__name__}")
        if self.calibration is None:
            return
        if not isinstance(self.calibration, Calibration):
            raise TypeError(f"`calibration` must be a Calibration or None, got {type(self.calibration).__name__}")
        if differs := differences(self.moments.fingerprint, self.calibration.fingerprint):
            raise ValueError(f"`calibration` must be of the model of `moments`, got one with {', '.join(differs)}")
        if self.calibration.moments and self.calibration.moments["model"] is not self.moments:
            raise ValueError("`moments` must be those of the calibration, got others")

    def __repr__(self) -> str:
        calibrated = "" if self.calibration is None else f", calibrated on {self.calibration.tokens} tokens"
        return f"Profile({repr(self.moments).partition('(')[2].removesuffix(')')}{calibrated})"

    @property
    def layers(self) -> tuple[LayerMoments, ...]:
        """Moments of each layer that has keys, in order."""
        return self.moments.layers

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Of the model: its type and shape, rotary embedding, a few weights."""
        return self.moments.fingerprint

    @property
    def tokens(self) -> int:
        """How many tokens moments were measured on."""
        return self.moments.tokens

    @property
    def source(self) -> str:
        """Which tokens these were, in words."""
        return self.moments.source

    @property
    def not_probed(self) -> tuple[int, ...]:
        """Layers whose keys turn in a way that could not be found: they have a constant centre."""
        return self.moments.not_probed

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        calibrated = () if self.calibration is None else self.calibration.arrays().values()
        return self.moments.nbytes + sum(array.nbytes for array in calibrated)

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Raises ValueError, naming what differs, unless `fingerprint` is of the model that this was measured on."""
        self.moments.check(fingerprint)

    @classmethod
    def of(cls, source: Profile | str | os.PathLike[str]) -> Profile:
        """A profile as it is, or the one in that file."""
        if isinstance(source, cls):
            return source
        if isinstance(source, (str, os.PathLike)):
            with path_called("`profile`"):
                return cls.load(source)
        raise TypeError(f"`profile` must be a Profile or the path of a file, got {quoted(source)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, whole or not at all."""
        described: dict[str, Any] = {"moments": self.moments.described(), "calibration": None}
        if self.checkpoint:
            described["checkpoint"] = self.checkpoint
        arrays = {f"moments.{name}": array for name, array in self.moments.arrays().items()}
        if self.calibration is not None:
            described["calibration"] = self.calibration.described()
            arrays |= {f"calibration.{name}": array for name, array in self.calibration.arrays().items()}
        write_arrays(path, FORMAT, described, arrays)

    @classmethod
    def from_hub(cls, name: str | os.PathLike[str], revision: str | None = None) -> Profile:
        """Reads the profile in a folder, or in a repository of the Hugging Face hub, where `to_hub` puts it; `revision`
        is a branch, tag or commit of a repository. Raises FileNotFoundError where there is none, and what `load` and
        huggingface_hub raise."""
        folder = file_name(name, "name")
        if os.path.isdir(folder):
            if revision is not None:
                raise ValueError(f"`revision` must be None for a folder, got {revision!r}")
            return cls.load(os.path.join(folder, FILE))
        try:
            from huggingface_hub import errors, hf_hub_download
        except ImportError as error:
            raise ImportError("profiles of the hub need huggingface_hub: pip install huggingface_hub") from error
        try:
            return cls.load(hf_hub_download(folder, FILE, revision=revision))
        except errors.HFValidationError as error:
            raise FileNotFoundError(f"`name` must be a folder or a repository of the hub, got {folder!r}") from error

    def to_hub(self, name: str | os.PathLike[str]) -> None:
        """Puts the profile, as one file, into a folder, or into a repository of the hub that exists, for `from_hub`.
        Beside the model's own files is a good place."""
        folder = file_name(name, "name")
        if os.path.isdir(folder):
            self.save(os.path.join(folder, FILE))
            return
        try:
            from huggingface_hub import upload_file
        except ImportError as error:
            raise ImportError("profiles of the hub need huggingface_hub: pip install huggingface_hub") from error
        with tempfile.TemporaryDirectory() as temporary:
            self.save(os.path.join(temporary, FILE))
            upload_file(path_or_fileobj=os.path.join(temporary, FILE), path_in_repo=FILE, repo_id=folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a file that `save` wrote, with NumPy alone. Raises FileNotFoundError if there is none, ValueError for
        one that is damaged, foreign or of another version."""
        name = file_name(path)
        try:
            described, arrays = read_arrays(name, FORMAT, "a profile")
            parts: dict[str, dict[str, Any]] = {"moments": {}, "calibration": {}}
            for key, array in arrays.items():
                part, _, rest = key.partition(".")
                parts[part][rest] = array
            moments = Moments.of_arrays(described["moments"], parts["moments"])
            told = described["calibration"]
            calibration = None if told is None else Calibration.of_arrays(told, parts["calibration"], moments)
            return cls(moments, calibration, str(described.get("checkpoint", "")))
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"`path` must be a profile, got {name!r}: {why}") from error


def used_by(
    spec: CacheSpec, profile: Profile | None, n_layers: int, packed: Sequence[int] | None = None
) -> tuple[list[CacheSpec], Calibration | None, Moments | None]:
    """Returns (the spec of each layer, the calibration, the moments) that a spec takes from a profile. The last two are
    None where it takes none, or `profile` is None.

    packed   the layers that have keys; None: all
    Raises ValueError if the spec needs a calibrated profile and there is none, for a profile that it does not use, and
    what `layer_specs` raises.
    """
    each = [spec.for_layer(i, n_layers) for i in range(n_layers)]
    calibration = None
    if profile is not None and any(s.calibrated for s in each):
        if profile.calibration is None:
            way_out = "make one with turboquant.calibrate(model), or `turboquant calibrate`"
            raise ValueError(f"`profile` must be calibrated for this spec, got one of turboquant.measure: {way_out}")
        calibration = profile.calibration
    elif profile is not None and not any(s.measured for s in each):
        raise ValueError('`profile` must be None for a spec that uses none, without centre="wave", metric="query" and '
                         f"a budget, got one: {spec}")  # fmt: skip
    specs = layer_specs(spec, calibration, n_layers, packed)
    moments = None
    if profile is not None and any(s.measured for s in specs):
        own = None if calibration is None else calibration.moments_of(spec)
        moments = profile.moments if own is None else own
    return specs, calibration, moments


def shared_widths(
    spec: CacheSpec, specs: Sequence[CacheSpec], moments: Moments | None, kinds: Sequence[str]
) -> list[CacheSpec]:
    """Returns the spec of each layer with its share of the bits of which `spec` names the average
    (`CacheSpec.uniform`), or `specs` as they are where widths are uniform.

    specs   as `used_by` returns them;  kinds  one for each of them. Layers of a kind with equally many KV heads and
            channels share bits, so that a cache has as many bytes as with uniform widths, however long it is
    """
    average = spec.shared_bits
    if average is None or moments is None or moments.costs is None:
        return list(specs)
    shapes = [(kind, *layer.centre.shape) for kind, layer in zip(kinds, moments.layers, strict=True)]
    least, most = max(average - 1, 1 if average == 2 else 2), average + 1
    shared = list(specs)
    for shape in dict.fromkeys(shapes):
        alike = [i for i, one in enumerate(shapes) if one == shape]
        tries = int(specs[alike[0]].with_widths(spec, most, most).tries)
        widths = side_widths(moments.costs[alike], average, tries, shape[2], least, most)
        for i, (key, value) in zip(alike, widths.tolist()):
            shared[i] = specs[i].with_widths(spec, key, value)
    return shared
