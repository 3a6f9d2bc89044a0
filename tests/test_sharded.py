"""A model that transformers' `tp_plan` shards: each rank measures, packs and attends to its own heads."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from models import tiny
from ranks import run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.distributed", reason="this transformers has no DistributedConfig")

RANKS = 2


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [RANKS, 1])
def test_two_ranks(tmp_path, kv_heads):
    tiny("llama", num_attention_heads=4, num_key_value_heads=kv_heads).save_pretrained(tmp_path)
    says = "as one model" if kv_heads == RANKS else "LlamaForCausalLM cannot be patched: `tp_plan` on 2 ranks"
    assert all(says in out for out in run_ranks(RANKS, __file__, str(tmp_path), timeout=900))


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
    if whole.config.num_key_value_heads < RANKS:
        with pytest.raises(NotImplementedError) as refused:
            turboquant.patch(sharded)
        print(refused.value)
        return
    for all_heads, own in zip(turboquant.measure(whole).layers, turboquant.measure(sharded).layers):
        assert len(own.scale) * RANKS == len(all_heads.scale)
        assert np.abs(all_heads.scale[rank : rank + 1] - own.scale).max() < 1e-5
    os.environ["TURBOQUANT_CACHE"] = f"{folder}/kept by {rank}"
    turboquant.measure(sharded)
    (kept,) = Path(os.environ["TURBOQUANT_CACHE"]).iterdir()
    if rank == 0:  # rank 0 then has no moments, and cannot run the model alone
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
