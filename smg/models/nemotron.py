"""Nemotron 3 (Nano, Super, Ultra): the tool-call format of Qwen3-Coder, thoughts in ``<think>`` blocks."""

from __future__ import annotations

from smg.models.family import Family, ReasoningFormat
from smg.models.qwen_coder import tool_format

FAMILY: Family = Family(
    name="nemotron",
    tools=(tool_format("nemotron"),),
    reasoning=(
        ReasoningFormat(
            name="nano_v3",
            rank=16,
            patterns=("nemotron-nano", "nemotron-super", "nano-v3", "nemotron-3"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
        ),
    ),
)
