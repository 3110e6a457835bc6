"""The part that chat, messages and the turns of sessions have in common: a rendered conversation becomes a draft.

Decided here: which parsers read the output and how they start, the constraint of a forced call, and which special
tokens decoding keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from smg.api.context import Context, Tokenizer
from smg.api.errors import ApiError, refused
from smg.api.limits import check_length, empty_prompt
from smg.api.plan import Draft, EncodedPrompt
from smg.api.tools import AUTO, ToolChoice
from smg.engines.base import Constraint, Sampling
from smg.messages import ModelInfo, ParserPlan
from smg.models import harmony
from smg.models.constraints import ToolConstraint, forced_mode, tool_constraint
from smg.models.prompt import PromptError, RenderedPrompt, RenderRequest
from smg.models.registry import PASSTHROUGH, ParserNames, Selection, call_id_style, select_parsers, skip_special_tokens
from smg.models.thinking import ReasoningStart, reasoning_start

_encode = msgspec.json.Encoder().encode


def prompt_error(error: PromptError) -> ApiError:
    """A conversation that cannot be rendered, or a constraint that cannot be built."""
    return refused(error.code, error.message, param=error.param)


@dataclass(slots=True)
class Conversation:
    """One generation from messages. ``tools`` are all declarations in chat form (``tools_given`` False: the client
    sent no list at all), ``choice`` None = not given. ``engine_api``: "chat", "messages" or "responses".
    ``known_calls``: tool calls that the history already holds. ``start`` is found with the prompt, None for models that
    are not read by the thinking rules."""

    engine_api: str
    render: RenderRequest
    tools: list[dict[str, Any]]
    choice: ToolChoice | None
    sampling: Sampling
    tools_given: bool = True
    output: Constraint | None = None
    parallel: bool = True
    separate_reasoning: bool = True
    skip_special_tokens: bool = True
    known_calls: int = 0
    responses: harmony.ResponsesConversation | None = None
    start: ReasoningStart | None = None


@dataclass(slots=True)
class Reading:
    """How the output will be read, and what the engine is told."""

    parser: ParserPlan
    skip_special_tokens: bool
    tool: ToolConstraint | None = None
    output: Constraint | None = None
    reasoning_on: bool = False


class Prompt(NamedTuple):
    """A rendered conversation; ``uncounted`` ids at its end are not billed."""

    rendered: RenderedPrompt
    ids: Sequence[int]
    uncounted: int


def render_prompt(tokenizer: Tokenizer, info: ModelInfo, conversation: Conversation) -> Prompt:
    """The prompt of a conversation. Raises ``PromptError``."""
    speaks_harmony = is_harmony(info)
    conversation.render.tools = _renderer_tools(tokenizer, conversation, speaks_harmony)
    if speaks_harmony and conversation.responses is not None:
        return _counted(tokenizer, *tokenizer.prepare_responses(conversation.responses))
    return prompt_of(tokenizer, conversation.render)


def prompt_of(tokenizer: Tokenizer, render: RenderRequest) -> Prompt:
    """The prompt of a conversation as ``render`` states it. Raises ``PromptError``."""
    return _counted(tokenizer, *tokenizer.prepare(render))


def _counted(tokenizer: Tokenizer, rendered: RenderedPrompt, ids: Sequence[int]) -> Prompt:
    return Prompt(rendered, ids, len(tokenizer.encode(rendered.uncounted)) if rendered.uncounted else 0)


def check_prompt(ids: Sequence[int], info: ModelInfo) -> None:
    """A generation needs a prompt, and one that fits the model. Raises ``ApiError``."""
    check_length(len(ids), info)
    if not ids:
        raise empty_prompt("messages")


def is_harmony(info: ModelInfo) -> bool:
    """Whether the model speaks gpt-oss's Harmony format."""
    return harmony.speaks_harmony(info.id, info.architectures, info.model_type)


def draft_conversation(
    context: Context, info: ModelInfo, conversation: Conversation, *, api: str, request_id: str, engine_id: str
) -> Draft:
    """The draft of one conversation: prompt, constraint, parsers. Raises ``ApiError``."""
    tokenizer = context.tokenizer(info)
    speaks_harmony = is_harmony(info)
    try:
        prompt = render_prompt(tokenizer, info, conversation)
        check_prompt(prompt.ids, info)
        read = _read_harmony if speaks_harmony else _read
        reading = read(context, info, tokenizer, conversation, prompt.rendered)
    except PromptError as error:
        raise prompt_error(error) from None
    check_constraint(context, reading.tool.constraint if reading.tool else None)
    check_constraint(context, reading.output)
    sampling = conversation.sampling
    stop_strings = sampling.stop
    text = prompt.rendered.text
    if speaks_harmony:
        text = harmony.PLACEHOLDER_TEXT
        sampling.stop_token_ids = [*dict.fromkeys((*sampling.stop_token_ids, *harmony.STOP_TOKEN_IDS))]
        sampling.stop = ()
        sampling.skip_special_tokens = conversation.engine_api != "responses"
    draft = Draft(
        info=info,
        api=api,
        engine_api=conversation.engine_api,
        request_id=request_id,
        body_id=engine_id,
        engine_ids=[engine_id],
        prompts=[EncodedPrompt(text, prompt.ids, prompt.uncounted)],
        sampling=sampling,
        parser=reading.parser,
        eos_ids=tokenizer.eos_ids,
        tool=reading.tool,
        output=reading.output,
        reasoning_on=reading.reasoning_on,
        skip_special_tokens=reading.skip_special_tokens,
        stop_strings=stop_strings,
        keep_stop=speaks_harmony,
    )
    draft.stop_encodings = stop_encodings(info, tokenizer, sampling.stop)
    if reading.tool is not None:
        draft.options["forced"] = True
    return draft


