"""vLLM's OpenAI server over packed caches, streaming, on four ranks: `make test-vllm`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress

import numpy as np
from engines import ENVIRONMENT, Engine

pytest_plugins = ["engines"]  # its fixtures


@contextmanager
def server(folder, log, **environment):
    """Runs a server and yields its address. Its four ranks share the model's two KV heads, two ranks a head."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
               "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8",
               "--enforce-eager", "--tensor-parallel-size", "4", "--served-model-name", "demo",
               "--additional-config", '{"turboquant": {}}']  # fmt: skip
    given = os.environ | ENVIRONMENT | environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1",
                                                      "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, env=given, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        late = time.monotonic() + 900  # five processes import vLLM, beside what else a machine does
        while True:
            assert process.poll() is None and time.monotonic() < late, log.read_text()[-5000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ranks that outlive it


def ask(url, **body):
    """Returns the answer's lines."""
    data = json.dumps({"model": "demo", "temperature": 0, "ignore_eos": True} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode().splitlines()


def test_the_server_streams_from_four_ranks(demo, ids, tmp_path):
    prompt, log, metrics = ids[:300], tmp_path / "log", tmp_path / "metrics"
    metrics.mkdir()
    with Engine(None, demo, dtype="float32") as engine:
        stock = engine.log_probs([prompt])
    with Engine({}, demo, dtype="float32") as engine:
        one = engine.log_probs([prompt])
        blocks = engine.blocks
    with server(demo, log, PROMETHEUS_MULTIPROC_DIR=str(metrics)) as url:
        answer = json.loads(ask(url, prompt=prompt, max_tokens=1, echo=True, logprobs=0)[0])
        four = np.array(answer["choices"][0]["logprobs"]["token_logprobs"][1:300])
        whole = json.loads(ask(url, prompt=prompt, max_tokens=40)[0])["choices"][0]["text"]
        lines = [line.removeprefix("data: ") for line in ask(url, prompt=prompt, max_tokens=40, stream=True) if line]
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
            counted = dict(re.findall(r"^(turboquant:\w+) ([\d.e+]+)$", page.read().decode(), re.MULTILINE))
    said = log.read_text()
    assert lines[-1] == "[DONE]" and len(lines) > 20
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
    assert abs(four - one).mean() < 0.1 * abs(one - stock).mean()
    # Each rank counts: 3 requests of 1, 40 and 40 steps, of which the last two had a prefix hit.
    assert float(counted["turboquant:sinks_exact_total"]) >= 4 * 81
    assert float(counted["turboquant:sinks_lost_total"]) == 0
    (line,) = re.findall(r"turboquant: spec default.*", said)
    found = int(re.search(r"([\d,]+) blocks of 128", line)[1].replace(",", ""))
    assert 1.9 < found / blocks < 2.1  # each rank has 1 GiB, and half of each block's bytes
