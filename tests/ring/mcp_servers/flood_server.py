"""A stdio server that asks its client 20,000 questions before it answers one. Its tool tells how many were answered."""

from __future__ import annotations

import json
import sys

answers = 0
TOOL = {"name": "answered", "inputSchema": {"type": "object"}}


def send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")


for line in sys.stdin:
    message = json.loads(line)
    method = message.get("method")
    if method == "initialize":
        info = {"name": "flood", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        for number in range(20_000):
            send({"id": f"q{number}", "method": "ping"})
        result = {"tools": [TOOL]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": str(answers)}]}
    else:
        answers += "result" in message
        continue
    send({"id": message["id"], "result": result})
    sys.stdout.flush()
