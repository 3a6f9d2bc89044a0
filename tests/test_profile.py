"""`Profile`: one object and one file for what is measured, and the arguments of `patch` beside it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import models
import numpy as np
import pytest
import torch
from conftest import ROOT
from transformers import LlamaForCausalLM

import turboquant
from turboquant import CacheSpec, Profile, TurboQuantCache
from turboquant.cli import main

DEMO = ROOT / "demo" / "turboquant_demo"
pytestmark = pytest.mark.filterwarnings("ignore:the model is measured on random token ids")


@pytest.fixture(scope="module")
def model():
    return models.tiny()


@pytest.fixture(scope="module")
def calibrated(model):
    return turboquant.calibrate(model, [models.prompts(1, 100)["input_ids"]], sensitivity_batches=1)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(x, b[name]) for name, x in a.items())


def test_calibrate_measures_too(model, calibrated, tmp_path):
    plain = turboquant.measure(model)
    assert plain.calibration is None and same(plain.moments.arrays(), calibrated.moments.arrays())
    for found in (plain, calibrated):
        found.save(tmp_path / "p")
        back = Profile.load(tmp_path / "p")
        assert same(back.moments.arrays(), found.moments.arrays()) and back.fingerprint == found.fingerprint
        assert (back.calibration is None) == (found.calibration is None) and str(back) == str(found)
    assert same(back.calibration.arrays(), calibrated.calibration.arrays())
    assert back.calibration.described() == calibrated.calibration.described()


@pytest.mark.parametrize("weights", [10**400, {"a": 1}, "x", [[], [0]]], ids=["large", "a mapping", "text", "uneven"])
def test_weights_of_a_file_that_are_no_numbers_are_other_weights(weights, calibrated, tmp_path):
    moments = replace(calibrated.moments, fingerprint={**calibrated.fingerprint, "weights": weights})
    Profile(moments).save(tmp_path / "p")
    with pytest.raises(ValueError, match="`profile` must be of this model, .* this one has other weights"):
        Profile.load(tmp_path / "p").check(calibrated.fingerprint)


def test_folders_and_repositories_of_the_hub(model, tmp_path, monkeypatch):
    import huggingface_hub

    plain = turboquant.measure(model)
    plain.to_hub(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["turboquant.profile"]
    assert same(Profile.from_hub(tmp_path).moments.arrays(), plain.moments.arrays())
    asked: list[tuple[object, ...]] = []

    def upload(*, path_or_fileobj, path_in_repo, repo_id):
        asked.append((repo_id, path_in_repo, Profile.load(path_or_fileobj).tokens))

    def download(repo, file, revision):
        asked.append((repo, file, revision))
        return tmp_path / file

    monkeypatch.setattr(huggingface_hub, "upload_file", upload)
    plain.to_hub("us/model")
    assert asked.pop() == ("us/model", "turboquant.profile", plain.tokens)
    with pytest.raises(FileNotFoundError, match="`name` must be a folder or a repository of the hub, got '/no/where'"):
        Profile.from_hub("/no/where")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert Profile.from_hub("us/model", "v1").tokens == plain.tokens
    assert asked == [("us/model", "turboquant.profile", "v1")]
    with pytest.raises(ValueError, match="`revision` must be None for a folder, got 'v1'"):
        Profile.from_hub(tmp_path, "v1")
    with pytest.raises(FileNotFoundError, match="`path` must be a profile"):
        Profile.from_hub(tmp_path.parent)
    with pytest.raises(TypeError, match="`name` must be a str or a path, got 3"):
        Profile.from_hub(3)


def test_a_profile_serves_every_spec(model, calibrated):
    """A calibrated one has the moments of `default`; one that is not calibrated does not serve a budget."""
    turboquant.patch(model, "default", profile=calibrated)
    assert TurboQuantCache(model).moments is calibrated.moments
    assert TurboQuantCache(model).calibration is None
    turboquant.patch(model, CacheSpec(budget=3, method="axes"), profile=calibrated)
    assert TurboQuantCache(model).calibration is calibrated.calibration
    with pytest.raises(ValueError, match="`profile` must be calibrated for this spec, got one of turboquant.measure"):
        turboquant.patch(model, CacheSpec(budget=3, method="axes"), profile=Profile(calibrated.moments))
    with pytest.raises(ValueError, match="`profile` must be None for a spec"):
        turboquant.patch(model, "paper-mse-4", profile=calibrated)
    turboquant.unpatch(model)


def test_the_demo_models_profile_needs_numpy_alone():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers'): sys.modules[name] = None\n"
        "import turboquant\n"
        f"found = turboquant.Profile.load({str(DEMO / 'profile.safetensors')!r})\n"
        "print(len(found.layers), found.calibration.layers, len(found.calibration.trials) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "4", "True"]


def test_parts_that_do_not_belong_together(calibrated):
    other = turboquant.measure(models.tiny(seed=1)).moments
    with pytest.raises(ValueError, match="`calibration` must be of the model of `moments`, got one with other weights"):
        Profile(other, calibrated.calibration)
    with pytest.raises(TypeError, match="`moments` must be Moments, got int"):
        Profile(3)
    with pytest.raises(TypeError, match="`profile` must be a Profile or the path of a file, got 3"):
        Profile.of(3)


def test_the_command_writes_what_measure_finds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("turboquant.models.texts.TOKENS", 256)
    monkeypatch.setattr("turboquant.models.texts.OF_COSTS", 160)
    assert main(["measure", str(DEMO), "-o", str(tmp_path / "p")]) == 0
    assert "253 tokens (the text of the package), 4 layers" in capsys.readouterr().out
    found = Profile.load(tmp_path / "p")
    demo = LlamaForCausalLM.from_pretrained(DEMO, dtype="auto")
    assert same(found.moments.arrays(), turboquant.measure(demo).moments.arrays())
    with pytest.raises(SystemExit):
        main(["measure", str(DEMO), "-o", str(tmp_path)])
    assert "--out must be a file" in capsys.readouterr().err


def test_the_command_without_a_tokenizer_says_so_in_a_line(tmp_path, caplog, capsys):
    """`measure` warns in one line. `chat` and `eval`, which need a tokenizer, say what is missing."""
    models.tiny().save_pretrained(folder := tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["measure", str(folder), "-o", str(tmp_path / "p")]) == 0
    (line,) = [one for one in caplog.messages if "random token ids" in one]
    why = f"{str(folder)!r} (no tokenizer.json, nor another file that makes one)"
    assert line.startswith("the model is measured on random token ids, because no tokenizer can be read at ")
    assert why in line and line.endswith("Add the tokenizer's files to the model's folder, or pass `tokenizer`.")
    with pytest.raises(SystemExit):
        main(["measure", str(tmp_path)])
    wants = f"measure: MODEL must be a folder or a name on the Hugging Face hub, got {str(tmp_path)!r}: "
    assert wants in capsys.readouterr().err
    for command in (["chat", str(folder)], ["eval", str(folder), "--text", __file__, "--spec", "4"]):
        with pytest.raises(SystemExit):
            main(command)
        wants = f": {command[0]}: MODEL must be a folder or a name with the files of a tokenizer (tokenizer.json): no tokenizer can be read at {why}"  # noqa: E501
        assert wants in capsys.readouterr().err


def test_bits(model):
    turboquant.patch(model, bits=3)
    assert model._turboquant.spec == turboquant.preset("default").with_(key_bits=3, value_bits=3)
    turboquant.patch(model, "default", bits=2.0, prefill="packed")
    assert (model._turboquant.spec.key_bits, model._turboquant.spec.prefill) == (2, "packed")
    turboquant.unpatch(model)


@pytest.mark.parametrize("given, error, says", [
    (dict(spec="calibrated-3", bits=3), ValueError, "`bits` must be None for a spec with a budget of 3 bits, got 3"),
    (dict(bits="3"), TypeError, "`bits` must be a number or None, got '3'"),
    (dict(bits=True), TypeError, "`bits` must be a number"),
    (dict(bits=0), ValueError, "key_bits"),
    (dict(uniform=1), TypeError, "`uniform` must be True or False, got 1"),
])  # fmt: skip
def test_arguments_of_patch_that_are_refused(model, given, error, says):
    with pytest.raises(error, match=says):
        turboquant.patch(model, **given)
    assert not hasattr(model, "_turboquant")
    with pytest.raises(TypeError, match="positional"):
        turboquant.patch(model, "default", None)
    assert torch.is_tensor(model.lm_head.weight)
