"""The vocabulary of the ring: every struct that crosses a process boundary.

Rules of this file:

* A struct here is plain data: no methods with effects, no sockets, no references to live objects.
* Everything is encoded with msgpack (``smg.ipc``), many messages in one frame per loop tick.
* A stream is named by ``seq``, a number the frontend process mints. A resubmitted request gets a new ``seq``, so
  a late record for an old one is recognised by being unknown and is answered with an ``Abort``.
* ``frontend`` is the index of the frontend process that holds the client.
* Fields that one process passes on without looking into them are ``bytes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    Passed = bytes | memoryview
else:
    # Bytes that are passed on or read once. What comes out of a frame is a view of the frame, not a copy.
    Passed = memoryview


class Message(msgspec.Struct, array_like=True, tag_field="t", frozen=True, gc=False):
    """Base of everything that travels between processes of the data plane."""


# --------------------------------------------------------------------------------------------------
# What a model said, as events. Produced by the parsers of ``smg.models``, consumed by the renderers of
# ``smg.detok`` and, for multi-turn sessions, by the frontend process.


class Event(msgspec.Struct, array_like=True, tag_field="t", frozen=True, gc=False):
    """Base of the parser events. Concatenating the texts of one kind gives the complete field."""


class ReasoningDelta(Event, frozen=True, tag="r"):
    """A piece of chain-of-thought text."""

    text: str


class ContentDelta(Event, frozen=True, tag="c"):
    """A piece of the visible answer."""

    text: str


class ToolCallStart(Event, frozen=True, tag="ts"):
    """A tool call begins. ``index`` counts the calls of this answer from 0, ``name`` is as the model wrote it."""

    index: int
    name: str


class ToolCallArguments(Event, frozen=True, tag="ta"):
    """A fragment of the JSON text of the arguments of call ``index``; the fragments concatenate to valid JSON."""

    index: int
    fragment: str


class ToolCallEnd(Event, frozen=True, tag="te"):
    """The call ``index`` is complete: its argument text is valid JSON."""

    index: int


class LogprobsDelta(Event, frozen=True, tag="lp"):
    """Log-probabilities of tokens of the visible answer, behind the text they belong to. Each entry is ``{"token",
    "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}``. No parser makes it."""

    entries: list[dict[str, Any]]


ParserEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
TurnEvent = ParserEvent | LogprobsDelta


# --------------------------------------------------------------------------------------------------
# The generation plan: what the tokenizer pool decided about one request.


class StopPlan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the gateway itself ends a choice.

    ``strings`` are matched in the decoded text across any token boundary; ``token_ids`` are the client's stop
    tokens; ``eos_ids`` end a choice silently (empty when the client asked to ignore EOS). With ``keep`` the matched
    text stays in the answer (``no_stop_trim``, ``include_stop_str_in_output``).
    """

    strings: list[str] = []
    token_ids: list[int] = []
    eos_ids: list[int] = []
    keep: bool = False


class ParserPlan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Which parsers read the output and how they start.

    ``reasoning`` and ``tool`` are registered parser names or None for "leave the text alone". ``armed``: the prompt
    already opened the reasoning block. ``forced``: how a constraint makes the model call: "" (it doesn't), "tag" (in
    the format of ``tool``), or in bare JSON, "array" (a list of ``{"name", "parameters"}``) or "function:NAME" (the
    arguments of one function). ``leads``: texts that a forced answer begins with, white space apart, when there is no
    thought in front of it. ``tools`` is the JSON text of the request's tool list (types for the XML-like formats).
    ``id_style`` is "call", "kimi" or "kimi_k3" (with ``id_offset`` = number of calls already in the conversation).
    ``parallel`` False keeps only the first call. ``harmony`` selects the gpt-oss channel parser, which replaces both
    parsers and works on token IDs.
    """

    reasoning: str | None = None
    armed: bool = False
    tool: str | None = None
    forced: str = ""
    tools: bytes = b""
    id_style: str = "call"
    id_offset: int = 0
    parallel: bool = True
    harmony: bool = False
    leads: tuple[str, ...] = ()


class ResponsePlan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the answer is rendered. ``api`` is "chat", "completions", "generate", "messages" or "events" (parser events
    for a multi-turn session). ``body_id`` is the id the client sees, ``created`` Unix seconds. ``logprobs`` is None
    when the client asked for none, else the number of alternatives per token. ``options`` holds what only one API
    knows (JSON-like values), so that this struct need not grow with every API."""

    api: str
    body_id: str
    request_id: str
    model: str
    created: int
    stream: bool
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    options: dict[str, Any] = {}


class PromptPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One prompt of a request (a batch of completions has several; everything else has one).

    ``requests`` holds the ready-made engine request per engine kind (``"vllm"``, ``"sglang"`` ...), so that dispatch
    is one write. ``text`` is the prompt's text (only set when the answer needs it: ``echo``); ``token_ids`` likewise
    (little-endian uint32; ``return_token_ids`` and ``echo``). ``engine_id`` is the id the engine sees. ``uncounted``
    tokens at the end of the prompt reach the engine and are left out of what clients are told (``prompt_tokens``
    already excludes them).
    """

    engine_id: str
    prompt_tokens: int
    requests: dict[str, bytes]
    text: str | None = None
    token_ids: bytes | None = None
    uncounted: int = 0


class GenerationPlan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Everything the detok process needs to run one request. Travels through the router as opaque bytes."""

    seq: int
    frontend: int
    tokenizer: str
    parts: list[PromptPart]
    stop: StopPlan
    parser: ParserPlan
    response: ResponsePlan
    deadline: float = 0.0  # wall-clock seconds (time.time()); 0 = none


# --------------------------------------------------------------------------------------------------
# Link 1: frontend -> tokenizer pool


class Submit(Message, frozen=True, tag="submit"):
    """One HTTP request that the pool prepares or answers, body not decoded. ``headers`` holds only the ones the pool
    or the router acts on (lower-case names). ``received`` is wall-clock seconds."""

    seq: int
    frontend: int
    path: str
    request_id: str
    headers: dict[str, str]
    body: bytes
    received: float


# --------------------------------------------------------------------------------------------------
# Link 2: tokenizer pool -> router


class RoutePart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the router may know of one prompt: its length and the chained hashes of its token blocks
    (little-endian uint64, one per full block of the routing block size)."""

    prompt_tokens: int
    block_hashes: bytes = b""


class Route(Message, frozen=True, tag="route"):
    """A plan on its way to a worker. ``plan`` is an encoded ``GenerationPlan`` that the router does not decode.
    ``key_source`` says where ``routing_key`` comes from: "header" or "rid" (the request's own id). ``avoid`` names the
    workers that failed at it, one entry per failed attempt."""

    seq: int
    frontend: int
    model: str
    parts: list[RoutePart]
    plan: Passed
    routing_key: str = ""
    target_worker: str = ""
    endpoint: str = "chat"
    streaming: bool = False
    attempts: int = 0
    avoid: list[str] = []
    request_id: str = ""
    key_source: str = "header"


# --------------------------------------------------------------------------------------------------
# Link 3: router -> detok, and back


class WorkerRef(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A worker as the detok process needs it: its URL, engine kind ("vllm", "sglang", "trtllm", "tokenspeed", "mlx"),
    transport ("grpc" or "zmq") and data-parallel rank (-1: the engine balances)."""

    url: str
    kind: str
    transport: str = "grpc"
    dp_rank: int = -1

    @property
    def name(self) -> str:
        """The URL, with the rank where there are several workers behind one URL."""
        return f"{self.url}@{self.dp_rank}" if self.dp_rank >= 0 else self.url


class Dispatch(Message, frozen=True, tag="dispatch"):
    """Run the plan of ``route``; ``workers`` has one entry per prompt part. The route is what goes back to the router
    when another worker must be tried."""

    seq: int
    frontend: int
    workers: list[WorkerRef]
    route: Route


class Redispatch(Message, frozen=True, tag="redispatch"):
    """A worker failed before its first message: the router decides about another attempt and the breaker. ``code`` is
    the gRPC status name ("UNAVAILABLE" ...), ``worker`` the name of the worker that failed."""

    route: Route
    worker: str
    code: str
    message: str
    detok: int


class WorkerReport(Message, frozen=True, tag="wreport"):
    """What happened to one engine request: ``outcome`` is "success", "failure", "neutral" (neither for the breaker) or
    "aborted". Frees the worker's slot in the router's load count; ``routing_key`` is that of the ``Route``."""

    url: str
    detok: int
    outcome: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dp_rank: int = -1
    routing_key: str = ""


class DetokLoad(Message, frozen=True, tag="dload"):
    """In-flight engine requests of one detok process, per worker URL (``URL@RANK`` for a data-parallel rank); sent to a
    router that has just started."""

    detok: int
    inflight: dict[str, int]


# ZMQ workers: the router answers the handshake, the detok processes hold the data sockets.


class EngineAttach(Message, frozen=True, tag="eattach"):
    """router -> detok: hold the data sockets of a ZMQ worker, as its client number ``client``. Sent again when more is
    known. ``ranks`` engines belong to it; ``lockstep``: they step together. ``adopt``: an engine that has handshaken
    before may be running already, and ``orphans`` are client numbers of that time that nobody has now: this process
    stops what still comes for them. ``context_length`` and ``vocab_size`` 0 = unknown."""

    url: str
    kind: str
    ranks: int
    client: int
    adopt: bool = False
    lockstep: bool = False
    context_length: int = 0
    vocab_size: int = 0
    orphans: list[int] = []


class EngineDetach(Message, frozen=True, tag="edetach"):
    """router -> detok: the worker is gone, close its sockets."""

    url: str
    kind: str


class EngineLink(Message, frozen=True, tag="elink"):
    """detok -> router: an engine is connected to this process, or not any more (``up`` False, ``reason`` says why).
    ``ready`` is its registration, empty when it was not heard here."""

    url: str
    detok: int
    rank: int
    up: bool
    ready: bytes = b""
    reason: str = ""


class EngineLoad(Message, frozen=True, tag="eload"):
    """detok -> router: the last load an engine reported; ``kv_usage`` from 0 to 1."""

    url: str
    rank: int
    running: int
    waiting: int
    kv_usage: float


class EngineCall(Message, frozen=True, tag="ecall"):
    """router -> detok: call a method of an engine. ``arguments`` is a msgpack array."""

    url: str
    kind: str
    rank: int
    call_id: int
    method: str
    arguments: bytes = b"\x90"


class EngineAnswer(Message, frozen=True, tag="eanswer"):
    """detok -> router: what the engine answered; ``failure`` "" = it did what it was told. ``value`` is msgpack."""

    url: str
    call_id: int
    failure: str = ""
    value: bytes = b"\xc0"


# --------------------------------------------------------------------------------------------------
# Link 4: detok / router / pool -> frontend


class Owner(Message, frozen=True, tag="owner"):
    """The detok process ``detok`` now owns the stream; aborts go there and a retry is its business."""

    seq: int
    detok: int


class Reply(Message, frozen=True, tag="reply"):
    """A complete HTTP answer."""

    seq: int
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class StreamStart(Message, frozen=True, tag="sstart"):
    """Head of a streamed answer (status 200, ``text/event-stream``) and its first bytes."""

    seq: int
    headers: list[tuple[str, str]]
    body: bytes


class StreamData(Message, frozen=True, tag="sdata"):
    """More bytes of streamed answers: for each ``seq`` the ``body`` of one loop tick, of all streams in one record."""

    seqs: list[int]
    bodies: list[bytes]


class StreamEnd(Message, frozen=True, tag="send"):
    """Last bytes of a streamed answer. ``error_code`` is "" for a good end, else what the metrics count."""

    seq: int
    body: bytes
    error_code: str = ""


class TurnEvents(Message, frozen=True, tag="tevents"):
    """Events of one tick, for a multi-turn session; ``events`` is a msgpack list of ``TurnEvent``."""

    seq: int
    events: bytes


class TurnEnd(Message, frozen=True, tag="tend"):
    """One generation of a multi-turn session ended. ``error`` carries ``(status, code, message)`` of a failure."""

    seq: int
    finish_reason: str
    usage: dict[str, int]
    matched_stop: str | int | None = None
    error: tuple[int, str, str] | None = None


class Abort(Message, frozen=True, tag="abort"):
    """The client is gone (frontend -> owner), or the record's stream is unknown here (any -> sender)."""

    seq: int
    frontend: int


# --------------------------------------------------------------------------------------------------
# Admin: frontend <-> router


class AdminCall(Message, frozen=True, tag="acall"):
    """A control-plane request that the router answers with a ``Reply``: workers CRUD, loads, flush, profiles."""

    seq: int
    frontend: int
    method: str
    path: str
    query: str
    body: bytes
    request_id: str


# --------------------------------------------------------------------------------------------------
# Broadcast by the router: the models behind this gateway


class ModelInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One served model as the other processes need it.

    ``tokenizer`` names an entry of the tokenizer table; ``kinds`` are the engine kinds of its workers (a plan carries
    one ready-made request per kind); ``context_length`` and ``vocab_size`` 0 = unknown. ``tool_parser`` and
    ``reasoning_parser`` are per-model overrides ("" = none). ``default_sampling`` is the worker's generation config.
    ``class_labels`` names the classes of a classifier by their index. ``prefix_routed``: which worker has seen a
    prompt's prefix may decide where it goes, so plans carry block hashes. ``decoding_start`` is what all its workers
    say about the place from which they apply grammars: "first_token", "after_reasoning" or "" (they don't agree).
    """

    id: str
    tokenizer: str
    kinds: list[str]
    aliases: list[str] = []
    context_length: int = 0
    vocab_size: int = 0
    tool_parser: str = ""
    reasoning_parser: str = ""
    default_sampling: dict[str, float] = {}
    architectures: list[str] = []
    model_type: str = ""
    display_name: str = ""
    ready_workers: int = 0
    supports_embedding: bool = False
    class_labels: dict[str, str] = {}
    prefix_routed: bool = True
    decoding_start: str = ""


class TokenizerSource(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a tokenizer is loaded from: ``path`` is a local directory or file, or a hub id; ``chat_template`` a
    template file that replaces the directory's own ("" = none)."""

    name: str
    path: str
    chat_template: str = ""


class ModelTable(Message, frozen=True, tag="models"):
    """All served models and tokenizers. ``workers_total`` and ``workers_ready`` answer the readiness probe."""

    version: int
    models: list[ModelInfo]
    tokenizers: list[TokenizerSource]
    workers_total: int = 0
    workers_ready: int = 0


class TokenizerReport(Message, frozen=True, tag="treport"):
    """What became of loading a tokenizer in a process of the pool: its vocabulary's size, or why it failed."""

    source: TokenizerSource
    vocab_size: int
    failure: str = ""


# --------------------------------------------------------------------------------------------------
# Supervisor <-> children (over each child's control socket)


class Peer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One live process: ``generation`` grows with every restart and is part of the inbox address."""

    role: str
    index: int
    generation: int
    address: str


class Ready(Message, frozen=True, tag="ready"):
    """A child serves its inbox."""

    role: str
    index: int
    generation: int
    detail: str = ""


class PeerTable(Message, frozen=True, tag="peers"):
    """The live processes. A peer that is absent is dead: what it held is lost and must be submitted again."""

    peers: list[Peer]


class Drain(Message, frozen=True, tag="drain"):
    """Take no new work, finish what runs until ``deadline`` (``time.monotonic()`` seconds), then exit."""

    deadline: float


class Idle(Message, frozen=True, tag="idle"):
    """Answer to ``Drain``: this child has no running work left."""

    role: str
    index: int


RingMessage = (
    Submit | Route | Dispatch | Redispatch | WorkerReport | DetokLoad
    | EngineAttach | EngineDetach | EngineLink | EngineLoad | EngineCall | EngineAnswer
    | Owner | Reply | StreamStart | StreamData | StreamEnd | TurnEvents | TurnEnd | Abort
    | AdminCall | ModelTable | TokenizerReport
)  # fmt: skip
ControlMessage = Ready | PeerTable | Drain | Idle
