"""`measure` and `Moments`: measured moments are those of the model's projections, on every kind of model; files, the
cache folder and errors."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
import warnings

import numpy as np
import pytest
from conftest import ROOT
from esm_models import tiny_esm
from models import KINDS, tiny
from profiles import layer, profile_of

import turboquant
from turboquant import Profile
from turboquant.measuring.metric import POSITIONS
from turboquant.measuring.rotary import Rotary, _from_turns
from turboquant.models import texts
from turboquant.models.identity import fingerprint

torch = pytest.importorskip("torch", minversion="2.10")

DEMO = ROOT / "demo" / "turboquant_demo"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setenv("TURBOQUANT_CACHE", "")


def measured(model, *args, **options) -> Profile:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model is measured on random token ids")
        return turboquant.measure(model, *args, **options)


def demo():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


# ---- what is measured ----


def projections(model, ids):
    """Keys and queries of each layer before RoPE, [heads, tokens, head_dim], from forward hooks."""
    found, handles = {}, []
    for i, block in enumerate(model.model.layers):
        for name in ("q_norm", "k_norm") if hasattr(block.self_attn, "q_norm") else ("q_proj", "k_proj"):
            part = getattr(block.self_attn, name)
            handles.append(part.register_forward_hook(lambda m, a, out, at=(i, name[0]): found.update({at: out})))
    with torch.no_grad():
        model.model(input_ids=ids)
    for handle in handles:
        handle.remove()
    dim = model.model.layers[0].self_attn.head_dim

    def heads(x):
        x = x[0].double()
        return (x.unflatten(-1, (-1, dim)) if x.dim() == 2 else x).numpy()

    def in_front(x, count):  # [tokens, heads, head_dim], or [heads, tokens, head_dim] already
        return x if x.shape[0] == count else x.swapaxes(0, 1)

    counts = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    return [{side: in_front(heads(found[i, side]), n) for side, n in counts.items()} for i in range(len(found) // 2)]


def frequencies(theta, dim):
    return theta ** -(np.arange(0, dim, 2) / dim)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3, alternating"])
def test_moments_are_those_of_the_projections(kind):
    model = tiny(kind)
    ids = texts._random(model, 600)
    found = measured(model_of(model, 600))
    for i, (made, wanted) in enumerate(zip(found.layers, projections(model, ids))):
        assert made.kind == "wave"
        mean = wanted["k"][:, 4:].mean(1)
        sliding = kind.startswith("gemma3") and model.config.layer_types[i] == "sliding_attention"
        theta = rope_theta(model.config, "sliding_attention" if sliding else "full_attention")
        dim = made.centre.shape[1]
        want = frequencies(theta, dim)[made.pairs[:, 0]] / (2 * np.pi) * 2**32
        assert (np.abs(made.increments - want) <= 0.5 + 1.2e-7 * want).all()  # the model has its frequencies in float32
        assert (made.pairs[:, 1] - made.pairs[:, 0] == dim // 2).all()
        np.testing.assert_allclose(made.amplitudes, mean[:, made.pairs], rtol=0, atol=2e-5 * np.abs(mean).max())
        check_metric(made, wanted["q"][:, 4:], frequencies(theta, dim))


def model_of(model, positions):
    """A copy of the model whose configuration has this many positions."""
    other = copy.deepcopy(model)
    other.config.max_position_embeddings = positions
    return other


def rope_theta(config, kind):
    rope = getattr(config, "rope_parameters", None) or {}
    if kind in rope:
        return rope[kind]["rope_theta"]
    if "rope_theta" in rope:
        return rope["rope_theta"]
    return (
        config.rope_local_base_freq
        if kind == "sliding_attention" and hasattr(config, "rope_local_base_freq")
        else config.rope_theta
    )


def check_metric(made, queries, angles):
    """The metric A of each head is near F, a power of the queries' second moment averaged over positions one by one."""
    heads, dim = made.centre.shape
    rows = queries.reshape(heads, -1, dim)
    there, back = made.metric()
    for head in range(heads):
        moment = rows[head].T @ rows[head] / len(rows[head])
        mean = np.zeros_like(moment)
        for p in POSITIONS:
            turn = np.eye(dim)
            half = np.arange(dim // 2)
            turn[half, half] = turn[half + dim // 2, half + dim // 2] = np.cos(p * angles)
            turn[half, half + dim // 2], turn[half + dim // 2, half] = -np.sin(p * angles), np.sin(p * angles)
            mean += turn @ moment @ turn.T / len(POSITIONS)
        values, vectors = np.linalg.eigh(mean)
        powers = np.maximum(values, 1e-4 * values.max()) ** 0.2
        full = (vectors * (powers / np.sqrt(np.mean(powers**2)))) @ vectors.T
        assert np.linalg.norm(there[head] - full) < 0.2 * np.linalg.norm(full)
        np.testing.assert_allclose(there[head] @ back[head], np.eye(dim), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_probed(kind):
    model = tiny(kind)
    found = measured(model_of(model, 200))
    assert [made.kind for made in found.layers] == ["wave"] * model.config.num_hidden_layers
    assert found.tokens == 196 and found.nbytes == sum(made.nbytes for made in found.layers)
    if "partial" in kind:
        turning = {"phi": 16, "gpt-neox": 8}[kind.partition(",")[0]]
        assert all(made.pairs.max() < turning and made.centre[:, turning:].any() for made in found.layers)
        assert all(made.increments[made.amplitudes.any((0, 2))].all() for made in found.layers)


SCALED = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=256),
    "yarn": dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=256),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
}  # fmt: skip


def scaled(fields, **others):
    from transformers import LlamaConfig

    name = "rope_parameters" if hasattr(LlamaConfig(), "rope_parameters") else "rope_scaling"
    theta = {"rope_theta": 10000.0} if name == "rope_parameters" else {}
    return tiny("llama", **{name: {**fields, **theta}}, **others)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_angles_are_the_models(name):
    model = scaled(SCALED[name])
    rotary = model.model.rotary_emb
    before = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in rotary._buffers.items()}
    found = measured(model)
    want = rotary.inv_freq.double().numpy() / (2 * np.pi) * 2**32
    for made in found.layers:
        used = made.amplitudes.any((0, 2))
        precise = 0.501 if name != "dynamic" else 0.8  # probed at positions up to 1,024 only
        assert np.abs(made.increments[used] - want[made.pairs[used, 0]]).max() <= precise
    assert all(torch.equal(x, before[key]) for key, x in rotary._buffers.items())
    if name == "yarn":  # attention scaling is part of the keys that attention sees
        assert rotary.attention_scaling > 1
        mean = projections(model, texts._random(model, 2048))[0]["k"][:, 4:].mean(1) * rotary.attention_scaling
        np.testing.assert_allclose(found.layers[0].amplitudes, mean[:, found.layers[0].pairs], atol=1e-4)


