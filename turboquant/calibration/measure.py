"""`calibrate`: measures a model's keys and values on a few sequences.

Two passes over the sequences. The first adds up, per layer, side and KV head, the sum of the vectors and of their
outer products (float64, constant memory) and makes centres and principal axes of them. The second, over
`sensitivity_batches` of the batches, quantises one layer's keys (or values) at a time, to `PROBE_BITS` bits by the
operators themselves, and sets the divergence of the model's output from its own against the squared error: one
evaluation per layer and side. The output of a language model is the distribution of the next token; that of ESM-2 is
the last hidden states, whose divergence is 1 minus their cosine.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .. import ops as _ops  # noqa: F401  registers torch.ops.turboquant
from ..attention import own_attention, request_mask
from ..plan import PAGE_TOKENS, plan_words
from .data import Calibration
from .tables import kmeans_table

__all__ = ["calibrate", "describe", "fingerprint", "token_divergence"]

NAME = "turboquant_calibrate"
PROBE_BITS = 2  # coarse enough to move the output above rounding, fine enough for the error to act like a small one
SAMPLED_TENSORS, SAMPLED_WEIGHTS = 8, 16  # of a fingerprint

Batch = Mapping[str, torch.Tensor]
Hook = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _Tap:
    """The attention function that lets a hook see, or replace, the keys and values of each layer."""

    def __init__(self) -> None:
        self.order: dict[int, int] = {}  # layers in the order in which they are called
        self.hook: Hook | None = None

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = self.order.setdefault(id(module), len(self.order))
        if self.hook is not None:
            key, value = self.hook(layer, key, value)
        return own_attention(module, query, key, value, attention_mask, scaling, dropout, options)


@contextmanager
def _tapped(model: Any) -> Iterator[_Tap]:
    """Routes the model's attention through a tap, and puts back what was there."""
    tap = _Tap()
    parts = (m for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation"))
    before = [(config, config._attn_implementation) for config in {id(m.config): m.config for m in parts}.values()]
    was_training = model.training
    AttentionInterface.register(NAME, tap.attention)
    AttentionMaskInterface.register(NAME, request_mask)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        model.eval()
        with torch.no_grad():
            yield tap
    finally:
        for config, name in before:
            config._attn_implementation = name
        model.train(was_training)


def describe(config: Any) -> dict[str, Any]:
    """What a configuration alone says of a model: its type, how many layers and KV heads, of how many channels, its
    rotary embedding. The same in transformers 4.57 and 5."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    heads = text.num_attention_heads
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    if getattr(text, "rope_theta", None) is not None:
        rope.setdefault("rope_theta", text.rope_theta)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return {
        "model_type": text.model_type,
        "layers": text.num_hidden_layers,
        "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rope": {name: float(x) if isinstance(x, int) else x for name, x in sorted(rope.items())},
    }


def _is_esm(model: Any) -> bool:
    return bool(model.config.model_type == "esm")


def fingerprint(model: Any) -> dict[str, Any]:
    """What tells a model from another one: `describe`, and a sample of a few of its weights, to six digits."""
    # All ESM-2 models of one encoder, whatever their head, may share a calibration.
    tensors = model.base_model.encoder.named_parameters() if _is_esm(model) else model.state_dict().items()
    named = sorted((n, t) for n, t in tensors if t.is_floating_point() and t.numel())
    sample: list[float] = []
    for i in sorted({round(x) for x in np.linspace(0, len(named) - 1, SAMPLED_TENSORS)}):
        flat = _loaded(model, *named[i]).detach().reshape(-1)
        where = torch.linspace(0, flat.numel() - 1, SAMPLED_WEIGHTS, dtype=torch.float64).long()
        sample += [float(f"{x:.6g}") for x in flat[where.to(flat.device)].to("cpu", torch.float64).tolist()]
    return {**describe(model.config), "weights": sample}


def _loaded(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight where it is: a model that a `device_map` spread over memory and disk has some in its hooks alone."""
    if not tensor.is_meta:
        return tensor
    path, _, leaf = name.rpartition(".")
    hook = getattr(model.get_submodule(path), "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        if (held := getattr(each, "weights_map", None)) is not None and leaf in held:
            weight: torch.Tensor = held[leaf]
            return weight
    raise ValueError(f"`model` must have its weights loaded, got {name} on the meta device")


# ---- first pass: moments ----


class _Moments:
    """Sums of vectors and of their outer products, float64, one entry per layer and side on that layer's device."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, layer: int, side: int, x: torch.Tensor, real: torch.Tensor | None) -> None:
        """x [batch, kv_heads, tokens, head_dim]; real [batch, tokens] bool or None."""
        rows = x.transpose(0, 1).flatten(1, 2) if real is None else x.transpose(1, 2)[real.to(x.device)].transpose(0, 1)
        rows = rows.to(torch.float64)
        first, second = rows.sum(1), rows.mT @ rows
        if (layer, side) in self.sums:
            held = self.sums[layer, side]
            first, second = held[0].to(first.device) + first, held[1].to(first.device) + second
        self.sums[layer, side] = first, second

    def finish(self, layers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(centre, axes, eigenvalues) as `Calibration` holds them."""
        centre, axes, values = [], [], []
        for at in ((layer, side) for layer in range(layers) for side in range(2)):
            first, second = (t.cpu().numpy() for t in self.sums[at])
            if not np.isfinite(second).all():
                raise ValueError(f"`model` must give finite keys and values, got others in layer {at[0]}")
            mean = first / self.tokens
            covariance = second / self.tokens - mean[:, :, None] * mean[:, None, :]
            eigenvalues, vectors = np.linalg.eigh(covariance)  # rising
            vectors = vectors.swapaxes(-1, -2)[:, ::-1]
            # An axis has no direction of its own: its largest entry is made positive, on every machine.
            largest = np.take_along_axis(vectors, np.abs(vectors).argmax(-1)[..., None], -1)
            axes.append(vectors * np.sign(largest))
            values.append(np.maximum(eigenvalues[:, ::-1], 0))
            centre.append(mean)
        if len({x.shape for x in axes}) > 1:
            raise NotImplementedError("layers whose heads differ in number or channels cannot be calibrated")
        parts = [np.stack(x).reshape(layers, 2, *x[0].shape).astype(np.float32) for x in (centre, axes, values)]
        return parts[0], parts[1], parts[2]


def _count(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


def _real(batch: Batch) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def _forward(model: Any, batch: Batch) -> torch.Tensor:
    """[batch, tokens, ...]: what `_divergence` compares."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    if _is_esm(model):
        states: torch.Tensor = model.base_model(**inputs).last_hidden_state
        return states
    if _real(batch) is not None and "position_ids" not in inputs:  # as `generate` numbers the tokens of padded batches
        inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def _divergence(model: Any, reference: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """float32 [batch, tokens], of two results of `_forward`."""
    if not _is_esm(model):
        return token_divergence(reference, output)
    return 1 - torch.cosine_similarity(reference.double(), output.double(), dim=-1).float()


def token_divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of each next-token distribution from the reference's, in nats: float32 [batch,
    tokens] of two tensors of logits [batch, tokens, vocabulary]. In slices: it needs no third tensor of that size."""
    out = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    for b, start in ((b, s) for b in range(len(logits)) for s in range(0, logits.shape[1], 256)):
        at = b, slice(start, start + 256)
        want = torch.log_softmax(reference[at].to(logits.device).float(), -1)
        got = torch.log_softmax(logits[at].float(), -1)
        out[at] = (want.exp() * (want - got)).sum(-1)
    return out


# ---- second pass: sensitivities ----


def _probe(x: torch.Tensor, rotation: torch.Tensor, centre: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """x [batch, kv_heads, tokens, head_dim] quantised to PROBE_BITS and back, by the operators."""
    batch, _, tokens, head_dim = x.shape
    plan = plan_words(head_dim, PROBE_BITS, 0, rotation="dense")
    transform = {"key_rotation": rotation, "key_centre": centre, "key_steps": steps}
    pages = torch.ops.turboquant.quantize(x, None, plan, **transform)
    n = -(-tokens // PAGE_TOKENS)
    table = torch.arange(batch * n, dtype=torch.int32, device=x.device).view(batch, n)
    counts = torch.full((batch,), tokens, dtype=torch.int32, device=x.device)
    decoded: torch.Tensor = torch.ops.turboquant.dequantize(pages, table, counts, tokens, plan, **transform)[0]
    return decoded.to(x.dtype)


def _mean(per_token: torch.Tensor, real: torch.Tensor | None) -> float:
    """Over the real tokens of [batch, tokens]."""
    return float((per_token if real is None else per_token[real.to(per_token.device)]).double().mean())


class _Sensitivities:
    """Sums of divergences and squared errors over batches, [layers, 2]."""

    def __init__(self, layers: int) -> None:
        self.batches = 0
        self.divergence, self.error = np.zeros((layers, 2)), np.zeros((layers, 2))

    def add(self, model: Any, tap: _Tap, batch: Batch, plain: Calibration, step: Callable[[], Any]) -> None:
        tap.hook = None
        reference, real = _forward(model, batch), _real(batch)
        steps = plain.steps()
        divergence, error = np.zeros_like(self.divergence), np.zeros_like(self.error)
        for layer in range(plain.layers):
            rotation = plain.rotation(layer)
            for side in range(2):
                transform = rotation[side], plain.centre[layer, side], steps[layer, side]
                tap.hook = self._quantise_one(layer, side, transform, real, error)
                divergence[layer, side] = _mean(_divergence(model, reference, _forward(model, batch)), real)
                step()
        tap.hook = None
        self.divergence += divergence
        self.error += error
        self.batches += 1

    @staticmethod
    def _quantise_one(
        layer: int, side: int, transform: tuple[np.ndarray, ...], real: torch.Tensor | None, errors: np.ndarray
    ) -> Hook:
        def hook(at: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if at != layer:
                return key, value
            sides = [key, value]
            x = sides[side]
            sides[side] = _probe(x, *(torch.from_numpy(np.ascontiguousarray(t)).to(x.device) for t in transform))
            errors[layer, side] = _mean((sides[side].float() - x.float()).square().sum((1, 3)), real)
            return sides[0], sides[1]

        return hook

    def finish(self) -> np.ndarray:
        """Divergence per squared error. A side whose error is 0 costs nothing, whatever bits it gets."""
        weights = np.where(self.error > 0, np.maximum(self.divergence, 0) / np.maximum(self.error, 1e-30), 0)
        floor = 1e-3 * weights.max() if weights.max() > 0 else 1.0  # rounding may hide an effect, not abolish it
        return np.maximum(weights, floor).astype(np.float32)


# ---- tables of levels ----


def _measure_tables(model: Any, tap: _Tap, batch: Batch, plain: Calibration) -> np.ndarray:
    """[layers, 2, kv_heads, 9] of one batch: K-means of keys along their singular axes and of plain values."""
    tables: dict[tuple[int, int], np.ndarray] = {}
    real = _real(batch)

    def hook(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for side, x in enumerate((key, value)):
            rows = x.transpose(1, 2)[real.to(x.device)] if real is not None else x.transpose(1, 2).flatten(0, 1)
            heads = rows.transpose(0, 1).float().cpu().numpy()  # [kv_heads, tokens, head_dim]
            if side == 0:
                heads = heads @ plain.singular_axes(layer)[0].swapaxes(-1, -2)
            tables[layer, side] = np.stack([kmeans_table(head) for head in heads])
        return key, value

    tap.hook = hook
    _forward(model, batch)
    tap.hook = None
    return np.stack([np.stack([tables[layer, side] for side in range(2)]) for layer in range(plain.layers)])


# ---- the whole ----


class _Run:
    """What one calibration has found so far, kept in a file if it has one."""

    def __init__(self, layers: int, identity: str, file: str | os.PathLike[str] | None) -> None:
        self.moments, self.sensitivities, self.done = _Moments(), _Sensitivities(layers), 0
        self.identity, self.file = identity, None if file is None else Path(file)
        if self.file is not None and self.file.exists():
            self._load(self.file)

    def _load(self, file: Path) -> None:
        wrong = f"`checkpoint` must be one of this model, these batches and this seed, got {str(file)!r}"
        try:
            held = torch.load(file, weights_only=True, map_location="cpu")
            if held["identity"] != self.identity:
                raise ValueError("it is of others")
            self.done, self.moments.tokens, self.moments.sums = held["done"], held["tokens"], held["sums"]
            self.sensitivities.batches = held["probed"]
            self.sensitivities.divergence, self.sensitivities.error = (held[n].numpy() for n in ("divergence", "error"))
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{wrong}: remove it to start again ({error})") from error

    def save(self) -> None:
        if self.file is None:
            return
        found = self.sensitivities
        state = {
            "identity": self.identity,
            "done": self.done,
            "tokens": self.moments.tokens,
            "sums": self.moments.sums,
            "probed": found.batches,
            "divergence": torch.from_numpy(found.divergence),
            "error": torch.from_numpy(found.error),
        }
        new = self.file.with_name(self.file.name + ".new")
        torch.save(state, new)
        os.replace(new, self.file)


def calibrate(
    model: Any,
    batches: Sequence[Batch | torch.Tensor],
    *,
    sensitivity_batches: int = 2,
    seed: int = 0,
    source: str = "",
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Calibration:
    """Measures what a calibrated plan needs; good for every budget afterwards.

    model    a causal language model of transformers with rotary keys whose attention goes through AttentionInterface,
             or an ESM-2 model (`turboquant.esm.protein_batches` makes batches); patched or not; float32, float16 or
             bfloat16; on any device or spread over several. It is left as it was.
    batches  token ids [batch, tokens], or mappings with `input_ids` and perhaps `attention_mask`, as the model takes
             them. Text like that which the cache will see, but not what it will be tested on; tens of thousands of
             tokens are plenty. Padding is not counted.
    sensitivity_batches  of these, from the front, measure sensitivities: 2 * layers forwards each.
    seed     of the Hadamard signs inside groups. The same model, batches and seed give the same calibration.
    source   what text it was, in words; kept in the file.
    progress   a bar on stderr, one step per forward; needs tqdm.
    checkpoint  a file that keeps what was found while calibration runs, after every batch, so that an interrupted one
             goes on where it was; removed at the end.

    Raises TypeError for batches of another kind, ValueError if there are fewer tokens than channels and for a
    checkpoint that is damaged or of another run, NotImplementedError for a model without rotary keys or whose
    attention bypasses AttentionInterface: all before anything is measured.
    """
    given = [_checked(i, batch) for i, batch in enumerate(batches)]
    mark = _checked_model(model)
    tokens = sum(_count(b) for b in given)
    if tokens <= mark["head_dim"]:
        raise ValueError(
            f"`batches` must hold more tokens than a head has channels ({mark['head_dim']}), got {tokens}: more text"
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be in 0..2**63 - 1, got {seed}")
    if sensitivity_batches < 1:
        raise ValueError(f"`sensitivity_batches` must be at least 1, got {sensitivity_batches}")
    probes, layers = given[:sensitivity_batches], mark["layers"]
    run = _Run(layers, _identity(mark, given, len(probes), seed), checkpoint)
    with _bar(len(given) + 2 * layers * len(probes), progress) as step, _tapped(model) as tap:
        _measure_moments(model, tap, given, run, step, layers)
        centre, axes, eigenvalues = run.moments.finish(layers)
        ones = np.ones(centre.shape[:2], np.float32)
        plain = Calibration(centre, axes, eigenvalues, ones, mark, run.moments.tokens, seed, source)
        tables = _measure_tables(model, tap, given[0], plain)
        step(2 * layers * run.sensitivities.batches)
        for batch in probes[run.sensitivities.batches :]:
            run.sensitivities.add(model, tap, batch, plain, step)
            run.save()
    found = Calibration(centre, axes, eigenvalues, run.sensitivities.finish(), mark, run.moments.tokens, seed, source,
                        tables)  # fmt: skip
    if checkpoint is not None:
        Path(checkpoint).unlink(missing_ok=True)
    return found


def _checked(i: int, batch: Batch | torch.Tensor) -> Batch:
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        raise TypeError(f"`batches[{i}]` must be token ids [batch, tokens] or a mapping with such input_ids, got "
                        f"{tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(batch).__name__}")  # fmt: skip
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"`batches[{i}]` must have an attention_mask like its {tuple(ids.shape)} tokens, got {tuple(mask.shape)}"
        )
    return batch


def _checked_model(model: Any) -> dict[str, Any]:
    name = type(model).__name__
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise TypeError(f"`model` must be a transformers model, got {name}")
    if _is_esm(model):
        from ..esm.model import checked_model

        checked_model(model)
        return fingerprint(model)
    if not any("RotaryEmbedding" in type(m).__name__ for m in model.modules()):
        raise NotImplementedError(f"{name} cannot be calibrated: its keys are not rotary")
    if not getattr(model, "_supports_attention_backend", False):
        raise NotImplementedError(f"{name} cannot be calibrated: its attention does not go through AttentionInterface")
    return fingerprint(model)


def _identity(mark: dict[str, Any], batches: Sequence[Batch], probes: int, seed: int) -> str:
    digest = hashlib.sha256(repr((mark, probes, seed)).encode())
    for batch in batches:
        for name in ("input_ids", "attention_mask"):
            if batch.get(name) is not None:
                digest.update(f"{name}{tuple(batch[name].shape)}".encode() + batch[name].cpu().long().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[..., Any]]:
    if not shown:
        yield lambda n=1: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="forward", desc="calibrate") as bar:
        yield bar.update


def _measure_moments(
    model: Any, tap: _Tap, batches: Sequence[Batch], run: _Run, step: Callable[..., Any], layers: int
) -> None:
    step(run.done)
    for batch in batches[run.done :]:
        real = _real(batch)

        def hook(
            layer: int, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None = real
        ) -> tuple[torch.Tensor, torch.Tensor]:
            run.moments.add(layer, 0, key, real)
            run.moments.add(layer, 1, value, real)
            return key, value

        tap.hook = hook
        _forward(model, batch)
        if len(tap.order) != layers:
            raise NotImplementedError(f"{type(model).__name__} cannot be calibrated: the attention of {len(tap.order)} "
                                      f"of its {layers} layers goes through AttentionInterface")  # fmt: skip
        run.moments.tokens += _count(batch)
        run.done += 1
        run.save()
        step()
    tap.hook = None
