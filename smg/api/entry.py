"""One door for request bodies: ``handle`` takes a path and its body and gives a plan, or an answer that needs no
engine.

Pure as far as the caller's ``Context`` is: no sockets, no clock but the one that dates the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from smg.api import chat, completions, drafts, embeddings, generate, messages, responses, tokenize
from smg.api.chat_shape import open_envelope
from smg.api.context import Context
from smg.api.errors import ApiError
from smg.api.messages_answers import empty_answer
from smg.api.mold import Mold, build_embedding_plan, build_plan, fill
from smg.api.plan import Answer, Planned
from smg.messages import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from smg.models.machine import parse_whole
from smg.models.output import tool_specs
from smg.models.reasoning import reasoning_parser
from smg.models.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_format, tool_format

Handler = Callable[[Context, bytes, Mapping[str, str], str], Planned | Answer]

_TURN = re.compile(r"_(?:t|r)\d+\Z")


def handle(path: str, body: bytes, headers: Mapping[str, str], request_id: str, context: Context) -> Planned | Answer:
    """Decode, validate, render, encode and plan one request.

    ``headers`` have lower-case names; of them ``content-type``, ``x-smg-target-worker`` and those that carry a routing
    key matter here. Raises ``ApiError`` for every request that is refused (``errors.render_error`` makes the answer),
    ``KeyError`` for a path that is not served here (``PATHS``)."""
    result = _HANDLERS[path](context, body, headers, request_id)
    if isinstance(result, Planned):
        result.target_worker = headers.get("x-smg-target-worker", "")
        key = next(filter(None, map(headers.get, context.flags.routing_key_headers)), "")
        result.key_source = "header" if key else "rid"
        result.routing_key = key or sticky_id(result.routing_key)
    return result


def sticky_id(rid: str) -> str:
    """A client's own request id without its turn (``_t<n>``) and retry (``_r<n>``) marks: what keeps a conversation
    together."""
    while rid:
        cut = _TURN.sub("", rid)
        if cut == rid:
            break
        rid = cut
    return rid


def _chat(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    parser = headers.get("x-smg-parser")
    opened = open_envelope(body, headers) if parser is None else None
    if opened is not None:
        envelope, key = opened
        shape = context.chat_shapes.get(key, context.find_model(envelope.model))
        planned = shape.plan(context, envelope, request_id) if shape is not None and envelope.messages else None
        if planned is not None:
            return planned
    request = chat.decode(body, headers)
    draft, conversation = drafts.chat_draft(context, request, request_id, parser)
    mold = Mold(draft, context.codecs, context.flags.block_size)
    if opened is not None:
        context.chat_shapes.learn(opened[1], draft, request, conversation, mold)
    return fill(mold, draft)


def _completions(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    draft = drafts.completion_draft(context, completions.decode(body, headers), request_id)
    return build_plan(draft, context.codecs, context.flags.block_size)


def _generate(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    draft = drafts.generate_draft(context, generate.decode(body, headers), request_id)
    return build_plan(draft, context.codecs, context.flags.block_size)


def _messages(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    request = messages.decode(body, headers)
    draft = drafts.messages_draft(context, request, request_id, headers.get("x-smg-parser"))
    if request.max_tokens == 0:
        return empty_answer(draft)
    return build_plan(draft, context.codecs, context.flags.block_size)


def _count_tokens(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    request = messages.decode_count(body, headers)
    return Answer(b'{"input_tokens":%d}' % drafts.count_tokens(context, request))


def _turn(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    turn = responses.turn_decoder.decode(body)
    draft = drafts.turn_draft(context, turn, request_id)
    return build_plan(draft, context.codecs, context.flags.block_size)


def _embeddings(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    draft = drafts.embedding_draft(context, embeddings.decode(body, headers), request_id)
    return build_embedding_plan(draft, context.codecs, context.flags.block_size)


def _classify(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    draft = drafts.embedding_draft(context, embeddings.decode_classify(body, headers), request_id, api="classify")
    return build_embedding_plan(draft, context.codecs, context.flags.block_size)


def _tokenize(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    request = tokenize.decode_tokenize(body, headers)
    tokenizer = context.named_tokenizer(request.model)
    if tokenizer is None:
        raise tokenize.tokenizer_not_found(request.model, context.tokenizer_names())
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    return Answer(tokenize.tokenize_body(request.prompt, [tokenizer.encode(text) for text in texts]))


def _detokenize(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Planned | Answer:
    request = tokenize.decode_detokenize(body, headers)
    tokenizer = context.named_tokenizer(request.model)
    if tokenizer is None:
        raise tokenize.tokenizer_not_found(request.model, context.tokenizer_names())
    skip = request.skip_special_tokens
    return Answer(
        tokenize.detokenize_body(request, [tokenizer.decode(ids, skip) for ids in tokenize.id_lists(request)])
    )


def _parse_function_call(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Answer:
    request = tokenize.decode_function_call(body, headers)
    if request.tool_call_parser not in TOOL_PARSERS:
        raise tokenize.unknown_parser("tool", request.tool_call_parser)
    tools = msgspec.to_builtins(request.tools)
    parser = tool_format(request.tool_call_parser).parser(tool_specs(tools))
    remaining: list[str] = []
    calls: list[list[str]] = []
    for event in parse_whole(parser, request.text):
        if isinstance(event, ContentDelta):
            remaining.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.fragment
    return Answer(tokenize.function_call_body("".join(remaining), [(name, text) for name, text in calls]))


def _parse_reasoning(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Answer:
    request = tokenize.decode_reasoning(body, headers)
    if request.reasoning_parser not in REASONING_PARSERS:
        raise tokenize.unknown_parser("reasoning", request.reasoning_parser)
    parser = reasoning_parser(reasoning_format(request.reasoning_parser))
    events = (*parser.feed(request.text), *parser.finish())
    normal = "".join(event.text for event in events if isinstance(event, ContentDelta))
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    return Answer(tokenize.reasoning_body(normal, thought))


def _rerank(path: str) -> Handler:
    def refuse(context: Context, body: bytes, headers: Mapping[str, str], request_id: str) -> Answer:
        embeddings.decode_rerank(path, body, headers)
        raise ApiError(501, "not_implemented", "Rerank not implemented", plain=True)

    return refuse


_HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/generate": _generate,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _count_tokens,
    responses.TURN_PATH: _turn,
    "/v1/embeddings": _embeddings,
    "/v1/classify": _classify,
    "/v1/tokenize": _tokenize,
    "/v1/detokenize": _detokenize,
    "/parse/function_call": _parse_function_call,
    "/parse/reasoning": _parse_reasoning,
    "/rerank": _rerank("/rerank"),
    "/v1/rerank": _rerank("/v1/rerank"),
}

PATHS = frozenset(_HANDLERS)
