"""Drafts of the generation APIs: what each request asks of its engine and how its answer is rendered."""

from __future__ import annotations

from smg.api import chat, completions, embeddings, generate, messages, messages_blocks, responses, responses_tools
from smg.api.chat_messages import count_calls
from smg.api.completions import Prompt
from smg.api.context import Context, Tokenizer
from smg.api.conversation import (
    Conversation,
    check_constraint,
    draft_conversation,
    prompt_error,
    render_prompt,
    stop_encodings,
)
from smg.api.errors import ApiError, refused
from smg.api.fields import StreamOptions, fill_defaults, sampling_of
from smg.api.ids import body_id, engine_ids
from smg.api.limits import check_length, check_stop_tokens, check_vocabulary, effective_vocabulary, empty_prompt
from smg.api.plan import Draft, EncodedPrompt
from smg.api.profiles import apply_turn_rules
from smg.api.tools import visible
from smg.engines.base import Sampling
from smg.messages import ModelInfo
from smg.models.constraints import output_constraint
from smg.models.harmony import ResponsesConversation
from smg.models.output import tool_specs
from smg.models.prompt import PromptError, RenderRequest


def find_model(context: Context, name: str) -> ModelInfo:
    """The served model. Raises ``ApiError`` (404 ``model_not_found``, 503 ``no_available_workers``)."""
    info = context.find_model(name)
    if info is None:
        raise context.unserved(name)
    return info


# --------------------------------------------------------------------------------------------------
# Conversations


def check_parser_header(value: str | None) -> None:
    """``x-smg-parser`` names an output parser implementation. There is one, under both of its names. Raises
    ``ApiError``."""
    if value is not None and value.lower() not in ("legacy", "symphony"):
        raise refused("invalid_parser_header", f'x-smg-parser must be legacy or symphony, not "{value[:64]}"')


def chat_draft(
    context: Context, request: chat.ChatRequest, request_id: str, parser: str | None = None
) -> tuple[Draft, Conversation]:
    """``/v1/chat/completions``; ``parser`` is the ``x-smg-parser`` header."""
    tools, choice = chat.validate(request)
    render = chat.render_request(request, tools, choice)
    check_parser_header(parser)
    chat.check_modalities(request)
    info = find_model(context, request.model)
    render.model = info.id
    named = request.logit_bias or request.stop_token_ids
    vocabulary = effective_vocabulary(info, context.tokenizer(info).vocab_size) if named else 0
    check_stop_tokens(request.stop_token_ids, request.min_tokens, vocabulary, "stop_token_ids")
    sampling = sampling_of(request, info.default_sampling, max_tokens=request.limit, vocab_size=vocabulary)
    sampling.skip_special_tokens = True
    output = output_constraint(render.response_format, regex=request.regex, ebnf=request.ebnf)
    conversation = Conversation(
        engine_api="chat",
        render=render,
        tools=tools,
        tools_given=request.tools is not None or request.functions is not None,
        choice=choice,
        sampling=sampling,
        output=output,
        parallel=request.parallel_tool_calls is not False,
        separate_reasoning=request.separate_reasoning is not False,
        skip_special_tokens=request.skip_special_tokens is not False,
        known_calls=count_calls(request.messages),
    )
    ids = engine_ids(request_id, 1, request.rid)
    draft = draft_conversation(context, info, conversation, api="chat", request_id=request_id, engine_id=ids[0])
    draft.response_format = render.response_format is not None and output is not None
    draft.logprobs = (request.top_logprobs or 0) if request.logprobs else None
    draft.return_hidden_states = bool(request.return_hidden_states)
    draft.return_token_ids = bool(request.return_token_ids)
    draft.routing_id = request.rid or ""
    _stream(draft, request.stream, request.stream_options)
    return draft, conversation


def _stream(draft: Draft, stream: bool | None, options: StreamOptions | None) -> None:
    draft.stream = bool(stream)
    if options is not None:
        draft.include_usage = bool(options.include_usage)
        draft.continuous_usage = bool(options.continuous_usage_stats)


def _messages_conversation(info: ModelInfo, request: messages.CountTokensRequest, sampling: Sampling) -> Conversation:
    choice = messages.chat_tool_choice(request)
    thinking = messages.thinking_type(request)
    render = messages_blocks.render_request(request, choice, thinking, info.id)
    adapted = apply_turn_rules(
        request.model, render.messages, render.tool_choice, effort=render.effort, thinking_type=thinking
    )
    render.effort, render.template_kwargs = adapted.effort, adapted.template_kwargs
    return Conversation(
        engine_api="messages",
        render=render,
        tools=messages_blocks.chat_tools(request.tools or ()),
        tools_given=request.tools is not None,
        choice=choice,
        sampling=sampling,
        parallel=messages.parallel_calls(request),
    )


