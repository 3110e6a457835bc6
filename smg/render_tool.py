"""``smg render``: what prompt a request becomes, without a gateway or an engine. One JSON document per line.

Input is a request body, or ``{"path": "/v1/chat/completions", "body": {...}}`` for another endpoint
(``/v1/completions``, ``/generate``, ``/v1/messages``). Output, in the same order::

    {"prompt": str, "token_ids": [int], "prompt_tokens": int}

with lists of prompts and of id lists for a request with several prompts, or ``{"error": {"message", "type", "code",
"param", "status"}}`` for a request that the gateway would refuse. ``prompt_tokens`` is what the client would be billed.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO

import click

from smg.api import chat, completions, drafts, generate, messages
from smg.api.chat_shape import ChatShapes
from smg.api.context import Context, Flags
from smg.api.errors import ApiError, openai_type, refused
from smg.api.plan import Codec, Draft
from smg.engines.base import Constraint
from smg.engines.grpc.codecs import CODECS
from smg.messages import ModelInfo
from smg.models.grammar_check import GrammarChecker
from smg.models.harmony import PLACEHOLDER_TEXT
from smg.models.prompt import RenderedPrompt, RenderRequest
from smg.tokenizer_pool.model import TokenizerModel
from smg.vocab.load import TokenizerLoadError, load_model_dir

DEFAULT_PATH = "/v1/chat/completions"
_HEADERS = {"content-type": "application/json"}
_REQUEST_ID = "render"


class _RecordingModel(TokenizerModel):
    """A tokenizer model that keeps the last rendered prompt, for explanations."""

    last: RenderedPrompt | None = None

    def prepare(self, request: RenderRequest) -> tuple[RenderedPrompt, array[int]]:
        self.last, ids = super().prepare(request)
        return self.last, ids


@dataclass(frozen=True)
class _Options:
    """``ModelOptions`` without caches."""

    trust_control_tokens: bool
    tokenizer_procs: int = 1
    tokenizer_cache_enable_l0: bool = False
    tokenizer_cache_l0_max_entries: int = 0
    tokenizer_cache_l0_max_memory: int = 0
    tokenizer_cache_enable_l1: bool = False
    tokenizer_cache_l1_max_memory: int = 0


class RenderContext:
    """The ``smg.api.context.Context`` of a gateway that serves one model under every name, or under ``name``."""

    def __init__(self, model: TokenizerModel, name: str = "") -> None:
        self.model = model
        self.flags = Flags()
        self.codecs: Mapping[str, Codec] = CODECS
        self.chat_shapes = ChatShapes()
        self._name = name
        self._grammars = GrammarChecker()

    def find_model(self, name: str) -> ModelInfo | None:
        """The model; its id decides parsers and request profiles."""
        config = self.model.files.config
        architectures = config.get("architectures")
        return ModelInfo(
            id=self._name or name,
            tokenizer=self._name or name,
            kinds=["vllm"],
            architectures=architectures if isinstance(architectures, list) else [],
            model_type=str(config.get("model_type") or ""),
        )

    def unserved(self, name: str) -> ApiError:
        """No name is unknown here."""
        return refused("model_not_found", f"Model '{name}' not found", status=404)

    def tokenizer(self, info: ModelInfo) -> TokenizerModel:
        """The one tokenizer."""
        return self.model

    def named_tokenizer(self, name: str) -> TokenizerModel | None:
        """The one tokenizer."""
        return self.model

    def tokenizer_names(self) -> Sequence[str]:
        """Its name, if it was given one."""
        return [self._name] if self._name else []

    def check_constraint(self, constraint: Constraint) -> str | None:
        """As the tokenizer pool checks it."""
        return self._grammars.check(constraint)


def _messages_draft(context: Context, body: bytes) -> Draft:
    request = messages.decode(body, _HEADERS)
    messages.validate(request)
    return drafts.messages_draft(context, request, _REQUEST_ID)


_DRAFTS: dict[str, Callable[[Context, bytes], Draft]] = {
    DEFAULT_PATH: lambda context, body: drafts.chat_draft(context, chat.decode(body, _HEADERS), _REQUEST_ID)[0],
    "/v1/completions": lambda context, body: drafts.completion_draft(
        context, completions.decode(body, _HEADERS), _REQUEST_ID
    ),
    "/generate": lambda context, body: drafts.generate_draft(context, generate.decode(body, _HEADERS), _REQUEST_ID),
    "/v1/messages": _messages_draft,
}


def render_lines(lines: Iterable[bytes], out: TextIO, context: RenderContext, *, explain: bool = False) -> int:
    """Renders every line and writes one answer for each, in order; blank lines are skipped. Returns how many requests
    were refused. With ``explain`` answers carry how the prompt came about and how the output would be read."""
    failed = 0
    for line in lines:
        if not line.strip():
            continue
        answer = _answer(line, context, explain)
        failed += "error" in answer
        out.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return failed


def _answer(line: bytes, context: RenderContext, explain: bool) -> dict[str, Any]:
    if isinstance(context.model, _RecordingModel):
        context.model.last = None
    try:
        path, body = _request(line)
        if path not in _DRAFTS:
            raise ApiError(404, "not_found", f"'{path}' is none of {', '.join(_DRAFTS)}")
        draft = _DRAFTS[path](context, body)
    except ApiError as error:
        kind = error.type or openai_type(error.status)
        return {
            "error": {
                "message": error.message,
                "type": kind,
                "code": error.code,
                "param": error.param,
                "status": error.status,
            }
        }
    answer = _prompts(draft, context.model)
    return answer | {"explain": _explanation(draft, context.model)} if explain else answer


def _request(line: bytes) -> tuple[str, bytes]:
    """Path and body of a line. The body's own bytes are kept where it is the whole line: numbers and duplicate keys
    reach the validation as they were written."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return DEFAULT_PATH, line.strip()
    if isinstance(document, dict) and "body" in document and document.keys() <= {"path", "body"}:
        body = json.dumps(document["body"], ensure_ascii=False).encode("utf-8", "surrogatepass")
        return str(document.get("path") or DEFAULT_PATH), body
    return DEFAULT_PATH, line.strip()


