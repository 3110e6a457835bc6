"""Control tokens of the Harmony format (gpt-oss) and which models speak it.

Token ids are those of the ``o200k_harmony`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

START = "<|start|>"
END = "<|end|>"
MESSAGE = "<|message|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
RETURN = "<|return|>"
CALL = "<|call|>"

TOKEN_IDS = {
    RETURN: 200002,
    CONSTRAIN: 200003,
    CHANNEL: 200005,
    START: 200006,
    END: 200007,
    MESSAGE: 200008,
    CALL: 200012,
}
CONTROL_TOKENS = {token_id: token for token, token_id in TOKEN_IDS.items()}

# The model has finished its turn: with an answer, or with a call.
STOP_TOKEN_IDS = (TOKEN_IDS[RETURN], TOKEN_IDS[CALL])

# What an engine request carries as its prompt text beside the token ids.
PLACEHOLDER_TEXT = "[harmony]"


def speaks_harmony(model_id: str, architectures: Iterable[str] = (), model_type: str = "") -> bool:
    """Whether a model is served with Harmony. ``architectures`` and ``model_type`` are what its workers report (empty
    while it has none); ``model_id`` is its name, of which any spelling of ``gpt-oss`` decides."""
    return "GptOssForCausalLM" in architectures or model_type == "gpt_oss" or "gpt-oss" in model_id.lower()
