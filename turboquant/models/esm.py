"""ESM-2 in particular: its alphabet, the parts of a model, and how tokens become embeddings.

Works on `EsmModel` and all models that have one as their base, in transformers 4.57 and 5. Where these differ, the
attributes of the model decide, not the version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..arguments import bounded, integer, listed

__all__ = ["ALPHABET", "AMINO_ACIDS", "CLS", "EOS", "MASK", "PAD", "attentions", "base_of", "check_batch_size",
           "checked_model", "dropout_factor", "embed", "integers", "letter_tokens", "padded", "positioned",
           "tokenise"]  # fmt: skip

# Token i of every ESM-2 model is ALPHABET[i] (Lin et al. 2023, doi 10.1126/science.ade2574).
ALPHABET = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
CLS, PAD, EOS, MASK = (ALPHABET.index(name) for name in ("<cls>", "<pad>", "<eos>", "<mask>"))
#: The twenty of the genetic code, by letter.
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
_LETTERS = {token: i for i, token in enumerate(ALPHABET) if len(token) == 1 or token == "<mask>"}

MASKED_IN_TRAINING = 0.15 * 0.8  # share of all tokens; `token_dropout` compensates for it


def base_of(model: Any) -> Any:
    """The EsmModel in a model, which may be one itself."""
    return getattr(model, "base_model", model)


def attentions(model: Any) -> list[Any]:
    """The self-attention module of each layer."""
    return [layer.attention.self for layer in base_of(model).encoder.layer]


def checked_model(model: Any) -> Any:
    """The EsmModel in `model`, if it is an ESM-2 encoder with rotary positions.

    Raises TypeError for anything but a transformers model; NotImplementedError, naming the class, for another one.
    """
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module) or not hasattr(getattr(model, "config", None), "model_type"):
        raise TypeError(f"`model` must be a transformers model, got {name}")
    base = base_of(model)
    config: Any = model.config

    def refuse(why: str) -> None:
        raise NotImplementedError(f"{name} cannot be used as an ESM-2 model: {why}")

    if config.model_type != "esm":
        refuse(f"it is {config.model_type!r}")
    if not hasattr(getattr(base, "encoder", None), "layer"):
        refuse("it has no encoder of its own")
    if config.emb_layer_norm_before:
        refuse("it has a layer norm before its first layer, as ESM-1b has")
    if config.position_embedding_type != "rotary":
        refuse(f"its positions must be rotary, got position_embedding_type={config.position_embedding_type!r}")
    if config.is_decoder or config.add_cross_attention:
        refuse("it is set up as a decoder")
    if not getattr(base, "_supports_attention_backend", False):
        refuse("its attention does not go through transformers' AttentionInterface")
    return base


def tokenise(sequence: str | Sequence[str], config: Any, argument: str = "sequence") -> list[int]:
    """Token ids of a protein, ``<cls>`` in front and ``<eos>`` behind.

    sequence   upper-case letters of the ESM-2 alphabet, as a string, or as a list, whose entries may be "<mask>" too.

    Raises ValueError for no residues, another letter, or more tokens than the model has positions (its
    ``max_position_embeddings - 2``, 1,024 for the published models).
    """
    most = config.max_position_embeddings - 4
    if isinstance(sequence, Sequence) and len(sequence) > most:
        raise ValueError(
            f"`{argument}` must have at most {most} residues, for which the model has positions, got "
            f"{len(sequence)}: crop it, or raise model.config.max_position_embeddings beyond what it was trained on"
        )
    return [CLS, *letter_tokens(sequence, argument), EOS]


def letter_tokens(sequence: str | Sequence[str], argument: str = "sequence") -> list[int]:
    """As `tokenise`, but of a protein of any length, without the tokens in front and behind."""
    if not isinstance(sequence, Sequence):
        raise TypeError(f"`{argument}` must be a string or a list of letters, got {type(sequence).__name__}")
    if not sequence:
        raise ValueError(f"`{argument}` must have at least one residue, got none")
    for i, letter in enumerate(sequence):
        if not isinstance(letter, str) or letter not in _LETTERS:
            allowed = "".join(sorted(token for token in _LETTERS if len(token) == 1))
            raise ValueError(f"`{argument}[{i}]` must be a letter of the ESM-2 alphabet, {allowed}, got {letter!r}")
    return [_LETTERS[letter] for letter in sequence]


def integers(numbers: Iterable[Any], argument: str) -> list[int]:
    """Converts whatever counts as an integer (NumPy's, tensors of one) to int. Raises TypeError for anything else."""
    entries = listed(numbers, f"`{argument}` must be a list of integers")
    return [integer(number, f"`{argument}[{i}]`") for i, number in enumerate(entries)]


def check_batch_size(size: Any) -> None:
    bounded("`batch_size`", size)


def padded(tokens: Sequence[Sequence[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, real) [batch, longest], padded on the right; real is bool."""
    longest = max(map(len, tokens))
    ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in tokens], device=device)
    lengths = torch.tensor([len(row) for row in tokens], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def embed(base: Any, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Embeddings [batch, tokens, hidden] of token ids; factor [batch] scales them for `token_dropout`.

    ESM-2 sets masked tokens to 0 and scales the others of a sequence by the share that is masked. The share of a few
    tokens alone would be nonsense (a lone ``<mask>`` divides 0 by 0): `dropout_factor` takes the whole sequence.
    """
    rows: torch.Tensor = base.embeddings.word_embeddings(ids)
    if not base.config.token_dropout:
        return rows
    rows = rows.masked_fill((ids == MASK)[..., None], 0)
    return (rows * factor.to(rows.device)[:, None, None]).to(rows.dtype)


def dropout_factor(ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """float32 [batch]: (1 - share masked in training) / (1 - share masked here), as `EsmEmbeddings` scales."""
    masked = (ids == MASK).sum(1).float() / real.sum(1)
    return (1 - MASKED_IN_TRAINING) / (1 - masked)


@contextmanager
def positioned(modules: Sequence[Any], positions: torch.Tensor | None) -> Iterator[dict[str, torch.Tensor]]:
    """Has the rotary embeddings of a model's `attentions` use `positions` [batch, tokens]; yields keyword arguments for
    the model's forward.

    Transformers 5 takes position_ids. 4.57 rotates inside each layer and always counts from 0: there a hook on each
    layer's rotary embedding rotates instead. None: positions are 0, 1, ... and nothing needs to be done.
    """
    rotary = [m for m in (getattr(a, "rotary_embeddings", None) for a in modules) if m is not None]
    if positions is None:
        yield {}
    elif not rotary:
        yield {"position_ids": positions}
    else:
        with ExitStack() as stack:
            for module in rotary:
                stack.callback(module.register_forward_hook(_rotated_at(positions)).remove)
            yield {}


def _rotated_at(positions: torch.Tensor) -> Any:
    def hook(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> tuple[torch.Tensor, ...]:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        angles = (positions[..., None].to(module.inv_freq.dtype) * module.inv_freq).repeat(1, 1, 2)[:, None]
        return tuple(rotate(x, angles.cos(), angles.sin()).to(x.dtype) for x in args)

    return hook
