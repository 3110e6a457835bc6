"""``POST /v1/chat/completions``: request type, validation, and what it means for renderer and engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from smg.api.chat_messages import ChatMessage, message_dicts
from smg.api.decode import BodyDecoder
from smg.api.errors import ApiError, invalid, refused
from smg.api.fields import (
    ONE_CONSTRAINT,
    U32,
    Request,
    SamplingRequest,
    check_decimal,
    check_integer,
    check_sampling_ranges,
    check_stream_options,
    token_bias,
)
from smg.api.profiles import apply_rules, vendor_of
from smg.api.tools import (
    AUTO,
    NONE,
    Tool,
    ToolChoice,
    chat_tools,
    check_choice,
    check_parameters,
    parse_choice,
    visible,
)
from smg.models.prompt import RenderRequest

MAX_N = 10
MAX_TOP_LOGPROBS = 20


class Thinking(Request):
    """``thinking`` of chat requests. ``clear_thinking`` is about the thoughts of earlier turns."""

    type: Literal["enabled", "disabled", "adaptive"] | None = None
    effort: str | None = None
    clear_thinking: bool | None = None


class JsonSchema(Request):
    name: str
    schema: Any
    strict: bool | None = None


class TextFormat(Request, tag_field="type", tag="text"):
    """No constraint."""


class JsonObjectFormat(Request, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaFormat(Request, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChatRequest(SamplingRequest, kw_only=True):
    """The body. Members typed ``Any`` without a rule below are accepted and have no effect."""

    messages: list[ChatMessage]
    model: str
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | int | float | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None
    metadata: dict[str, str] | None = None
    verbosity: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: Any = None
    store: Any = None
    prediction: Any = None
    audio: Any = None

    @property
    def effort_text(self) -> str | None:
        """``reasoning_effort`` as text; a number is its JSON text."""
        effort = self.reasoning_effort
        return effort if effort is None or type(effort) is str else msgspec.json.encode(effort).decode()

    @property
    def effective_effort(self) -> str | None:
        """``thinking.effort``, or else ``reasoning_effort``."""
        if self.thinking is not None and self.thinking.effort is not None:
            return self.thinking.effort
        return self.effort_text

    @property
    def limit(self) -> int | None:
        """The token limit: ``max_completion_tokens`` wins over ``max_tokens``."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_DECODER = BodyDecoder(
    ChatRequest,
    unions={
        r"messages\[\d+\]": ("role",),
        r"response_format": ("type",),
        r"stop(?=\[)": (),
    },
    special={"reasoning_effort": "json_parse_error"},
)