def test_interleaved_pairs():
    import transformers

    config = transformers.CohereConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    found = measured(transformers.CohereForCausalLM(config).eval())
    for made in found.layers:
        assert made.kind == "wave" and {tuple(pair) for pair in made.pairs.tolist()} == {
            (i, i + 1) for i in range(0, 16, 2)
        }


def smollm3(*rotary):
    """A model of four layers, with the same weights whichever of them are rotary."""
    import transformers

    if not hasattr(transformers, "SmolLM3Config"):
        pytest.skip("transformers has no SmolLM3")
    config = transformers.SmolLM3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, no_rope_layers=list(rotary), bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.SmolLM3ForCausalLM(config).eval()


def test_layers_without_rotation_have_a_constant_centre():
    model = smollm3(1, 0, 1, 0)
    found = measured(model)
    assert [made.kind for made in found.layers] == ["wave", "constant", "wave", "constant"] and not found.not_probed
    mean = projections(model, texts._random(model, 256))[1]["k"][:, 4:].mean(1)
    np.testing.assert_allclose(found.layers[1].centre, mean, atol=1e-5)


def test_a_rotation_that_is_none_is_named(monkeypatch):
    """Layers whose angles are not proportional to the position get a constant centre and are listed in `not_probed`."""
    model = tiny("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def squared(x, position_ids):
        return plain(x, position_ids**2)

    monkeypatch.setattr(rotary, "forward", squared)
    found = measured(model)
    assert found.not_probed == (0, 1, 2) and "not_probed=[0, 1, 2]" in repr(found)
    assert all(not len(made.pairs) and made.centre.any() for made in found.layers)


def test_matrices_that_do_not_turn_pairs_are_refused(rng):
    positions = [0, 1, 2, 4]
    turn = Rotary(np.array([[0, 2], [1, 3]]), np.array([2**28, 2**31 + 2**20 + 5], np.uint32))
    turns = np.stack([turn.turned(np.eye(4), p).T for p in positions])
    assert _from_turns(turns, positions).increments.tolist() == turn.increments.tolist()
    moved = turns[:, [1, 0, 3, 2]] * 1.5  # rows moved and scaled
    assert {tuple(pair) for pair in _from_turns(moved, positions).pairs.tolist()} == {(0, 2), (1, 3)}
    assert _from_turns(turns + 0.01 * rng.standard_normal(turns.shape), positions) is None
    reflected = turns.copy()
    reflected[1:, 0] *= -1
    assert _from_turns(reflected, positions) is None


# ---- how the model is run ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = tiny("llama")
    half = copy.deepcopy(model).to(dtype)
    half.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq  # as from_pretrained leaves it
    want, got = measured(model), measured(half)
    for a, b in zip(want.layers, got.layers):
        assert a.kind == b.kind == "wave"
        order = [np.argsort(x.pairs[:, 0]) for x in (a, b)]
        np.testing.assert_array_equal(a.increments[order[0]], b.increments[order[1]])
        off = a.amplitudes[:, order[0]] - b.amplitudes[:, order[1]]
        assert np.linalg.norm(off) < 0.03 * np.linalg.norm(a.amplitudes)


def test_frequencies_that_were_rounded_are_the_models():
    """`model.to(torch.bfloat16)` rounds the frequencies, and the wave must use the rounded ones."""
    model = tiny("llama").to(torch.bfloat16)
    want = model.model.rotary_emb.inv_freq.double().numpy() / (2 * np.pi) * 2**32
    for made in measured(model).layers:
        assert made.kind == "wave" and np.abs(made.increments - want[made.pairs[:, 0]]).max() <= 0.501


def test_the_model_is_left_as_it_was():
    model = tiny("llama", attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    name = model.config._attn_implementation
    state = torch.get_rng_state()
    heads = []
    model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    a, b = measured(model), measured(model)
    assert [m.training for m in model.modules()] == modes and model.config._attn_implementation == name
    assert torch.equal(torch.get_rng_state(), state)
    assert not heads and all(p.grad is None for p in model.parameters())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules()] == hooks[
        1 : 1 + len([*model.model.modules()])
    ]
    assert all(np.array_equal(x.amplitudes, y.amplitudes) for x, y in zip(a.layers, b.layers))


def test_defaults_of_torch_change_nothing():
    """Other default dtypes and devices do not change what is measured. A tensor made on meta would have no numbers."""
    model, esm = demo(), tiny_esm()
    want, before = [measured(one) for one in (model, esm)], torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            got = [measured(one) for one in (model, esm)]
            kinds = texts.kinds(model, None)
    finally:
        torch.set_default_dtype(before)
    assert all(map(same, got, want)) and [ids.device.type for ids in kinds] == ["cpu"] * 4


def test_forwards_of_other_threads_are_not_probed():
    """Another thread's forward is not measured. It has its rotary embedding before, and enters layers during it."""
    model = tiny()
    want = measured(model)
    begun, go = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: model(torch.ones(1, 40, dtype=torch.long), use_cache=False))

    def wait(*_):
        if threading.current_thread() is other:
            begun.set()
            go.wait()

    def let_go(*_):
        if threading.current_thread() is not other:
            go.set()
            other.join()

    layers = model.model.layers
    hooks = layers[0].register_forward_pre_hook(wait), layers[-1].register_forward_hook(let_go)
    other.start()
    begun.wait()
    found = measured(model)
    [hook.remove() for hook in hooks]
    assert not other.is_alive() and not found.not_probed
    for a, b in zip(found.layers, want.layers, strict=True):
        np.testing.assert_array_equal(a.amplitudes, b.amplitudes)


