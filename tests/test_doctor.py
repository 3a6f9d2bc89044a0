"""`turboquant doctor`: what it says of a machine and of models, and that problems are reported with their reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import forks
import pytest
from conftest import ROOT

pytest.importorskip("turboquant._core")
import models
from causal_types import VERSION
from models import torch, transformers

import turboquant
from turboquant.cli import findings, main
from turboquant.cli.findings import cuda_findings
from turboquant.models.names import CACHE
from turboquant.patching import check

DEMO = ROOT / "demo" / "turboquant_demo"
WHEEL = os.environ.get("TURBOQUANT_WHEEL", "")


def lines(text: str) -> dict[str, tuple[str, str]]:
    """name -> (verdict, fact) of what the command printed."""
    found = re.findall(r"^(ok|note|FAIL) +(\S+(?: \S+)?) {2,}(.*)$", text, re.MULTILINE)
    return {name: (verdict, fact) for verdict, name, fact in found}


def config_folder(folder: Path, name: str, **fields: object) -> str:
    """A model that is a configuration alone: doctor reads no weights."""
    getattr(transformers, name)(**fields).save_pretrained(folder)
    return str(folder)


SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


def test_a_machine_where_all_works(capsys):
    assert main(["doctor"]) == 0
    said = lines(capsys.readouterr().out)
    assert not [fact for verdict, fact in said.values() if verdict == "FAIL"]
    assert said["torch"] == ("ok", torch.__version__)
    assert said["torch operators"] == ("ok", "loaded")


def test_info_states_the_facts_of_doctor(capsys):
    assert main(["info"]) == 0
    info = capsys.readouterr().out
    main(["doctor"])
    said = lines(capsys.readouterr().out)
    assert info.splitlines() == [f"{name:16} {fact}" for name, (_, fact) in said.items()]


def test_a_model_that_can_be_packed(capsys, monkeypatch):
    assert main(["doctor", str(DEMO), "--tokens", "1000"]) == 0
    said = lines(capsys.readouterr().out)
    assert said["model"] == ("ok", "LlamaForCausalLM, 4 million parameters")
    assert said["layers"] == ("ok", "4 of 4 packed, 2 KV heads of 64 channels; 4 with full attention")
    assert said["preset"][1].startswith("default fits: 4 bits on average")
    fact = "measured on the text of the package, when a cache is first made"
    assert said["moments"] == ("ok", f"{fact}; not kept, because TURBOQUANT_CACHE is empty")
    monkeypatch.setattr("turboquant.models.texts.OF_COSTS", 160)
    # The bytes that it promises are those that a cache then holds, as `calc` counts them.
    model = turboquant.patch(transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval())
    cache = turboquant.TurboQuantCache(model)
    with torch.no_grad():
        model(torch.arange(1000)[None], **{CACHE: cache})
    promised = float(re.search(r"([\d.]+) MiB packed", said["cache"][1])[1]) * 2**20
    assert promised == pytest.approx(cache.nbytes, abs=0.05 * 2**20)
    assert main(["calc", str(DEMO), "--tokens", "1000", "--spec", "default"]) == 0
    assert f" {cache.nbytes:,} " in capsys.readouterr().out


def test_a_model_whose_packed_cache_is_not_counted(tmp_path, capsys):
    fields = dict(num_attention_heads=4, q_lora_rank=16, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32)
    model = config_folder(tmp_path, "DeepseekV3Config", **{**SMALL, **fields}, v_head_dim=32, n_routed_experts=4,
                          moe_intermediate_size=16, num_experts_per_tok=2, n_group=1, topk_group=1)  # fmt: skip
    assert main(["doctor", model, "--tokens", "1000"]) == 0
    fact = lines(capsys.readouterr().out)["cache"][1]
    full = 1000 * 2 * 2 * (32 + 32) / 2**20
    assert fact == (f"1,000 tokens of one sequence: {full:.1f} MiB in bfloat16; packed it is not counted, because its "
                    "attention is latent")  # fmt: skip


def test_sliding_windows_are_counted(tmp_path, capsys):
    fields = dict(SMALL, num_hidden_layers=3, num_key_value_heads=1, head_dim=32, sliding_window=512)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model = config_folder(tmp_path, "Gemma3TextConfig", layer_types=kinds, **fields)
    assert main(["doctor", model]) == 0
    said = lines(capsys.readouterr().out)
    expected = "3 of 3 packed, 1 KV head of 32 channels; 1 with full attention, 2 with a window of 512 tokens"
    assert said["layers"] == ("ok", expected)
    assert f"{(32768 + 2 * 512) * 2 * 2 * 32 / 2**20:.1f} MiB in bfloat16" in said["cache"][1]
    assert "measured on random token ids: no tokenizer is found" in said["moments"][1]


@pytest.mark.skipif(VERSION < (5, 20), reason="older transformers has no cache layers with chunks")
def test_chunks_are_no_full_attention(tmp_path, capsys):
    kinds = ["chunked_attention"] * 3 + ["full_attention"]
    fields = dict(SMALL, num_hidden_layers=4, num_key_value_heads=1, head_dim=32, num_local_experts=2)
    model = config_folder(tmp_path, "Llama4TextConfig", **fields, layer_types=kinds, attention_chunk_size=512)
    assert main(["doctor", model]) == 0
    expected = "4 of 4 packed, 1 KV head of 32 channels; 1 with full attention, 3 with chunks of 512 tokens"
    assert lines(capsys.readouterr().out)["layers"] == ("ok", expected)


@pytest.mark.skipif(not hasattr(transformers, "Qwen3_5Config"), reason="transformers is older")
def test_a_hybrid_with_a_vision_tower(tmp_path, capsys):
    text = dict(SMALL, head_dim=32, num_key_value_heads=1, num_hidden_layers=8, full_attention_interval=4)
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2)
    model = config_folder(tmp_path, "Qwen3_5Config", text_config=text, vision_config=vision)
    assert main(["doctor", model, "--tokens", "1000"]) == 0
    said = lines(capsys.readouterr().out)
    assert said["layers"] == ("ok", "2 of 8 packed, 1 KV head of 32 channels; 2 with full attention")
    assert f"{1000 * 2 * 2 * 2 * 32 / 2**20:.1f} MiB in bfloat16" in said["cache"][1]


def test_esm(tmp_path, capsys):
    fields = dict(SMALL, vocab_size=33, position_embedding_type="rotary", token_dropout=True, pad_token_id=1)
    assert main(["doctor", config_folder(tmp_path, "EsmConfig", **fields), "--spec", "esm-default"]) == 0
    said = lines(capsys.readouterr().out)
    assert said["layers"] == ("ok", "2 of 2 packed, by esm.ContextCache")
    assert said["moments"][1].startswith("measured on the proteins of the package")


WRONG_MODELS = {
    "ALiBi": ("BloomConfig", dict(n_layer=2, hidden_size=64, n_head=4, vocab_size=96), "layers",
              "none can be packed: BloomForCausalLM cannot be patched: its attention adds ALiBi biases"),
    "a head that is too wide": ("LlamaConfig", dict(SMALL, head_dim=520), "layers",
                                "cannot be patched: its head_dim is 520, at most 512 can be packed"),
    "heads of 12 channels": ("LlamaConfig", dict(SMALL, head_dim=12), "layers",
                             "none can be packed: `head_dim` must be a multiple of 8"),
    "no attention": ("MambaConfig", dict(vocab_size=96, hidden_size=64, num_hidden_layers=2), "layers",
                     "none can be packed: MambaForCausalLM cannot be patched"),
    "no decoder": ("T5Config", dict(vocab_size=96, d_model=64, num_layers=2, num_heads=4), "model", "cannot be made"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_a_model_that_cannot_be_packed(case, tmp_path, capsys):
    """The reason is that of `patch`, and the exit status says that what was asked for cannot work."""
    config, fields, name, reason = case
    assert main(["doctor", config_folder(tmp_path, config, **fields)]) == 1
    out = capsys.readouterr().out
    verdict, fact = lines(out)[name]
    assert verdict == "FAIL" and reason in fact
    assert out.endswith("1 of these cannot work.\n")


def test_folders_and_presets_that_are_none(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 1
    assert "MODEL must be a folder or a hub name of a causal language model or an ESM-2" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "llama9"}')
    assert main(["doctor", str(tmp_path)]) == 1
    assert "a newer transformers may know it: pip install -U transformers" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    assert main(["doctor", str(tmp_path)]) == 1
    assert "cannot be made: Validation error for field 'hidden_size'\n" in capsys.readouterr().out
    assert main(["doctor", str(DEMO), "--spec", "calibrated-3"]) == 1
    assert "make one with turboquant.calibrate" in lines(capsys.readouterr().out)["preset"][1]
    assert main(["doctor", str(DEMO), "--spec", "3"]) == 0
    assert lines(capsys.readouterr().out)["preset"] == (
        "ok",
        "3 fits: 3 bits on average; exact are the first 4 tokens and the last 128",
    )
    nowhere = str(tmp_path / "none")
    for arguments, wants in (
        ([str(DEMO), "--spec", "defalt"], "--spec must be a preset, got 'defalt': did you mean 'default'"),
        ([str(DEMO), "--tokens", "0"], "--tokens must be in 1..2147483647, got 0"),
        ([str(DEMO), "--tokens", str(2**31)], "--tokens must be in 1..2147483647, got 2147483648"),
        ([nowhere], f"MODEL must be a folder or a name on the Hugging Face hub, got {nowhere!r}"),
        ([""], "MODEL must be a folder or a name on the Hugging Face hub, got ''"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *arguments])
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and wants in err and not out  # before the machine is described


def test_check_says_what_patch_says_and_changes_nothing():
    model = models.tiny()
    check(model, "default")
    assert not hasattr(model, "_turboquant") and model.config._attn_implementation != "turboquant"
    with pytest.raises(ValueError) as refused:
        check(model, "calibrated-3")
    with pytest.raises(ValueError, match=re.escape(str(refused.value))):
        turboquant.patch(model, "calibrated-3")


# ---- versions and other owners of the name ----


@pytest.mark.parametrize(("name", "found", "advice"), [
    ("torch", "2.9.1+cu130", "it is too old: pip install -U 'torch>=2.10'"),
    ("transformers", "4.56.2", "it is too old: pip install -U 'transformers>=4.57'"),
    ("torch", "not installed", "models and operators need it: pip install 'turboquant-attention[hf]'"),
    ("transformers", "not installed", "models need it: pip install 'turboquant-attention[hf]'"),
])  # fmt: skip
def test_what_models_need(name, found, advice, monkeypatch, capsys):
    """A missing or old package fails the check if a model is named. Otherwise it is a note: NumPy may be enough."""
    real = findings.installed
    monkeypatch.setattr(findings, "installed", lambda one: found if one == name else real(one))
    assert main(["doctor", str(DEMO)]) == 1
    out = capsys.readouterr().out
    assert lines(out)[name] == ("FAIL", found) and advice in out
    assert main(["doctor"]) == 0
    assert lines(capsys.readouterr().out)[name] == ("note", found)


def test_other_owners_of_the_name(monkeypatch, capsys):
    owners = {"turboquant": ["turboquant_attention", "turboquant", "turboquant-gpu"]}
    monkeypatch.setattr(findings, "packages_distributions", lambda: owners)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert lines(out)["package name"] == ("FAIL", "turboquant is also a package of turboquant, turboquant-gpu")
    assert "pip uninstall turboquant turboquant-gpu turboquant-attention, then pip install turboquant-attention" in out
    monkeypatch.setattr(findings, "packages_distributions", lambda: {"turboquant": ["Turboquant.Attention"]})
    assert main(["doctor"]) == 0


# ---- GPUs (the tests need none) ----

H100, T4, BLACKWELL = ("H100", (9, 0)), ("T4", (7, 5)), ("RTX 5090", (12, 0))
ALL = "13.0: 80 90a 100 120+PTX"


@pytest.mark.parametrize(("build", "driver", "gpus", "name", "verdict", "text"), [
    (ALL, (13, 0), [H100], "GPU", "ok", "H100, 9.0"),
    (ALL, (13, 1), [("A10", (8, 6)), ("B300", (10, 3))], "GPU", "ok", "B300, 10.3"),
    (ALL, (13, 1), [("next", (13, 0))], "GPU", "ok", "next, 13.0"),  # by PTX
    (ALL, (13, 0), [T4], "GPU", "FAIL", "compute capability 8.0 or newer is needed; use the CPU"),
    ("13.0: 90a", (13, 0), [BLACKWELL], "GPU", "FAIL", "build with TURBOQUANT_CUDA_ARCHS=120"),
    ("13.0: 80+PTX 90a", (13, 0), [BLACKWELL], "GPU", "ok", "RTX 5090, 12.0"),
    (ALL, (12, 4), [H100], "CUDA", "FAIL", "update the GPU's driver to one for CUDA 13; tensors on the CPU work"),
    (ALL, (12, 4), [], "CUDA", "note", "the driver is for CUDA 12.4"),
    ("12.8: 90a", (13, 0), [H100], "CUDA", "ok", "built with CUDA 12.8 for 90a"),
    ("", (13, 0), [H100], "CUDA", "note", "for GPUs install a wheel, or put nvcc on the PATH and build again"),
])  # fmt: skip
def test_gpus(build, driver, gpus, name, verdict, text):
    last = [f for f in cuda_findings(build, "torch with CUDA 13.0", driver, gpus) if f.name == name][-1]
    assert ("FAIL" if last.fails else "note" if last.advice else "ok") == verdict
    assert text in f"{last.fact}; {last.advice}"


# ---- missing packages, and builds that fail ----


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


HIDE = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_what_needs_torch_says_so(missing):
    names = ["patch", "TurboQuantCache", "calibrate", "measure", "evaluate"]
    ask = "import turboquant\nfor name in {}:\n try: getattr(turboquant, name)\n except ImportError as e: print(e)"
    said = in_a_process(f"{HIDE.format(names=[missing])}{ask.format(names)}").stdout.splitlines()
    wants = rf"turboquant.* needs? {missing}: pip install 'turboquant-attention\[hf\]'"
    assert len(said) == len(names) and all(re.fullmatch(wants, line) for line in said), said


def test_old_transformers_says_so():
    code = "import transformers\ntransformers.__version__ = '4.56.2'\nimport turboquant\nturboquant.patch"
    last = forks.python(code).stderr.splitlines()[-1]
    assert last == "ImportError: turboquant needs transformers >= 4.57, this is 4.56.2: pip install -U transformers"


def test_old_torch_says_so():
    code = "import torch\ntorch.__version__ = '2.9.1'\nimport turboquant\nturboquant.ops"
    last = forks.python(code).stderr.splitlines()[-1]
    assert last == "ImportError: turboquant.ops needs torch >= 2.10, this is 2.9.1: pip install -U torch"


def test_doctor_without_numpy_or_torch():
    code = HIDE.format(names=["torch", "numpy"]) + "from turboquant.cli import main; sys.exit(main(['doctor']))"
    done = in_a_process(code)
    assert done.returncode == 1, done.stderr
    assert lines(done.stdout)["turboquant"][0] == "FAIL"


SETUP = """
import runpy, sys
from setuptools.command.build_ext import build_ext  # before the system is another one
{change}
sys.argv = ['setup.py', '-q', 'build_ext']
runpy.run_path('setup.py')
"""
BUILDS = {
    "macOS": ("sys.platform = 'darwin'", {}, "only Linux with glibc is supported so far, this is darwin"),
    "Windows": ("sys.platform = 'win32'", {}, "only Linux with glibc is supported so far, this is win32"),
    "Alpine": ("import platform; platform.libc_ver = lambda *a, **k: ('', '')", {},
               "only Linux with glibc is supported so far, this is another libc, such as Alpine's musl"),
    "no compiler": ("", {"PATH": "/nowhere", "CC": "", "CXX": ""},
                    "no compiler (cc, gcc, clang) on the PATH. Install gcc"),
    "no such glibc": ("", {"TURBOQUANT_GLIBC": "two"}, "TURBOQUANT_GLIBC must be a version like 2.28, got 'two'"),
    "no such machine": ("", {"TURBOQUANT_MACHINE": "riscv64"},
                        "TURBOQUANT_MACHINE must be x86_64 or aarch64, got 'riscv64'"),
    "no compiler for a machine": ("", {"TURBOQUANT_MACHINE": "aarch64", "TURBOQUANT_GLIBC": "2.28", "CC": ""},
                                  "TURBOQUANT_MACHINE=aarch64 needs TURBOQUANT_GLIBC, CC and CXX"),
    "CUDA without nvcc": ("", {"TURBOQUANT_CUDA": "1", "NVCC": "/nowhere/nvcc"},
                          "TURBOQUANT_CUDA=1, but nvcc was not found. Install the CUDA toolkit"),
}  # fmt: skip


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no compiler, which Python itself looks for on macOS")
@pytest.mark.parametrize("case", BUILDS.values(), ids=BUILDS)
def test_builds_that_cannot_be(case):
    pytest.importorskip("setuptools", minversion="77")
    change, variables, text = case
    environment = os.environ | {"TURBOQUANT_CUDA": "0"} | variables
    done = subprocess.run(
        [sys.executable, "-c", SETUP.format(change=change)], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"turboquant: {text}"), done.stderr


LEFT_OUT = """
import runpy, sys
sys.argv = ['setup.py', '-q', '--version']
asks = runpy.run_path('setup.py')['{asks}']
asks.__globals__['find_torch'] = lambda: None
print(asks())
"""


@pytest.mark.parametrize(("asks", "text"), [
    ("nvcc_to_build_with", "the CUDA kernels are left out. To have them, install a wheel, or install the CUDA toolkit"),
    ("torch_to_build_with", "torch is not installed; once it is there, run the install again"),
])  # fmt: skip
def test_builds_without_nvcc_or_torch_say_how_to_get_them(asks, text):
    pytest.importorskip("setuptools", minversion="77")
    environment = os.environ | {"NVCC": "/nowhere/nvcc", "TURBOQUANT_CUDA": "auto", "TURBOQUANT_TORCH": "auto"}
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT.format(asks=asks)], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert text in done.stdout + done.stderr


@pytest.mark.skipif(not WHEEL, reason="TURBOQUANT_WHEEL names no wheel (make wheel test-wheel)")
@pytest.mark.parametrize("options", [
    ["--python-version", "3.10"],
    ["--implementation", "cp", "--python-version", "3.13", "--abi", "cp313t"],  # free-threaded
    ["--platform", "musllinux_1_2_x86_64"],
    ["--platform", "macosx_14_0_arm64"],
    ["--platform", "win_amd64"],
], ids=lambda options: options[-1])  # fmt: skip
def test_pip_refuses_the_wheel_elsewhere(options, tmp_path):
    if "cp313t" in options and tuple(map(int, version("pip").split(".")[:2])) < (24, 1):
        pytest.skip(f"pip {version('pip')} knows no free-threaded Python")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", str(tmp_path)]
    done = subprocess.run([*pip, *options, WHEEL], capture_output=True, text=True)
    assert done.returncode != 0 and "is not a supported wheel on this platform" in done.stderr, done.stderr
