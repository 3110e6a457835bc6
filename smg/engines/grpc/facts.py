"""What a worker tells about itself, engine-neutral."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Health:
    """Answer of a health check; ``message`` is the engine's own text."""

    healthy: bool
    message: str = ""


@dataclass(slots=True)
class Outcome:
    """Answer to an admin operation (cache flush, profiler)."""

    success: bool
    message: str = ""


@dataclass(slots=True)
class Embedding:
    """One embedding vector and the number of prompt tokens behind it."""

    vector: list[float]
    prompt_tokens: int


@dataclass(slots=True)
class WorkerFacts:
    """Who a worker is.

    ``labels`` are the strings shown in the workers API: every field of the engine's model and server information that
    has a value, lists and objects as JSON. ``model_id`` is the name the worker serves its model under (its path when it
    has no other). ``context_length`` and ``vocab_size`` are 0 when unknown. ``default_sampling_params`` is the JSON
    text of the model's generation config or "". ``tokenizer_path`` is a path on the worker's machine.
    """

    kind: str
    model_id: str
    labels: dict[str, str] = field(default_factory=dict)
    model_path: str = ""
    tokenizer_path: str = ""
    served_model_name: str = ""
    context_length: int = 0
    vocab_size: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    default_sampling_params: str = ""
    dp_size: int = 1
    block_size: int = 0
    architectures: list[str] = field(default_factory=list)
    model_type: str = ""
    is_generation: bool = True
    supports_embedding: bool = False


@dataclass(slots=True)
class RankLoad:
    """Load of one data-parallel rank. ``token_usage`` is the used share of the KV cache (0 to 1), ``gen_throughput``
    tokens per second, ``num_waiting_uncached_tokens`` the prompt tokens of queued requests that no cache serves."""

    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_total_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    utilization: float = 0.0
    max_running_requests: int = 0


@dataclass(slots=True)
class LoadReport:
    """A load report of one worker, one entry per data-parallel rank. ``timestamp`` is the worker's, ISO 8601."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[RankLoad]
