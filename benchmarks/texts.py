"""Texts that quality.py measures real models on."""

from __future__ import annotations

import gzip
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch

SHARED = Path(os.environ.get("TURBOQUANT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
MOST = 4_000_000  # characters of a folder that are read: tokenising more takes minutes


def text_of(name: str) -> str:
    """Returns the text `wikitext2`; `source`: modules of Python's standard library; or that of a folder of files, which
    may be .gz, such as the manual pages of Debian's manpages-de, unpacked by `dpkg -x`."""
    if name == "wikitext2":
        return (SHARED / "data" / "wikitext2_test.txt").read_text(encoding="utf-8")
    folder, pattern = (Path(sysconfig.get_path("stdlib")), "*.py") if name == "source" else (Path(name), "**/*")
    parts: list[str] = []
    for file in sorted(folder.glob(pattern)):
        if sum(map(len, parts)) > MOST:
            break
        if file.is_file() and not file.is_symlink():
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            parts.append(data.decode("utf-8", errors="ignore"))
    if not parts:
        raise SystemExit(f"{name}: no files")
    return "\n".join(parts)


def real_windows(text: str, tokenizer: Any, windows: int, length: int) -> torch.Tensor:
    """Returns token ids [windows, length]. The text is cut into windows, of which some are taken, evenly spread from
    30 % on. The first token of each is BOS if the model's texts start with it."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    every = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    chosen = every[torch.linspace(int(0.3 * len(every)), len(every) - 1, windows).long()]
    if tokenizer.bos_token_id in tokenizer("text")["input_ids"]:
        chosen[:, 0] = tokenizer.bos_token_id
    return chosen
