"""Conversations → tokens and their loss mask, by the target's own chat template.

What is supervised is found from the template itself, never by searching the text: from its generation marks
({% generation %}) where it has them, otherwise from the growth of the rendered prefix. The answer of turn i
begins where the generation prompt after messages[:i] ends, and ends where messages[:i+1] does, both rendered by
the template and both required to be prefixes of the whole text. A conversation is rendered once in full and
tokenised once; spans of characters become tokens by the tokenizer's offsets. A message that spells out a header
is just text before or between these positions.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_stream.config import PrepareSettings
from dflash_stream.errors import UserError
from dflash_stream.hashing import fingerprint
from dflash_stream.prepare.chats import BadRow, Chat

Span = tuple[int, int]  # characters [start, end) of the rendered text

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REWRITES = (
    "the chat template renders earlier turns differently once later ones follow (it rewrites history), so "
    "turn {turn} is not the text that is served: use prepare.turns last or each, or a template variable that "
    "keeps history (prepare.template_kwargs)"
)
_NO_START = (
    "the answer of turn {turn} does not begin as the generation prompt ends: the template rewrites history or "
    "the data have another thinking mode (prepare.turns last or each, prepare.thinking)"
)


@dataclass(frozen=True)
class Tokens:
    """One conversation, or one turn with its history: input_ids [T] int32, loss_mask [T] uint8.

    turn: index of the message that is supervised, -1 for all; group: 64-bit hash of what comes before the
    conversation's first answer to a user, equal for all samples of a conversation
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    turn: int
    group: int


class Renderer:
    """The chat template and tokenizer of a target, with the settings that change what they produce."""

    def __init__(self, tokenizer: Any, settings: PrepareSettings) -> None:
        """UserError when there is no chat template, or no fast tokenizer to give character offsets."""
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"the target's tokenizer ({type(tokenizer).__name__}) has no fast version, which the loss "
                "mask needs: save one as tokenizer.json beside the model, or prepare from input_ids and loss_mask"
            )
        if not tokenizer.chat_template:
            raise UserError(
                "the target has no chat template: add chat_template.jinja to the model directory, choose the "
                "instruct version of the model, or prepare from input_ids and loss_mask"
            )
        self.tokenizer = tokenizer
        self.turns = settings.turns
        self.template: str = tokenizer.get_chat_template()
        self.template_sha256 = hashlib.sha256(self.template.encode()).hexdigest()
        self.marked = bool(_MARKS.search(self.template))
        self._variables = dict(settings.template_kwargs)
        if settings.thinking is not None:
            self._variables["enable_thinking"] = settings.thinking
        self._prompt_variables = [self._variables]
        if "enable_thinking" in self.template and settings.thinking is not False:
            # Of a turn without reasoning the empty think block belongs to the prompt, and only this variable
            # puts it there.
            self._prompt_variables.append({**self._variables, "enable_thinking": False})
        self._encoder = _offset_encoder(tokenizer)

    @cached_property
    def tokenizer_sha256(self) -> str:
        """A hash of everything that decides how text becomes tokens."""
        return fingerprint(json.loads(self.tokenizer.backend_tokenizer.to_str()))

    def warnings(self) -> list[str]:
        """What the user should know about this template."""
        if "strftime_now" in self.template and "date_string" not in self._variables:
            return [
                "the chat template writes today's date: repeated on another day, prepare gives other tokens. "
                "Fix it with prepare.template_kwargs, often {date_string: 1 Jan 2026}"
            ]
        return []

    def tokens(self, chat: Chat) -> list[Tokens]:
        """The samples of a conversation: one, or with `turns: each` one for each assistant turn. Raises BadRow."""
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if self.turns == "all":
            return [self._tokens(chat, len(chat.messages), answers, -1)]
        chosen = answers[-1:] if self.turns == "last" else answers
        return [self._tokens(chat, i + 1, [i], i) for i in chosen]

    def render(
        self, chat: Chat, count: int, *, prompt: bool = False, variables: dict[str, Any] | None = None
    ) -> str:
        """The text of the first `count` messages. Raises BadRow with the template's own complaint."""
        variables = self._variables if variables is None else variables
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat.messages[:count],
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **variables,
            )
        except Exception as error:  # a template is a program of the model's author: anything may come out of it
            raise BadRow(f"chat template: {error or type(error).__name__}") from None
        return text

    def _tokens(self, chat: Chat, count: int, answers: list[int], turn: int) -> Tokens:
        if self.marked:
            text, spans = self._marked_spans(chat, count, answers)
        else:
            text = self.render(chat, count)
            spans = [self._span(chat, text, i) for i in answers]
        check_calls(chat.messages[:count], text)
        try:
            encoding = self._encoder.encode(text, add_special_tokens=False)
        except TypeError:  # JSON can spell them, UTF-8 cannot
            raise BadRow("the text has lone surrogates: halves of a character, such as \\ud83d alone") from None
        mask = supervised_tokens(np.asarray(encoding.offsets, np.int64).reshape(-1, 2), spans)
        return Tokens(np.asarray(encoding.ids, np.int32), mask, turn, prompt_hash(chat))

    def _span(self, chat: Chat, text: str, answer: int) -> Span:
        """Where the answer messages[answer] lies in the text, by the growth of the rendered prefix."""
        grown = self.render(chat, answer + 1)
        if not text.startswith(grown):
            raise BadRow(_REWRITES.format(turn=answer))
        prompts = [
            self.render(chat, answer, prompt=True, variables=variables) for variables in self._prompt_variables
        ]
        start = max((len(prompt) for prompt in prompts if grown.startswith(prompt)), default=None)
        if start is None:
            raise BadRow(_NO_START.format(turn=answer))
        return trimmed(text, start, len(grown))

    def _marked_spans(self, chat: Chat, count: int, answers: list[int]) -> tuple[str, list[Span]]:
        """The text and the spans between generation marks; for a single answer, those that it added."""
        text, spans = self._render_marked(chat, count)
        if len(answers) == 1 and self.turns != "all":
            _, before = self._render_marked(chat, answers[0])
            spans = spans[len(before) :]
        return text, [trimmed(text, start, end) for start, end in spans]

    def _render_marked(self, chat: Chat, count: int) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **self._variables}
        render: Any = render_jinja_template  # its annotation promises less than it returns
        try:
            texts, spans = render(
                [chat.messages[:count]],
                tools=chat.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        except Exception as error:
            raise BadRow(f"chat template: {error or type(error).__name__}") from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]


