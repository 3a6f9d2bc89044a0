"""Measures every preset through the packed path: KL divergence, perplexity, top-1 agreement and bytes.

    python benchmarks/quality.py --device cuda --batch 4 --out benchmarks/results/h200    the whole table
    python benchmarks/quality.py --ship      the demo model's profile, demo/turboquant_demo/profile.safetensors
    python benchmarks/quality.py --guard     tests/golden/quality_*.json, the figures of the guard tests
    python benchmarks/quality.py --real smollm2 --windows 8    beside what people use: baselines.py

Each text is measured with everything packed, with all but each query's own token, and with 4 sinks and a window of 128.
Calibrated presets use one calibration, made here on the first half of books_val.txt. "books" is the second half, so
no text that is measured was calibrated on. The model runs in float32, so that only the cache differs. Files:
quality_<model>_<text>.json for 12 x 2048 tokens, quality_<model>_<text>_<size>.json for other sizes. `--add` keeps the
rows of other specs that a file has, so that a table can be made in parts.

--real measures a model of `make real-models` on WikiText-2's test text, or on --text. The tokens are cut into windows,
of which some are taken, evenly spread from 30 % of the text on. Each starts with BOS if the model's texts do. 4 sinks
are exact, and a window of --window tokens. With --random-moments the model's moments are of random token ids, as if no
tokenizer was found. The other formats are simulated, our specs are not. File: real_<model>.json, which --tables prints.
--sweep measures specs with several numbers of exact tokens: real_<model>_exact.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from baselines import BASELINES, measured
from texts import SHARED, real_windows, text_of
from timing import RESULTS, Report, commit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import turboquant
from turboquant import CacheSpec, Profile
from turboquant.evaluation.decoder import evaluate_all, markdown, text_windows
from turboquant.measured.choice import table

ROOT = Path(__file__).resolve().parent.parent
REAL_MODELS = Path(os.environ.get("TURBOQUANT_REAL_MODELS", ROOT / "build" / "real-models"))
REAL_SPECS = ["default-5", "default", "default-3", "default-2"]
SINKS = 4  # of --real
DEMO = ROOT / "demo" / "turboquant_demo"
GOLDEN = ROOT / "tests" / "golden"
GUARDED = ("default", "calibrated-3", "paper-mse-3")
MADE_HERE = "moments+widths at {} bits, made here"
GUARDED_REAL = ("default", "default-3", "default-2")

_ALONE: dict[str, Any] = {"centre": "none", "metric": "none", "sinks": 0, "window": 0}

# Beside the presets: the default method at other widths, and each of its parts.
EXTRAS = {
    **{f"default-{bits}": CacheSpec(bits, bits) for bits in (5, 3, 2)},
    "wave-3, no metric": CacheSpec(3, 3, metric="none", sinks=0, window=0),
    "no wave, metric-3": CacheSpec(3, 3, centre="none", sinks=0, window=0),
    **{f"eden-{bits}": CacheSpec(bits, bits, **_ALONE) for bits in (4, 3, 2)},
    **{f"norm-corrected-{bits}": CacheSpec(bits, bits, scale="norm_corrected", **_ALONE) for bits in (4, 3)},
    "eden-3, calibrated centres": CacheSpec(3, 3, centre="calibrated", metric="none", sinks=0, window=0),
    "keys 4, values 3": CacheSpec(4, 3, sinks=0, window=0),
    "keys 3, values 4": CacheSpec(3, 4, sinks=0, window=0),
}
# --sweep: numbers of exact tokens. Presets have as few as keep their promise.
SWEEP = {
    f"{bits} bits, {sinks} sinks, window {window}": CacheSpec(bits, bits, sinks=sinks, window=window)
    for bits, sinks, window in (
        *((bits, 4, window) for bits in (4, 3, 2) for window in (0, 32, 64, 128)),
        *((bits, 1, window) for bits in (5, 4, 3, 2) for window in (0, 32)),
        *((4, 1, window) for window in (8, 16)),
    )
}
TEXTS = ["books", "wikitext2"]
VARIANTS = {
    "packed": dict(sinks=0, window=0),
    "own token exact": dict(sinks=0, window=1),
    "sinks and window": dict(sinks=4, window=128),
}


def load(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Returns a model in float32 and its tokenizer."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.to(device), tokenizer


def load_real(name: str, device: str) -> tuple[Any, Any]:
    """Returns a model of `make real-models` in float32 and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(REAL_MODELS / name)
    model = AutoModelForCausalLM.from_pretrained(REAL_MODELS / name, dtype=torch.float32).eval()
    return model.to(device), tokenizer


