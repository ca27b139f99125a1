"""Chats of other interfaces, as llama-server converts them.

The conversions follow ``server-chat.cpp``. Where they differ, the tokens are guessed wrong, which costs time and never
an answer: the server compares the tokens of a slot with those of the request.
"""

from __future__ import annotations

import json
import re
from typing import Any

from prefixstore.server.refused import RefusedError

NO_MESSAGES = "the request has no messages that can be read"
# a stamp that a client changes with each request: the server overwrites it, too
BILLING = re.compile(r"^(x-anthropic-billing-header:.*?cch=).{5}(?=;)", re.DOTALL)


def chat_of_messages(request: dict[str, Any]) -> dict[str, Any]:
    """The chat of an Anthropic request (``/v1/messages``). Raises `RefusedError` if there is none."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RefusedError(NO_MESSAGES)
    chat: list[dict[str, Any]] = []
    system = request.get("system")
    if system is not None:
        chat.append({"role": "system", "content": BILLING.sub(r"\1fffff", _text(system))})
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            chat += _message(str(message.get("role", "")), [block for block in content if isinstance(block, dict)])
        elif content is not None or message.get("role") != "assistant":
            chat.append(message)
    converted: dict[str, Any] = {"messages": chat}
    if isinstance(request.get("tools"), list):
        converted["tools"] = [_tool(tool) for tool in request["tools"] if isinstance(tool, dict)]
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
        converted["tool_choice"] = "auto" if choice["type"] == "auto" else "required"
    return converted | {name: request[name] for name in ("chat_template_kwargs",) if name in request}


def _message(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [block for block in blocks if block.get("type") == "text"]
    thoughts = "".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking")
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    made: list[dict[str, Any]] = []
    if texts or calls or thoughts:
        message: dict[str, Any] = {"role": role, "content": texts or ""}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        made.append(message)
    made += [
        {"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": _text(block.get("content"))}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    return made


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False, separators=(",", ":"))
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(block.get("text", "")) for block in content if isinstance(block, dict) and "text" in block)


def chat_of_responses(request: dict[str, Any]) -> dict[str, Any]:
    """The chat of an OpenAI request to ``/v1/responses``. Raises `RefusedError` if there is none."""
    given = request.get("input")
    converted = {name: value for name, value in request.items() if name not in ("input", "instructions", "tools")}
    messages: list[dict[str, Any]] = []
    if "instructions" in request:
        messages.append({"role": "system", "content": str(request["instructions"] or "")})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
        for item in given:
            _add_item(messages, item)
    else:
        raise RefusedError(NO_MESSAGES)
    if isinstance(request.get("tools"), list):
        converted["tools"] = [
            {"type": "function", "function": {"strict": True} | {name: tool[name] for name in tool if name != "type"}}
            for tool in request["tools"]
            if isinstance(tool, dict) and tool.get("type") == "function"
        ]
    reasoning = converted.pop("reasoning", None)
    if isinstance(reasoning, dict) and "effort" in reasoning:
        converted["reasoning_effort"] = reasoning["effort"]
    return converted | {"messages": messages}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    after_answer = bool(messages) and messages[-1].get("role") == "assistant"
    kind = item.get("type")
    if kind == "function_call":
        function = {"name": item.get("name", ""), "arguments": item.get("arguments", "")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        if after_answer:
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = _text(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": output})
    elif kind == "reasoning":
        thoughts = _text(item.get("content"))
        if after_answer:
            messages[-1]["reasoning_content"] = thoughts
        else:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    elif item.get("role") == "assistant":
        parts = [{"type": "text", "text": _text(item.get("content"))}]
        if after_answer:
            messages[-1]["content"] = parts
        else:
            messages.append({"role": "assistant", "content": parts})
    else:
        content = item.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else _texts(content)
        role = "system" if item.get("role") == "developer" else item.get("role", "")
        messages.append({"role": role, "content": parts})


def _texts(content: object) -> list[dict[str, Any]]:
    blocks = content if isinstance(content, list) else []
    return [{"type": "text", "text": str(block.get("text", ""))} for block in blocks if isinstance(block, dict)]
