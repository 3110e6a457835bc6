"""From a validated request and its prompt to the generation plan.

``Draft`` collects what the API modules decided; ``build_plan`` adds everything that costs: engine requests per engine
kind, block hashes for routing, stop encodings. ``Planned`` is ready to travel once the stream's number is known.

``ResponsePlan.options`` by API:

* chat: ``forced`` (a call is forced: streams open with null content), ``hidden_states``. * completions: ``echo``,
``suffix``, ``keep`` (with ``best_of``: how many of the ``n`` choices of each prompt are shown, best mean
log-probability first), ``hide_logprobs`` (log-probabilities only rank), ``hidden_states``. * generate:
``hidden_states``. * messages: ``thinking`` (the request asked for thinking: usage carries ``thinking_tokens``),
``input_tokens``. * embeddings: ``encoding_format`` ("float" or "base64"), ``dimensions`` (0 = all). * classify: none.
* events (a turn of a session): none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from smg.api.blocks import block_hashes, token_bytes
from smg.api.errors import ApiError, refused
from smg.engines.base import BuildError, Constraint, EngineRequest, Sampling
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
from smg.models.constraints import ToolConstraint, engine_constraint

_encode_plan = msgspec.msgpack.Encoder().encode
_NO_PARSER = ParserPlan()


class Codec(Protocol):
    """What the pool uses of an engine codec."""

    @property
    def supports_embedding(self) -> bool: ...

    def encode(self, request: EngineRequest) -> bytes: ...

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


def build_plan(draft: Draft, codecs: Mapping[str, Codec], block_size: int) -> Planned:
    """The plan of a generation. Raises ``ApiError`` when no engine kind of the model can take the request."""
    parts = [
        _part(draft, codecs, engine_id, prompt)
        for engine_id, prompt in zip(draft.engine_ids, draft.prompts, strict=True)
    ]
    return _planned(draft, parts, block_size)


def _planned(draft: Draft, parts: list[PromptPart], block_size: int) -> Planned:
    sampling = draft.sampling
    strings = draft.stop_strings if draft.stop_strings is not None else sampling.stop
    return Planned(
        model=draft.info.id,
        tokenizer=draft.info.tokenizer,
        endpoint=draft.engine_api,
        request_id=draft.request_id,
        parts=parts,
        route_parts=[
            RoutePart(len(prompt.ids), block_hashes(prompt.ids, block_size) if draft.info.prefix_routed else b"")
            for prompt in draft.prompts
        ],
        stop=StopPlan(
            strings=list(strings),
            token_ids=list(sampling.stop_token_ids),
            eos_ids=[] if sampling.ignore_eos else list(draft.eos_ids),
            keep=sampling.no_stop_trim or draft.keep_stop,
        ),
        parser=draft.parser,
        response=_response(draft),
        routing_key=draft.routing_id,
    )


def _response(draft: Draft) -> ResponsePlan:
    return ResponsePlan(
        api=draft.api,
        body_id=draft.body_id,
        request_id=draft.request_id,
        model=draft.info.id,
        created=int(time.time()),
        stream=draft.stream,
        n=draft.sampling.n,
        include_usage=draft.include_usage,
        continuous_usage=draft.continuous_usage,
        logprobs=draft.logprobs,
        return_token_ids=draft.return_token_ids,
        skip_special_tokens=draft.skip_special_tokens,
        spaces_between_special_tokens=draft.sampling.spaces_between_special_tokens,
        options=draft.options,
    )


def _part(draft: Draft, codecs: Mapping[str, Codec], engine_id: str, prompt: EncodedPrompt) -> PromptPart:
    request = EngineRequest(
        request_id=engine_id,
        api=draft.engine_api,
        text=prompt.text,
        token_ids=prompt.ids,
        stream=draft.stream,
        sampling=draft.sampling,
        logprobs=draft.logprobs,
        prompt_logprobs=draft.prompt_logprobs,
        logprob_start_len=draft.logprob_start_len,
        token_ids_logprob=draft.token_ids_logprob,
        reasoning_on=draft.reasoning_on,
        stop_encodings=draft.stop_encodings,
        return_hidden_states=draft.return_hidden_states,
        log_metrics=draft.log_metrics,
        eos_ids=draft.eos_ids,
        watched=bool(draft.sampling.stop if draft.stop_strings is None else draft.stop_strings),
    )
    keep_ids = draft.return_token_ids or prompt.echo is not None
    return PromptPart(
        engine_id=engine_id,
        prompt_tokens=len(prompt.ids) - prompt.uncounted,
        requests=_encode_for_kinds(draft, codecs, request),
        text=prompt.echo,
        token_ids=token_bytes(prompt.ids) if keep_ids else None,
        uncounted=prompt.uncounted,
    )


def _encode_for_kinds(draft: Draft, codecs: Mapping[str, Codec], request: EngineRequest) -> dict[str, bytes]:
    """The request's bytes for each engine kind of the model that can take it."""
    requests: dict[str, bytes] = {}
    failure = "no engine kind is known for this model"
    tool = draft.tool.constraint if draft.tool is not None else None
    for kind in draft.info.kinds:
        codec = codecs.get(kind)
        if codec is None:
            failure = f"engine kind {kind!r} is not known"
            continue
        try:
            request.constraint = engine_constraint(
                kind, tool, draft.output, response_format=draft.response_format, chat=draft.engine_api == "chat"
            )
            requests[kind] = codec.encode(request)
        except BuildError as error:
            failure = str(error)
    if not requests:
        raise _unbuildable(draft, failure)
    return requests


def _unbuildable(draft: Draft, text: str) -> ApiError:
    if not draft.info.kinds:
        return refused("no_available_workers", f"No available workers for model '{draft.info.id}'", status=503)
    head = "" if draft.refusal == "build_request_failed" else "Invalid request parameters: "
    return refused(draft.refusal, head + text)


def build_embedding_plan(draft: Draft, codecs: Mapping[str, Codec], block_size: int) -> Planned:
    """The plan of an embedding (or classification) request. Raises ``ApiError`` (501 ``unsupported_backend``)."""
    usable = [kind for kind in draft.info.kinds if kind in codecs and codecs[kind].supports_embedding]
    if not usable:
        if not draft.info.kinds:
            raise _unbuildable(draft, "")
        text = f"Embeddings are not supported by the workers of model '{draft.info.id}'"
        raise refused("unsupported_backend", text, status=501)
    parts = [
        PromptPart(
            engine_id=engine_id,
            prompt_tokens=len(prompt.ids),
            requests={kind: codecs[kind].embed_request(engine_id, prompt.text, prompt.ids) for kind in usable},
        )
        for engine_id, prompt in zip(draft.engine_ids, draft.prompts, strict=True)
    ]
    return _planned(draft, parts, block_size)
