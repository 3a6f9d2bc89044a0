"""Measures ESM-2: quality of packed full passes, scans from a shared context, decoding speed and bytes.

    python benchmarks/esm.py quality families ablation scan memory --out benchmarks/results/cpu
    python benchmarks/esm.py decode scan memory full quality families --device cuda --out benchmarks/results/h200

    quality    int8, presets and widths, proteins_val.fasta, calibrated on proteins_train.fasta
    full       one packed full pass of 64 x 1,022 residues of the 650M shape, against the model's own
    families   final cosine by SCOP class, proteins of proteins_val.fasta
    ablation   the default method at 3 bits, and TurboESM's, without each of their parts
    scan       masked marginals by a loop with transformers alone, one at a time, batched and from a shared context, and
               wild-type marginals: time, memory, rank correlation with the first, errors
    decode     one changed residue a protein: packed context against a full one in the model's dtype, by SDPA; on a GPU
               both also as CUDA graphs
    overhead   CPU time a layer of a decoding step beyond the model's: 33 narrow layers of 20 heads, one short protein
    memory     bytes that a context of the 650M shape holds
    embed      means of proteins of proteins_train.fasta, cut at 1,022 residues, by `esm.embed` and by transformers in
               padded batches of 8 in the order of the file, in turns, 3 rounds; random weights in the shapes of the 8M
               and 35M models in float32 on a CPU, of the 650M model in bfloat16 on a GPU

quality, families, ablation and scan run models/esm-reference in float32; on a GPU scan also times the 650M shape. That
shape has random weights in bfloat16. On a CPU, memory runs it with feed-forward layers that are 16 wide.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import RESULTS, Report
from transformers import EsmConfig, EsmForMaskedLM

import turboquant
from turboquant import CacheSpec, Profile, esm
from turboquant.esm.attention import NAME
from turboquant.models.esm import padded, tokenise
from turboquant.models.routing import routed

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("TURBOQUANT_SHARED", ROOT.parent / "shared"))

PRESET = turboquant.preset("esm-default")
AXES: dict[str, Any] = {"method": "axes"}
SPECS = {
    "int8": CacheSpec(8, 8, rotation="none", key_levels="absmax", value_levels="absmax", key_block=32,
                             value_block=32, centre="none", metric="none", sinks=0, window=0),
    "esm-default": PRESET,
    **{f"esm-{b}": PRESET.with_(key_bits=b, value_bits=b, sinks=0) for b in (4, 3, 2)},
    **{f"default-{b}": CacheSpec(b, b, sinks=0, window=0) for b in (5, 4, 3, 2)},
    # The method "axes", in groups of 32 and of 16 channels.
    **{f"calibrated-{b}": CacheSpec(budget=b, sinks=0, window=0, **AXES) for b in (4, 3.5, 3, 2.5, 2)},
    **{f"calibrated-fine-{b}": CacheSpec(budget=b, group=16, sinks=0, window=0, **AXES) for b in (4, 3.5, 3, 2.5, 2)},
    **{f"paper-mse-{b}": turboquant.preset(f"paper-mse-{b}") for b in (4, 3, 2)},
    "turboesm": turboquant.preset("turboesm"),
    "keys 4, values 3": CacheSpec(4, 3, sinks=0, window=0),
}  # fmt: skip
WITHOUT = {
    "all parts": CacheSpec(3, 3, sinks=0, window=0),
    "no metric": CacheSpec(3, 3, metric="none", sinks=0, window=0),
    "no wave": CacheSpec(3, 3, centre="none", sinks=0, window=0),
    "no rotation": CacheSpec(3, 3, rotation="none", sinks=0, window=0),
    "Haar in place of Hadamard": CacheSpec(3, 3, rotation="dense", sinks=0, window=0),
    "norm in place of EDEN": CacheSpec(3, 3, scale="norm", sinks=0, window=0),
    "none of them": CacheSpec(3, 3, rotation="none", scale="norm", centre="none", metric="none", sinks=0, window=0),
    "turboesm": SPECS["turboesm"],
    "turboesm, no rotation": SPECS["turboesm"].with_(rotation="none"),
    "turboesm, Haar in place of SVD": SPECS["turboesm"].with_(rotation="dense"),
    "turboesm, no tables": SPECS["turboesm"].with_(key_levels="codebook", value_levels="codebook"),
    "turboesm, no residual": SPECS["turboesm"].with_(sketch="none"),
}
CLASSES = {"a": "all alpha", "b": "all beta", "c": "alpha/beta", "d": "alpha + beta", "f": "membrane", "g": "small"}
CASES = [(1, 256), (1, 1022), (1, 4094), (8, 256), (8, 1022), (8, 4094), (64, 256), (64, 1022), (64, 4094)]


def reference(device: str = "cpu") -> Any:
    model = EsmForMaskedLM.from_pretrained(SHARED / "models/esm-reference", dtype=torch.float32).eval()
    return model.to(device)


def shape_650m(device: str, intermediate: int = 5120) -> Any:
    config = EsmConfig(
        vocab_size=33, hidden_size=1280, num_hidden_layers=33, num_attention_heads=20, intermediate_size=intermediate,
        max_position_embeddings=4100, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
        token_dropout=True, emb_layer_norm_before=False,
    )  # fmt: skip
    with torch.device(device):
        return EsmForMaskedLM(config).eval().to(torch.bfloat16)


def proteins(name: str, longest: int = 1022) -> list[esm.Protein]:
    return [p for p in esm.read_fasta(SHARED / "data" / name) if len(p.sequence) <= longest]


def spread(items: list[Any], count: int) -> list[Any]:
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def calibrated(model: Any, args: argparse.Namespace) -> Profile:
    if args.profile:
        return Profile.load(args.profile)
    chosen = [p.sequence for p in spread(proteins("proteins_train.fasta"), 200)]
    batches = esm.protein_batches(model, chosen)
    return turboquant.calibrate(model, batches, source="proteins_train.fasta, 200 proteins", progress=True)


def quality(report: Report, args: argparse.Namespace) -> None:
    model = reference(args.device)
    chosen = [p.sequence for p in spread(proteins("proteins_val.fasta"), args.proteins)]
    specs = {name: spec for name, spec in SPECS.items() if not args.specs or name in args.specs}
    profile = calibrated(model, args) if any(spec.calibrated for spec in specs.values()) else None
    found = esm.evaluate(model, chosen, specs, profile=profile, progress=True)
    for name, one in found.items():
        source = profile.calibration.source if profile and SPECS[name].calibrated else None
        params = {"spec": name, "proteins": one.proteins, "residues": one.residues, "calibrated_on": source}
        report.add("quality", params, rounded(one.metrics()))
        print(f"{name:34} {one}")


def plot(report: Report, path: str) -> None:
    """Plots final cosine and divergence against bits, scales included, with a line through each family of specs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    shown = {"final_cosine_mean": "1 - final cosine, mean", "masked_kl_divergence": "KL divergence, nats"}
    for axes, (metric, label) in zip(figure.subplots(1, 2), shown.items()):
        for family in ("esm", "default", "calibrated", "calibrated-fine", "paper-mse", "int8", "turboesm"):
            rows = [row for row in report.rows if re.fullmatch(rf"{family}(-[\d.]+)?", row["params"]["spec"])]
            if not rows:
                continue
            points = sorted((row["metrics"]["packed_bits"], row["metrics"][metric]) for row in rows)
            points = [(bits, 1 - y if "cosine" in metric else y) for bits, y in points]
            axes.plot(*zip(*points), marker="o", markersize=3, label=family)
        axes.set(xlabel="bits per number, scales included", ylabel=label, yscale="log")
        axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def families(report: Report, args: argparse.Namespace) -> None:
    """Measures proteins whose domains are all of one class."""
    model = reference(args.device)
    profile = calibrated(model, args)
    lines = (SHARED / "data/proteins_scop.tsv").read_text().splitlines()
    of = {chain: {domain[0] for domain in classes.split(",")} for chain, classes in (line.split() for line in lines)}
    held_out = proteins("proteins_val.fasta")
    specs = {name: SPECS[name] for name in ("default-4", "calibrated-fine-3")}
    for letter, described in CLASSES.items():
        mine = [p.sequence for p in held_out if of.get(p.name.rpartition("|")[2]) == {letter}][: args.family]
        for name, one in esm.evaluate(model, mine, specs, profile=profile).items():
            params = {"class": f"{letter}: {described}", "spec": name, "proteins": one.proteins}
            report.add("families", params, rounded(one.metrics()))
            print(f"{letter}: {described:14} {name:18} {one}")


