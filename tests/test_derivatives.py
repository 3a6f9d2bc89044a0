"""Operators, patched models and packed encoders have no derivative. Every way in which torch takes one is an error.
Transforms work if they take no derivative, or none through an operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import forks
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from ops_cases import (  # noqa: E402
    GRAD,
    PLAN,
    array,
    samples,
    tq,
)
from torch import Tensor, func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

TANGENT = "without a tangent (inference only: detach it), got a tensor of forward-mode differentiation"


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> object:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))  # type: ignore[no-untyped-call]


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under(mode: Callable[[], Any], take: Callable[..., object]) -> Callable[..., object]:
    def run(f: Any, x: Tensor) -> object:
        with mode():
            return take(f, x)

    return run


def required(f: Callable[[Tensor], Tensor], x: Tensor) -> object:
    return f(x.clone().requires_grad_())


def counter() -> Any:
    return FlopCounterMode(display=False)


WAYS: dict[str, tuple[Callable[..., object], str]] = {
    "requires_grad": (required, GRAD),
    "grad": (lambda f, x: func.grad(f)(x), GRAD),
    "vjp": (lambda f, x: func.vjp(f, x), GRAD),
    "jacrev": (lambda f, x: func.jacrev(f)(x), GRAD),
    "hessian": (lambda f, x: func.hessian(f)(x), GRAD),
    "jvp": (lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),)), TANGENT),
    "jacfwd": (lambda f, x: func.jacfwd(f)(x), TANGENT),
    "forward_ad": (dual, TANGENT),
    "vmap of grad": (lambda f, x: func.vmap(func.grad(f))(x[None]), GRAD),
    "grad, grad mode off outside": (lambda f, x: torch.no_grad()(func.grad(f))(x), GRAD),
    "jvp, grad mode off": (lambda f, x: torch.no_grad()(func.jvp)(f, (x,), (torch.ones_like(x),)), TANGENT),
    "forward_ad, grad mode off": (under(torch.no_grad, dual), TANGENT),
    "requires_grad, FlopCounterMode": (under(counter, required), GRAD),
    "requires_grad of a result, FlopCounterMode": (under(counter, lambda f, x: required(lambda y: f(y + 0), x)), GRAD),
    "requires_grad, modes": (under(Passing, under(counter, required)), GRAD),
    "forward_ad, mode, grad mode off": (under(Passing, under(torch.no_grad, dual)), TANGENT),
}
FULL = ("attend, full", "append, full", "append_attend, full", "rotate", "quantize", "dequantize", "merge")


def of_argument(arguments: dict[str, Any], op: Any, name: str) -> Callable[[Tensor], Tensor]:
    """Returns a function of one argument of the operator, whose result is a number. Each call gets copies of what the
    operator writes to."""
    written = {argument.name for argument in op._schema.arguments if argument.alias_info}

    def f(x: Tensor) -> Tensor:
        given = {key: arg.clone() if key in written and arg is not None else arg for key, arg in arguments.items()}
        out = op(**given | {name: x})
        out = out[0] if isinstance(out, tuple) else out
        return x.sum() + (out.sum() if isinstance(out, Tensor) and out.is_floating_point() else 0)

    return f


def arguments_of(sample: str, rng: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    found: Any = samples(rng, "cpu")[sample]
    op, args, kwargs = found
    return op, dict(zip([argument.name for argument in op._schema.arguments], args)) | kwargs


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sample", FULL)
def test_every_derivative_of_every_argument_is_refused(sample: str, way: str, rng: np.random.Generator) -> None:
    op, arguments = arguments_of(sample, rng)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    floats = [name for name, x in tensors.items() if x.is_floating_point()]
    assert floats
    for name in floats:
        take, text = WAYS[way]
        with pytest.raises(ValueError, match=re.escape(f"{op.__name__.split('.')[0]}: `{name}` must be {text}")):
            take(of_argument(arguments, op, name), tensors[name].detach())
    for name, x in tensors.items():
        assert torch.equal(x.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("sample", FULL)
def test_what_is_not_differentiated_is_left_alone(sample: str, rng: np.random.Generator) -> None:
    """Inside a transform, operators on tensors that it does not follow give what they give outside."""
    op, arguments = arguments_of(sample, rng)
    name = next(name for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point())
    x, f = arguments[name], of_argument(arguments, op, name)
    want, one = f(x), torch.ones(())
    torch.testing.assert_close(func.grad(lambda a: f(x) * a)(one), want)
    torch.testing.assert_close(func.grad(lambda a: f((x + 0 * a).detach()) * a)(one), want)
    torch.testing.assert_close(func.jvp(lambda a: f(x + 0.0) * a, (one,), (one,))[1], want)
    torch.testing.assert_close(func.grad(lambda a: func.grad(lambda b: f(x) * a * b)(one) * a)(one), 2 * want)
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, x).detach())  # type: ignore[no-untyped-call]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            required(f, x)
            with counter(), Passing():
                torch.testing.assert_close(required(f, x), want)
    with torch.inference_mode():  # in which torch drops tangents
        dual(f, x)
    with counter():
        torch.testing.assert_close(f(x), want)
    if not op._schema.is_mutable:
        batch = func.vmap(f)(torch.stack([x, x]))
        torch.testing.assert_close(batch, torch.stack([want, want]))
        torch.testing.assert_close(func.vmap(lambda a: f(x) * a)(torch.ones(2)), torch.stack([want, want]))
        torch.testing.assert_close(func.functionalize(f)(x), want)
        with pytest.raises(ValueError, match="must be without requires_grad"):
            func.vmap(f)(x[None].clone().requires_grad_())
        with pytest.raises(ValueError, match="must be without requires_grad"):
            func.grad(lambda y: func.vmap(f)(y[None]).sum())(x)


def test_under_a_mode_of_the_python_dispatcher(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32))
    with counter():
        torch.testing.assert_close(tq.rotate(PLAN.words, tq.rotate(PLAN.words, x), inverse=True), x)
    assert np.isfinite(
        array(torch.fx.experimental.proxy_tensor.make_fx(lambda x: tq.rotate(PLAN.words, x))(x)(x))
    ).all()


@pytest.mark.parametrize("way", [way for way in WAYS if "requires" not in way and "mode off" not in way])
def test_while_tracing(way: str) -> None:
    torch._dynamo.reset()
    take, text = WAYS[way]
    with pytest.raises(Exception, match=re.escape(text)):
        take(torch.compile(lambda x: tq.rotate(PLAN.words, x).sum(), backend="eager"), torch.ones(2, 64))
    if way == "forward_ad":  # a compiled function that fails leaves torch's dual level open
        return
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(text)):
        torch.compile(lambda x: take(lambda x: tq.rotate(PLAN.words, x).sum(), x), backend="eager")(torch.ones(2, 64))


MODELS = {
    way: take
    for way, (take, _) in WAYS.items()
    if "requires_grad" not in way and "mode," not in way and way not in ("vmap of grad", "jacrev", "jacfwd", "hessian")
}


@pytest.mark.parametrize("way", MODELS)
def test_a_patched_model_and_a_filled_cache(way: str) -> None:
    pytest.importorskip("transformers")
    import models

    import turboquant

    model = turboquant.patch(models.tiny())
    embed, ids = model.get_input_embeddings(), torch.arange(40)[None]
    with torch.no_grad():
        cache = turboquant.TurboQuantCache(model)
        model(ids, past_key_values=cache)
    x = embed(ids[:, :1]).detach()

    def step(x: Tensor, **given: Any) -> Tensor:
        return model(inputs_embeds=x, **given).logits.sum()  # type: ignore[no-any-return]

    wants = "attention through a TurboQuantCache has no gradient: train with use_cache=False"
    with pytest.raises(RuntimeError, match=wants):
        MODELS[way](lambda x: step(x, past_key_values=cache), x)
    if "forward_ad" not in way:
        with pytest.raises(RuntimeError, match="a TurboQuantCache has no gradient: inside a transform of torch.func"):
            MODELS[way](lambda x: step(x, use_cache=True), x)
        if "jvp" not in way:  # torch's attention has no forward mode
            MODELS[way](lambda x: step(x, use_cache=False), x)
    with torch.no_grad():
        assert cache.get_seq_length() == 40
        out = model(ids[:, :1], past_key_values=cache).logits
        assert out.isfinite().all() and cache.get_seq_length() == 41


@pytest.mark.parametrize("way", MODELS)
def test_a_packed_encoder(way: str) -> None:
    pytest.importorskip("transformers")
    import esm_models

    import turboquant

    model = turboquant.patch(esm_models.tiny_esm())
    x = model.get_input_embeddings()(torch.arange(4, 24)[None]).detach()
    with pytest.raises(RuntimeError, match=r"attention over packed keys and values has no gradient"):
        MODELS[way](lambda x: model(inputs_embeds=x).logits.sum(), x)


def test_a_first_call_in_inference_mode_does_not_hide_later_derivatives() -> None:
    program = """
import torch
from turboquant import Plan, ops

plan, x = Plan(64, 4, 4), torch.ones(1, 64)
with torch.inference_mode(), torch.enable_grad():
    ops.rotate(plan, x)
try:
    ops.rotate(plan, x.requires_grad_())
except ValueError as error:
    print(error)
"""
    assert GRAD in forks.python(program).stdout


def test_an_import_in_inference_mode_does_not_hide_later_derivatives() -> None:
    program = """
import torch

with torch.inference_mode():
    from turboquant import Plan, ops
plan, x = Plan(64, 4, 4), torch.ones(2, 1, 64, requires_grad=True)
try:
    torch.vmap(lambda x: ops.rotate(plan, x))(x)
except ValueError as error:
    print(error)
"""
    assert GRAD in forks.python(program).stdout
