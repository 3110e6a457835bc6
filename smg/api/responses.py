"""``POST /v1/responses``: request type, validation, and the chat form of one turn.

Everything here is a pure function of the request. Sessions (stored history, MCP servers, several generations per
answer) are built on top: they add items and tools and send each generation on as a ``TurnRequest``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from smg.api.chat import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from smg.api.decode import BodyDecoder
from smg.api.errors import ApiError, invalid
from smg.api.fields import (
    I32,
    U32,
    StreamOptions,
    StringOrList,
    check_decimal,
    check_integer,
    check_stop,
    check_top_k,
    stop_strings,
)
from smg.api.responses_items import (
    AdditionalToolsItem,
    InputItem,
    MessageItem,
    check_items,
    parse_items,
)
from smg.api.responses_tools import ChoiceObject, ResponsesTool, check_choice, check_tools, parse_choice
from smg.engines.base import Sampling

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_TOP_LOGPROBS = 20

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Strict(msgspec.Struct, kw_only=True, gc=False):
    """Base of the nested objects; unknown members are ignored."""


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class PlainFormat(Strict, tag_field="type", tag="text"):
    """No constraint."""


class ObjectFormat(Strict, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    name: str
    schema: Any
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: PlainFormat | ObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRef(Strict, kw_only=True):
    id: str


class StoredPrompt(Strict, kw_only=True):
    id: str
    version: str | None = None
    variables: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The body. Unlike the other APIs, unknown members are refused (``unknown_parameter``). Those that only steer the
    vendor's own service, or that agents send along for its telemetry, are known and have no effect."""

    input: str | list[Any]
    model: str
    include: list[Include] | None = None
    background: bool | None = None
    instructions: str | None = None
    max_output_tokens: U32 | None = None
    max_tool_calls: U32 | None = None
    metadata: dict[str, Any] | None = None
    conversation: str | ConversationRef | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    tool_choice: Any = None
    tools: list[ResponsesTool] | None = None
    top_logprobs: U32 | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextConfig | None = None
    user: str | None = None
    request_id: str | None = None
    priority: I32 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: StringOrList | None = None
    prompt: StoredPrompt | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    stream_options: StreamOptions | None = None
    context_management: list[Any] | None = None
    client_metadata: dict[str, Any] | None = None
    access_programs: dict[str, Any] | None = None
    background_options: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of ``conversation`` in either form."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


_DECODER = BodyDecoder(
    ResponsesRequest,
    unions={
        r"tools\[\d+\]": ("type",),
        r"text\.format": ("type",),
        r"stop(?=\[)": (),
    },
    opaque=("conversation",),
)


class Parsed(msgspec.Struct, kw_only=True, gc=False):
    """A validated request with its typed input and tool choice."""

    request: ResponsesRequest
    items: list[InputItem]
    choice: ChoiceObject | str | None


def decode(body: bytes, headers: Mapping[str, str]) -> ResponsesRequest:
    """The typed body. Raises ``ApiError``."""
    return _DECODER.decode(body, headers)


def _items_of(request: ResponsesRequest) -> list[InputItem]:
    value = request.input
    if isinstance(value, str):
        if not value:
            raise invalid("input_text_empty", "Input text cannot be empty", "input")
        return [MessageItem(role="user", content=value)]
    if not value:
        raise invalid("input_items_empty", "Input items cannot be empty", "input")
    return parse_items(value)


