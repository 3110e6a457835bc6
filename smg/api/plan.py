"""From a validated request and its prompt to the generation plan.

``Draft`` collects what the API modules decided; ``smg.api.mold`` adds everything that costs: engine requests per engine
kind, block hashes for routing. ``Planned`` is ready to travel once the stream's number is known.

``ResponsePlan.options`` by API:

* chat: ``forced`` (a call is forced: streams open with null content), ``hidden_states``. * completions: ``echo``,
``suffix``, ``keep`` (with ``best_of``: how many of the ``n`` choices of each prompt are shown, best mean
log-probability first), ``hide_logprobs`` (log-probabilities only rank), ``hidden_states``. * generate:
``hidden_states``. * messages: ``thinking`` (the request asked for thinking: usage carries ``thinking_tokens``),
``input_tokens``. * embeddings: ``encoding_format`` ("float" or "base64"), ``dimensions`` (0 = all). * classify: none.
* events (a turn of a session): none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from smg.engines.base import Constraint, EngineRequest, PromptEncoder, Sampling
from smg.messages import (
    GenerationPlan,
    ModelInfo,
    ParserPlan,
    PromptPart,
    ResponsePlan,
    Route,
    RoutePart,
    StopPlan,
)
from smg.models.constraints import ToolConstraint

_encode_plan = msgspec.msgpack.Encoder().encode
_NO_PARSER = ParserPlan()


class Codec(Protocol):
    """What the pool uses of an engine codec."""

    @property
    def supports_embedding(self) -> bool: ...

    def bind(self, request: EngineRequest) -> PromptEncoder: ...

    def embed_request(self, request_id: str, text: str, token_ids: Sequence[int]) -> bytes: ...


class EncodedPrompt(NamedTuple):
    """One prompt. ``text`` is what goes to engines as ``original_text``; ``uncounted`` ids at the end are not billed.
    ``echo`` is the text to repeat in the answer."""

    text: str
    ids: Sequence[int]
    uncounted: int = 0
    echo: str | None = None


@dataclass(slots=True)
class Draft:
    """A request on its way to a plan.

    ``api`` is the renderer ("chat", "completions", "generate", "messages", "events", "embeddings", "classify"),
    ``engine_api`` the endpoint as engines distinguish it. ``n`` counts generated choices per prompt. ``keep_stop``: a
    matched stop string stays in the text whatever the client says. ``stop_encodings`` maps stop strings to their ids
    (for engines that take one-token stops as ids). ``refusal`` is the error code for what no engine kind can take."""

    info: ModelInfo
    api: str
    engine_api: str
    request_id: str
    body_id: str
    engine_ids: list[str]
    prompts: list[EncodedPrompt]
    sampling: Sampling
    stream: bool = False
    parser: ParserPlan = _NO_PARSER
    eos_ids: Sequence[int] = ()
    tool: ToolConstraint | None = None
    output: Constraint | None = None
    response_format: bool = False
    reasoning_on: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None
    token_ids_logprob: Sequence[int] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_hidden_states: bool = False
    log_metrics: bool = True
    skip_special_tokens: bool = True
    stop_strings: Sequence[str] | None = None
    keep_stop: bool = False
    stop_encodings: dict[str, list[int]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    refusal: str = "invalid_request_parameters"
    routing_id: str = ""


@dataclass(slots=True)
class Planned:
    """A plan without the number of its stream. ``tokenizer`` names the entry of the tokenizer table."""

    model: str
    tokenizer: str
    endpoint: str
    request_id: str
    parts: list[PromptPart]
    route_parts: list[RoutePart]
    stop: StopPlan
    parser: ParserPlan
    response: ResponsePlan
    routing_key: str = ""
    target_worker: str = ""
    key_source: str = "header"

    def plan(self, seq: int, frontend: int, deadline: float = 0.0) -> GenerationPlan:
        """The plan of stream ``seq`` of ``frontend``; ``deadline`` in wall-clock seconds, 0 = none."""
        return GenerationPlan(
            seq, frontend, self.tokenizer, self.parts, self.stop, self.parser, self.response, deadline
        )

    def route(self, seq: int, frontend: int, deadline: float = 0.0) -> Route:
        """The message to the router."""
        return Route(
            seq=seq,
            frontend=frontend,
            model=self.model,
            parts=self.route_parts,
            plan=_encode_plan(self.plan(seq, frontend, deadline)),
            routing_key=self.routing_key,
            target_worker=self.target_worker,
            endpoint=self.endpoint,
            streaming=self.response.stream,
            request_id=self.request_id,
            key_source=self.key_source,
        )


@dataclass(slots=True)
class Answer:
    """A request that is answered without an engine."""

    body: bytes
    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=lambda: [("content-type", "application/json")])
