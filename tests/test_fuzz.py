"""A short run of the fuzzer that needs no clang; `make fuzz` runs all fuzzers for longer."""

from __future__ import annotations

import models  # noqa: F401  skips without torch and transformers
from fuzz.cache_file_fuzzer import fuzz


def test_mutated_cache_files_are_refused_or_only_wrong():
    assert fuzz(seconds=120, most=600) == 600