def _renderer_tools(
    tokenizer: Tokenizer, conversation: Conversation, speaks_harmony: bool
) -> list[dict[str, Any]] | None:
    """The tools the renderer gets. Some state even a forbidden or an empty list in the prompt."""
    given = conversation.tools if conversation.tools_given else None
    if speaks_harmony:
        return given
    if tokenizer.keeps_tools and (not given or (conversation.choice or AUTO).mode == "none"):
        return given
    return conversation.render.tools


def stop_encodings(info: ModelInfo, tokenizer: Tokenizer, strings: Sequence[str]) -> dict[str, list[int]]:
    """Ids of the stop strings, for engines that take one-token stops as ids."""
    if not strings or "sglang" not in info.kinds:
        return {}
    return {text: list(tokenizer.encode(text)) for text in strings}


def check_constraint(context: Context, constraint: Constraint | None) -> None:
    """Refuses what no engine could compile. Raises ``ApiError``."""
    problem = context.check_constraint(constraint) if constraint is not None else None
    if problem is not None:
        raise refused("invalid_request_parameters", f"Invalid request parameters: {problem}")


def selection_of(context: Context, info: ModelInfo) -> Selection:
    """The parsers of a model: its override, the gateway's flags, its name."""
    return _selection(info.id, info.tool_parser, info.reasoning_parser, context.flags.parsers)


@lru_cache(maxsize=256)
def _selection(model: str, tool: str, reasoning: str, flags: ParserNames) -> Selection:
    return select_parsers(model, ParserNames(tool, reasoning), flags)


def _read(
    context: Context, info: ModelInfo, tokenizer: Tokenizer, conversation: Conversation, rendered: RenderedPrompt
) -> Reading:
    selection = selection_of(context, info)
    choice = conversation.choice or AUTO
    start = reasoning_start(rendered, conversation.render, tokenizer.switch, selection.reasoning)
    conversation.start = start
    tool = tool_constraint(
        conversation.tools,
        choice,
        selection,
        native=context.flags.native_constraints,
        thinking=start.armed,
        parallel=conversation.parallel,
        decoding_start=info.decoding_start,
    )
    forced = forced_mode(tool, conversation.output, info.kinds)
    parse_tools = bool(conversation.tools) and choice.mode != "none" and choice.names != () and forced is not None
    kinds = [constraint.kind for constraint in (tool.constraint if tool else None, conversation.output) if constraint]
    return Reading(
        parser=_parser_plan(info, conversation, selection, start, tool if forced else None, parse_tools),
        skip_special_tokens=skip_special_tokens(
            selection,
            separate_reasoning=conversation.separate_reasoning,
            parse_tools=parse_tools,
            json_constraint="json_schema" in kinds,
            requested=conversation.skip_special_tokens,
        ),
        tool=tool,
        output=conversation.output,
        reasoning_on=start.thinking and not (tool is not None and tool.reasons),
    )


def _parser_plan(
    info: ModelInfo,
    conversation: Conversation,
    selection: Selection,
    start: ReasoningStart,
    forced: ToolConstraint | None,
    parse_tools: bool,
) -> ParserPlan:
    reasoning = start.parser if conversation.separate_reasoning and start.parser != PASSTHROUGH else None
    style = call_id_style(info.id)
    return ParserPlan(
        reasoning=reasoning,
        armed=start.armed and reasoning is not None,
        tool=selection.tool.name if parse_tools and selection.tool.name != PASSTHROUGH else None,
        forced=forced.forced if forced is not None else "",
        leads=forced.leads if forced is not None else (),
        tools=_encode(conversation.tools) if parse_tools else b"",
        id_style=style,
        id_offset=conversation.known_calls if style != "call" else 0,
        parallel=conversation.parallel,
    )


def _read_harmony(
    context: Context, info: ModelInfo, tokenizer: Tokenizer, conversation: Conversation, rendered: RenderedPrompt
) -> Reading:
    """gpt-oss: one format for thoughts, calls and answers, read by token ids."""
    harmony.refuse_ignore_eos(conversation.sampling.ignore_eos)
    render = conversation.render
    if conversation.responses is not None:
        functions = harmony.responses_functions(conversation.responses)
        conflict = "conflicting_constraints"
    else:
        functions = harmony.chat_functions(render.tools, render.tool_choice)
        conflict = "invalid_request_parameters"
    tag = harmony.structural_tag(functions, render.tool_choice, render.response_format, conflict_code=conflict)
    output = conversation.output
    if output is not None and output.kind == "json_schema":
        output = None  # the schema is part of the tag
    if tag is not None and output is None:
        output = Constraint("structural_tag", _encode(tag).decode())
    return Reading(
        parser=ParserPlan(
            tools=_encode(conversation.tools) if conversation.tools else b"",
            parallel=conversation.parallel,
            harmony=True,
        ),
        skip_special_tokens=conversation.skip_special_tokens,
        output=output,
    )