def _check_metadata(metadata: dict[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        text = f"too many properties: {len(metadata)}, but the maximum is {MAX_METADATA}"
        raise invalid("object_above_max_properties", text, "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise invalid("string_above_max_length", f"a key is longer than {MAX_METADATA_KEY} characters", "metadata")
        if isinstance(value, str) and len(value) > MAX_METADATA_VALUE:
            text = f"the value of '{key}' is longer than {MAX_METADATA_VALUE} characters"
            raise invalid("string_above_max_length", text, "metadata")


def _check_text(text: TextConfig | None) -> None:
    schema = text.format if text is not None else None
    if isinstance(schema, SchemaFormat):
        if not schema.name:
            raise invalid("json_schema_name_empty", "JSON schema name cannot be empty", "text")
        if type(schema.schema) is not dict:
            raise invalid("json_schema_schema_not_object", "JSON schema 'schema' must be a JSON object", "text")


def _check_conversation(request: ResponsesRequest) -> None:
    name = request.conversation_id
    if name is not None and not name.startswith("conv_"):
        raise invalid("invalid_conversation_id", f"'{name}' does not begin with 'conv_'", "conversation")


def _check_ranges(request: ResponsesRequest) -> None:
    """Rules of single members, in alphabetical order."""
    check_decimal("frequency_penalty", request.frequency_penalty, -2, 2)
    check_integer("max_output_tokens", request.max_output_tokens, 1)
    check_integer("max_tool_calls", request.max_tool_calls, 1)
    if request.metadata is not None:
        _check_metadata(request.metadata)
    check_decimal("min_p", request.min_p, 0, 1)
    check_decimal("presence_penalty", request.presence_penalty, -2, 2)
    check_decimal("repetition_penalty", request.repetition_penalty, 0, 2)
    check_stop("stop", request.stop)
    check_decimal("temperature", request.temperature, 0, 2)
    _check_text(request.text)
    check_tools(request.tools or ())
    check_integer("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    check_top_k("top_k", request.top_k)
    check_decimal("top_p", request.top_p, 0, 1, above=True)


def add_tools(request: ResponsesRequest, given: Iterable[Any]) -> None:
    """Make tools that came in ``additional_tools`` items tools of the request. Raises ``ApiError``."""
    added = list(given)
    if not added:
        return
    try:
        tools = msgspec.convert(added, list[ResponsesTool])
    except msgspec.ValidationError as error:
        text = f"Invalid JSON data: input: additional_tools: {error}"
        raise ApiError(400, "invalid_type", text, "input") from None
    check_tools(tools)
    request.tools = [*(request.tools or ()), *tools]


def validate(request: ResponsesRequest) -> Parsed:
    """All rules that need nothing but the request. Raises ``ApiError``."""
    choice = parse_choice(request.tool_choice)
    items = _items_of(request)
    add_tools(request, (tool for item in items if type(item) is AdditionalToolsItem for tool in item.tools))
    _check_conversation(request)
    check_items(items)
    _check_ranges(request)
    if request.previous_response_id is not None and request.conversation is not None:
        text = (
            "Mutually exclusive parameters. Ensure you are only providing one of: 'previous_response_id' or "
            "'conversation'."
        )
        raise invalid("mutually_exclusive_parameters", text)
    check_choice(choice, request.tools)
    return Parsed(request=request, items=items, choice=choice)


def response_format(request: ResponsesRequest) -> ResponseFormat | None:
    """``text.format`` as the chat API spells it."""
    chosen = request.text.format if request.text is not None else None
    if chosen is None:
        return None
    if isinstance(chosen, SchemaFormat):
        return JsonSchemaFormat(json_schema=JsonSchema(name=chosen.name, schema=chosen.schema, strict=chosen.strict))
    return JsonObjectFormat() if isinstance(chosen, ObjectFormat) else TextFormat()


class TurnSampling(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Sampling members of one generation of a session; None = unset."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: list[str] = []


class TurnRequest(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One generation of a session, as the session sends it to the tokenizer pool (path ``TURN_PATH``, JSON).

    ``messages`` and ``tools`` are in chat form (tools: all functions the model may see this turn, MCP functions
    included); ``tool_choice`` is the request's own value, or None when an earlier turn has satisfied it.
    ``engine_id`` names the generation; it must be fresh for every turn."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    effort: str | None = None
    sampling: TurnSampling = msgspec.field(default_factory=TurnSampling)
    top_logprobs: int | None = None
    logprobs: bool = False
    stream: bool = False
    routing_id: str = ""
    items: list[dict[str, Any]] | None = None
    instructions: str | None = None
    client_tools: list[dict[str, Any]] = []
    mcp_tools: list[dict[str, Any]] = []
    engine_id: str  # last: requests with equal beginnings go to the same tokenizer process


TURN_PATH = "/internal/turn"


def turn_sampling(request: ResponsesRequest) -> TurnSampling:
    """The sampling members of a request. The temperature is always set, so a worker's default never applies to it."""
    return TurnSampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        max_tokens=request.max_output_tokens,
        stop=list(stop_strings(request.stop)),
    )


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the answer's text is to carry log-probabilities."""
    return "message.output_text.logprobs" in (request.include or ())


def turn_request(
    parsed: Parsed, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], engine_id: str
) -> TurnRequest:
    """The first generation of a session. ``messages``: history and input in chat form
    (``responses_items.chat_messages``), without the instructions, which this adds; ``tools``: chat declarations
    (``responses_tools.chat_tools`` and what MCP servers offer)."""
    request = parsed.request
    system = [{"role": "system", "content": request.instructions}] if request.instructions is not None else []
    return TurnRequest(
        model=request.model,
        engine_id=engine_id,
        messages=[*system, *messages],
        tools=list(tools),
        tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=response_format(request),
        effort=request.reasoning.effort if request.reasoning is not None else None,
        sampling=turn_sampling(request),
        top_logprobs=request.top_logprobs,
        logprobs=wants_logprobs(request),
        stream=bool(request.stream),
        routing_id=request.request_id or "",
    )


def engine_sampling(turn: TurnSampling) -> Sampling:
    """The engine's form of a turn's sampling members."""
    return Sampling(
        temperature=turn.temperature,
        top_p=turn.top_p,
        top_k=turn.top_k,
        min_p=turn.min_p,
        frequency_penalty=turn.frequency_penalty,
        presence_penalty=turn.presence_penalty,
        repetition_penalty=turn.repetition_penalty,
        max_tokens=turn.max_tokens,
        stop=turn.stop,
    )


turn_decoder = msgspec.json.Decoder(TurnRequest)
turn_encoder = msgspec.json.Encoder()
