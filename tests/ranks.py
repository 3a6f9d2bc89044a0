"""Runs a program in several processes, which `torch.distributed` connects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT


def run_ranks(ranks: int, *command: str, timeout: float) -> list[str]:
    """Returns what each rank of `python COMMAND` prints. All must succeed. Skips the test if one lacks a package."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "TURBOQUANT_CACHE": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    started = [
        subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                         env={**env, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(ranks)
    ]  # fmt: skip
    printed = []
    try:
        for rank in started:
            out = rank.communicate(timeout=timeout)[0]
            last = (out.strip().splitlines() or [""])[-1]
            if rank.returncode and ("pip install" in last or "No module named" in last) and "turboquant" not in last:
                pytest.skip(last)
            assert rank.returncode == 0, out
            printed.append(out)
    finally:
        for rank in started:
            rank.kill()
    return printed
