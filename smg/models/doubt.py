"""Events between the stages of one parser, for text whose field is not known yet. They never leave that parser."""

from __future__ import annotations

from smg.messages import ReasoningDelta


class Unclear(ReasoningDelta, tag="unclear", frozen=True):
    """Text from a section opener inside an open thought on."""


class Closed(ReasoningDelta, tag="closed", frozen=True):
    """The tag that closes such a thought."""
