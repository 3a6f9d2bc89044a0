"""The command line, also as ``python -m turboquant``."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import platform
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import turboquant

from ..arguments import STANDARD_OUTPUT, check_options, check_output
from ..named_specs import print_presets
from ..plot import check_picture, points
from ..progress import log
from .calc_table import GPUS, ITEM_BYTES
from .doctor import doctor, info
from .findings import device_code, installed, library
from .index_commands import add_parser as add_index_parser
from .kernels import print_kernels

if TYPE_CHECKING:
    from ..models.fasta import Entries

CALIBRATION_TOKENS, CALIBRATION_WINDOW = 16384, 2048
HELD_OUT = 4  # 1 token in 4 of a text, or 1 protein in 4, is held out, to try methods on
EVALUATED_PROTEINS = 60
_EXAMPLES = {
    "info": "info --kernels 16,8,4,32768,128",
    "doctor": "doctor HuggingFaceTB/SmolLM2-135M-Instruct",
    "calc": "calc llama-3.1-8b --batch 8 --memory 40GB --gpu h200",
    "presets": "presets",
    "demo": "demo --prompt-tokens 512",
    "measure": "measure HuggingFaceTB/SmolLM2-135M-Instruct --out smollm2.profile",
    "calibrate": "calibrate HuggingFaceTB/SmolLM2-135M-Instruct --out smollm2.safetensors",
    "eval": "eval HuggingFaceTB/SmolLM2-135M-Instruct --text book.txt --spec default,compact",
    "esm-embed": "esm-embed proteins.fasta --model facebook/esm2_t33_650M_UR50D --out proteins.safetensors",
    "chat": "chat HuggingFaceTB/SmolLM2-135M-Instruct --spec compact",
    "esm-scan": "esm-scan proteins.fasta --model facebook/esm2_t6_8M_UR50D --csv scores.csv",
}
_MODEL = "MODEL must be a folder or a name on the Hugging Face hub"


def _missing(error: ImportError, command: str) -> str:
    """Returns what is missing and how to install it: in the error's own words, or with all that the command needs."""
    if error.name is None:  # ours
        return str(error)
    extra = "demo" if command == "demo" else "hf"
    return f"{error}; {command} needs: pip install 'turboquant-attention[{extra}]'"


def demo(chosen: argparse.Namespace) -> int:
    """Run the demonstration."""
    from .demo import demo as run

    return run(chosen.prompt_tokens, chosen.tokens, chosen.seed)


def _checked_files(chosen: argparse.Namespace) -> tuple[str, Entries | None]:
    """Returns the text, empty if no file was named, or the proteins, after a check that the model suits them. A file is
    read only once, because it may be a pipe."""
    _check_name(chosen.model)
    if chosen.fasta is not None:
        from ..models.fasta import read_entries

        try:
            proteins = read_entries(chosen.fasta)
        except FileNotFoundError as error:
            raise ValueError(str(error).replace("`path`", "the FASTA file", 1)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"the FASTA file must be one of text, plain or compressed by gzip or xz, got {chosen.fasta!r}: {error}"
            ) from None
        _check_kind(chosen.model, proteins=True)
        return "", proteins
    try:
        text = "" if chosen.text is None else Path(chosen.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text must be a file of UTF-8 text, got {chosen.text!r}: {error}") from None
    _check_kind(chosen.model, proteins=False)
    return text, None


def _check_name(model: str) -> None:
    """Checks that a name that looks like a path is one. Any other may be a name on the hub."""
    if not model or ((model.startswith((".", "/", "~")) or model.endswith("/")) and not os.path.exists(model)):
        raise ValueError(f"{_MODEL}, got {model!r}")


def _config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_MODEL}, got {name!r}: {str(error).strip().partition(chr(10))[0]}") from None


def _check_kind(name: str, proteins: bool) -> None:
    """Checks that a model is for proteins, or that it is for text."""
    from ..models.families import family_of

    config = _config(name)
    if proteins != family_of(config).proteins:
        wants = "an ESM-2 model, for proteins" if proteins else "a causal language model"
        raise ValueError(f"MODEL must be {wants}, got {name!r}, which is of type {config.model_type!r}")


