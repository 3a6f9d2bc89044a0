"""Writes docs/compatibility.md: features by versions, each cell what the feature's tests said.

    python tests/compatibility.py        runs them with the versions of this environment and fills in their column

make test-compat does so for every version it tries. A cell is "yes" if all tests of the feature passed, "no" if one
failed, "-" if they could not run.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers

FILE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
HEAD = """# What works with which version

Written by `python tests/compatibility.py` from the tests named in it; `make test-compat` fills in a column for each
version.
What does not work says so in an error that [troubleshooting.md](troubleshooting.md) lists.

"""
FEATURES = {
    "13 architectures, window over everything: exact": "test_a_wide_window_gives_the_same_text",
    "13 architectures, packed: close; sliding layers free pages": "test_packed_logits_are_close",
    "left padding": "test_a_padded_batch_is_each_sequence_alone or test_left_padding_is_never_stored",
    "sampling, num_return_sequences": "test_sampling",
    "beam search": "test_beams or test_packed_beams",
    "assisted and prompt-lookup decoding": "test_speculative_decoding",
    "crop across the window": "test_crop",
    "chat over several turns": "test_turns",
    "chunked prefill": "test_chunked_prefill or test_generate_in_chunks",
    "inputs_embeds": "test_embeddings_in",
    "float16, bfloat16": "test_half_precision",
    "fork, shared prefixes": "test_forks or test_only_the_last_page",
    "save and load": "test_a_cache_goes_on_after_loading or test_a_prefix_serves",
    "offload and prefetch of layers": "test_offload_and_prefetch",
    "packed position_ids": "test_packed_positions",
    "torch.inference_mode": "test_inference_mode or test_prefill_and_decode_in_different_modes",
    "torch.compile of the decode step": "test_a_compiled_decode_step",
    "CUDA graphs of the decode step (needs a GPU)": "test_the_text_is_that_of_plain_steps or test_replays_notice",
    "layers on two GPUs": "test_layers_on_two_devices",
    "same text over threads, runs and processes": "test_the_same",
    "patch twice, two models, copies, threads": "test_patch_twice or test_two_models or test_a_copy_of or test_threads",
    "training, no cache, attention weights: as before": "test_training or without_a_cache",
    "custom masks, right padding, gradients: a clear error": "test_custom_masks or test_masks or test_there_is_no",
    "other architectures: a clear error": "test_unsupported_models",
}
TESTS = [f"test_{name}.py" for name in ("generate", "cache", "pages", "patch", "persistence", "graph")]


def outcome(expression: str) -> str:
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(here / name) for name in TESTS]
        pytest.main(["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", expression, *files])
        suites = list(ElementTree.parse(report).iter("testsuite")) if report.exists() else []
    count = {name: sum(int(s.get(name, 0)) for s in suites) for name in ("tests", "errors", "failures", "skipped")}
    if count["errors"] or count["failures"]:
        return "no"
    return "yes" if count["tests"] > count["skipped"] else "-"


def columns() -> dict[str, dict[str, str]]:
    """What the file says so far: version -> feature -> outcome."""
    rows = [line.strip("| \n").split(" | ") for line in FILE.read_text().splitlines() if line.startswith("|")]
    return {version: {row[0]: row[i] for row in rows[2:]} for i, version in enumerate(rows[0]) if i}


def main() -> int:
    table = columns() if FILE.exists() else {}
    version = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    table[version] = {feature: outcome(expression) for feature, expression in FEATURES.items()}
    versions = sorted(table, key=lambda name: [int(part) for part in name.split()[1].strip(",").split(".")[:3]])
    lines = ["| | " + " | ".join(versions) + " |", "|---" * (1 + len(versions)) + "|"]
    lines += [f"| {f} | " + " | ".join(table[v].get(f, "-") for v in versions) + " |" for f in FEATURES]
    behind = re.search(r"(?ms)^## .*", FILE.read_text()) if FILE.exists() else None  # tests/upstream writes that
    FILE.write_text(HEAD + "\n".join(lines) + "\n" + (f"\n{behind[0]}" if behind else ""))
    return int("no" in table[version].values())


if __name__ == "__main__":
    sys.exit(main())
