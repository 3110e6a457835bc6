"""Every transport gives the answers of the engine's own server, token by token."""

from __future__ import annotations

from answers import Outcome, ask, differences, without_stop_tokens
from processes import GatewayProcess
from prompts import CHATS, TEXTS, Request

MIN_PROMPTS = 50


def test_the_reference_is_worth_comparing_with(reference: dict[str, tuple[Request, Outcome]]) -> None:
    """Equal refusals, or equal answers without a token, would prove nothing."""
    assert len(TEXTS) + len(CHATS) >= MIN_PROMPTS
    empty = [
        name
        for name, (_, outcome) in reference.items()
        if not all(choice["token_ids"] for choice in outcome.get("choices") or [{"token_ids": []}])
    ]
    assert empty == []
    assert sum(bool(body.get("stream")) for (_, body), _ in reference.values()) >= 30
    ended = {choice["finish_reason"] for _, outcome in reference.values() for choice in outcome["choices"]}
    assert ended == {"length", "stop"}


def test_the_gateway_says_what_the_engine_says(
    gateway: GatewayProcess, reference: dict[str, tuple[Request, Outcome]]
) -> None:
    different = {}
    for name, ((path, body), theirs) in reference.items():
        if name.startswith("stop-logprobs"):
            theirs = without_stop_tokens(theirs)
        found = differences(ask(gateway.client, path, body), theirs)
        if found:
            different[name] = found
    print(f"{gateway.engine.mode}: {len(reference) - len(different)} of {len(reference)} requests answered the same")
    assert different == {}, "\n".join(f"{name}: {found}" for name, found in different.items())
