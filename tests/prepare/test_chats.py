"""The forms that rows come in."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_stream.prepare.chats import BadRow, parse_chat
from dflash_stream.prepare.inputs import without_nulls


def roles(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in parse_chat(row).messages]


def test_sharegpt_is_read_as_messages() -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}
    assert roles(row) == [("system", "s"), ("user", "a"), ("assistant", "b")]


def test_conversations_with_roles_and_json_text_are_read() -> None:
    row = {"conversations": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}
    assert roles(row) == [("user", "a"), ("assistant", "b")]


def test_sharegpt_tool_calls_become_tool_calls() -> None:
    turns = [
        {"from": "human", "value": "time?"},
        {"from": "function_call", "value": '{"name": "now", "arguments": {"zone": "CET"}}'},
        {"from": "observation", "value": "12:00"},
        {"from": "gpt", "value": "Noon."},
    ]
    chat = parse_chat({"conversations": turns, "tools": '[{"type": "function", "function": {"name": "now"}}]'})
    assert chat.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}
    ]
    assert chat.messages[2] == {"role": "tool", "content": "12:00"}
    assert chat.tools == [{"type": "function", "function": {"name": "now"}}]


def test_further_fields_reach_the_template() -> None:
    turns = [
        {"role": "user", "content": "a", "name": "eve"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
    ]
    chat = parse_chat({"messages": turns})
    assert chat.messages[0]["name"] == "eve"
    assert chat.messages[1]["reasoning_content"] == "r"


def test_what_follows_the_last_answer_is_left_out() -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    assert len(parse_chat({"messages": turns}).messages) == 2


def test_text_parts_are_joined_and_images_rejected() -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "c"}
    assert roles({"messages": [{"role": "user", "content": parts}, answer]})[0] == ("user", "ab")
    parts[1] = {"type": "image", "url": "x.png"}
    with pytest.raises(BadRow, match="image"):
        parse_chat({"messages": [{"role": "user", "content": parts}, answer]})


def test_fields_that_a_table_fills_with_nulls_are_absent() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "a", "tool_calls": None},
            {"x": {"city": "Rome", "zone": None}},
        ]
    }
    assert without_nulls(row) == {"messages": [{"role": "user", "content": "a"}, {"x": {"city": "Rome"}}]}


NESTED = "[" * 50_000 + "]" * 50_000  # deeper than a parser goes
U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, "no messages: the row has text"),
        ({}, "no fields"),
        ({"messages": []}, "no messages"),
        ({"messages": "oops"}, "text that is not JSON"),
        ({"messages": [1]}, "not a list of objects"),
        ({"messages": [U]}, "no assistant message"),
        ({"messages": [A, U, A]}, "begins with an assistant message"),
        (
            {"messages": [{"role": "human", "content": "x"}, A]},
            r"message 0: unknown role 'human' \(role user\?\)",
        ),
        ({"messages": [{"content": "x"}, A]}, "neither role nor from"),
        ({"messages": [{"role": ["user"], "content": "x"}, A]}, r"unknown role \['user'\]"),
        ({"conversations": [{"from": {"a": 1}, "value": "x"}]}, "unknown sender {'a': 1}"),
        ({"messages": NESTED}, "text that is not JSON"),
        ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": NESTED}]}]}, "f are not JSON"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown sender 'alien'"),
        ({"messages": [U, {"role": "assistant", "content": None}]}, "message 1: content is NoneType"),
        ({"messages": [{"role": "user", "content": 3}, A]}, "message 0: content is int"),
        (
            {"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}]},
            "arguments of tool call f are not JSON",
        ),
        (
            {"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "are list, not an object",
        ),
        ({"messages": [U, {**A, "tool_calls": [{"function": {}}]}]}, "no name"),
        ({"messages": [U, A], "tools": [1]}, "tools is not a list"),
    ],
)
def test_a_bad_row_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse_chat(row)
