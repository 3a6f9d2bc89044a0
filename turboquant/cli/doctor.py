"""``turboquant info`` prints what is on this machine; ``turboquant doctor`` judges it, and a model."""

from __future__ import annotations

from collections.abc import Iterable

from .findings import Finding, machine

__all__ = ["doctor", "info"]


def info() -> int:
    """Print versions, instruction set, threads, CUDA build and device."""
    for one in machine():
        print(f"{one.name:16} {one.fact}")
    return 0


def doctor(model: str | None, spec: str, tokens: int) -> int:
    """Print findings on the machine, and on a model if one is named. Returns 1 if something cannot work, else 0."""
    failed = _printed(machine(for_models=model is not None))
    if model is not None and not failed:
        from .diagnosis import diagnose

        failed = _printed(diagnose(model, spec, tokens))
    print("All of this works." if not failed else f"{failed} of these cannot work.")
    return 1 if failed else 0


def _printed(findings: Iterable[Finding]) -> int:
    """Prints each finding with a verdict. Returns how many fail."""
    failed = 0
    for one in findings:
        failed += one.fails
        verdict = "FAIL" if one.fails else "note" if one.advice else "ok"
        print(f"{verdict:5} {one.name:16} {one.fact}")
        if one.advice:
            print(f"{'':22} {one.advice}")
    return failed
