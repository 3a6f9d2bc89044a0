"""The digest of a checkpoint's files: which weights they hold, found without loading them.

An engine that fuses and shards weights finds the profile of a model by it. It covers the configuration, and of each
tensor in the safetensors files the name, the dtype, the shape and some of its bytes: all of a tensor of up to 1 KiB,
otherwise 8 runs of 64 bytes, spread over it. How tensors are split into files does not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["checkpoint_digest", "checkpoint_folder", "digest_of", "profile_file"]

_RUNS, _RUN = 8, 64  # runs of a large tensor that count, and bytes of each
_WHOLE = 1024
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_OF_NO_WEIGHT = ("_name_or_path", "transformers_version")  # entries of config.json


def checkpoint_folder(model: str, revision: str | None = None) -> Path:
    """The folder that holds a model's files: `model` itself, or where the Hugging Face hub's cache has it. Nothing is
    downloaded. Raises FileNotFoundError if it is neither."""
    if os.path.isdir(model):
        return Path(model)
    from transformers.utils import cached_file

    try:
        config_file = cached_file(model, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{model!r} is no folder and not in the Hugging Face hub's cache") from error
    return Path(str(config_file)).parent


def checkpoint_digest(folder: str | os.PathLike[str]) -> str:
    """Returns 32 hexadecimal digits. Raises FileNotFoundError for a folder without config.json or safetensors files,
    ValueError for damaged ones."""
    root = Path(folder)
    config = root / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{str(root)!r} must be the folder of a checkpoint, got one without config.json")
    told = {key: x for key, x in _object(config, config.read_bytes()).items() if key not in _OF_NO_WEIGHT}
    tensors = dict(_tensors(root))
    if not tensors:
        raise FileNotFoundError(f"{str(root)!r} must have weights in safetensors files, got none")
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} ".encode(errors="surrogatepass") + tensors[name])
    return digest.hexdigest()[:32]


def digest_of(model: str, revision: str | None = None) -> str:
    """The digest of the files of a model, a folder or a name on the hub; "" if they are not there or not safetensors.
    Raises ValueError for damaged files."""
    try:
        return checkpoint_digest(checkpoint_folder(model, revision))
    except FileNotFoundError:
        return ""


def profile_file(digest: str) -> Path | None:
    """Where `turboquant measure` keeps the profile of the checkpoint with this digest; None if TURBOQUANT_CACHE says
    that nothing is kept."""
    from ..files import cache_folder

    folder = cache_folder()
    return None if folder is None else folder / f"checkpoint-{digest}.safetensors"


def _object(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object that a file holds as `text`. Raises ValueError for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got a damaged file")
    return content


def _tensors(root: Path) -> Iterator[tuple[str, bytes]]:
    """(name, digest of dtype, shape and sample) of each tensor."""
    for path in _files(root):
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} must be a safetensors file, got none")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"{str(path)!r} must be a safetensors file, got another one or a truncated one")
            entries = _object(path, file.read(length))
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                try:
                    start, stop = map(index, entry["data_offsets"])
                    said = f"{entry['dtype']} {entry['shape']}".encode()
                except (KeyError, TypeError, ValueError):
                    raise ValueError(f"{str(path)!r} must say the type, the shape and the place of `{name:.80}`, got a "
                                     "damaged file") from None  # fmt: skip
                if not 0 <= start <= stop <= size - 8 - length:
                    raise ValueError(f"{str(path)!r} must hold `{name:.80}` whole, got a truncated file")
                sample = b"".join(_sample(file, 8 + length + start, stop - start))
                yield name, hashlib.sha256(said + sample).digest()


def _files(root: Path) -> list[Path]:
    """The files that transformers would read: those of the index, the one file, or all."""
    listed = root / "model.safetensors.index.json"
    if listed.is_file():
        names = _object(listed, listed.read_bytes()).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"{str(listed)!r} must name the file of each tensor, got a damaged file")
        return [root / name for name in sorted({*names.values()})]
    one = root / "model.safetensors"
    return [one] if one.is_file() else sorted(root.glob("*.safetensors"))


def _sample(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    whole = size <= _WHOLE
    places = [0] if whole else [i * ((size - _RUN) // (_RUNS - 1)) for i in range(_RUNS)]
    for at in places:
        file.seek(start + at)
        yield file.read(size if whole else _RUN)
