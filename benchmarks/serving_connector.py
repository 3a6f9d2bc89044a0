"""A vLLM connector for serving_cuda.py: while STATE is on, it says that a prompt is cached except its last token."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

STATE = {"on": False}


class Connector(DecodeBenchConnector):
    """Leaves in blocks what they hold: the benchmark has filled the whole cache."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found if STATE["on"] else (0, False)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass
