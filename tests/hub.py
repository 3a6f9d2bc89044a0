"""Makes a folder like the cache of the Hugging Face hub, with small models under the names that the docs use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import ROOT

DEMO = ROOT / "demo" / "turboquant_demo"
CAUSAL, PROTEINS = "HuggingFaceTB/SmolLM2-135M-Instruct", "facebook/esm2_t6_8M_UR50D"
# Sizes of SmolLM2-135M.
SHAPE = dict(num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576,
             intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192)  # fmt: skip


def make_hub(folder: Path, shape_alone: bool = False) -> None:
    """Empties `folder` and fills it. The language model is the demo's. With `shape_alone` it is only a configuration,
    with the sizes of the real model. The ESM-2 model has random weights."""
    from esm_models import tiny_esm

    shutil.rmtree(folder)
    folder.mkdir()
    proteins, causal = folder / "esm", folder / "causal"
    tiny_esm().save_pretrained(proteins)
    shutil.copytree(DEMO, causal)
    if shape_alone:
        (causal / "model.safetensors").unlink()
        config = json.loads((causal / "config.json").read_text())
        (causal / "config.json").write_text(json.dumps(config | SHAPE))
    for name, model in {CAUSAL: causal, PROTEINS: proteins}.items():
        place = folder / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        (place / "snapshots").mkdir()
        (place / "snapshots" / ("0" * 40)).symlink_to(model, target_is_directory=True)
