"""Requests whose answers are compared with the engine's own server: ``(path, body)`` in the gateway's words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from processes import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Request = tuple[str, dict[str, Any]]

LATIN = {
    "english": "Once upon a time, in a village at the edge of the sea, there lived",
    "german": "Grüße aus Köln: Übermäßig viele Straßen führen",
    "french": "L’été dernier, « déjà vu » fut l’œuvre de Noël",
    "turkish": "İstanbul'da ığdır, şeker ve çay",
    "vietnamese": "Hà Nội là thủ đô của nước Việt Nam, với",
    "polish": "Zażółć gęślą jaźń",
}
SCRIPTS = {
    "chinese": "长江是中国最长的河流,全长约六千三百公里。",
    "japanese": "吾輩は猫である。名前はまだ無い。どこで",
    "korean": "대한민국의 수도는 서울이며",
    "arabic": "كان يا ما كان في قديم الزمان",
    "hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
    "hindi": "नमस्ते दुनिया, यह एक परीक्षण है",
    "thai": "กรุงเทพมหานครเป็นเมืองหลวงของ",
    "russian": "Широка страна моя родная, много в ней",
    "greek": "Ἐν ἀρχῇ ἦν ὁ λόγος",
    "georgian": "გამარჯობა მსოფლიო",
    "amharic": "ሰላም ለዓለም",
    "cuneiform": "𒀀𒁀𒂀 𓀀𓁀",
    "combining": "e\u0301a\u0308o\u0302 Z͑ͫ̓a̴l̵g̷o",
}
SYMBOLS = {
    "emoji": "🐋🐋 whales 🌊 and 🚀",
    "emoji-joined": "👩‍👩‍👧‍👦 👍🏽 🇳🇴 ❤️‍🔥",
    "mathematics": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε; ∑ᵢ₌₁ⁿ",
    "digits": "3.14159265358979 2718281828 0x7fffffff 1e-9",
    "punctuation": "?!... --- ((([[[{{{ \\\\ ''\"\" ;;;",
    "control-words": "<|im_start|>user\nhi<|im_end|>\n<think>",
    "half-control": "<|im_st art|> </think <tool_call",
    "box": "┌──┬──┐\n│  │  │\n└──┴──┘",
}
CODE = {
    "python": 'def fib(n: int) -> int:\n    """Fibonacci."""\n    return n if n < 2 else',
    "c": "#include <stdio.h>\nint main(void) {\n\tfor (int i = 0; i < 10; ++i)\n\t\tprintf(",
    "rust": "impl<'a, T: Clone> Iterator for Foo<'a, T> {\n    type Item =",
    "html": '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>&nbsp;',
    "sql": "SELECT a.id, COUNT(*) FROM a LEFT JOIN b USING (id) WHERE a.x IS NOT NULL GROUP BY 1 HAVING",
    "json": '{"name": "x", "list": [1, 2.5, null, true], "nested": {"a\\n": "\\u00e9"',
    "shell": "for f in *.txt; do\n  sed -e 's/\\(a\\)/\\1/g' \"$f\" |",
    "latex": "\\begin{align}\n  \\int_0^\\infty e^{-x^2}\\,dx &= \\frac{\\sqrt{\\pi}}{2} \\\\\n",
    "diff": "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-old\n+new\n ",
}
BLANKS = {
    "space": " ",
    "newlines": "\n\n\n",
    "tab": "\t",
    "spaces-around": "   in the middle   ",
    "crlf": "one\r\ntwo\r\n\r\nthree\r\n",
    "odd-spaces": "a\u00a0b\u2003c\u200bd\u3000e",
    "one-letter": "x",
    "nul": "a\u0000b",
    "mark": "\ufeffbyte order",
    "long-blank": "a" + " " * 200 + "b",
}
LONG = {
    "long-prose": "The quick brown fox jumps over the lazy dog while the sun sets slowly. " * 34,
    "long-mixed": "".join(f"{i}. Zeile №{i} — 東京 🐋 x={i * i};\n" for i in range(32)),
    "long-code": "".join(f"    values[{i}] = compute({i}, seed={i * 7919})\n" for i in range(32)),
    "long-word": "ab" * 700,
}
TEXTS = LATIN | SCRIPTS | SYMBOLS | CODE | BLANKS | LONG

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "tags": {"type": "array", "items": {"enum": ["a", "ß"]}, "maxItems": 3}},
    "required": ["ok", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather — of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "Why is the sky blue?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief.\n"}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Rayleigh."}, {"role": "user", "content": "とは?"}]},
    "thought": {
        "messages": [
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."},
            {"role": "user", "content": "?"},
        ]
    },
    "thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts 🧩"}]}]},
    "blank-user": {"messages": [{"role": "user", "content": " "}]},
    "empty-user": {"messages": [{"role": "user", "content": ""}]},
    "script": {"messages": [{"role": "user", "content": SCRIPTS["arabic"] + " " + SYMBOLS["emoji-joined"]}]},
    "code": {"messages": [{"role": "user", "content": "Explain:\n```c\n" + CODE["c"] + "\n```"}]},
    "long": {"messages": [{"role": "user", "content": LONG["long-prose"]}]},
    "tools": {"messages": [USER], "tools": [WEATHER]},
    "tool-result": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": -3}'},
        ],
        "tools": [WEATHER],
    },
}  # fmt: skip


def requests() -> Iterator[tuple[str, Request]]:
    """All requests that need no other's answer. Every third is streamed; special ones both ways."""
    common = {"model": MODEL, "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    for number, (name, text) in enumerate(TEXTS.items()):
        yield f"text-{name}", (COMPLETIONS, _streamed(common | {"prompt": text}, streamed=number % 3 == 0))
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    for number, (name, fields) in enumerate(CHATS.items()):
        yield f"chat-{name}", (CHAT, _streamed(common | thinks | fields, streamed=number % 3 == 0))
    for name, (path, body) in _special(common, common | thinks | {"messages": [USER]}).items():
        yield name, (path, body)
        yield f"{name}-streamed", (path, _streamed(body, streamed=True))


def _streamed(body: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    return body | {"stream": True, "stream_options": {"include_usage": True}} if streamed else body


def _special(raw: dict[str, Any], chat: dict[str, Any]) -> dict[str, Request]:
    """Log-probabilities, several choices, penalties and grammars."""
    text = raw | {"prompt": LATIN["english"]}
    seeded = {"temperature": 0.9, "seed": 1234}
    # The engine's own server refuses several choices at temperature 0; equal logits make top_k 1 a matter of chance.
    nearly_greedy = {"temperature": 0.02, "seed": 99}
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    return {
        "logprobs": (COMPLETIONS, text | {"logprobs": 3}),
        "logprobs-0": (COMPLETIONS, text | {"logprobs": 0}),
        "logprobs-chat": (CHAT, chat | {"logprobs": True, "top_logprobs": 2}),
        "n": (COMPLETIONS, text | nearly_greedy | {"n": 3}),
        "n-seeded": (COMPLETIONS, text | seeded | {"n": 3}),
        "n-chat": (CHAT, chat | nearly_greedy | {"n": 2}),
        "batch": (COMPLETIONS, raw | {"prompt": [CODE["python"], SCRIPTS["thai"]]}),
        "token-ids": (COMPLETIONS, raw | {"prompt": [[9707, 11, 1879]]}),
        "seed": (CHAT, chat | seeded),
        "top-k": (COMPLETIONS, text | seeded | {"top_k": 3, "top_p": 0.5, "min_p": 0.05}),
        "penalties": (COMPLETIONS, text | penalties),
        "bias": (COMPLETIONS, text | {"logit_bias": {"9707": 100}, "max_tokens": 4}),
        "one-token": (CHAT, chat | {"max_tokens": 1}),
        "many-tokens": (COMPLETIONS, text | {"max_tokens": 200}),
        "regex": (COMPLETIONS, text | {"regex": r"It is (sunny|rainy) in Oslo\."}),
        "regex-scripts": (CHAT, chat | {"regex": r"[а-я]{3} (東京|🐋){2}\n", "max_tokens": 40}),
        "schema": (COMPLETIONS, text | {"json_schema": json.dumps(SCHEMA), "max_tokens": 60}),
        "schema-chat": (CHAT, chat | {"response_format": schema, "max_tokens": 60}),
        "json-object": (CHAT, chat | {"response_format": {"type": "json_object"}, "max_tokens": 30}),
        "ebnf": (COMPLETIONS, text | {"ebnf": 'root ::= item ("," item){2}\nitem ::= [a-c] | "ß"'}),
        "choice": (CHAT, chat | {"ebnf": 'root ::= "red" | "green" | "blue"'}),
    }


def with_stops(ids: list[int], text: str) -> dict[str, Request]:
    """Requests that stop in the middle of the known answer to ``many-tokens``."""
    base = dict(requests())["many-tokens"][1]
    middle = len(text) // 2
    inside = text[middle : middle + 5]
    stops = {
        "stop-string": {"stop": [inside]},
        "stop-strings": {"stop": ["never said", text[20:22], inside]},
        "stop-letter": {"stop": text[7]},
        "stop-kept": {"stop": [inside], "include_stop_str_in_output": True},
        "stop-logprobs": {"stop": [inside], "logprobs": 1},
        "stop-token": {"stop_token_ids": [ids[9]]},
        "stop-token-late": {"stop_token_ids": [ids[100], 5]},
        "stop-token-min": {"stop_token_ids": [ids[3], ids[60]], "min_tokens": 10},
    }
    whole = {name: (COMPLETIONS, base | fields) for name, fields in stops.items()}
    return whole | {f"{name}-streamed": (path, _streamed(body, streamed=True)) for name, (path, body) in whole.items()}


def for_engine(body: dict[str, Any]) -> dict[str, Any]:
    """The request in the words of the engine's own server."""
    body = dict(body)
    if "regex" in body:
        body["structured_outputs"] = {"regex": body.pop("regex")}
    if "ebnf" in body:
        body["structured_outputs"] = {"grammar": body.pop("ebnf")}
    if "json_schema" in body:
        body["structured_outputs"] = {"json": json.loads(body.pop("json_schema"))}
    return body