def messages_draft(
    context: Context, request: messages.MessagesRequest, request_id: str, parser: str | None = None
) -> Draft:
    """``/v1/messages``; ``parser`` is the ``x-smg-parser`` header."""
    messages.validate(request)
    check_parser_header(parser)
    info = find_model(context, request.model)
    conversation = _messages_conversation(info, request, messages.sampling_of(request, info.default_sampling))
    engine_id = engine_ids(request_id, 1)[0]
    draft = draft_conversation(context, info, conversation, api="messages", request_id=request_id, engine_id=engine_id)
    draft.stream = bool(request.stream)
    draft.options["thinking"] = conversation.render.thinking_type == "enabled"
    draft.options["input_tokens"] = len(draft.prompts[0].ids) - draft.prompts[0].uncounted
    return draft


def count_tokens(context: Context, request: messages.CountTokensRequest) -> int:
    """Tokens of the whole prompt of a Messages request. Raises ``ApiError``."""
    messages.validate_count(request)
    info = find_model(context, request.model)
    conversation = _messages_conversation(info, request, Sampling())
    try:
        prompt = render_prompt(context.tokenizer(info), info, conversation)
    except PromptError as error:
        raise prompt_error(error) from None
    return len(prompt.ids) - prompt.uncounted


def turn_draft(context: Context, turn: responses.TurnRequest, request_id: str) -> Draft:
    """One generation of a session."""
    info = find_model(context, turn.model)
    names = {tool["function"]["name"] for tool in turn.tools}
    choice = responses_tools.chat_choice(responses_tools.parse_choice(turn.tool_choice), names)
    raw_choice = choice.raw if turn.tool_choice is not None or turn.tools else None
    response_format = chat.response_format_value(turn.response_format)
    adapted = apply_turn_rules(turn.model, turn.messages, raw_choice, effort=turn.effort)
    render = RenderRequest(
        model=info.id,
        messages=turn.messages,
        tools=visible(turn.tools, choice),
        tool_choice=raw_choice,
        response_format=response_format,
        effort=adapted.effort,
        template_kwargs=adapted.template_kwargs,
        adapt=True,
    )
    sampling = responses.engine_sampling(turn.sampling)
    fill_defaults(sampling, info.default_sampling)
    conversation = Conversation(
        engine_api="responses",
        render=render,
        tools=turn.tools,
        tools_given=bool(turn.tools),
        choice=choice,
        sampling=sampling,
        output=output_constraint(response_format),
        parallel=turn.parallel_tool_calls,
        known_calls=sum(len(message.get("tool_calls") or ()) for message in turn.messages),
        responses=_harmony_conversation(turn),
    )
    draft = draft_conversation(
        context, info, conversation, api="events", request_id=request_id, engine_id=turn.engine_id
    )
    draft.stream = turn.stream
    draft.response_format = conversation.output is not None
    draft.logprobs = (turn.top_logprobs or 0) if turn.logprobs else None
    draft.routing_id = turn.routing_id
    return draft


def _harmony_conversation(turn: responses.TurnRequest) -> ResponsesConversation | None:
    if turn.items is None:
        return None
    return ResponsesConversation(
        items=turn.items,
        instructions=turn.instructions or "",
        tools=turn.client_tools,
        functions=tool_specs(turn.mcp_tools),
        tool_choice=turn.tool_choice,
        effort=turn.effort,
    )


# --------------------------------------------------------------------------------------------------
# Raw prompts


def _encode(
    tokenizer: Tokenizer, info: ModelInfo, prompt: Prompt, *, param: str, code: str, echo: bool, room: int
) -> EncodedPrompt:
    """A text or id prompt, checked against the model."""
    vocabulary = effective_vocabulary(info, tokenizer.vocab_size)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
        encoded = EncodedPrompt(prompt, ids, echo=prompt if echo else None)
    else:
        check_vocabulary(prompt, vocabulary, param, code)
        text = tokenizer.decode(prompt, skip_special_tokens=False) if echo else ""
        encoded = EncodedPrompt(text, prompt, echo=text if echo else None)
    if not encoded.ids:
        raise empty_prompt(param, code if code != "invalid_value" else "prompt_empty")
    check_length(len(encoded.ids), info, room=room)
    return encoded


