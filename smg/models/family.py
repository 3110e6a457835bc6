"""What a model family is: the declarations that ``smg.models`` modules fill in.

A family module declares ``ToolFormat`` and ``ReasoningFormat`` values. The same declaration yields the incremental
parser, the structural tag for forced calls, the set of special tokens that decoding must keep, and the encoder that
the property tests generate outputs with, so that these can't disagree.

Parsers are sans-I/O state machines and obey these laws (``tests/property`` holds every registered one to them):

* Chunking does not matter: any split of the same text gives the same concatenated result per field, and the answer of a
  request without streaming is the same machine fed once.
* Nothing is lost: text held back as a possible marker that was none comes out, in order, in the field it belongs to.
* Linear: total work is O(output length); no buffer is parsed again from its start for each chunk.
* No input raises: garbage ends in content or in a well-formed partial call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from smg.messages import ParserEvent


class OutputParser(Protocol):
    """Text in, events out. ``finish`` is called once, after the last ``feed``; it releases everything held back."""

    def feed(self, text: str) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


class ReasoningParser(OutputParser, Protocol):
    """Separates chain-of-thought from the answer: ``ReasoningDelta`` and ``ContentDelta`` events only.

    ``in_reasoning`` tells the caller which side plain text goes to at the moment (tool parsing is off meanwhile);
    ``holding``, whether text waits for the next ``feed``. ``whole`` is ``feed`` for text that is certain to go to one
    side as it is; of any other text it takes nothing and gives None.
    """

    def whole(self, text: str) -> list[ParserEvent] | None: ...

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def holding(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One declared function: ``parameters`` is its JSON schema (an empty dict when the request gave none)."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call, as the encoder of a format takes it. ``arguments`` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TagRequest:
    """What a structural tag must force: at least one call of ``tools`` (already filtered by ``tool_choice``), several
    if ``parallel``. ``thinking`` True means the prompt ended inside an open reasoning block; ``native`` that the tag
    was asked for and need not be the one that the format has by default."""

    tools: Sequence[ToolSpec]
    parallel: bool = True
    thinking: bool = False
    native: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A tool-call format under its registered name.

    ``stems`` are lower-case substrings of model names; the longest that matches over all formats wins. ``parser``
    makes a fresh machine for one choice; it gets the declared tools (may be empty). ``openers`` are the markers at
    which calls begin: a thought that is not closed before the output ends is over at such a call. ``special_tokens``
    are the markers of the format that are control tokens in its vocabularies. ``structural_tag`` builds the constraint
    in the format itself, as an xgrammar structural-tag object. ``tag_by_default``: a forced call uses that tag when the
    parser was set by flag or override; other formats are forced with a JSON schema unless ``--tool-constraint
    native`` is given. ``forced_parser`` reads what the tag forces where the tag allows more than the format.
    ``encode`` writes calls the way the model would (text before the calls, the calls).
    """

    name: str
    parser: Callable[[Sequence[ToolSpec]], OutputParser]
    stems: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    special_tokens: frozenset[str] = frozenset()
    structural_tag: Callable[[TagRequest], dict[str, Any]] | None = None
    tag_by_default: bool = False
    forced_parser: Callable[[Sequence[ToolSpec]], OutputParser] | None = None
    encode: Callable[[str, Sequence[ToolCall]], str] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A reasoning format under its registered name.

    ``open`` and ``close`` are the markers around a thought. With nothing more to say a format is run by the shared tag
    machine; others also give ``parser``, a factory that takes ``armed`` (True: the first token is already reasoning).
    ``patterns`` are lower-case substrings of model names; ``rank`` orders the search (the first match in rank order
    wins). ``needs_special_tokens``: decode with special tokens kept. ``thinking_toggle``: requests can turn the
    thoughts of these models on and off. ``encode`` writes (reasoning, content) the way the model would; ``armed`` as
    in the parser.
    """

    name: str
    rank: int
    patterns: tuple[str, ...] = ()
    open: str = ""
    close: str = ""
    starts_in_reasoning: bool = False
    needs_special_tokens: bool = False
    thinking_toggle: bool = False
    special_tokens: frozenset[str] = frozenset()
    parser: Callable[[bool], ReasoningParser] | None = None
    encode: Callable[[str, str, bool], str] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """All that is particular to one model family; one module, one ``FAMILY`` value."""

    name: str
    tools: tuple[ToolFormat, ...] = ()
    reasoning: tuple[ReasoningFormat, ...] = ()
