"""The tokens that a model is measured on: the text or the proteins that ship with the package, a user's text, or random
ones."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..measured.moments import PROTEINS, RANDOM_IDS
from .esm import tokenise
from .fasta import read_fasta
from .tokens import vocabulary

__all__ = ["PACKAGE", "TOKENS", "Sample", "check_tokenizer", "cost_texts", "found_tokenizer", "kinds", "protein_sample",
           "sample", "tokenizer_at"]  # fmt: skip

TOKENS = 2048  # beside BOS
PACKAGE = "the text of the package"
OF_A_KIND = 1024  # tokens of each kind of text of the package, at most
OF_COSTS = 384  # tokens of each text that costs are measured on, at most: few, so that a backward pass takes seconds
LEAST = 16
_TEXTS = Path(__file__).resolve().parents[1] / "data" / "moments"
_PARTS = {"prose.txt": 0.34, "source.txt": 0.34, "german.txt": 0.16, "japanese.txt": 0.16}


class Sample(NamedTuple):
    """ids: sequences, each [1, tokens] int64 on the CPU. source: what they are, in words."""

    ids: tuple[torch.Tensor, ...]
    source: str


def check_tokenizer(tokenizer: Any) -> None:
    """Raises TypeError for what is neither a tokenizer nor None, such as the name of one."""
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"`tokenizer` must be a tokenizer of transformers or None, got {type(tokenizer).__name__}")


def sample(model: Any, tokenizer: Any, text: str | None, limit: int) -> Sample:
    """At most `limit` tokens for a model of transformers.

    Raises TypeError for a text or tokenizer of another kind, ValueError for a text that is too short, or without a
    tokenizer.
    """
    if text is not None and not isinstance(text, str):
        raise TypeError(f"`text` must be a string or None, got {type(text).__name__}")
    check_tokenizer(tokenizer)
    why = ""
    if tokenizer is None:
        tokenizer, why = found_tokenizer(model)
    if tokenizer is None and text is not None:
        raise ValueError(f"`tokenizer` must be given with a `text`: {why}")
    if tokenizer is None:
        warnings.warn(
            f"the model is measured on random token ids, because {why}: its cache will diverge 1.2 to 1.5 times as "
            "much as with moments of text. Add the tokenizer's files to the model's folder, or pass `tokenizer`.",
            stacklevel=4,
        )
        return Sample((_random(model, limit),), RANDOM_IDS)
    first = _bos(tokenizer)
    wanted = min(TOKENS, limit - len(first))
    ids = _shipped(tokenizer, wanted) if text is None else _tokens(tokenizer, text)[:wanted]
    if text is not None and len(ids) < LEAST:
        raise ValueError(f"`text` must have at least {LEAST} tokens, got {len(ids)}")
    _check(model, first + ids)
    source = PACKAGE if text is None else "a text of the user"
    return Sample((_tensor(first + ids),), source)


def kinds(model: Any, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids [1, at most OF_A_KIND] of each kind of text of the package, behind BOS where the tokenizer has one. []
    without a tokenizer, which is looked for as in `sample`. Raises what `sample` raises."""
    check_tokenizer(tokenizer)
    tokenizer = tokenizer or found_tokenizer(model)[0]
    if tokenizer is None:
        return []
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or OF_A_KIND
    limit = min(limit, OF_A_KIND)
    first = _bos(tokenizer)
    texts = [(first + _tokens(tokenizer, (_TEXTS / name).read_text(encoding="utf-8")))[:limit] for name in _PARTS]
    for ids in texts:
        _check(model, ids)
    return [_tensor(ids) for ids in texts]


def cost_texts(model: Any, tokenizer: Any, drawn: Sample) -> list[torch.Tensor]:
    """Token ids [1, at most OF_COSTS] of the texts that costs are measured on: each kind of text of the package, or the
    text of the user; [] for random ids. drawn: what `sample` has returned for the other arguments."""
    texts = kinds(model, tokenizer) if drawn.source == PACKAGE else [] if drawn.source == RANDOM_IDS else drawn.ids
    return [ids[:, :OF_COSTS] for ids in texts]


