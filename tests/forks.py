"""Runs Python programs in new processes without the seconds that importing torch and transformers takes. Each process
is a fork of one server process, which has imported them and nothing of turboquant."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MODULES = ("torch", "transformers", "transformers.models.llama.modeling_llama")

SERVER = """
import importlib, json, os, sys
from importlib.util import find_spec

for name in sys.argv[1:]:
    if find_spec(name.partition(".")[0]):
        importlib.import_module(name)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
code, environment, folder, arguments, *streams = json.loads(line)
for number, path in enumerate([os.devnull, *streams]):
    os.dup2(os.open(path, os.O_RDWR), number)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
sys.argv[1:] = arguments
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


@cache
def hub() -> Path:
    """The folder that these processes use as the cache of the Hugging Face hub, empty at first. It is the same for all,
    because the server reads HF_HUB_CACHE when it imports transformers. tests/hub.py can fill it."""
    folder = tempfile.mkdtemp(prefix="turboquant-hub-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process, with its sys.path as PYTHONPATH, the hub's folder, and `variables`."""
    here = os.pathsep.join(map(os.path.abspath, sys.path))
    return os.environ | {"PYTHONPATH": here, "HF_HUB_CACHE": str(hub()), "HF_HUB_OFFLINE": "1"} | variables


@cache
def server() -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER, *MODULES],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(started.communicate)  # closes its standard input, which ends it
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    return started


def python(
    code: str, arguments: Sequence[str] = (), folder: Path = Path(), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Like `python -c code arguments` in `folder`, with `variables` in its environment."""
    process = server()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = [code, environment(**variables), os.path.abspath(folder), list(arguments), out.name, err.name]
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read(), err.read())