def _tokenizer(name: str) -> Any:
    from ..models.texts import tokenizer_at

    tokenizer, why = tokenizer_at(name)
    if tokenizer is None:
        raise ValueError(f"MODEL must be a folder or a name with the files of a tokenizer (tokenizer.json): {why}")
    return tokenizer


def _model(chosen: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    device = _device(chosen.device)
    family = AutoModelForCausalLM if chosen.fasta is None else AutoModelForMaskedLM
    model = family.from_pretrained(chosen.model, dtype=chosen.dtype).eval()
    return model.to(device)


def _device(wanted: str | None) -> str:
    """Returns the wanted device, or else a GPU if there is one that the operators were built for, or the CPU."""
    import torch

    if wanted is not None:
        try:
            torch.zeros(1, device=wanted).item()  # the meta device holds no numbers
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
            said = str(error).partition("\n")[0]
            raise ValueError(f"--device must be one that this torch can use, got {wanted!r}: {said}") from None
        return wanted
    built = library()
    return "cuda" if built and torch.cuda.is_available() and device_code(built) else "cpu"


def calibrate(chosen: argparse.Namespace) -> int:
    """Measure a model's keys and values and the cost of errors in them, and write the profile for calibrated specs."""
    check_output(chosen.out, "--out", {"--text": chosen.text, "--fasta": chosen.fasta}, moved=True)
    if chosen.text is chosen.fasta is None and chosen.tokens is not None:
        raise ValueError(f"--tokens must be given with --text or --fasta only, got {chosen.tokens}")
    text, proteins = _checked_files(chosen)
    from ..models.checkpoint import digest_of  # after the checks, because it loads torch

    checkpoint = f"{chosen.out}.part"
    if chosen.fasta is None:
        profile = _calibrated_on_text(chosen, text, checkpoint)
    else:
        from .esm_commands import calibrated

        amount = chosen.tokens, CALIBRATION_TOKENS
        averages = _averages(chosen.bits)
        profile = calibrated(_model(chosen), chosen.fasta, amount, averages, chosen.seed, checkpoint, proteins)
    profile = dataclasses.replace(profile, checkpoint=digest_of(chosen.model))
    profile.save(chosen.out)
    Path(checkpoint).unlink(missing_ok=True)  # not before the result is on the disk, which may be full
    size, calibration = Path(chosen.out).stat().st_size, profile.calibration
    sizes = dict.fromkeys(calibration.sizes)
    heads = " or ".join(f"{heads} KV heads of {channels} channels" for heads, channels in sizes)
    print(f"{chosen.out}: {calibration.tokens:,} tokens, {calibration.layers} layers, {heads}, {size:,} bytes")
    print(f"\n{_calibration_table(calibration, chosen)}")
    return 0


def _averages(text: str) -> tuple[float, ...]:
    from ..calibration.calibrate import checked_averages

    try:
        return checked_averages([float(bits) for bits in text.split(",")])
    except ValueError as error:
        raise ValueError(f"--bits must be averages between commas, got {text!r}: {error}") from None


def loaded_profile(path: str) -> Any:
    """Loads the profile in the file that --profile names."""
    from ..files import path_called
    from ..measured import Profile

    with path_called("--profile"):
        return Profile.load(path)


def measure(chosen: argparse.Namespace) -> int:
    """Measure a model's moments and write its profile, by default to the file in the cache folder where engines look
    for it."""
    check_output(chosen.out, "--out", {}, moved=True)
    _check_name(chosen.model)
    from ..evaluation.forecast import measure as run
    from ..models.checkpoint import digest_of
    from ..models.families import family_of

    config = _config(chosen.model)
    model = family_of(config).auto_class(config).from_pretrained(chosen.model, dtype=chosen.dtype).eval()
    digest = digest_of(chosen.model)
    out = Path(_kept_profile(digest, chosen.model) if chosen.out is None else chosen.out)
    profile = dataclasses.replace(run(model.to(_device(chosen.device)), budget=True), checkpoint=digest)
    profile.save(out)
    size = out.stat().st_size
    print(f"{out}: {profile.tokens:,} tokens ({profile.source}), {len(profile.layers)} layers, {size:,} bytes")
    return 0


def _kept_profile(digest: str, model: str) -> Path:
    """Returns the file in the cache folder for a checkpoint's profile, and makes its folder."""
    from ..models.checkpoint import profile_file

    if not digest:
        raise ValueError(f"--out must name a file for a model without safetensors files, such as {model!r}")
    file = profile_file(digest)
    if file is None:
        raise ValueError("--out must name a file where TURBOQUANT_CACHE is empty, which keeps nothing")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _calibration_table(calibration: Any, chosen: argparse.Namespace) -> str:
    """Returns a table of the trials and of what was chosen."""
    from ..measured.choice import table

    what = "KL divergence in nats per token" if chosen.fasta is None else "1 - cosine of last hidden states"
    place = "the text of the package" if chosen.text is chosen.fasta is None else "the held-out part"
    other = "; in brackets its ratio to none on the kind of text where that is largest"
    return f"{what}, on {place}{other if calibration.trials[0].elsewhere else ''}:\n\n{table(calibration.trials)}"


def _calibrated_on_text(chosen: argparse.Namespace, text: str, checkpoint: str) -> Any:
    from ..calibration.calibrate import calibrate as run
    from ..evaluation.decoder import leading_token

    averages, tokenizer = _averages(chosen.bits), _tokenizer(chosen.model)
    options: Any = dict(averages=averages, tokenizer=tokenizer, seed=chosen.seed, progress=True, checkpoint=checkpoint)
    if chosen.text is None:
        return run(_model(chosen), **options)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    wanted = min(CALIBRATION_TOKENS, len(ids)) if chosen.tokens is None else chosen.tokens
    least = CALIBRATION_WINDOW // 2
    if len(ids) < least:
        raise ValueError(f"--text must have at least {least} tokens, got {chosen.text!r} with {len(ids)}")
    if not least <= wanted <= len(ids):
        raise ValueError(f"--tokens must be in {least}..{len(ids)}, what --text has, got {wanted}")
    cut = len(ids) - len(ids) // HELD_OUT
    first = leading_token(tokenizer)
    learned, tests = (_spread_windows(part, tokens, first) for part, tokens in (
        (ids[:cut], wanted - wanted // HELD_OUT), (ids[cut:], wanted // HELD_OUT)))  # fmt: skip
    return run(_model(chosen), learned, held_out=tests, source=Path(chosen.text).name, **options)


def _spread_windows(ids: Sequence[int], tokens: int, first: int | None) -> list[Any]:
    """Returns tensors [1, n] of token ids, spread evenly over `ids`, with n as near CALIBRATION_WINDOW as `tokens`
    allow. first: the token that each begins with, in place of its own, or None."""
    import torch

    from ..evaluation.decoder import spaced

    count = max(1, round(tokens / CALIBRATION_WINDOW))
    windows = torch.tensor(spaced(ids, count, min(tokens, len(ids)) // count))
    if first is not None:
        windows[:, 0] = first
    return [windows[i : i + 1] for i in range(count)]


def _specs(chosen: argparse.Namespace) -> dict[str, Any]:
    """Returns the specs of the presets or numbers of bits in --spec, with the fields of --set."""
    from ..named_specs import named_or_bits
    from ..spec import CacheSpec

    names = [field.name for field in dataclasses.fields(CacheSpec)]
    changed: dict[str, Any] = {}
    for change in chosen.set:
        field, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set must be FIELD=VALUE, got {change!r}")
        if field not in names:
            raise ValueError(f"--set must name a field among {', '.join(names)}, got {field!r}")
        try:
            changed[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changed[field] = value
    return {name: named_or_bits(name, "--spec").with_(**changed) for name in filter(None, chosen.spec.split(","))}


def evaluate(chosen: argparse.Namespace) -> int:
    """Measure what specs cost in quality on a text or on proteins, through the packed path."""
    specs = _specs(chosen)
    if not specs:
        raise ValueError("--spec must name at least one preset")
    missing = [name for name, spec in specs.items() if spec.calibrated and chosen.profile is None]
    if missing:
        raise ValueError(f"--profile must name a file for {', '.join(missing)}; `turboquant calibrate` makes one")
    read = {"--text": chosen.text, "--fasta": chosen.fasta, "--profile": chosen.profile}
    if chosen.json not in STANDARD_OUTPUT:
        check_output(chosen.json or None, "--json", read)
    if chosen.plot:
        check_picture(chosen.plot, "--plot")
        check_output(chosen.plot, "--plot", read | {"--json": chosen.json})
    profile = None if chosen.profile is None else loaded_profile(chosen.profile)
    text, proteins = _checked_files(chosen)
    if chosen.fasta is None:
        from ..evaluation.decoder import evaluate_all, markdown, text_windows

        tokenizer = _tokenizer(chosen.model)
        try:
            windows = text_windows(text, tokenizer, chosen.windows, chosen.length)
        except ValueError as error:
            raise ValueError(f"--windows {chosen.windows} of --length {chosen.length} do not fit: {error}") from None
        model, bench = _model(chosen), "quality"
        named: tuple[str, ...] = ("exact", "windows", "length", "prefill")
        results: Any = evaluate_all(model, windows, specs, profile=profile, prefill=chosen.prefill,
                                    everything_packed=chosen.everything_packed, generate=chosen.generate,
                                    batch=chosen.batch, progress=True)  # fmt: skip
        table = markdown(results)
    else:
        from . import esm_commands

        if any(change.partition("=")[0] == "window" for change in chosen.set):
            raise ValueError("--set window: does not apply to proteins, which an encoder reads at once")
        specs = {name: spec.with_(window=0) for name, spec in specs.items()}
        model, bench, named = _model(chosen), "esm-quality", ("proteins", "residues", "masked")
        count = chosen.proteins, EVALUATED_PROTEINS
        results = esm_commands.evaluated(model, chosen.fasta, specs, profile, count, proteins)
        table = esm_commands.markdown(results)
    if chosen.plot:
        loss = "kl_divergence" if chosen.fasta is None else "masked_kl_divergence"
        measured = {name: (one.effective_bits, max(getattr(one, loss), 1e-9)) for name, one in results.items()}
        points(chosen.plot, measured, "bits of a number, scales included", "KL divergence, nats a token")
    to_stdout = chosen.json in STANDARD_OUTPUT
    print(table, file=sys.stderr if to_stdout else sys.stdout)
    if chosen.json:
        rows = []
        for name, one in results.items():
            params = {
                "spec": name,
                "fields": dataclasses.asdict(one.spec),
                "model": Path(chosen.model).name,
                "text": Path(chosen.text or chosen.fasta).name,
                **{field: getattr(one, field) for field in named},
                "device": model.device.type,
                "dtype": str(model.dtype).removeprefix("torch."),
                "calibrated_on": profile.calibration.source if profile is not None and specs[name].calibrated else None,
            }
            rows.append({"bench": bench, "params": params, "metrics": one.metrics()})
        machine = {"system": f"{platform.system()} {platform.machine()}", "torch": installed("torch"),
                   "transformers": installed("transformers"), "python": platform.python_version()}  # fmt: skip
        result = {"machine": machine, "commit": f"turboquant {turboquant.__version__}", "rows": rows}
        written = json.dumps(result, indent=1) + "\n"
        if to_stdout:
            sys.stdout.write(written)
        else:
            Path(chosen.json).write_text(written, encoding="utf-8")
    return 0


def _doctor(chosen: argparse.Namespace) -> int:
    from ..named_specs import named_or_bits

    named_or_bits(chosen.spec, "--spec")
    if chosen.model is not None:
        _check_name(chosen.model)
    return doctor(chosen.model, chosen.spec, chosen.tokens)


def calc(chosen: argparse.Namespace) -> int:
    """Print the bytes of a model's cache, the tokens that fit, and an estimate of a step."""
    from .calc import calc as run

    return run(chosen)


def chat(chosen: argparse.Namespace) -> int:
    """Hold a conversation in the terminal on a packed cache."""
    from ..named_specs import named_or_bits

    if not 0 <= chosen.temperature <= 100:
        raise ValueError(f"--temperature must be in 0..100, got {chosen.temperature}")
    spec = named_or_bits(chosen.spec, "--spec")
    if spec.calibrated and chosen.profile is None:
        raise ValueError(f"--profile must name a file for {chosen.spec}; `turboquant calibrate` makes one")
    _check_name(chosen.model)
    chosen.fasta = None
    _check_kind(chosen.model, proteins=False)
    from .chat import chat as run

    profile = None if chosen.profile is None else loaded_profile(chosen.profile)
    tokenizer = _tokenizer(chosen.model)
    return run(_model(chosen), tokenizer, spec, profile, chosen.tokens, chosen.temperature, chosen.seed)


def esm_scan(chosen: argparse.Namespace) -> int:
    """Write masked or wild-type marginals of proteins: what a model expects at each position."""
    from ..named_specs import named_or_bits
    from . import esm_commands

    read = {"FASTA": chosen.fasta, "--profile": chosen.profile, "--mutants": chosen.mutants}
    if chosen.joint and chosen.mutants is None:
        raise ValueError("--joint must be given with --mutants only, got none")
    if chosen.joint and chosen.method == "wild-type-marginals":
        raise ValueError(f"--joint must be given with a --method that masks, got {chosen.method}")
    if chosen.joint and chosen.heatmap:
        raise ValueError(f"--joint must be given without --heatmap, got {chosen.heatmap!r}")
    if chosen.csv in STANDARD_OUTPUT:
        chosen.csv = "-"
    else:
        check_output(chosen.csv, "--csv", read, moved=True)
    check_output(chosen.heatmap or None, "--heatmap", {**read, "--csv": None if chosen.csv == "-" else chosen.csv})
    if chosen.heatmap:
        check_picture(chosen.heatmap, "--heatmap")
    if chosen.method != "shared-context":
        for option, path in (("--spec", chosen.spec), ("--profile", chosen.profile)):
            if path is not None:
                raise ValueError(f"{option} must be given with --method shared-context only, got {path}")
    name = "esm-default" if chosen.spec is None else chosen.spec
    chosen.spec = named_or_bits(name, "--spec")
    if chosen.spec.calibrated and chosen.profile is None:
        raise ValueError(f"--profile must name a file for {name}; `turboquant calibrate` makes one")
    profile = None if chosen.profile is None else loaded_profile(chosen.profile)
    _, proteins = _checked_files(chosen)
    return esm_commands.scan(_model(chosen), chosen, profile, proteins)


def esm_embed(chosen: argparse.Namespace) -> int:
    """Embed proteins of any length: means, and on request every residue and an index of the means."""
    from . import esm_commands

    check_output(chosen.out, "--out", {"FASTA": chosen.fasta}, moved=True)
    check_output(chosen.index, "--index", {"FASTA": chosen.fasta, "--out": chosen.out}, moved=True)
    try:
        chosen.layers = [int(layer) for layer in chosen.layers.split(",")]
    except ValueError:
        raise ValueError(f"--layers must be integers between commas, got {chosen.layers!r}") from None
    _, proteins = _checked_files(chosen)
    esm_commands.check_embedding(chosen)
    return esm_commands.embedded(_model(chosen), chosen, proteins)


def _add_model_options(parser: argparse.ArgumentParser, required: bool = True, own_dtype: bool = False) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument("--text", metavar="FILE", help="UTF-8 text, for a causal language model")
    source.add_argument("--fasta", metavar="FILE", help="proteins, for an ESM-2 model")
    _add_device_options(parser, own_dtype)


def _add_device_options(parser: argparse.ArgumentParser, own_dtype: bool = False) -> None:
    """Adds --device and --dtype. own_dtype: the default is the dtype that the model's files name, not float32."""
    parser.add_argument("--device", help="such as cpu or cuda:0; the default is a GPU if there is one")
    usual = "auto, is the model's own" if own_dtype else "float32, adds no rounding of its own"
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"),
                        default="auto" if own_dtype else "float32",
                        help=f"dtype of the model; the default, {usual}")  # fmt: skip


def _add_calc(commands: Any) -> None:
    one = commands.add_parser("calc", help="bytes of a model's cache, tokens that fit, and time of a step; exit status "
                              "1 if its packed cache is not counted")  # fmt: skip
    one.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a config.json or a model of the table, which "
                     "is printed without one")  # fmt: skip
    one.add_argument("--batch", type=int, metavar="N", default=1, help="sequences (default 1)")
    one.add_argument("--tokens", type=int, metavar="N", help="tokens of each (default 32768)")
    one.add_argument("--spec", metavar="NAME[,NAME...]", default="4,3,2", help="presets, or numbers of bits for the "
                     "preset default (default 4,3,2)")  # fmt: skip
    one.add_argument("--memory", metavar="SIZE", help="for the cache, such as 40GB or 512MiB: also print how many "
                     "tokens of each sequence fit")  # fmt: skip
    one.add_argument("--profile", metavar="FILE", help="of `turboquant measure`: also print which bits two of "
                     "--tokens, --memory and --quality choose")  # fmt: skip
    one.add_argument("--quality", type=float, metavar="NATS", help="a divergence of the next token, with --profile")
    one.add_argument("--gpu", metavar="NAME", default="h100", help=f"to estimate a step for: {', '.join(GPUS)} "
                     "(default h100)")  # fmt: skip
    one.add_argument("--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="of the model (default bfloat16)")
    one.add_argument("--plot", metavar="FILE", help="a picture of bytes by tokens, .png, .svg or .pdf")
    one.set_defaults(run=calc)


def _add_esm_embed(commands: Any) -> None:
    one = commands.add_parser(
        "esm-embed",
        help="embed proteins of any length with an ESM-2 model",
        description="Embed proteins of any length with an ESM-2 model. The same command goes on after an interruption.",
    )
    one.add_argument("fasta", metavar="FASTA", help="proteins, plain or compressed by gzip or xz")
    one.add_argument("--model", metavar="MODEL", required=True, help="a folder, or a name on the Hugging Face hub")
    one.add_argument("--out", "-o", metavar="FILE", required=True, help="the embeddings; FILE.part and FILE.part.json "
                     "while it runs, to resume")  # fmt: skip
    one.add_argument("--layers", metavar="N[,N...]", default="-1", help="whose states are taken: 0 is the input of the "
                     "first layer, -1 the model's output (the default)")  # fmt: skip
    one.add_argument("--residues", choices=("none", "float16", "4bit"), default="none", help="beside the means also "
                     "every residue, in float16 or packed (default none)")  # fmt: skip
    one.add_argument("--index", metavar="FILE", help="also an index of the means of the last of the layers, with the "
                     "names, for turboquant index search: 4 bits, cosine")  # fmt: skip
    one.add_argument("--window", type=int, metavar="N", help="residues read together of a protein that has more "
                     "(default: as many as the model has positions for)")  # fmt: skip
    one.add_argument("--overlap", type=int, metavar="N", help="residues that neighbouring windows share at least "
                     "(default: a quarter of a window)")  # fmt: skip
    one.add_argument("--memory", type=int, metavar="MIB", help="for what a layer computes, beside the model (default "
                     "1024, and 64 on CPUs, which take longer with more)")  # fmt: skip
    _add_device_options(one)
    one.set_defaults(run=esm_embed)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. shtab makes shell completion from it (docs/api/commands.md)."""
    parser = argparse.ArgumentParser(
        prog="turboquant", description="KV-cache quantisation and attention on packed bytes."
    )
    parser.add_argument("--version", action="version", version=turboquant.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("info", help="versions, instruction set, threads, CUDA build and device")
    one.add_argument(
        "--kernels",
        nargs="*",
        metavar="SHAPE",
        help="print which kernels run for batch,kv_heads,heads_per_kv,tokens,head_dim (default: some usual shapes)",
    )
    one.add_argument("--gpu", metavar="NAME", help="--kernels on this GPU, such as h100, which need not be there")
    one.add_argument("--moments", action="store_true", help="--kernels of plans with a wave and a metric of keys")
    one.set_defaults(run=lambda chosen: print_kernels(chosen.kernels or [], _device(None), chosen.gpu, chosen.moments))
    one = commands.add_parser(
        "doctor", help="info with verdicts, and whether a model can be packed; exit status 1 if something cannot work"
    )
    one.add_argument("model", metavar="MODEL", nargs="?", help="a folder, or a name on the Hugging Face hub")
    one.add_argument("--spec", metavar="NAME", default="default", help="preset, or number of bits, to judge the model "
                     "by (default default)")  # fmt: skip
    one.add_argument(
        "--tokens", type=int, metavar="N", default=32768, help="count the cache's bytes for N tokens (default 32768)"
    )
    one.set_defaults(run=_doctor)
    _add_calc(commands)
    one = commands.add_parser("presets", help="all presets: their bits, exact tokens and what they need")
    one.set_defaults(run=lambda chosen: print_presets())
    one = commands.add_parser("demo", help="a passage continued through packed caches of 4, 3 and 2 bits")
    one.add_argument("--prompt-tokens", type=int, metavar="N", default=1024, help="of the prompt (default 1024)")
    one.add_argument("--tokens", type=int, metavar="N", default=96, help="to generate for each row (default 96)")
    one.add_argument("--seed", type=int, metavar="N", default=0, help="of the sampling (default 0)")
    one.set_defaults(run=demo)
    one = commands.add_parser(
        "measure", help="measure a model once, for the wave and the metric of presets: its profile"
    )
    one.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    one.add_argument("--out", "-o", metavar="FILE", help="the profile (default: the file in the cache folder where "
                     "turboquant.vllm looks for it)")  # fmt: skip
    _add_device_options(one, own_dtype=True)
    one.set_defaults(run=measure)
    one = commands.add_parser(
        "calibrate",
        help="measure a model once, try what fits it best, for calibrated presets; without "
        "--text and --fasta, on the text of the package",
    )
    _add_model_options(one, required=False, own_dtype=True)
    one.add_argument(
        "--out", "-o", metavar="FILE", required=True, help="the profile; FILE.part while it runs, to resume"
    )
    one.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"tokens to read, spread over the text or proteins; a quarter is held out, to try methods on (default "
        f"{CALIBRATION_TOKENS}, or all if there are fewer)",
    )
    one.add_argument("--bits", metavar="N[,N...]", default="4,3.5,3,2.5,2", help="averages at which methods are tried, "
                     "in 2..6 (default 4,3.5,3,2.5,2); a budget in between is stored as the nearest one")  # fmt: skip
    one.add_argument(
        "--seed", type=int, default=0, help="seed of rotations inside groups, and of samples to measure errors on"
    )
    one.set_defaults(run=calibrate)
    one = commands.add_parser("eval", help="quality and bytes of specs on a text or proteins")
    _add_model_options(one)
    one.add_argument("--spec", metavar="NAME[,NAME...]", required=True, help="presets, or numbers of bits for the "
                     "preset default")  # fmt: skip
    one.add_argument(
        "--set", metavar="FIELD=VALUE", action="append", default=[], help="a field of the spec, such as sinks=4"
    )
    one.add_argument("--profile", metavar="FILE", help="of the model, as measure and calibrate write it; calibrated "
                     "presets need one of calibrate")  # fmt: skip
    one.add_argument(
        "--proteins",
        type=int,
        metavar="N",
        help=f"how many of --fasta, spread over it (default {EVALUATED_PROTEINS}, or all if there are fewer)",
    )
    one.add_argument("--windows", type=int, default=12, help="windows of --text, spread over it (default 12)")
    one.add_argument("--length", type=int, default=2048, help="tokens of a window (default 2048)")
    one.add_argument("--prefill", choices=("packed", "chunked", "decode"), default="packed")
    one.add_argument("--everything-packed", action="store_true", help="without the specs' windows; sinks stay exact")
    one.add_argument("--generate", type=int, metavar="N", default=1024, help="tokens of each greedy text that is "
                     "compared with the full cache's; 0: none (default 1024)")  # fmt: skip
    one.add_argument("--batch", type=int, default=1, help="windows of --text that run together (default 1)")
    one.add_argument("--json", metavar="OUT", help="file to write; - for standard output, with the table on standard "
                     "error")  # fmt: skip
    one.add_argument("--plot", metavar="FILE", help="a picture of divergence against bits, .png, .svg or .pdf")
    one.set_defaults(run=evaluate)
    add_index_parser(commands)
    _add_esm_embed(commands)
    one = commands.add_parser("esm-scan", help="score every mutation of proteins with an ESM-2 model")
    one.add_argument("fasta", metavar="FASTA", help="proteins, plain or compressed by gzip or xz")
    one.add_argument("--model", metavar="MODEL", required=True, help="a folder, or a name on the Hugging Face hub")
    one.add_argument(
        "--csv",
        metavar="FILE",
        required=True,
        help="the scores: one line per position and amino acid; FILE.part while it runs; - for standard output",
    )
    one.add_argument("--heatmap", metavar="FILE", help="a picture, .png, .svg or .pdf; of several proteins FILE-1, ...")
    one.add_argument("--method", choices=("shared-context", "masked-marginals", "wild-type-marginals"),
                     default="shared-context", help="masked marginals over one packed pass (the default); exactly, a "
                     "full pass for each position; or wild-type marginals: one pass, nothing masked")  # fmt: skip
    one.add_argument(
        "--spec",
        metavar="NAME",
        help="preset, or number of bits, of the shared context (default esm-default)",
    )
    one.add_argument("--profile", metavar="FILE", help="of the model, as measure and calibrate write it; calibrated "
                     "presets need one of calibrate")  # fmt: skip
    one.add_argument("--mutants", metavar="FILE", help="score these mutants of the one protein alone: a CSV file with "
                     "a column mutant, such as A12W:C30D, as ProteinGym writes them; its columns are written again, "
                     "and the score, the sum over mutations")  # fmt: skip
    one.add_argument("--joint", action="store_true", help="with --mutants, mask all positions of a mutant together")
    one.add_argument("--batch", type=int, default=32, help="masked copies that run together (default 32)")
    _add_device_options(one)
    one.set_defaults(run=esm_scan)
    one = commands.add_parser("chat", help="a conversation in the terminal, which tells the bytes of its packed cache")
    one.add_argument("model", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    one.add_argument("--spec", metavar="NAME", default="default", help="preset, or number of bits, of the cache "
                     "(default default)")  # fmt: skip
    one.add_argument("--profile", metavar="FILE", help="of the model, as measure and calibrate write it")
    one.add_argument("--tokens", type=int, metavar="N", default=512, help="the most of an answer (default 512)")
    one.add_argument("--temperature", type=float, metavar="T", default=0.7, help="of the sampling; 0: the likeliest "
                     "token (default 0.7)")  # fmt: skip
    one.add_argument("--seed", type=int, metavar="N", default=0, help="of the sampling (default 0)")
    _add_device_options(one, own_dtype=True)
    one.set_defaults(run=chat)
    for name, example in _EXAMPLES.items():
        commands.choices[name].epilog = f"example: turboquant {example}"
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status. That is 2, with a message, if something cannot be done, and as in other
    programs 130 after Ctrl-C and 141 if nobody reads the output any more."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # Python started with it closed
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    parser = make_parser()
    chosen = parser.parse_args(words)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:  # -W and PYTHONWARNINGS want warnings as Python shows them
                warnings.showwarning = _show
            status = _run(parser, chosen, words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"\nturboquant: {chosen.command}: interrupted", file=sys.stderr)
        part = {"calibrate": ".part", "esm-embed": ".part.json"}.get(chosen.command)
        if part and os.path.exists(f"{chosen.out}{part}"):
            print(f"{chosen.out}.part has what was found so far. To go on: {shlex.join(['turboquant', *words])}",
                  file=sys.stderr)  # fmt: skip
        return 128 + signal.SIGINT


def _in_options(error: Exception, words: Sequence[str]) -> str:
    """Returns an error's text with the option that was given in place of the library's argument and function name."""
    text = re.sub(r"^\w+: (?=`)", "", str(error))
    argument = re.match(r"`(\w+)(\[\d+\])?`", text)
    option = "" if argument is None else f"--{argument[1].replace('_', '-')}"
    is_option = any(word.partition("=")[0] == option for word in words)
    return f"{option}{text[argument.end() :]}" if argument is not None and is_option else text


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows a UserWarning as one line, without its place in the source, and other warnings as Python shows them."""
    if category is UserWarning:
        log.warning("%s", message)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _run(parser: argparse.ArgumentParser, chosen: argparse.Namespace, words: Sequence[str]) -> int:
    if chosen.command == "info" and chosen.kernels is None and not (chosen.gpu or chosen.moments):
        return info()
    try:
        check_options(chosen.command, chosen)
        return int(chosen.run(chosen))
    except BrokenPipeError:
        raise
    except ImportError as error:
        said = _missing(error, chosen.command)
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        said = f"{chosen.command}: {_in_options(error, words)}"
    except RuntimeError as error:
        if not str(getattr(error, "argument", "")).startswith("TURBOQUANT_"):
            raise
        said = f"{chosen.command}: {error}"  # a variable of the environment
    parser.exit(2, f"{parser.prog}: error: {said}\n")