@torch.no_grad()
def full(report: Report, args: argparse.Namespace) -> None:
    model = shape_650m(args.device)
    batch = esm.protein_batches(model, [random_protein(1022, seed) for seed in range(64)], batch_size=64)[0]
    for name in ("the model's own", "default-4", "default-3", "default-2"):
        if name in SPECS:
            turboquant.patch(model, SPECS[name])
        metrics = {
            "ms": timed(lambda: model(**batch), model, 3),
            "peak_bytes": peak_bytes(model, lambda: model(**batch)),
        }
        report.add("full", {"spec": name, "proteins": 64, "residues": 1022, "shape": "650M"}, metrics)
        print(report.rows[-1], flush=True)


def ablation(report: Report, args: argparse.Namespace) -> None:
    model = reference(args.device)
    profile = calibrated(model, args)
    chosen = [p.sequence for p in spread(proteins("proteins_val.fasta", 400), args.proteins // 2)]
    for name, one in esm.evaluate(model, chosen, WITHOUT, profile=profile, progress=True).items():
        report.add("ablation", {"parts": name, "proteins": one.proteins}, rounded(one.metrics()))
        print(f"{name:28} {one}")


def rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{x:.6g}") for name, x in metrics.items()}


def scan(report: Report, args: argparse.Namespace) -> None:
    if args.device == "cuda":
        scan_one(report, shape_650m("cuda"), "650M shape, random weights", "random", random_protein(512), 128)
    model = reference(args.device)
    for p in spread([p for p in proteins("proteins_val.fasta", 200) if len(p.sequence) >= 60], args.scans):
        scan_one(report, model, "esm-reference", p.name, p.sequence, 32)


def scan_one(report: Report, model: Any, name: str, protein: str, sequence: str, batch: int) -> None:
    """Scans a protein in each way. Errors are against the first way, a full pass for each masked position; packed and
    exact contexts tell the error of packing from that of reuse. Seconds are wall time on a GPU, processor time on a
    CPU."""
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    masked = partial(esm.masked_marginals, model)
    ways: dict[str, Callable[..., esm.Scan]] = {
        "a loop by hand": partial(scan_by_hand, model),
        "masked marginals, one at a time": partial(masked, shared_context=False, batch_size=1),
        "masked marginals, batched": partial(masked, shared_context=False, batch_size=batch),
        "shared context, unpacked": partial(masked, spec=esm.EXACT, batch_size=batch),
        "shared context, 4 bits": partial(masked, batch_size=batch),
        "wild-type marginals": partial(esm.wild_type_marginals, model),
    }
    found: dict[str, esm.Scan] = {}
    for way, run in ways.items():
        run(sequence[:16])  # the first call pays for what is loaded once
        wait(model)
        start = clock()
        found[way] = run(sequence)
        wait(model)
        seconds = clock() - start
        some = range(min(batch, len(sequence)))  # every batch takes as much memory as the first
        exact = next(iter(found.values()))
        error = np.abs(found[way].scores - exact.scores).mean(1)  # of each position
        metrics = {
            "seconds": seconds,
            "peak_bytes": peak_bytes(model, lambda run=run, some=some: run(sequence, some)),
            "spearman": spearman(exact.scores, found[way].scores),
            "error_mean": error.mean(),
            "error_p90": np.quantile(error, 0.9),
            "error_max": error.max(),
        }
        if way == "shared context, 4 bits":
            packing = found[way].scores - found["shared context, unpacked"].scores
            metrics["packing_error_mean"] = np.abs(packing).mean()
        params = {"model": name, "protein": protein, "residues": len(sequence), "batch": batch, "way": way}
        report.add("scan", params, rounded({key: float(x) for key, x in metrics.items()}))
        print(params, report.rows[-1]["metrics"], flush=True)


def scan_by_hand(model: Any, sequence: str, positions: Iterable[int] | None = None) -> esm.Scan:
    """Scans as one would write it with transformers alone."""
    ids = torch.tensor([tokenise(sequence, model.config)], device=model.device)
    letters = tokenise(esm.AMINO_ACIDS, model.config)[1:-1]
    at = tuple(range(len(sequence)) if positions is None else positions)
    found, own = [], []
    for p in at:
        masked = ids.clone()
        masked[0, p + 1] = model.config.mask_token_id
        with torch.no_grad():
            logs = model(input_ids=masked).logits[0, p + 1].float().log_softmax(-1).cpu().numpy()
        found.append(logs[letters])
        own.append(logs[int(ids[0, p + 1])])
    return esm.Scan(sequence, at, np.stack(found), np.array(own))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the rank correlation. Ties, which only wild types have, rank in the order of their places."""
    ranks = [np.argsort(np.argsort(x.ravel(), kind="stable")) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def peak_bytes(model: Any, run: Any) -> int:
    """Returns the most memory that a run takes beyond what was held before: torch's on CUDA, else the process's."""
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = resident_bytes("VmRSS")
    run()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def random_protein(length: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng(seed).choice(list(esm.AMINO_ACIDS), length))


class FullContext:
    """The baseline of `decode` and `overhead`: keys and values of each protein in the model's dtype. Those of the
    changed residue are written in place, and SDPA attends to all of them."""

    def __init__(self, model: Any, batch: int, tokens: int, at: int) -> None:
        heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
        shape = (layers, 2, batch, heads, tokens, model.config.hidden_size // heads)
        self.held, self.at, self.layer = torch.randn(shape, device=model.device, dtype=model.dtype), at, 0

    def attend(self, call: Any) -> torch.Tensor:
        k, v = self.held[self.layer]
        self.layer = (self.layer + 1) % len(self.held)
        k[:, :, self.at], v[:, :, self.at] = call.key[:, :, 0], call.value[:, :, 0]
        out = torch.nn.functional.scaled_dot_product_attention(call.query, k, v, scale=call.scaling)
        return out.transpose(1, 2)


@torch.no_grad()
def decode(report: Report, args: argparse.Namespace) -> None:
    model = shape_650m(args.device)
    for batch, residues in CASES:
        at = residues // 2
        full = FullContext(model, batch, residues + 2, at + 1)
        ids = torch.full((batch, 1), 5, device=model.device)

        def full_step(context: FullContext = full, ids: torch.Tensor = ids) -> None:
            with routed(model.esm, NAME):
                states = model.esm(inputs_embeds=model.esm.embeddings.word_embeddings(ids), turboquant_context=context)
                model.lm_head(states.last_hidden_state)

        common = {"batch": batch, "context": residues, "model": "650M shape, random weights"}
        dtype = str(model.dtype).removeprefix("torch.")
        ways = (False, True) if model.device.type == "cuda" else (False,)
        for graphs in ways:
            metrics = {"ms": timed(recorded(full_step) if graphs else full_step, model), "bytes": full.held.nbytes}
            report.add("decode", {**common, "context_kept_as": dtype, "cuda_graphs": graphs}, metrics)
        del full, full_step
        for bits, graphs in product((4, 3, 2), ways):
            cache = esm.ContextCache(model, CacheSpec(bits, bits, centre="none", sinks=0, window=0), cuda_graphs=graphs)
            cache.encode([random_protein(residues, i) for i in range(batch)])

            def step(cache: Any = cache, batch: int = batch, at: int = at) -> None:
                cache.decode(["A"] * batch, [[at]] * batch, batch_size=batch)

            report.add("decode", {**common, "context_kept_as": f"{bits} bits", "cuda_graphs": graphs},
                       {"ms": timed(step, model), "bytes": cache.nbytes})  # fmt: skip
            del cache, step
        for row in report.rows[-4 * len(ways) :]:
            print(row["params"], row["metrics"], flush=True)


def recorded(step: Any) -> Any:
    """Records a step as a CUDA graph and returns its replay."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Any, model: Any, repeats: int = 12) -> float:
    """Returns the median wall time of a step in milliseconds, Python included."""
    times = []
    for _ in range(repeats + 3):
        wait(model)
        start = time.perf_counter()
        step()
        wait(model)
        times.append((time.perf_counter() - start) * 1e3)
    return round(float(np.median(times[3:])), 3)


class NoContext:
    """Attention that does nothing, so that a step costs what the model costs."""

    def attend(self, call: Any) -> torch.Tensor:
        return call.query.transpose(1, 2)


@torch.no_grad()
def overhead(report: Report, args: argparse.Namespace) -> None:
    """Runs take turns and the least time of a thread counts, so that a busy machine hardly matters. Attention over the
    few tokens is included."""
    torch.set_num_threads(1)
    layers, residues = 33, 30
    config = EsmConfig(
        vocab_size=33, hidden_size=320, num_hidden_layers=layers, num_attention_heads=20, intermediate_size=32,
        max_position_embeddings=1026, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
        token_dropout=True, emb_layer_norm_before=False,
    )  # fmt: skip
    model = EsmForMaskedLM(config).eval()

    def own(context: Any) -> None:
        with routed(model.esm, NAME):
            embeddings = model.esm.embeddings.word_embeddings(torch.full((1, 1), 5))
            model.lm_head(model.esm(inputs_embeds=embeddings, turboquant_context=context).last_hidden_state)

    full = FullContext(model, 1, residues + 2, residues // 2)
    steps: dict[str, Any] = {"none": lambda: own(NoContext()), "SDPA": lambda: own(full)}
    for name, spec in {
        "4 bits": CacheSpec(4, 4, centre="none", sinks=0, window=0),
        "default-4": SPECS["default-4"],
        "esm-default": PRESET,
    }.items():
        cache = esm.ContextCache(model, spec)
        cache.encode([random_protein(residues)])
        steps[name] = lambda cache=cache: cache.decode(["A"], [[residues // 2]])
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(100):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            least[name] = min(least[name], time.thread_time() - start)
    for name, seconds in least.items():
        beyond = (seconds - least["none"]) / layers * 1e6
        report.add("overhead", {"attention": name}, {"step_us": seconds * 1e6, "beyond_model_us_per_layer": beyond})
        print(f"{name:12} {seconds * 1e6:8.0f} us a step, {beyond:6.1f} us a layer beyond the model")


def memory(report: Report, args: argparse.Namespace) -> None:
    """Measures the bytes of contexts. Only attention matters, so a CPU runs feed-forward layers that are 16 wide."""
    model = shape_650m(args.device, intermediate=5120 if args.device == "cuda" else 16)
    for residues in (254, 1022):
        for name in ("default-4", "default-3", "default-2", "exact"):
            cache = esm.ContextCache(model, esm.EXACT if name == "exact" else SPECS[name])
            cache.encode([random_protein(residues)])
            numbers = 2 * 33 * 1280 * (residues + 2)
            size = cache.nbytes
            metrics = {"bytes": size, "bits": 8 * size / numbers, "ratio_bf16": 2 * numbers / size,
                       "ratio_fp32": 4 * numbers / size}  # fmt: skip
            report.add("memory", {"spec": name, "residues": residues, "shape": "650M"}, rounded(metrics))
            print(report.rows[-1])


SHAPES = {"8M": (320, 6), "35M": (480, 12)}  # width, layers; 20 heads


def embed(report: Report, args: argparse.Namespace) -> None:
    """Compares `esm.embed` with transformers. Seconds are wall time on a GPU, processor time on a CPU."""
    found = spread(esm.read_fasta(SHARED / "data/proteins_train.fasta"), args.proteins)
    sequences = [p.sequence[:1022].replace("J", "L") for p in found]
    shapes = {"650M": None} if args.device == "cuda" else SHAPES
    for name, shape in shapes.items():
        model = shape_650m("cuda") if shape is None else shaped(*shape)
        clock = time.perf_counter if shape is None else time.process_time
        ways = {"transformers": partial(padded_means, model, sequences),
                "embed": lambda model=model: esm.embed(model, sequences).means()}  # fmt: skip
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        means: dict[str, np.ndarray] = {}
        for _ in range(3):
            for way, run in ways.items():
                wait(model)
                start = clock()
                means[way] = run()
                wait(model)
                seconds[way].append(clock() - start)
        ratio = np.median([a / b for a, b in zip(*seconds.values())])
        error = np.abs(means["embed"] - means["transformers"]).max()
        params = {"shape": name, "proteins": len(sequences), "residues": sum(map(len, sequences))}
        metrics = {**{way: float(np.median(all_of)) for way, all_of in seconds.items()},
                   "ratio": float(ratio), "largest_difference": float(error)}  # fmt: skip
        report.add("embed", params, rounded(metrics))
        print(params, report.rows[-1]["metrics"], flush=True)


def shaped(width: int, layers: int) -> Any:
    config = EsmConfig(
        vocab_size=33, hidden_size=width, num_hidden_layers=layers, num_attention_heads=20, intermediate_size=4 * width,
        max_position_embeddings=1026, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary",
        token_dropout=True, emb_layer_norm_before=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return EsmForMaskedLM(config).eval()


def padded_means(model: Any, sequences: list[str]) -> np.ndarray:
    """Returns the means as one would compute them with transformers alone."""
    means = []
    for at in range(0, len(sequences), 8):
        tokens = [tokenise(sequence, model.config) for sequence in sequences[at : at + 8]]
        ids, real = padded(tokens, model.device)
        with torch.no_grad():
            states = model.base_model(input_ids=ids, attention_mask=real.long()).last_hidden_state.float()
        means += [states[b, 1 : len(own) - 1].mean(0).cpu().numpy() for b, own in enumerate(tokens)]
    return np.stack(means)


BENCHES = {"quality": quality, "full": full, "families": families, "ablation": ablation, "scan": scan, "decode": decode,
           "overhead": overhead, "memory": memory, "embed": embed}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="+", choices=BENCHES, metavar="BENCH", help=", ".join(BENCHES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--proteins", type=int, default=60, help="of proteins_val.fasta")
    parser.add_argument("--specs", nargs="+", choices=SPECS, metavar="SPEC", help="of quality; all if none are named")
    parser.add_argument("--family", type=int, default=12, help="at most so many proteins of a class")
    parser.add_argument("--scans", type=int, default=8, help="proteins of 60 to 200 residues to scan")
    parser.add_argument("--profile", help="a file, instead of calibrating")
    parser.add_argument("--plot", metavar="FILE", help="quality as a picture: docs/esm_quality.svg")
    parser.add_argument("--out", default=RESULTS / "local")
    args = parser.parse_args()
    for name in args.benches:
        report = Report(f"esm_{name}", args.device)
        BENCHES[name](report, args)
        print(report.save(args.out))
        if args.plot and name == "quality":
            plot(report, args.plot)


if __name__ == "__main__":
    main()
