"""What request handling needs of its process: models, tokenizers, codecs and a few settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smg.api.blocks import BLOCK_SIZE
from smg.api.errors import ApiError
from smg.api.plan import Codec
from smg.engines.base import Constraint
from smg.messages import ModelInfo
from smg.models.harmony import ResponsesConversation
from smg.models.prompt import RenderedPrompt, RenderRequest
from smg.models.registry import ParserNames
from smg.models.thinking import ThinkingSwitch

if TYPE_CHECKING:
    from smg.api.chat_shape import ChatShapes


class Tokenizer(Protocol):
    """One model's tokenizer and prompt renderer."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a generation."""

    @property
    def vocab_size(self) -> int:
        """Ids below this exist, added tokens included."""

    @property
    def switch(self) -> ThinkingSwitch:
        """The thinking switch of the chat template."""

    @property
    def keeps_tools(self) -> bool:
        """The renderer states ``tool_choice`` "none" and an empty list in the prompt: it gets the client's list
        then."""

    def prepare(self, request: RenderRequest) -> tuple[RenderedPrompt, Sequence[int]]:
        """The rendered prompt and its ids. Raises ``PromptError``."""

    def prepare_responses(self, conversation: ResponsesConversation) -> tuple[RenderedPrompt, Sequence[int]]:
        """The same for a Responses conversation of a model that speaks Harmony. Raises ``PromptError``."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text with control tokens recognised, nothing added."""

    def encode_framed(self, text: str) -> Sequence[int]:
        """Ids of a text with the special tokens that the tokenizer itself adds (BOS ...)."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary give nothing."""


_UNSET = ParserNames()


@dataclass(frozen=True, slots=True)
class Flags:
    """Settings that shape plans: parser flags, ``--tool-constraint native``, ``--block-size``, the headers that carry a
    routing key (lower-case names, the first present one counts)."""

    parsers: ParserNames = _UNSET
    native_constraints: bool = False
    block_size: int = BLOCK_SIZE
    routing_key_headers: tuple[str, ...] = ("x-smg-routing-key",)


class Context(Protocol):
    """What ``handle`` is given."""

    @property
    def flags(self) -> Flags: ...

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Codecs by engine kind."""

    @property
    def chat_shapes(self) -> ChatShapes:
        """What earlier chat requests left behind."""

    def find_model(self, name: str) -> ModelInfo | None:
        """The served model of this id or alias."""

    def unserved(self, name: str) -> ApiError:
        """The refusal of a model that ``find_model`` does not know."""

    def tokenizer(self, info: ModelInfo) -> Tokenizer:
        """The tokenizer of a served model. Raises ``ApiError`` (503 ``tokenizer_load_failed``,
        ``tokenizer_not_ready``)."""

    def named_tokenizer(self, name: str) -> Tokenizer | None:
        """A tokenizer by its registered name; "" and "unknown" mean the first. None = no such tokenizer."""

    def tokenizer_names(self) -> Sequence[str]:
        """All registered names."""

    def check_constraint(self, constraint: Constraint) -> str | None:
        """None when an engine can compile the constraint (or nobody here can tell), else what is wrong with it."""
