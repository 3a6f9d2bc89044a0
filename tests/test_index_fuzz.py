"""A short run of the fuzzer of index files, which needs no clang and no torch."""

from __future__ import annotations

from fuzz.index_file_fuzzer import fuzz


def test_mutated_index_files_are_refused_or_only_wrong():
    assert fuzz(seconds=120, most=1500) == 1500