def decode(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """The typed body. Raises ``ApiError``."""
    return _DECODER.decode(body, headers)


def declared_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """All declarations in canonical form, the deprecated ``functions`` included when there are no ``tools``."""
    if request.tools is not None:
        return chat_tools(request.tools)
    if not request.functions:
        return []
    wrapped = [Tool(type="function", function=function) for function in request.functions]
    try:
        return chat_tools(wrapped)
    except ApiError as error:
        if error.param is not None:
            error.param = error.param.replace("tools[", "functions[").replace("].function.", "].")
        raise


def tool_choice_of(request: ChatRequest) -> ToolChoice | None:
    """``tool_choice``, or the deprecated ``function_call`` when that is absent; None when neither is given."""
    if request.tool_choice is not None:
        return parse_choice(request.tool_choice)
    call = request.function_call
    if call is None:
        return None
    if call == "auto":
        return AUTO
    if call == "none":
        return NONE
    name = call.get("name") if type(call) is dict else None
    if type(name) is not str:
        raise ApiError(
            400, "json_parse_error", "Invalid JSON data: function_call: expected auto, none or a name", "function_call"
        )
    return ToolChoice("function", (name,), {"type": "function", "function": {"name": name}})


def _check_constraints(request: ChatRequest) -> None:
    response_format = request.response_format
    is_json = type(response_format) in (JsonObjectFormat, JsonSchemaFormat)
    if request.regex is not None and is_json:
        raise invalid("regex_conflicts_with_json", "cannot use regex constraint with JSON response format")
    if request.ebnf is not None and is_json:
        raise invalid("ebnf_conflicts_with_json", "cannot use EBNF constraint with JSON response format")
    if request.regex is not None and request.ebnf is not None:
        raise invalid("multiple_constraints", ONE_CONSTRAINT)
    if type(response_format) is JsonSchemaFormat:
        if not response_format.json_schema.name:
            raise invalid("json_schema_name_empty", "JSON schema name cannot be empty")
        if type(response_format.json_schema.schema) is not dict:
            raise invalid("json_schema_schema_not_object", "JSON schema 'schema' must be a JSON object")


def _check_fields(request: ChatRequest) -> None:
    """Rules of single members."""
    check_decimal("frequency_penalty", request.frequency_penalty, -2, 2)
    check_integer("max_completion_tokens", request.max_completion_tokens, 1)
    check_integer("max_tokens", request.max_tokens, 1)
    if not request.messages:
        text = "empty array. Expected an array with minimum length 1, but got an empty array instead."
        raise invalid("empty_array", f"Invalid 'messages': {text}", "messages")
    check_sampling_ranges(request, MAX_N)
    check_integer("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.verbosity is not None and request.verbosity not in ("low", "medium", "high"):
        raise invalid("unsupported_value", "expected low, medium or high", "verbosity")


def validate(request: ChatRequest) -> tuple[list[dict[str, Any]], ToolChoice | None]:
    """All rules that need nothing but the request. Returns the declared tools in canonical form and the effective
    ``tool_choice`` (None = not given). Raises ``ApiError``."""
    choice = tool_choice_of(request)
    tools = declared_tools(request)
    _check_fields(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs_requires_logprobs", "top_logprobs is only allowed when logprobs is enabled")
    check_stream_options(request)
    limit = request.limit
    if request.min_tokens is not None and limit is not None and request.min_tokens > limit:
        raise invalid("min_tokens_exceeds_max", "min_tokens cannot exceed max_tokens/max_completion_tokens")
    _check_constraints(request)
    for index, tool in enumerate(tools):
        check_parameters(tool["function"], f"tools[{index}].function")
    if choice is not None:
        check_choice(choice, {tool["function"]["name"] for tool in tools})
    token_bias(request.logit_bias)
    return tools, choice


def check_modalities(request: ChatRequest) -> None:
    """Text is the only thing this gateway can produce."""
    for modality in request.modalities or ():
        if modality != "text":
            raise refused("unsupported_output_modality", f"unsupported output modality '{modality}', only text is")


def render_request(request: ChatRequest, tools: list[dict[str, Any]], choice: ToolChoice | None) -> RenderRequest:
    """The conversation for the prompt renderer. ``tools`` and ``choice`` come from ``validate``. The model name is
    the one in the request: the vendor's rules go by it. Raises ``ApiError``."""
    if choice is None and tools:
        choice = AUTO
    messages = message_dicts(request.messages, request.model, keep_tools=vendor_of(request.model) == "kimi")
    raw_choice = choice.raw if choice is not None else None
    adapted = apply_rules(request, request.messages, messages, tools, raw_choice)
    return RenderRequest(
        model=request.model,
        messages=messages,
        tools=visible(tools, choice) if choice is not None else None,
        tool_choice=raw_choice,
        response_format=response_format_value(request.response_format),
        continue_final_message=bool(request.continue_final_message),
        thinking_type=adapted.thinking_type,
        effort=adapted.effort,
        clear_thinking=adapted.clear_thinking,
        template_kwargs=adapted.template_kwargs,
    )


def response_format_value(response_format: ResponseFormat | None) -> Any:
    """``response_format`` as plain JSON values, the way templates see it."""
    if response_format is None:
        return None
    if type(response_format) is not JsonSchemaFormat:
        return {"type": response_format.__struct_config__.tag}
    schema = response_format.json_schema
    inner: dict[str, Any] = {"name": schema.name, "schema": schema.schema}
    if schema.strict is not None:
        inner["strict"] = schema.strict
    return {"type": "json_schema", "json_schema": inner}
