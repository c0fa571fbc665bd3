"""A row of a dataset as a conversation in the one form that chat templates take.

Knows the `messages` form (role, content) and the ShareGPT `conversations` form (from, value), tool calls and
tools in both. What cannot be understood is a BadRow with the reason; how a conversation becomes text is left to
`template`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "observation": "tool",
}
COLUMNS = ("messages", "conversations", "tools", "system")


class BadRow(Exception):  # noqa: N818
    """A row that cannot become samples; the text is the reason shown to the user."""


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with an assistant message, as a chat template takes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def parse_chat(row: dict[str, Any]) -> Chat:
    """One row as a Chat. What follows the last assistant message is left out: nothing of it is ever supervised."""
    turns = _from_json(row.get("messages") or row.get("conversations"), "messages")
    if not turns:
        raise BadRow(f"no messages: the row has {', '.join(sorted(row)) or 'no fields'}")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("messages is not a list of objects")
    messages = [_message(turn, place) for place, turn in enumerate(turns)]
    if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise BadRow("no assistant message")
    if messages[0]["role"] == "assistant":
        raise BadRow("the conversation begins with an assistant message: there is no prompt that it answers")
    tools = _from_json(row.get("tools"), "tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools is not a list of objects")
    return Chat(messages[: last + 1], tools)


def _from_json(value: Any, name: str) -> Any:
    """Columns of a table often hold JSON text in place of a nested value."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is text that is not JSON: {error}") from None


def _message(turn: dict[str, Any], place: int) -> dict[str, Any]:
    """One turn in either form as {role, content, …}; fields of the `messages` form that we do not know pass through."""
    where = f"message {place}"
    if "role" in turn:
        role = turn["role"]
        message = {name: value for name, value in turn.items() if value is not None}
        if not isinstance(role, str) or role not in ROLES:
            hint = (
                f" (role {SHAREGPT_ROLES[role]}?)" if isinstance(role, str) and role in SHAREGPT_ROLES else ""
            )
            raise BadRow(f"{where}: unknown role {role!r}{hint}")
    elif "from" in turn:
        sender = turn["from"]
        if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
            raise BadRow(f"{where}: unknown sender {sender!r}")
        role = SHAREGPT_ROLES[sender]
        message = {"role": role, "content": turn.get("value")}
        if sender == "function_call":
            calls = _from_json(turn.get("value"), f"{where}: function_call")
            message = {"role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    else:
        raise BadRow(f"{where} has neither role nor from")
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, where) for call in _as_list(message["tool_calls"], where)]
    else:
        message.pop("tool_calls", None)
    message["content"] = _content(message, where)
    return message


def _as_list(value: Any, where: str) -> list[Any]:
    value = _from_json(value, f"{where}: tool_calls")
    if not isinstance(value, list):
        raise BadRow(f"{where}: tool_calls is not a list")
    return value


def _content(message: dict[str, Any], where: str) -> str:
    """The text of a message: a string, the joined text parts, or nothing beside tool calls."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise BadRow(f"{where}: content part of type {kind!r}, only text is supported")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f"{where}: content is {type(content).__name__}, not text")
    return content


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are a mapping: templates walk them, and fail on the JSON text that APIs return."""
    if not isinstance(call, dict):
        raise BadRow(f"{where}: a tool call is {type(call).__name__}, not an object")
    nested = isinstance(call.get("function"), dict)
    function = call["function"] if nested else call
    name = function.get("name")
    if not isinstance(name, str):
        raise BadRow(f"{where}: a tool call has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadRow(
                f"{where}: the arguments of tool call {name} are not JSON: {arguments[:80]!r}"
            ) from None
    if not isinstance(arguments, dict | None):
        raise BadRow(
            f"{where}: the arguments of tool call {name} are {type(arguments).__name__}, not an object"
        )
    function = {**function, "arguments": arguments or {}}
    return {**call, "function": function} if nested else {"type": "function", "function": function}
