"""The small interface between the gateway and an inference engine.

``EngineRequest`` is what the tokenizer pool knows about a generation; a ``RequestCodec`` turns it into the bytes of
one engine's protocol and is a pure function. ``Delta`` is what comes back; an ``EngineClient`` owns the connection to
one worker and calls a ``Sink`` for every message. No client awaits per token: sinks are called from the loop's reader
callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from smg.engines.grpc.facts import Embedding


class BuildError(Exception):
    """The engine kind cannot take this request (400 ``invalid_request_parameters`` / ``build_request_failed``)."""


@dataclass(slots=True)
class Sampling:
    """Sampling parameters; None = the client (and the worker's defaults) left it unset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    sampling_seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None


@dataclass(slots=True)
class Constraint:
    """``kind``: "json_schema", "regex", "ebnf" or "structural_tag"; ``value`` its text. ``origin``: "output"
    (response_format, regex, ebnf) or "tool" (a forced call)."""

    kind: str
    value: str
    origin: str = "output"


@dataclass(slots=True)
class EngineRequest:
    """One generation, engine-neutral. ``api`` is the endpoint ("chat", "completions", "generate", "messages",
    "responses"): engines get different defaults per endpoint. ``logprobs``: None = none asked, else the number of
    alternatives. ``stop_encodings`` maps a stop string to its token IDs (SGLang takes one-token stops as ids).
    ``reasoning_on``: thinking is on for this prompt (SGLang's ``require_reasoning``). ``eos_ids`` end a generation, the
    model's own first; ``watched``: the gateway looks for stop strings while the output comes; ``keep_stop_token``: it
    must see the stop token that ends the output, too."""

    request_id: str
    api: str
    text: str
    token_ids: Sequence[int]
    stream: bool
    sampling: Sampling
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None
    token_ids_logprob: Sequence[int] = ()
    reasoning_on: bool = False
    stop_encodings: dict[str, list[int]] = field(default_factory=dict)
    return_hidden_states: bool = False
    log_metrics: bool = True
    eos_ids: Sequence[int] = ()
    watched: bool = False
    keep_stop_token: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class TokenLogprobs:
    """Logprobs of one delta: ``logprobs[i]`` belongs to ``token_ids[i]``; ``top[i]`` lists ``(token_id, logprob)``
    alternatives.
    """

    __slots__ = ("logprobs", "token_ids", "top")

    def __init__(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        self.token_ids = token_ids
        self.logprobs = logprobs
        self.top = top


class Delta:
    """One message of an engine stream for one choice.

    ``token_ids`` are new ids (never cumulative: codecs that receive totals subtract). ``finish_reason`` is None until
    the choice ends, then the engine's word ("stop", "length", "abort", "error" ...). Counts are totals for the choice
    and 0 when the engine did not say. ``matched_stop`` is a stop string, a token id or None. The next message may come
    in the same object, with other ids and counts.
    """

    # Defaults live on the class: a message of the token path sets two or three attributes, not a dozen.
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = -1
    spec_accepted: int = 0
    spec_draft: int = 0
    hidden_states: Any = None

    def __init__(self, index: int, token_ids: Sequence[int]) -> None:
        self.index = index
        self.token_ids = token_ids
        # A default of three types would be lost where the class is compiled.
        self.matched_stop: str | int | None = None


class EngineError(Exception):
    """A failed engine call. ``code`` is a gRPC status name ("UNAVAILABLE", "INVALID_ARGUMENT" ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@mypyc_attr(allow_interpreted_subclasses=True)
class Sink:
    """Receives one engine stream. Exactly one of ``on_end`` and ``on_error`` is called, last; none after
    ``Call.abort``.
    """

    __slots__ = ()

    def on_delta(self, delta: Delta) -> None:
        """A message of the stream."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The stream ended as it should."""
        raise NotImplementedError

    def on_error(self, error: EngineError) -> None:
        """The stream broke, or never began."""
        raise NotImplementedError


class Call(Protocol):
    """A running generation."""

    def abort(self) -> None:
        """Stop the generation in the engine at once; the sink is not called again. Idempotent."""

    def abort_choice(self, index: int) -> None:
        """One choice needs no more tokens, the others go on. Stops it where the engine runs choices as requests of
        their own, else does nothing; the sink must expect more deltas of it."""


PromptEncoder = Callable[[str, str, Sequence[int]], bytes]
"""(request id, prompt text, prompt ids) -> bytes of the engine's generate request."""


class RequestCodec(Protocol):
    """Pure translation for one engine kind (tokenizer pool side)."""

    kind: str

    def encode(self, request: EngineRequest) -> bytes:
        """Bytes of the engine's generate request. Raises ``BuildError``."""

    def bind(self, request: EngineRequest) -> PromptEncoder:
        """An encoder for requests that differ from ``request`` only in id and prompt; what they share is encoded now.
        Raises ``BuildError``, and so does the encoder."""

    def extend(self, request: bytes, generated: Sequence[int]) -> bytes:
        """The same request with ``generated`` ids appended to the prompt and the token limits lowered by as many
        (continuation of a broken stream on another worker)."""


class EngineClient(Protocol):
    """A connection to one worker (detok side)."""

    def generate(
        self,
        request_id: str,
        request: bytes,
        sink: Sink,
        *,
        streaming: bool,
        dp_rank: int = -1,
        timeout: float | None = None,
    ) -> Call:
        """Start a generation. Never raises for engine trouble: failures reach ``sink.on_error``."""

    async def embed(self, request: bytes, timeout: float) -> Embedding:
        """One embedding. Raises ``EngineError`` (UNIMPLEMENTED where the transport has none)."""

    async def close(self) -> None: ...
