"""The Harmony format of gpt-oss: prompts, output constraints, output parsing."""

from smg.models.harmony.constraint import refuse_ignore_eos, structural_tag
from smg.models.harmony.conversation import (
    ResponsesConversation,
    chat_functions,
    from_chat,
    from_responses,
    responses_functions,
)
from smg.models.harmony.parser import HarmonyParser, HarmonyTextParser
from smg.models.harmony.render import HarmonyRenderer, encode_messages
from smg.models.harmony.tokens import PLACEHOLDER_TEXT, STOP_TOKEN_IDS, speaks_harmony

__all__ = [
    "PLACEHOLDER_TEXT",
    "STOP_TOKEN_IDS",
    "HarmonyParser",
    "HarmonyRenderer",
    "HarmonyTextParser",
    "ResponsesConversation",
    "chat_functions",
    "encode_messages",
    "from_chat",
    "from_responses",
    "refuse_ignore_eos",
    "responses_functions",
    "speaks_harmony",
    "structural_tag",
]