def test_a_patched_model_gives_the_same():
    model = tiny("llama")
    want = measured(model)
    turboquant.patch(model)
    got = measured(model)
    assert all(np.array_equal(a.amplitudes, b.amplitudes) for a, b in zip(want.layers, got.layers))
    assert model(torch.tensor([[1, 2, 3]]), use_cache=True).logits.shape[1] == 3


def test_fewer_tokens_where_the_model_has_fewer_positions():
    assert measured(tiny(max_position_embeddings=64)).tokens == 60
    assert measured(tiny()).tokens == 2044
    with pytest.raises(NotImplementedError, match="it has 12 positions, 16 are needed"):
        measured(tiny(max_position_embeddings=12))


@pytest.mark.parametrize(
    "on_disk", [(), ("model.layers.1", "model.embed_tokens", "lm_head")], ids=["in memory", "on disk"]
)
def test_accelerates_hooks(on_disk, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    spread = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, offload_folder=tmp_path,
        device_map={part: "disk" if part in on_disk else "cpu" for part in parts},
    )  # fmt: skip
    want, got = measured(demo()), measured(spread)
    assert got.fingerprint == want.fingerprint
    assert all(np.array_equal(a.amplitudes, b.amplitudes) for a, b in zip(want.layers, got.layers))


def test_weights_that_torchao_quantised():
    """8-bit weights give nearly the same moments. torchao's tensors have no views."""
    quantization = pytest.importorskip("torchao.quantization")
    model = demo()
    want = measured(model)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    got = measured(model)
    assert got.fingerprint != want.fingerprint and not got.not_probed
    for a, b in zip(want.layers, got.layers):
        assert np.abs(a.scale - b.scale).max() < 0.05


