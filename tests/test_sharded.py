"""A model that transformers' `tp_plan` shards: each rank measures its own heads, and packs and attends to them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from models import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed", reason="this transformers has no DistributedConfig")

RANKS = 2


@pytest.mark.slow
def test_two_ranks(tmp_path):
    tiny("llama", num_attention_heads=4, num_key_value_heads=RANKS).save_pretrained(tmp_path)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "TURBOQUANT_CACHE": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, env={**env, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(RANKS)
    ]  # fmt: skip
    try:
        for rank in ranks:
            out = rank.communicate(timeout=900)[0]
            if "pip install" in out or "ImportError" in out:
                pytest.skip(out.strip().splitlines()[-1])
            assert rank.returncode == 0 and "as one model" in out, out
    finally:
        for rank in ranks:
            rank.kill()


def run_rank(folder: str) -> None:
    """Compares this rank's part with the whole model: moments, and logits through a packed cache."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import turboquant

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sharded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
    rank = torch.distributed.get_rank()
    for all_heads, own in zip(turboquant.measure(whole).layers, turboquant.measure(sharded).layers):
        assert len(own.scale) * RANKS == len(all_heads.scale)
        assert np.abs(all_heads.scale[rank : rank + 1] - own.scale).max() < 1e-5
    os.environ["TURBOQUANT_CACHE"] = f"{folder}/kept by {rank}"
    turboquant.measure(sharded)
    (kept,) = Path(os.environ["TURBOQUANT_CACHE"]).iterdir()
    if rank == 0:  # which then has no moments, and cannot run the model alone
        kept.unlink()
    turboquant.measure(sharded)
    assert kept.exists()
    os.environ["TURBOQUANT_CACHE"] = ""
    ids = torch.arange(1, 200)[None] % 90
    logits = []
    for model in (whole, sharded):
        turboquant.patch(model, turboquant.CacheSpec(4, 4, centre="wave", metric="query"))
        with torch.no_grad():
            logits.append(model(ids, past_key_values=turboquant.TurboQuantCache(model), use_cache=True).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-3
    torch.distributed.barrier()
    print("as one model")


if __name__ == "__main__":
    run_rank(sys.argv[1])
