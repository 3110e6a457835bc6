"""A gateway context for tests of request handling: one model, a tokenizer with one id per character, a prompt that is
the conversation as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from smg.api import responses, responses_items, responses_tools
from smg.api.chat_shape import ChatShapes
from smg.api.context import Flags
from smg.api.entry import handle
from smg.api.errors import ApiError, refused
from smg.api.plan import Answer, Codec, Planned
from smg.engines.base import Constraint, EngineRequest, PromptEncoder
from smg.engines.grpc.codecs import CODECS
from smg.messages import ModelInfo, ModelTable
from smg.models.harmony import HarmonyRenderer, ResponsesConversation
from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.registry import ParserNames
from smg.models.thinking import ThinkingSwitch
from smg.readiness import unserved

JSON = {"content-type": "application/json"}
MODEL = "test-model"


class CharacterTokenizer:
    """Ids are code points. ``rendered`` keeps what was asked of the renderer."""

    eos_ids: Sequence[int] = (0,)
    vocab_size = 0x110000
    switch = ThinkingSwitch("enable_thinking", default_on=False)
    keeps_tools = False

    def __init__(self) -> None:
        self.rendered: list[RenderRequest] = []

    def prepare(self, request: RenderRequest) -> tuple[RenderedPrompt, Sequence[int]]:
        self.rendered.append(request)
        if any(message["role"] == "root" for message in request.messages):
            raise PromptError("no such role")
        text = json.dumps(request.messages)
        return RenderedPrompt([Piece(text)], "json"), self.encode(text)

    def prepare_responses(self, conversation: ResponsesConversation) -> tuple[RenderedPrompt, Sequence[int]]:
        rendered = HarmonyRenderer(lambda: "2025-01-01").render_responses(conversation)
        return rendered, self.encode(rendered.text)

    def encode(self, text: str) -> Sequence[int]:
        return [ord(char) for char in text]

    def encode_framed(self, text: str) -> Sequence[int]:
        return [1, *self.encode(text)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if token < 0x110000)


class RecordingCodec:
    """Encodes with the real codec of a kind and keeps the engine-neutral request."""

    def __init__(self, kind: str) -> None:
        self._codec = CODECS[kind]
        self.requests: list[EngineRequest] = []

    @property
    def supports_embedding(self) -> bool:
        return self._codec.supports_embedding

    def bind(self, request: EngineRequest) -> PromptEncoder:
        self.requests.append(replace(request))
        return self._codec.bind(request)

    def embed_request(self, request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
        return self._codec.embed_request(request_id, text, token_ids)


class Gateway:
    """``smg.api.context.Context`` with one served model; keyword arguments are fields of ``ModelInfo``."""

    def __init__(self, *, kinds: Sequence[str] = ("vllm",), flags: Flags | None = None, **facts: Any) -> None:
        self.info = ModelInfo(**{"id": MODEL, "tokenizer": MODEL, "kinds": list(kinds), **facts})
        self.flags = flags or Flags()
        self.recorders = {kind: RecordingCodec(kind) for kind in kinds if kind in CODECS}
        self.codecs: Mapping[str, Codec] = self.recorders
        self.characters = CharacterTokenizer()
        self.chat_shapes = ChatShapes()
        self.broken_constraints: dict[str, str] = {}

    def find_model(self, name: str) -> ModelInfo | None:
        return self.info if name == self.info.id or name in self.info.aliases else None

    def tokenizer(self, info: ModelInfo) -> CharacterTokenizer:
        if not info.tokenizer:
            raise refused("tokenizer_load_failed", "no tokenizer", status=503)
        return self.characters

    def unserved(self, name: str) -> ApiError:
        return unserved(ModelTable(1, [self.info], []), name)

    def named_tokenizer(self, name: str) -> CharacterTokenizer | None:
        return self.characters if name in ("", "unknown", self.info.id) else None

    def tokenizer_names(self) -> Sequence[str]:
        return [self.info.id]

    def check_constraint(self, constraint: Constraint) -> str | None:
        return self.broken_constraints.get(constraint.value)

    def send(
        self, path: str, body: Any, headers: Mapping[str, str] = JSON, request_id: str = "req"
    ) -> Planned | Answer:
        """Handle a request; Responses requests go the way of a session with one turn."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        if path != "/v1/responses":
            return handle(path, raw, headers, request_id, self)
        parsed = responses.validate(responses.decode(raw, headers))
        model = parsed.request.model
        if self.find_model(model) is None:
            raise self.unserved(model)
        chat = responses_items.chat_messages(parsed.items, model)
        tools = responses_tools.chat_tools(parsed.request.tools or ())
        turn = responses.turn_request(parsed, chat, tools, "turn-1")
        return handle(responses.TURN_PATH, responses.turn_encoder.encode(turn), {}, request_id, self)

    def plan(self, path: str, body: Any, headers: Mapping[str, str] = JSON, request_id: str = "req") -> Planned:
        result = self.send(path, body, headers, request_id)
        assert isinstance(result, Planned)
        return result

    def answer(self, path: str, body: Any) -> Any:
        result = self.send(path, body)
        assert isinstance(result, Answer)
        return msgspec.json.decode(result.body)

    @property
    def render(self) -> RenderRequest:
        """The last rendered conversation."""
        return self.characters.rendered[-1]

    def engine(self, kind: str = "vllm") -> EngineRequest:
        """The last request that was encoded for an engine kind."""
        return self.recorders[kind].requests[-1]


def parser_flags(tool: str = "", reasoning: str = "") -> Flags:
    return Flags(parsers=ParserNames(tool, reasoning))