def test_weights_that_bitsandbytes_quantised(tmp_path):
    """8-bit weights give nearly the same moments."""
    pytest.importorskip("accelerate")
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    want = measured(demo())
    quantised = AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"
    )
    got = measured(quantised)
    assert got.fingerprint != want.fingerprint and not got.not_probed
    for a, b in zip(want.layers, got.layers):
        assert np.abs(a.scale - b.scale).max() < 0.05


# ---- tokens ----


def test_the_text_of_the_package_is_found_by_the_models_name():
    model = demo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = turboquant.measure(model)
    assert found.source == "the text of the package" and found.tokens >= 2040 and not found.not_probed


def test_parts_of_the_text_keep_their_shares():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    for wanted in (2048, 500, 60):
        ids = texts._shipped(tokenizer, wanted)
        assert len(ids) == wanted
    parts = [texts._tokens(tokenizer, (texts._TEXTS / name).read_text()) for name in texts._PARTS]
    ids = texts._shipped(tokenizer, 100)
    assert ids == parts[0][:34] + parts[1][:34] + parts[2][:16] + parts[3][:16]


def test_a_text_of_the_user():
    model = demo()
    found = turboquant.measure(model, text="One two three four five six seven eight nine. " * 20)
    assert found.source == "a text of the user" and 100 < found.tokens < 2040


def test_without_a_tokenizer_random_ids_are_a_warning(tmp_path):
    model = tiny()
    with pytest.warns(UserWarning, match="random token ids, because the model's `name_or_path` is empty"):
        found = turboquant.measure(model)
    assert found.source == "random token ids"
    model.name_or_path = model.config._name_or_path = str(tmp_path)
    with pytest.warns(UserWarning, match="no tokenizer can be read at the model's `name_or_path`"):
        turboquant.measure(model)
    ids = texts._random(tiny(eos_token_id=[7, 8]), 2049)[0]
    assert len(ids) == 2049 and ids[0] == 1 and ids.max() == 95 and not {*ids[1:].tolist()} & {0, 1, 7, 8}


