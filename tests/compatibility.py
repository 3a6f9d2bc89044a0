"""Writes docs/compatibility.md: a table of features by versions, with the outcome of each feature's tests.

    python tests/compatibility.py           runs the tests with the installed versions and fills in their column
    python tests/compatibility.py WORD ...  only the rows whose feature has one of these words; others stay

`make test-compat` does so for every version it tries. A cell is "yes" if all tests of the feature passed, "no" if one
failed, "-" if they could not run, and empty before they ran.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "compatibility.md"
HEAD = """# What works with which version

`python tests/compatibility.py` writes this page from the tests named in it; `make test-compat` fills in a column for
each version. "-" means that the tests could not run, because there was no GPU or because this transformers lacks the
feature. An empty cell has not been run yet. For another torch, from 2.10 on:
`make test-compat COMPAT_TORCH=torch==2.10.0`.
Since 4.57, diverse beam search, contrastive search and DoLa are not part of transformers but code on the hub.
What does not work raises an error that [troubleshooting.md](troubleshooting.md) lists.

**Positions.** A spec with a wave turns the mean key by the positions of the model. In each sequence these may differ
from the cache's own count of tokens by one shift: with left padding without `position_ids`, or with `position_ids`
that begin elsewhere. The first forward sets the shift. If positions jump by 4 or more inside a sequence (several texts
in one row), results are right but have a larger error. At 2 bits a jump of 4 positions makes the divergence of
SmolLM2-135M 1.3 times as large, one of 512 positions 2.3 times (512 tokens, no window, 4 sinks). A patched model warns
of that once. On a GPU, steps of one token are not checked, because that would synchronise the device. With
`centre="none"` positions do not matter.

"""
# The tests of each feature: names of tests in TESTS, or parts of names, or the file that has all of them.
FEATURES = {
    "11 architectures, window over everything: exact": "test_a_wide_window_gives_the_same_text",
    "11 architectures, packed: close; sliding layers free pages": "test_packed_logits_are_close",
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
    "images and sound in the prompt (Gemma 3 and 4, Qwen3-VL, LLaVA, Voxtral)": "test_multimodal.py",
    "hybrids with states (Qwen3.5, LFM2, Falcon-H1)": "test_hybrids.py",
    "latents (MLA: DeepSeek V3, Kimi-Linear)": "test_latent.py",
    "training, no cache, attention weights: as before": "test_training or without_a_cache",
    "custom masks, gradients: a clear error": "test_custom_masks or test_masks or test_there_is_no",
    "other architectures: a clear error": "test_unsupported_models",
}
TESTS = [f"test_{name}.py" for name in ("generate", "cache", "pages", "patch", "persistence", "graph")]


class Outcomes(dict[str, str]):
    """A pytest plugin that keeps the outcome of each test, by its file, name and parameters."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("tests/")[2]
        if report.failed:
            self[name] = "failed"
        elif report.skipped or report.when == "call":
            self.setdefault(name, report.outcome)


def outcomes(expressions: Iterable[str]) -> Outcomes:
    """The outcomes of the tests that some values of FEATURES name."""
    files = [one for one in expressions if one.endswith(".py")]
    named = [one for one in expressions if one not in files]
    found = Outcomes()
    for names, options in ((files, ["-m", "not slow"]), (TESTS if named else [], ["-k", " or ".join(named)])):
        paths = [str(ROOT / "tests" / name) for name in names]
        code = pytest.main(["-q", "-p", "no:cacheprovider", *options, *paths], [found]) if paths else pytest.ExitCode.OK
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(f"the tests did not run: pytest ended with {code!r}")
    return found


def cell(expression: str, found: Outcomes) -> str:
    def counts(test: str) -> bool:
        file, _, name = test.partition("::")
        return file == expression or (file in TESTS and any(part in name for part in expression.split(" or ")))

    mine = {what for test, what in found.items() if counts(test)}
    if not mine:
        sys.exit(f"no test is called {expression}")
    return "no" if "failed" in mine else "yes" if "passed" in mine else "-"


def columns() -> dict[str, dict[str, str]]:
    """The table that the file has so far: version -> feature -> outcome."""
    table = [
        line.strip("|").split("|") for line in FILE.read_text().partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    rows = [[text.strip() for text in row] for row in table]
    return {version: {row[0]: row[i] for row in rows[2:]} for i, version in enumerate(rows[0]) if i}


def main(words: Sequence[str] = ()) -> int:
    table = columns() if FILE.exists() else {}
    chosen = {f: tests for f, tests in FEATURES.items() if not words or any(word in f for word in words)}
    version = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    found = outcomes(chosen.values())
    table[version] = table.get(version, {}) | {f: cell(expression, found) for f, expression in chosen.items()}
    versions = sorted(table, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    lines = ["| | " + " | ".join(versions) + " |", "|---" * (1 + len(versions)) + "|"]
    lines += [f"| {f} | " + " | ".join(table[v].get(f, "") for v in versions) + " |" for f in FEATURES]
    # The sections below the table, which tests/upstream writes.
    behind = re.search(r"(?ms)^## .*", FILE.read_text()) if FILE.exists() else None
    FILE.write_text(HEAD + "\n".join(lines) + "\n" + (f"\n{behind[0]}" if behind else ""))
    return int("no" in table[version].values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