def _prompts(draft: Draft, model: TokenizerModel) -> dict[str, Any]:
    ids = [list(prompt.ids) for prompt in draft.prompts]
    texts = [
        model.decode(prompt.ids, skip_special_tokens=False) if prompt.text == PLACEHOLDER_TEXT else prompt.text
        for prompt in draft.prompts
    ]
    counted = sum(len(prompt.ids) - prompt.uncounted for prompt in draft.prompts)
    if len(ids) == 1:
        return {"prompt": texts[0], "token_ids": ids[0], "prompt_tokens": counted}
    return {"prompt": texts, "token_ids": ids, "prompt_tokens": counted}


def _explanation(draft: Draft, model: TokenizerModel) -> dict[str, Any]:
    switch = model.switch
    explanation: dict[str, Any] = {
        "renderer": model.renderer.name,
        "encoder": model.encoder.backend,
        "template": model.files.template.origin,
        "thinking_switch": {"key": switch.key, "default_on": switch.default_on},
        "reasoning_parser": draft.parser.reasoning,
        "tool_parser": draft.parser.tool,
        "starts_in_reasoning": draft.parser.armed,
        "thinks": draft.reasoning_on or draft.parser.armed,
        "forced": draft.parser.forced,
        "constraints": _constraints(draft),
        "eos_ids": list(draft.eos_ids),
    }
    rendered = model.last if isinstance(model, _RecordingModel) else None
    if rendered is not None:
        explanation["engine"] = rendered.renderer
        explanation["continued"] = rendered.continued
        explanation["pieces"] = [{"text": piece.text, "trusted": piece.trusted} for piece in rendered.pieces]
    if draft.parser.harmony:
        del explanation["thinks"]  # the model decides, by the channels that it opens
    return explanation


def _constraints(draft: Draft) -> list[dict[str, str]]:
    """What the engine holds the output to: a forced call, the format that the client asked for."""
    tool = draft.tool.constraint if draft.tool is not None else None
    found = (("tool_choice", tool), ("output", draft.output))
    return [{"from": source, "kind": item.kind, "value": item.value} for source, item in found if item is not None]


@click.command("render")
@click.argument("source", type=click.File("rb"), default="-")
@click.option("--model-path", required=True, help="Model directory, tokenizer file or hub id.")
@click.option("--model", "name", default="", help="Name the model is served under (default: the request's 'model').")
@click.option("--chat-template", default="", help="Template file that replaces the model's own.")
@click.option("--trust-control-tokens", is_flag=True, help="Let message text spell the model's control tokens.")
@click.option("--explain", is_flag=True, help="Also say how the prompt came about.")
def render_command(
    source: BinaryIO, model_path: str, name: str, chat_template: str, trust_control_tokens: bool, explain: bool
) -> None:
    """Render request bodies (JSON lines) to prompts and token ids."""
    try:
        model = _RecordingModel(load_model_dir(model_path, chat_template), _Options(trust_control_tokens))
    except TokenizerLoadError as error:
        raise click.ClickException(str(error)) from None
    render_lines(source, sys.stdout, RenderContext(model, name), explain=explain)