loaded_real = functools.cache(load_real)  # for several calls of `main` in one process


def halves(name: str = "books_val.txt") -> tuple[str, str]:
    text = (SHARED / "data" / name).read_text(encoding="utf-8")
    return text[: len(text) // 2], text[len(text) // 2 :]


def held_out(name: str) -> str:
    """Returns a text that no calibration saw: books or wikitext2."""
    return halves()[1] if name == "books" else "".join(halves(f"{name}_test.txt"))


def calibrated(model: Any, tokenizer: Any, tokens: int, length: int, batch: int, half: int = 0) -> Profile:
    """Calibrates on a half of the books. The last quarter of its windows is held out, to try methods on."""
    windows = text_windows(halves()[half], tokenizer, tokens // length, length)
    source = f"the {('first', 'second')[half]} half of books_val.txt, {len(windows)} x {length} tokens"
    learned, held_out = windows[: -(-3 * len(windows) // 4)], windows[-(-3 * len(windows) // 4) :]
    return turboquant.calibrate(model, list(learned.split(batch)), held_out=list(held_out.split(batch)),
                                tokenizer=tokenizer, sensitivity_batches=max(1, 4 // batch), source=source,
                                progress=True)  # fmt: skip


def demo_guard() -> dict[str, float]:
    """Returns the KL divergence of the shipped model on the passage that it ships with, by preset, everything packed.
    Also that with a calibration made here, with a fixed seed, on prose of the package: packed at 3 bits, and with sinks
    and window at 3 and at 2 bits (some sides then have 1 bit)."""
    model, tokenizer = load(DEMO)
    text = (DEMO / "a_christmas_carol.txt").read_text(encoding="utf-8")
    windows = text_windows(text, tokenizer, 2, 512)
    specs = {name: turboquant.preset(name).with_(sinks=0, window=0) for name in GUARDED}
    found = evaluate_all(model, windows, specs, profile=DEMO / "profile.safetensors", generate=0)
    prose = text_windows((ROOT / "turboquant/data/moments/prose.txt").read_text(encoding="utf-8"), tokenizer, 3, 256)
    made = turboquant.calibrate(model, [prose[:2]], held_out=[prose[2:]], averages=(3,), tokenizer=tokenizer, seed=0)
    exact = {bits: CacheSpec(budget=bits, method="moments+widths") for bits in (3, 2)}
    used = {MADE_HERE.format(3): exact[3].with_(sinks=0, window=0)}
    used |= {f"{MADE_HERE.format(bits)}, 4 sinks, window 128": spec for bits, spec in exact.items()}
    found |= evaluate_all(model, windows, used, profile=made, generate=0)
    return {name: one.kl_divergence for name, one in found.items()}


def smollm2_guard(folder: Path) -> dict[str, float]:
    """Returns KL divergences of SmolLM2 on the demo's passage, all packed but 4 sinks. Moments are measured anew."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    windows = text_windows((DEMO / "a_christmas_carol.txt").read_text(encoding="utf-8"), tokenizer, 2, 512)
    kept = os.environ.get("TURBOQUANT_CACHE")
    os.environ["TURBOQUANT_CACHE"] = ""
    try:
        every = {**turboquant.presets(), **EXTRAS}
        specs = {name: every[name].with_(sinks=SINKS) for name in GUARDED_REAL}
        found = evaluate_all(model, windows, specs, everything_packed=True, generate=0)
    finally:
        os.environ.pop("TURBOQUANT_CACHE")
        os.environ.update({} if kept is None else {"TURBOQUANT_CACHE": kept})
    return {name: one.kl_divergence for name, one in found.items()}


def write_guards() -> None:
    """Writes the figures of both guard tests; the second only if `make real-models` has made its model."""
    what = "KL divergence in nats per token; {} on a passage of A Christmas Carol, 2 x 512 tokens, {}"
    guards: dict[str, tuple[str, Any]] = {
        "demo": (what.format("demo/turboquant_demo", "everything packed"), demo_guard)
    }
    if (folder := REAL_MODELS / "smollm2").exists():
        described = what.format("SmolLM2-135M-Instruct (de-quantised 4-bit weights)", f"all packed but {SINKS} sinks")
        guards["smollm2"] = described, lambda: smollm2_guard(folder)
    for name, (described, measure) in guards.items():
        figures = {spec: round(kl, 6) for spec, kl in measure().items()}
        text = json.dumps({"what": described, "kl_divergence": figures}, indent=1) + "\n"
        (GOLDEN / f"quality_{name}.json").write_text(text)
        print(text)


def real(args: argparse.Namespace) -> Report:
    """Measures the baselines and our specs on a real model."""
    if args.random_moments:
        model, tokenizer = load_real(args.real, args.device)
        model.name_or_path = ""  # no tokenizer is found there: moments are measured on random token ids
    else:
        model, tokenizer = loaded_real(args.real, args.device)
    windows = real_windows(text_of(args.text), tokenizer, args.windows, args.length).to(args.device)
    if args.only:
        windows = windows[args.only]
    every, asked = {**turboquant.presets(), **EXTRAS}, args.specs or [*BASELINES, *REAL_SPECS]
    every |= {name: turboquant.preset(name) for name in asked if name.startswith("calibrated-")}
    plain = "uncalibrated-"  # the same bits as calibrated-N, spent as without a calibration
    every |= {n: CacheSpec(budget=float(n[len(plain) :]), method="none") for n in asked if n.startswith(plain)}
    if args.sweep:
        every, asked = SWEEP, ["fp8 e4m3", *SWEEP]
    own = args.own_exact or args.sweep
    profile = Profile.load(args.profile) if args.profile else None
    specs = {n: every[n] if own else every[n].with_(sinks=SINKS, window=args.window) for n in asked if n in every}
    baselines = {name: BASELINES[name] for name in asked if name in BASELINES}
    found = measured(model, windows, baselines, SINKS, args.generate) if baselines else {}
    ours: dict[str, Any] = {}
    if specs:
        fed: dict[str, Any] = {"prefill": "chunked", "chunk": args.chunk} if args.chunk else {}
        packed = not own and not args.window
        ours = evaluate_all(model, windows, specs, profile=profile, everything_packed=packed,
                            generate=args.generate, progress=True, **fed)  # fmt: skip
    report = Report(f"real_{args.real}{'_exact' if args.sweep else ''}", torch.device(args.device).type)
    for name, metrics in {**found, **{name: one.metrics() for name, one in ours.items()}}.items():
        sinks, window = (specs[name].sinks, specs[name].window) if name in specs else (SINKS, 0)
        exact = f"{sinks} sinks, window {window}" if window else f"{sinks} sinks"
        exact = baselines[name].exact_tokens(SINKS) if name in baselines else exact
        params = {"spec": name, "simulated": name in found, "exact": exact, "model": args.real,
                  "text": Path(args.text).name, "windows": len(windows), "only": args.only, "length": args.length,
                  "chunk": args.chunk,
                  "moments": "random ids" if args.random_moments else "text",
                  "calibrated_on": profile.calibration.source if profile and "calibrated-" in name else None,
                  "generate": args.generate, "dtype": "float32", "commit": commit()}  # fmt: skip
        report.add("real-quality", params, {key: float(f"{x:.6g}") for key, x in metrics.items()})
    print(*real_tables(report.rows), sep="\n")
    if args.add:
        report.rows = others(Path(args.out) / f"{report.name}.json", report.rows) + report.rows
    return report


def real_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns Markdown tables from rows of `real`: one for each model, text and way to measure."""
    measured = ("model", "text", "windows", "length", "chunk", "moments")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row["params"].get(name) for name in measured), []).append(row)
    lines = []
    for (model, text, windows, length, chunk, moments), group in groups.items():
        fed = f", {chunk} tokens of a forward" if chunk else ""
        full = f"perplexity of the full cache {group[0]['metrics']['reference_perplexity']:.3f}"
        lines += [f"{model}, {text}, {windows} x {length:,} tokens{fed}, moments of {moments}, {full}:\n"]
        lines += ["| cache | exact tokens | bits | KL, mean | 99 % | 99.9 % | perplexity | same likeliest token |"]
        lines += [f"|---|---|{'---:|' * 6}"]
        for row in group:
            m = row["metrics"]
            lines += [f"| {row['params']['spec']} | {row['params']['exact']} | {m['effective_bits']:.2f} | "
                      f"{m['kl_divergence']:.4f} | {m['kl_divergence_p99']:.3f} | {m['kl_divergence_p999']:.3f} | "
                      f"{m['perplexity']:.3f} | {100 * m['top1_agreement']:.1f} % |"]  # fmt: skip
        lines += [""]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="reference", help="a folder of the shared models, or demo")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS)
    parser.add_argument("--specs", nargs="+", help="presets, extras and, with --real, baselines; all unless said")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--only", type=int, nargs="+", help="--real: which of the windows, from 0; all unless said")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--profile", help="a file, instead of calibrating")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--calibration-length", type=int, default=2048, help="of a window")
    parser.add_argument("--add", action="store_true", help="keep other rows of the file")
    parser.add_argument("--out", default=RESULTS / "local")
    parser.add_argument("--own-exact", action="store_true", help="--real: specs with their own sinks and windows")
    parser.add_argument("--sweep", action="store_true", help="--real: numbers of sinks and windows")
    parser.add_argument("--ship", action="store_true", help="calibrate the demo model, and nothing else")
    parser.add_argument("--real", choices=("smollm2", "gemma3"), help="one of `make real-models` beside baselines")
    parser.add_argument("--text", default="wikitext2", help="--real: wikitext2, source, or a folder of files")
    parser.add_argument("--random-moments", action="store_true", help="--real: measured as without a tokenizer")
    parser.add_argument("--window", type=int, default=0, help="--real: exact tokens at the end")
    parser.add_argument("--chunk", type=int, help="--real: tokens of a forward")
    parser.add_argument("--generate", type=int, default=1024, help="tokens of greedy texts, with --real")
    parser.add_argument("--tables", nargs="+", metavar="FILE", help="print files of --real as tables, and nothing else")
    parser.add_argument("--guard", action="store_true", help="write the figures of the guard tests, and nothing else")
    args = parser.parse_args(argv)
    if args.ship:
        found = calibrated(*load(DEMO), args.calibration_tokens, 1024, 1, half=1)  # the demo's text is short
        found.save(DEMO / "profile.safetensors")
        print(table(found.trials))
        return
    if args.tables:
        for file in args.tables:
            print(*real_tables(json.loads(Path(file).read_text())["rows"]), sep="\n")
        return
    if args.guard:
        write_guards()
        return

    if args.real:
        print(real(args).save(args.out))
        return
    every = {**turboquant.presets(), **EXTRAS}
    specs = {name: every[name] for name in args.specs or every}
    model, tokenizer = load(SHARED / "models" / args.model, args.device)
    windows = {name: text_windows(held_out(name), tokenizer, args.windows, args.length) for name in args.texts}
    profile = Profile.load(args.profile) if args.profile else None
    if profile is None and any(spec.calibrated for spec in specs.values()):
        start = time.perf_counter()
        profile = calibrated(model, tokenizer, args.calibration_tokens, args.calibration_length, args.batch)
        print(f"calibrated in {time.perf_counter() - start:.1f} s")
    for text, ids in windows.items():
        size = "" if (args.windows, args.length) == (12, 2048) else f"_{args.windows}x{args.length}"
        report = Report(f"quality_{args.model}_{text}{size}", torch.device(args.device).type)
        for variant in args.variants:
            chosen = {name: spec.with_(**VARIANTS[variant]) for name, spec in specs.items()}
            found = evaluate_all(model, ids, chosen, profile=profile, batch=args.batch, generate=0, progress=True)
            print(f"\n{text}, {variant}\n\n{markdown(found)}\n")
            for name, one in found.items():
                used = profile.calibration.source if profile is not None and specs[name].calibrated else None
                params = {
                    "spec": name,
                    "exact": one.exact,
                    "model": args.model,
                    "text": text,
                    "windows": one.windows,
                    "length": one.length,
                    "prefill": one.prefill,
                    "dtype": "float32",
                    "calibrated_on": used,
                    "commit": commit(),
                }
                report.add("quality", params, {key: float(f"{x:.6g}") for key, x in one.metrics().items()})
        if args.add:
            report.rows = others(Path(args.out) / f"{report.name}.json", report.rows) + report.rows
        print(report.save(args.out))


def others(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of a file that `rows` do not measure again."""
    held = json.loads(file.read_text())["rows"] if file.exists() else []
    named = ("spec", "exact", "text", "windows", "every", "only", "length", "chunk", "moments", "calibrated_on")

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row["params"].get(name) for name in named)

    measured = {key(row) for row in rows}
    return [row for row in held if key(row) not in measured]


if __name__ == "__main__":
    main()