def check_calls(messages: list[dict[str, Any]], text: str) -> None:
    """BadRow when a tool call is missing from the rendered text: a template that knows no tools drops it silently,
    and what is left would teach the model to say nothing.
    """
    for turn, message in enumerate(messages):
        for call in message.get("tool_calls") or []:
            if call["function"]["name"] not in text:
                raise BadRow(
                    f"turn {turn} calls {call['function']['name']}, which the chat template does not render"
                )


def trimmed(text: str, start: int, end: int) -> Span:
    """The span without the blanks at its end: they follow the end-of-turn token, where the model has stopped."""
    return start, start + len(text[start:end].rstrip())


def supervised_tokens(offsets: NDArray[np.int64], spans: list[Span]) -> NDArray[np.uint8]:
    """offsets [T, 2] → mask [T] uint8: 1 for a token whose characters [start, end) lie wholly inside a span."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        mask[(starts >= start) & (ends <= end) & (starts < ends)] = 1
    return mask


def prompt_hash(chat: Chat) -> int:
    """A 64-bit hash of the messages before the first answer to a user; of all messages where no user speaks.

    What comes before the user's first message (a system prompt, a greeting) may be the same in a whole dataset.
    """
    roles = [message["role"] for message in chat.messages]
    asked = roles.index("user") if "user" in roles else len(roles)
    first = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    return int(fingerprint(chat.messages[:first])[:16], 16)


@lru_cache(maxsize=1)
def _offset_encoder(tokenizer: Any) -> Any:
    """A copy of the tokenizer's backend whose offsets are exact.

    A byte-level post-processor may trim blanks from them, and tokenizer.json may ask for padding or truncation.
    """
    from tokenizers.processors import ByteLevel

    backend = tokenizer.backend_tokenizer
    copy = type(backend).from_str(backend.to_str())
    copy.post_processor = ByteLevel(trim_offsets=False)
    copy.no_truncation()
    copy.no_padding()
    return copy
