"""One choice of one generation: token ids in, parser events out.

Order of the stages: end-of-sequence and stop tokens, incremental detokenizer, stop strings, reasoning parser, tool
parser. No I/O and no API format: a choice is fed by the engine's messages and read by a renderer.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg.detok.logprobs import LogprobTracker
from smg.detok.stop import StopMatcher
from smg.engines.base import Delta, TokenLogprobs
from smg.messages import ContentDelta, GenerationPlan, ParserEvent, ToolCallStart
from smg.models.harmony import HarmonyParser
from smg.models.output import ResponseParser, tool_call_id
from smg.vocab.decode import DecodeTable, IncrementalDecoder


class Choice:
    """State of one choice. ``finish_reason`` is None while the choice runs, then the engine's word or "stop".

    ``logprobs`` is None unless the client asked for them. ``pending`` holds the ids of the first message of
    this loop iteration until they are read, ``behind`` those of the others, ``last`` the newest message, whose counts
    are taken over when somebody asks (``settle``). ``started``: the engine has streamed something, if only an empty
    message (some send no token that ends the output).
    """

    __slots__ = (
        "_by_token", "_decoder", "_end_ids", "_id_offset", "_id_style", "_keep", "_parser", "_stop", "behind",
        "cached_tokens", "completion_tokens", "cut_short", "ended_by_gateway", "engine_reasoning_tokens",
        "finish_reason",
        "hidden_states", "index", "keep_token_ids", "last", "logprobs", "matched_stop", "pending", "prompt_logprobs",
        "prompt_tokens", "spec_accepted", "spec_draft", "started", "stop_token_ids", "surplus", "token_ids",
        "tokens_seen",
    )  # fmt: skip

    def __init__(self, index: int, plan: GenerationPlan, table: DecodeTable, *, keep_token_ids: bool) -> None:
        response, stop, parser = plan.response, plan.stop, plan.parser
        parses = parser.reasoning is not None or parser.tool is not None or parser.forced
        # First what every token needs, side by side.
        self.index = index
        self.finish_reason: str | None = None
        self.pending: Sequence[int] = ()
        self.behind: list[int] = []
        self.last: Delta | None = None
        self.logprobs = LogprobTracker() if response.logprobs is not None else None
        self.tokens_seen = 0
        self.surplus = 0
        self.started = False
        self.ended_by_gateway = False
        self.keep_token_ids = keep_token_ids
        self.stop_token_ids = frozenset(stop.token_ids)
        self._end_ids = self.stop_token_ids.union(stop.eos_ids)
        self._stop = StopMatcher(stop.strings, keep=stop.keep) if stop.strings else None
        self._decoder = IncrementalDecoder(table, response.skip_special_tokens, response.spaces_between_special_tokens)
        self._parser = ResponseParser(parser) if parses else None
        self._by_token = self._parser is not None and self._parser.separates_reasoning
        self._keep = stop.keep
        self._id_style = parser.id_style
        self._id_offset = parser.id_offset
        self.token_ids: list[int] = []
        self.matched_stop: str | int | None = None
        self.cut_short = False
        self.completion_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.engine_reasoning_tokens = -1
        self.spec_accepted = 0
        self.spec_draft = 0
        self.prompt_logprobs: TokenLogprobs | None = None
        self.hidden_states: object = None

    def take_pending(self) -> Sequence[int]:
        """The tokens of this loop iteration, which are no longer pending."""
        token_ids, self.pending = self.pending, ()
        if self.behind:
            token_ids = [*token_ids, *self.behind]
            self.behind.clear()
        return token_ids

    def call_id(self, start: ToolCallStart) -> str:
        """A new id for the tool call that ``start`` announces; ask once per call."""
        return tool_call_id(self._id_style, start.name, self._id_offset + start.index)

    @property
    def stop_string_matched(self) -> bool:
        """A stop string was found here: the engine has nothing more to say."""
        return self._stop is not None and self._stop.matched is not None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the chain-of-thought: the engine's count if it reports one, else the parser's."""
        if self.engine_reasoning_tokens > 0 or self._parser is None:
            return max(0, self.engine_reasoning_tokens)
        return self._parser.reasoning_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: the engine's count if it reports one, without those that came after a stop string."""
        counted = max(0, self.completion_tokens - self.surplus)
        return max(counted, self.tokens_seen) if self.cut_short else counted or self.tokens_seen

    # Output of the engine ------------------------------------------------------------------------

    def feed(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> list[ParserEvent]:
        """New tokens; the events they complete. Tokens after the end are ignored."""
        if self.ended_by_gateway or not token_ids:
            return []
        self.started = True
        self.tokens_seen += len(token_ids)
        if self.keep_token_ids:
            self.token_ids += token_ids
        ends = self._end_ids
        if ends and (token_ids[0] in ends or (len(token_ids) > 1 and not ends.isdisjoint(token_ids))):
            token_ids = self._cut_at_end_token(token_ids)
        if self.logprobs is not None:
            return self._feed_tracked(token_ids, logprobs, self.logprobs)
        if self._by_token:
            pieces = self._decoder.pieces(token_ids)
            if self._stop is None and self._parser is not None:
                return self._parser.feed_pieces(pieces)
            return self._feed_pieces(pieces)
        text = self._decoder.feed(token_ids) if self._stop is None else self._feed_stop(token_ids)
        if not text:
            return []
        return [ContentDelta(text)] if self._parser is None else self._parser.feed(text)

    def _feed_stop(self, token_ids: Sequence[int]) -> str:
        """The text that is released, with stop strings to look for."""
        stop = self._stop
        assert stop is not None
        if len(token_ids) == 1:
            return self._release(self._decoder.feed(token_ids))
        pieces = self._decoder.pieces(token_ids)
        text = self._release("".join(pieces))
        if stop.matched is not None:
            needed = len(pieces)
            behind = stop.behind
            while behind >= len(pieces[needed - 1]):
                needed -= 1
                behind -= len(pieces[needed])
            self._drop(len(pieces) - needed)
        return text

    def _drop(self, surplus: int) -> None:
        """The last ``surplus`` tokens came after a stop string: the engine did not know of it yet. They are no part of
        the answer."""
        if surplus:
            self.surplus = surplus
            self.tokens_seen -= surplus
            if self.keep_token_ids:
                del self.token_ids[-surplus:]

    def _release(self, text: str) -> str:
        """Text that no stop string can claim any more."""
        stop = self._stop
        if stop is None or not text:
            return text
        text = stop.feed(text)
        if stop.matched is not None:
            self.ended_by_gateway = True
            self.matched_stop = stop.matched
        return text

    def _cut_at_end_token(self, token_ids: Sequence[int]) -> Sequence[int]:
        for position, token in enumerate(token_ids):
            if token in self._end_ids:
                self.ended_by_gateway = True
                if token in self.stop_token_ids:
                    self.matched_stop = token
                    if self._keep:
                        position += 1
                return token_ids[:position]
        return token_ids

    def _feed_pieces(self, pieces: list[str]) -> list[ParserEvent]:
        """Text by token, so that each one counts as reasoning exactly if its text is part of the reasoning."""
        parser, stop = self._parser, self._stop
        assert parser is not None
        if stop is None:
            return parser.feed_pieces(pieces)
        released = []
        for piece in pieces:
            released.append(self._release(piece))
            if stop.matched is not None:
                self._drop(len(pieces) - len(released))
                break
        return parser.feed_pieces(released)

    def _feed_tracked(
        self, token_ids: Sequence[int], logprobs: TokenLogprobs | None, tracker: LogprobTracker
    ) -> list[ParserEvent]:
        """Token by token, with the offsets that tie log-probabilities to text."""
        events: list[ParserEvent] = []
        parser = self._parser
        tracker.reported = tracker.reported or logprobs is not None
        for position, token in enumerate(token_ids):
            piece = self._decoder.feed((token,))
            before = parser is not None and parser.in_reasoning
            text = self._release(piece)
            if parser is None:
                new: list[ParserEvent] = [ContentDelta(text)] if text else []
            else:
                new = parser.feed_pieces([text]) if self._by_token else parser.feed(text)
            answer = not before and not (parser is not None and parser.in_reasoning)
            tracker.add(token, logprobs, position, len(piece), answer=answer)
            tracker.released += len(text)
            events += new
            if self.stop_string_matched:
                self._drop(len(token_ids) - position - 1)
                break
        return events

    # End -----------------------------------------------------------------------------------------

    def complete(self, delta: Delta) -> list[ParserEvent]:
        """The engine's last message for this choice: counts, reason, and what was held back."""
        self.started = self.started or self.last is not None
        self.settle()
        self.absorb_counts(delta)
        if self.finish_reason is not None:
            return []
        self.finish_reason = "stop" if self.stop_string_matched else delta.finish_reason
        if self.matched_stop is None:
            self.matched_stop = delta.matched_stop
        return self.flush()

    def end_by_gateway(self) -> list[ParserEvent]:
        """The gateway ended the choice (stop string) before the engine did: nothing more is expected of the engine."""
        self.cut_short = True
        self.finish_reason = "stop"
        return self.flush()

    def settle(self) -> None:
        """Bring the counts up to date. To be called before they are read."""
        last = self.last
        if last is not None:
            self.last = None
            self.absorb_counts(last)

    def absorb_counts(self, delta: Delta) -> None:
        """Take over the totals that a message reports."""
        if delta.completion_tokens:
            self.completion_tokens = delta.completion_tokens
        if delta.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
        if delta.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if delta.reasoning_tokens >= 0:
            self.engine_reasoning_tokens = delta.reasoning_tokens
        if delta.spec_draft:
            self.spec_accepted = delta.spec_accepted
            self.spec_draft = delta.spec_draft
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.hidden_states is not None:
            self.hidden_states = delta.hidden_states

    def flush(self) -> list[ParserEvent]:
        """Release everything that was held back, in order: detokenizer, stop matcher, parsers."""
        tail = ""
        stop = self._stop
        # A character whose last bytes never came is left out: U+FFFD stands for nothing the model said.
        rest = self._decoder.finish().rstrip("\ufffd")
        if stop is None:
            tail = rest
        elif stop.matched is None:
            tail = self._release(rest) + stop.finish()
        if self.logprobs is not None:
            self.logprobs.released += len(tail)
        if self._parser is None:
            return [ContentDelta(tail)] if tail else []
        events = self._parser.feed_pieces([tail]) if tail and self._by_token else []
        if tail and not self._by_token:
            events = self._parser.feed(tail)
        return events + self._parser.finish()


class HarmonyChoice(Choice):
    """A choice of a model that speaks Harmony: its parser works on token ids, control tokens included, and cuts each
    message by itself, stop strings as well."""

    __slots__ = ("_harmony", "_looks_for_stops")

    def __init__(self, index: int, plan: GenerationPlan, table: DecodeTable, *, keep_token_ids: bool) -> None:
        super().__init__(index, plan, table, keep_token_ids=keep_token_ids)
        stop, spaces = plan.stop, plan.response.spaces_between_special_tokens
        self._looks_for_stops = bool(stop.strings)
        self._harmony = HarmonyParser(
            lambda: IncrementalDecoder(table, False, spaces),
            (lambda: StopMatcher(stop.strings, keep=stop.keep)) if stop.strings else None,
        )

    @property
    def stop_string_matched(self) -> bool:
        return self._harmony.matched_stop is not None

    @property
    def reasoning_tokens(self) -> int:
        return self.engine_reasoning_tokens if self.engine_reasoning_tokens > 0 else self._harmony.reasoning_tokens

    def feed(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> list[ParserEvent]:
        if self.ended_by_gateway or not token_ids:
            return []
        self.started = True
        self.tokens_seen += len(token_ids)
        if self.keep_token_ids:
            self.token_ids += token_ids
        tracker = self.logprobs
        if tracker is None and not self._looks_for_stops:
            return self._harmony.feed(token_ids)
        events: list[ParserEvent] = []
        if tracker is not None:
            tracker.reported = tracker.reported or logprobs is not None
        for position, token in enumerate(token_ids):
            before = self._harmony.in_content
            events += self._harmony.feed((token,))
            if tracker is not None:
                tracker.add(token, logprobs, position, 1, answer=before and self._harmony.in_content)
                tracker.released += 1
            if self._harmony.matched_stop is not None:
                self._drop(len(token_ids) - position - 1)
                break
        if self._harmony.matched_stop is not None:
            self.ended_by_gateway = True
            self.matched_stop = self._harmony.matched_stop
        return events

    def flush(self) -> list[ParserEvent]:
        return self._harmony.finish()


def make_choice(index: int, plan: GenerationPlan, table: DecodeTable, *, keep_token_ids: bool) -> Choice:
    """The choice object that the plan's parser needs."""
    kind = HarmonyChoice if plan.parser.harmony else Choice
    return kind(index, plan, table, keep_token_ids=keep_token_ids)