def completion_draft(context: Context, request: completions.CompletionRequest, request_id: str) -> Draft:
    """``/v1/completions``."""
    prompts = completions.validate(request)
    info = find_model(context, request.model)
    tokenizer = context.tokenizer(info)
    echo = bool(request.echo)
    room = 0 if request.max_tokens == 0 else 1
    encoded = [
        _encode(tokenizer, info, prompt, param="prompt", code="invalid_value", echo=echo, room=room)
        for prompt in prompts
    ]
    vocabulary = effective_vocabulary(info, tokenizer.vocab_size)
    check_stop_tokens(request.stop_token_ids, request.min_tokens, vocabulary, "stop_token_ids")
    sampling = sampling_of(request, info.default_sampling, max_tokens=request.max_tokens, vocab_size=vocabulary)
    output = output_constraint(regex=request.regex, ebnf=request.ebnf, json_schema=request.json_schema)
    check_constraint(context, output)
    ids = engine_ids(request_id, len(encoded), request.rid)
    draft = _raw_draft(context, info, "completions", request_id, request.rid, ids, encoded, sampling)
    draft.output = output
    draft.logprobs = request.logprobs
    draft.prompt_logprobs = request.logprobs if echo else None
    draft.return_hidden_states = bool(request.return_hidden_states)
    draft.return_token_ids = bool(request.return_token_ids)
    draft.options = {"echo": echo, "suffix": request.suffix or ""}
    candidates = completions.ranked_candidates(request)
    if candidates:
        draft.options |= {"keep": sampling.n, "hide_logprobs": request.logprobs is None}
        sampling.n = candidates
        draft.logprobs = request.logprobs or 0
    _stream(draft, request.stream, request.stream_options)
    return draft


def _raw_draft(
    context: Context,
    info: ModelInfo,
    api: str,
    request_id: str,
    rid: str | None,
    ids: list[str],
    encoded: list[EncodedPrompt],
    sampling: Sampling,
) -> Draft:
    tokenizer = context.tokenizer(info)
    return Draft(
        info=info,
        api=api,
        engine_api=api,
        request_id=request_id,
        body_id=body_id(request_id, ids, rid),
        engine_ids=ids,
        prompts=encoded,
        sampling=sampling,
        eos_ids=tokenizer.eos_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        stop_encodings=stop_encodings(info, tokenizer, sampling.stop),
        routing_id=rid or "",
    )


def generate_draft(context: Context, request: generate.GenerateRequest, request_id: str) -> Draft:
    """``/generate``."""
    info = find_model(context, request.model)
    prompt = generate.prompt_of(request)
    params = generate.validate(request)
    tokenizer = context.tokenizer(info)
    vocabulary = effective_vocabulary(info, tokenizer.vocab_size)
    code = "resolve_input_failed"
    param = "text" if isinstance(prompt, str) else "input_ids"
    room = 0 if params.max_new_tokens == 0 else 1
    encoded = _encode(tokenizer, info, prompt, param=param, code=code, echo=False, room=room)
    check_vocabulary(request.token_ids_logprob or (), vocabulary, "token_ids_logprob", "build_request_failed")
    check_stop_tokens(
        params.stop_token_ids,
        params.min_new_tokens,
        vocabulary,
        "sampling_params.stop_token_ids",
        code="build_request_failed",
    )
    sampling = generate.sampling_of(params, info.default_sampling)
    output = output_constraint(regex=params.regex, ebnf=params.ebnf, json_schema=params.json_schema)
    try:
        check_constraint(context, output)
    except ApiError as error:
        raise refused("build_request_failed", error.message) from None
    ids = engine_ids(request_id, 1, request.rid)
    draft = _raw_draft(context, info, "generate", request_id, request.rid, ids, [encoded], sampling)
    draft.output = output
    draft.refusal = "build_request_failed"
    draft.stream = bool(request.stream)
    if request.return_logprob:
        draft.logprobs = max(request.top_logprobs_num or 0, 0)
        draft.logprob_start_len = request.logprob_start_len
        draft.token_ids_logprob = request.token_ids_logprob or ()
    draft.return_hidden_states = bool(request.return_hidden_states)
    draft.log_metrics = request.log_metrics is not False
    return draft


def embedding_draft(
    context: Context, request: embeddings.EmbeddingRequest, request_id: str, *, api: str = "embeddings"
) -> Draft:
    """``/v1/embeddings`` and ``/v1/classify``: one engine request per input."""
    inputs = embeddings.validate(request)
    if api == "classify" and len(inputs) > 1:
        raise refused("empty_input", "Classification takes one text")
    info = find_model(context, request.model)
    tokenizer = context.tokenizer(info)
    vocabulary = effective_vocabulary(info, tokenizer.vocab_size)
    encoded = []
    for value in inputs:
        if isinstance(value, str):
            prompt = EncodedPrompt(value, tokenizer.encode_framed(value))
        else:
            check_vocabulary(value, vocabulary, "input")
            prompt = EncodedPrompt("", value)
        if not prompt.ids:
            raise empty_prompt("input", "empty_input")
        check_length(len(prompt.ids), info, room=0)
        encoded.append(prompt)
    ids = engine_ids(request_id, len(encoded), request.rid)
    draft = _raw_draft(context, info, api, request_id, request.rid, ids, encoded, Sampling())
    if api == "classify":
        draft.options = {"labels": info.class_labels}
    else:
        draft.options = {
            "encoding_format": request.encoding_format or "float",
            "dimensions": request.dimensions or 0,
        }
    return draft
