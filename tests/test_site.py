"""The site in a browser, which `make docs` runs on what it built: nothing of a page is cut off on a telephone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SITE = os.environ.get("TURBOQUANT_SITE")
BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="TURBOQUANT_SITE names no site (make docs)"),
    pytest.mark.skipif(BROWSER is None, reason="chromium is not there: apt install chromium"),
]
LOOK = """<script>
window.addEventListener("load", () => {
  const box = (one) => one.getBoundingClientRect();
  const tables = [...document.querySelectorAll("table.docutils")].map((table) => [
    box(table).left, box(table).right, box(table.parentElement).right,
    getComputedStyle(table.parentElement).overflowX, table.parentElement.scrollWidth]);
  const seen = {
    page: [document.documentElement.scrollWidth, innerWidth], tables,
    code: [...document.querySelectorAll("article div.highlight")].map(
      (one) => [box(one).top, !!one.querySelector("button.copy")]),
    boxes: document.querySelectorAll("article .admonition").length,
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>"""
# A window of Chromium has 500 pixels or more; a frame may have fewer.
FRAME = """<iframe src="{page}" style="width: {width}px; height: 900px; border: 0"></iframe><script>
addEventListener("message", ({{ data }}) => {{ document.body.innerHTML = `<pre id="seen">${{data}}</pre>`; }});
</script>"""


def seen(page: str, width: int, profile: Path) -> dict:
    """What the browser lays out in this width, in pixels. It has no network: no host name resolves."""
    file = Path(SITE).resolve() / f"{page}.html"
    asked = file.with_name(f"{page}-asked.html")  # beside what the page links to
    asked.write_text(file.read_text() + LOOK)
    frame = profile / "frame.html"
    frame.write_text(FRAME.format(page=asked.as_uri(), width=width))
    try:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile / 'profile'}",
             "--virtual-time-budget=10000", "--window-size=1400,1000", "--dump-dom", frame.as_uri()],
            capture_output=True, text=True, timeout=240, check=True)  # fmt: skip
    finally:
        asked.unlink()
    return json.loads(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)[1])


@pytest.mark.parametrize("page", ["index", "performance"])
def test_nothing_is_cut_off(page, tmp_path):
    """At 400 pixels the page is no wider than the window, and a table that is wider than the page scrolls inside it."""
    found = seen(page, 400, tmp_path)
    assert found["page"] == [400, 400] and found["tables"]
    for left, right, edge, overflow, scrolled in found["tables"]:
        assert left >= 0 and edge <= 400
        assert right <= edge + 1 or (overflow == "auto" and left + scrolled >= right - 1)
    if page == "index":  # the first table that anybody sees fits without
        left, right, edge, *_ = found["tables"][0]
        assert right <= edge + 1


def test_code_on_the_first_screen_and_copy_buttons(tmp_path):
    found = seen("index", 1280, tmp_path)
    tops, buttons = zip(*found["code"], strict=True)
    assert max(tops[:2]) < 400 and all(buttons)  # the install line and the first example
    assert seen("codec", 1280, tmp_path)["boxes"] == 2  # a warning and a note
