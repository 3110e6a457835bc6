"""Answers of two servers in a common form: what a client learns, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

Outcome = dict[str, Any]


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Outcome:
    """The request's outcome; a refusal is its status."""
    if not body.get("stream"):
        answer = client.post(path, json=body)
        return _whole(answer.json()) if answer.status_code == 200 else {"status": answer.status_code}
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            return {"status": response.status_code}
        return _joined(list(chunks(response)))


def chunks(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream, which has to end with its end marker."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])
    raise AssertionError("the stream has no end marker")


def _whole(answer: Any) -> Outcome:
    choices = [
        {
            "text": _text(choice),
            "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"],
            "logprobs": _logprobs(choice),
        }
        for choice in answer["choices"]
    ]
    prompts = [choice.get("prompt_token_ids") or answer.get("prompt_token_ids") for choice in answer["choices"]]
    return {"choices": choices, "prompts": prompts, "usage": _usage(answer["usage"])}


def _joined(events: list[Any]) -> Outcome:
    """The whole answer that the events of a stream amount to. Streams of the gateway do not repeat the prompt."""
    parts: dict[int, list[Any]] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    choices = []
    for _, pieces in sorted(parts.items()):
        logprobs = [entry for piece in pieces for entry in _logprobs(piece) or ()]
        reasons = [piece["finish_reason"] for piece in pieces if piece.get("finish_reason")]
        choices.append(
            {
                "text": "".join(map(_text, pieces)),
                "token_ids": [token for piece in pieces for token in piece.get("token_ids") or ()],
                "finish_reason": reasons[0] if len(reasons) == 1 else reasons,
                "logprobs": logprobs or None,
            }
        )
    [usage] = [_usage(event["usage"]) for event in events if event.get("usage")]
    return {"choices": choices, "usage": usage}


def _text(choice: Any) -> str:
    """All text of a choice. Where thought ends is the matter of parsers, which the engine's server has none of."""
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get("message") or choice["delta"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def _logprobs(choice: Any) -> list[tuple[str, float]] | None:
    """The chosen tokens with their log-probabilities."""
    shown = choice.get("logprobs")
    if shown is None:
        return None
    if "content" in shown:
        return [(entry["token"], entry["logprob"]) for entry in shown["content"] or ()]
    return list(zip(shown["tokens"], shown["token_logprobs"], strict=True))


def _usage(usage: Any) -> dict[str, int]:
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def differences(ours: Outcome, theirs: Outcome) -> dict[str, tuple[Any, Any]]:
    """What is not the same, by name. Log-probabilities may differ by rounding."""
    if "status" in ours or "status" in theirs:
        return {} if ours == theirs else {"status": (ours, theirs)}
    found: dict[str, tuple[Any, Any]] = {}
    if ours["usage"] != theirs["usage"]:
        found["usage"] = (ours["usage"], theirs["usage"])
    if "prompts" in ours and ours["prompts"] != theirs["prompts"]:
        found["prompts"] = (ours["prompts"], theirs["prompts"])
    if len(ours["choices"]) != len(theirs["choices"]):
        return found | {"choices": (len(ours["choices"]), len(theirs["choices"]))}
    for index, (our, their) in enumerate(zip(ours["choices"], theirs["choices"], strict=True)):
        for name in ("token_ids", "text", "finish_reason"):
            if our[name] != their[name]:
                found[f"{index}.{name}"] = (our[name], their[name])
        if not _close(our["logprobs"], their["logprobs"]):
            found[f"{index}.logprobs"] = (our["logprobs"], their["logprobs"])
    return found


def without_stop_tokens(outcome: Outcome) -> Outcome:
    """The gateway leaves out the log-probabilities of tokens that only fed a stop string."""
    choices = []
    for choice in outcome["choices"]:
        shown, length = [], 0
        for token, logprob in choice["logprobs"]:
            if length < len(choice["text"]):
                shown.append((token, logprob))
            length += len(token)
        choices.append(choice | {"logprobs": shown})
    return outcome | {"choices": choices}


def _close(ours: list[tuple[str, float]] | None, theirs: list[tuple[str, float]] | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return [token for token, _ in ours] == [token for token, _ in theirs] and all(
        abs(our - their) < 1e-3 for (_, our), (_, their) in zip(ours, theirs, strict=True)
    )