def protein_sample(model: Any, tokenizer: Any = None, text: str | None = None) -> Sample:
    """The proteins of the package for an ESM-2 model, cut where it has fewer positions. Raises ValueError for a
    tokenizer or a text, since it takes none."""
    for name, argument in (("tokenizer", tokenizer), ("text", text)):
        if argument is not None:
            raise ValueError(f"`{name}` must be None for an ESM-2 model, which is measured on proteins, got one")
    most = model.config.max_position_embeddings - 4
    sequences = (protein.sequence[:most] for protein in read_fasta(_TEXTS / "proteins.fasta"))
    return Sample(tuple(_tensor(tokenise(one, model.config)) for one in sequences), PROTEINS)


def found_tokenizer(model: Any) -> tuple[Any, str]:
    """(tokenizer, ""), or (None, why there is none): what is at `model.name_or_path`, local files only."""
    name = getattr(model, "name_or_path", "") or ""
    if not name:
        return None, "the model's `name_or_path` is empty, so no tokenizer is known"
    return tokenizer_at(name, "the model's `name_or_path` ", local_files_only=True)


def tokenizer_at(name: str, called: str = "", local_files_only: bool = False) -> tuple[Any, str]:
    """(tokenizer, ""), or (None, why there is none), of a folder or a name on the hub. called: goes before the name."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
        if {*_tokens(tokenizer, "The quick brown fox")} <= {*tokenizer.all_special_ids}:  # made without a file
            return None, f"the tokenizer at {called}{name!r} knows no words"
        return tokenizer, ""
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        if reason.rstrip().endswith(":"):  # a list of what else transformers looked for
            reason = "no tokenizer.json, nor another file that makes one"
        return None, f"no tokenizer can be read at {called}{name!r} ({reason})"


def _tensor(ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int64, device="cpu")


def _bos(tokenizer: Any) -> list[int]:
    bos = getattr(tokenizer, "bos_token_id", None)
    return [] if bos is None else [int(bos)]


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _shipped(tokenizer: Any, wanted: int) -> list[int]:
    """Tokens of each part of the text in proportion; the others make up for a part that is too short."""
    parts = {name: _tokens(tokenizer, (_TEXTS / name).read_text(encoding="utf-8")) for name in _PARTS}
    taken = {name: min(len(parts[name]), round(share * wanted)) for name, share in _PARTS.items()}
    for name in parts:
        taken[name] = min(len(parts[name]), taken[name] + max(0, wanted - sum(taken.values())))
    return [token for name, ids in parts.items() for token in ids[: taken[name]]][:wanted]


def _check(model: Any, ids: list[int]) -> None:
    if ids and max(ids) >= (size := vocabulary(model)):
        raise ValueError(f"`tokenizer` must be the model's, got one with token {max(ids)} for a vocabulary of {size}")


def _random(model: Any, limit: int) -> torch.Tensor:
    """BOS, if the model has one, and random ids of tokens that are not special."""
    special: set[int] = set()
    for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = getattr(config, name, None)
            special |= set(value) if isinstance(value, (list, tuple)) else {value} if isinstance(value, int) else set()
    size = vocabulary(model)
    plain = torch.tensor([i for i in range(size) if i not in special], dtype=torch.int64, device="cpu")
    if not len(plain):
        raise ValueError(f"`model` must have a vocabulary of plain tokens, got {size} of which all are special")
    bos = getattr(model.config.get_text_config(), "bos_token_id", None)
    first = [bos] if isinstance(bos, int) and 0 <= bos < size else []
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(len(plain), (min(TOKENS, limit - len(first)),), generator=generator, device="cpu")
    return _tensor(first + plain[drawn].tolist())
