"""A short form of tests/soak.py; `make soak` is the long one."""

from __future__ import annotations

import models  # noqa: F401  skips without torch and transformers
from hypothesis import settings
from soak import Lives

TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
