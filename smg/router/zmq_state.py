"""What is known of the engines of a ZMQ worker, and how it is shown."""

from __future__ import annotations

from typing import Any

import msgspec

from smg.engines.grpc.facts import RankLoad
from smg.engines.zmq.handshake import ReadyResponse
from smg.messages import EngineLoad


class Rank:
    """One engine: ``ready`` is its registration, ``awaiting`` means that it has dialled and not reported READY yet,
    ``links`` are the detok processes it is connected to."""

    def __init__(self) -> None:
        self.ready: ReadyResponse | None = None
        self.awaiting = False
        self.links: set[int] = set()
        self.load: EngineLoad | None = None

    @property
    def usable(self) -> bool:
        return self.ready is not None and not self.awaiting

    def reset(self) -> None:
        """The engine is gone, or another one begins."""
        self.ready = None
        self.load = None


class SavedState(msgspec.Struct):
    """What a later gateway must know to take running engines over: the registrations by rank, and how many clients
    the engines know."""

    kind: str
    clients: int
    ranks: dict[int, ReadyResponse]


def vocabulary_size(config: dict[str, Any]) -> int:
    """Rows of the model's embedding table by its ``config.json``, 0 when it does not say."""
    for source in (config, config.get("text_config")):
        size = source.get("vocab_size") if isinstance(source, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return 0


def labels_of(ready: ReadyResponse, model_path: str) -> dict[str, str]:
    """What the workers API shows of an engine."""
    values = {
        "model_path": model_path,
        "max_context_length": ready.max_model_len,
        "page_size": ready.tokens_per_block or None,
        "model_dtype": ready.dtype,
        "version": ready.vllm_version,
        "max_num_seqs": ready.max_num_seqs,
        "num_gpu_blocks": ready.num_gpu_blocks,
        "tp_size": ready.tensor_parallel_size,
        "pp_size": ready.pipeline_parallel_size,
        "kv_cache_size_tokens": ready.kv_cache_size_tokens,
    }
    return {name: str(value) for name, value in values.items() if value is not None and value != ""}


def rank_load(number: int, load: EngineLoad, ready: ReadyResponse) -> RankLoad:
    capacity = ready.kv_cache_size_tokens or (ready.num_gpu_blocks or 0) * ready.tokens_per_block
    return RankLoad(
        dp_rank=number,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=int(load.kv_usage * capacity),
        max_total_num_tokens=capacity,
        token_usage=load.kv_usage,
        max_running_requests=ready.max_num_seqs or 0,
    )