# ---- errors ----


def test_errors_come_before_anything_is_run():
    model = tiny()
    with pytest.raises(TypeError, match="`model` must be a transformers model, got int"):
        turboquant.measure(3)
    with pytest.raises(TypeError, match="`text` must be a string or None, got list"):
        turboquant.measure(model, text=["a"])
    with pytest.raises(TypeError, match="`tokenizer` must be a tokenizer of transformers or None, got str"):
        turboquant.measure(model, tokenizer="gpt2")
    with pytest.raises(
        ValueError, match="`tokenizer` must be given with a `text`: the model's `name_or_path` is empty"
    ):
        turboquant.measure(model, text="words " * 100)
    with pytest.raises(ValueError, match="`text` must have at least 16 tokens, got 1"):
        turboquant.measure(demo(), text="a")
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

    with pytest.raises(ValueError, match="`tokenizer` must be the model's, got one with token .* vocabulary of 96"):
        turboquant.measure(model, AutoTokenizer.from_pretrained(DEMO))
    with pytest.raises(NotImplementedError, match="its attention bypasses AttentionInterface"):
        measured(GPTNeoForCausalLM(GPTNeoConfig(vocab_size=96, hidden_size=32, num_layers=2, num_heads=2,
                                                attention_types=[[["global", "local"], 1]])))  # fmt: skip
    # With learned positions, the same tokens at later positions have other keys. No rotation is found, without an
    # error.
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=None)
    ).eval()
    assert {made.kind for made in measured(gpt2).layers} <= {"constant", "not probed"}


@pytest.mark.parametrize("kind", [ValueError, AttributeError, AssertionError])
def test_a_model_that_cannot_run_token_ids(kind, monkeypatch):
    model = tiny()

    def fails(*args, **kwargs):
        raise kind("pixel_values are needed\nmore")

    monkeypatch.setattr(model.model, "forward", fails)
    with pytest.raises(
        NotImplementedError, match=rf"forward of token ids failed \({kind.__name__}: pixel_values are needed\)"
    ):
        measured(model)


def test_running_out_of_memory_is_not_a_model_that_cannot_run(monkeypatch):
    model = tiny()
    monkeypatch.setattr(model.model, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        measured(model)


def test_keys_that_are_not_finite():
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] = float("inf")
    with pytest.raises(ValueError, match="`model` must give finite keys and queries, got others in layer 1"):
        measured(model)


# ---- files and the cache folder ----


def same(a: Profile, b: Profile) -> bool:
    names = [field.name for field in dataclasses.fields(a.layers[0])]
    return (a.fingerprint, a.tokens, a.source) == (b.fingerprint, b.tokens, b.source) and all(
        np.array_equal(getattr(x, name), getattr(y, name)) for x, y in zip(a.layers, b.layers) for name in names
    )


def test_files(tmp_path):
    found = measured(tiny("gemma3, alternating"))
    found.save(tmp_path / "m.safetensors")
    assert same(Profile.load(tmp_path / "m.safetensors"), found)
    assert repr(found) == (
        "Profile(layers=3, kv_heads=2, head_dim=32, pairs=16, tokens=2044, source='random token ids', "
        f"nbytes={found.nbytes}, no_costs='it has no text')"
    )
    with pytest.raises(FileNotFoundError, match="`path` must be a profile"):
        Profile.load(tmp_path / "absent")
    data = bytearray((tmp_path / "m.safetensors").read_bytes())
    data[-100] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        Profile.load(tmp_path / "damaged")
    for name, content in {"short": data[:100], "empty": b"", "words": b"words" * 100}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="`path` must be a profile"):
            Profile.load(tmp_path / name)
    with pytest.raises(ValueError, match="it is not one that turboquant wrote"):
        Profile.load(DEMO / "model.safetensors")


def test_files_of_another_version(tmp_path, monkeypatch):
    from turboquant.measured import profile as data

    found = measured(tiny())
    monkeypatch.setattr(data, "FORMAT", "turboquant-profile-9")
    found.save(tmp_path / "m")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="its format must be turboquant-profile-1, got 'turboquant-profile-9'"):
        Profile.load(tmp_path / "m")


def test_moments_of_another_model():
    found = measured(tiny())
    found.check(fingerprint(tiny()))
    with pytest.raises(ValueError, match="`profile` must be of this model, .* this one has other weights"):
        found.check(fingerprint(tiny(seed=1)))
    with pytest.raises(ValueError, match="this one has rope .*linear"):
        found.check(fingerprint(scaled(SCALED["linear"])))


def test_a_wave_for_layers_whose_keys_are_not_rotary():
    other, model, spec = smollm3(1, 1, 1, 1), smollm3(1, 0, 1, 0), turboquant.CacheSpec()
    moments, right = measured(other), measured(model)
    for use in (turboquant.patch, turboquant.TurboQuantCache):
        with pytest.raises(ValueError, match=r"`profile` must be of this model.*no_rope_layers \[1, 0, 1, 0\] instead"):
            use(model, spec, profile=profile_of(moments))
        made = dataclasses.replace(moments.moments, fingerprint=right.moments.fingerprint)
        with pytest.raises(
            ValueError, match=r"no wave in layer 1, whose keys are not rotary, got one\. Use .*\"none\""
        ):
            use(model, spec, profile=profile_of(made))
        use(model, spec, profile=profile_of(right))


BAD = {
    "not finite": dict(amplitudes=lambda x: x * np.float32("nan")),
    "a scale of 0": dict(scale=lambda x: x * 0),
    "a stretch of -1": dict(stretch=lambda x: x * 0 - 1),
    "wrong shape": dict(centre=lambda x: x[:, :-1]),
    "wrong dtype": dict(increments=lambda x: x.astype(np.int64)),
    "pairs for a constant centre": dict(kind=lambda x: "constant"),
    "a channel in two pairs": dict(pairs=lambda x: x * 0),
    "a channel that is not there": dict(pairs=lambda x: x + 60),
    "directions that lean": dict(directions=lambda x: x + 0.1),
    "a kind of its own": dict(kind=lambda x: "other"),
    "seven pairs": dict(pairs=lambda x: x[:7]),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_moments_that_are_wrong(rng, change):
    good = layer(rng)
    ((name, how),) = change.items()
    with pytest.raises(ValueError, match="must"):
        dataclasses.replace(good, **{name: how(getattr(good, name))})


def test_the_cache_folder(tmp_path, monkeypatch):
    from turboquant.measuring import moments as module

    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "kept"))
    runs = []
    plain = module._measured
    monkeypatch.setattr(module, "_measured", lambda *args: runs.append(1) or plain(*args))
    found = measured(tiny())
    assert same(measured(tiny()), found) and len(runs) == 1
    (file,) = (tmp_path / "kept").iterdir()
    changed = tiny()
    with torch.no_grad():
        changed.model.layers[2].self_attn.v_proj.weight += 1e-3  # as if an adapter was merged
    measured(changed)
    measured(model_of(tiny(), 100))
    assert len(runs) == 3 and len([*(tmp_path / "kept").iterdir()]) == 3
    file.write_bytes(file.read_bytes()[:-10])
    assert same(measured(tiny()), found) and len(runs) == 4 and same(Profile.load(file), found)
    monkeypatch.setenv("TURBOQUANT_CACHE", "")
    measured(tiny())
    assert len(runs) == 5
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TURBOQUANT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept in .*Not a directory|could not be kept in .*File exists"):
        turboquant.measure(tiny())


def test_the_cache_folder_of_the_user(monkeypatch, tmp_path):
    from turboquant.files import cache_folder

    assert cache_folder() is None
    monkeypatch.delenv("TURBOQUANT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "turboquant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "turboquant"


def test_fingerprints_survive_json():
    mark = fingerprint(tiny("gemma3, alternating"))
    assert json.loads(json.dumps(mark)) == mark
