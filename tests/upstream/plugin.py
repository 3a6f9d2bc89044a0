"""pytest plugin of run.py: runs transformers' own tests on our cache, and writes down the outcome of each.

TURBOQUANT_UPSTREAM   own: nothing is changed;  ours: every Llama is patched when it is first used, with a window that
                      holds everything, so that answers must be the full cache's;  left: the same, and the padding
                      masks of the common tester, which pads on the right, are turned around
TURBOQUANT_OUTCOMES   where to write {test: [outcome, reason, whether our cache was given keys]}, as JSON
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers

import turboquant

MODE = os.environ["TURBOQUANT_UPSTREAM"]
SPEC = turboquant.CacheSpec(4, 4, centre="none", metric="none", sinks=2, window=1024)

outcomes: dict[str, tuple[str, str, bool]] = {}
used = 0  # layers that were given keys so far


def pytest_configure() -> None:
    if MODE == "own":
        return
    patch_when_used(transformers.LlamaForCausalLM, "__call__")
    patch_when_used(transformers.LlamaForCausalLM, "generate")
    given = turboquant.TurboQuantCache.update

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        global used
        used += 1
        return given(self, *args, **kwargs)

    turboquant.TurboQuantCache.update = counted  # type: ignore[method-assign]


def patch_when_used(cls: Any, method: str) -> None:
    """Patches a model at its first use, because a user patches a model that is finished."""
    given = getattr(cls, method)

    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_turboquant"):
            turboquant.patch(self, SPEC)
        return given(self, *args, **kwargs)

    setattr(cls, method, functools.wraps(given)(use))


def pytest_collection_finish(session: pytest.Session) -> None:
    testers = {getattr(item.cls, "model_tester_class", None) for item in session.items} if MODE == "left" else set()
    for tester in testers - {None}:
        turn_masks(tester)


def turn_masks(tester: Any) -> None:
    prepare = tester.prepare_config_and_inputs_for_common

    def turned(self: Any) -> Any:
        config, inputs = prepare(self)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
        return config, inputs

    tester.prepare_config_and_inputs_for_common = turned


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    before = used
    try:
        return (yield)
    finally:
        outcome, reason, _ = outcomes.get(item.nodeid, ("error", "", False))
        outcomes[item.nodeid] = outcome, reason, used > before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    known = outcomes.get(report.nodeid)
    if (known and known[0] in ("failed", "skipped")) or (report.when == "teardown" and report.passed):
        return
    reason = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    outcomes[report.nodeid] = report.outcome, reason.strip().partition("\n")[0], False


def pytest_unconfigure() -> None:
    Path(os.environ["TURBOQUANT_OUTCOMES"]).write_text(json.dumps(outcomes))
