"""Decoding chat prompts with the real target and a drafter: the acceptance length as a server would see it.

Each prompt is also decoded by the target alone, and the two texts compared: drafts may only make decoding
faster. In float32 they must be equal; in the half precisions a near-tie of two logits can fall either way, and
is counted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.head import load_head, load_tokenizer
from dflash_stream.run import Identity
from dflash_stream.store import Store
from dflash_stream.target.identity import describe_target, target_settings
from dflash_stream.target.load import load_target
from train.bootstrap import bootstrap, interval_of
from train.decode import speculative_generate
from train.drafter import Drafter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveReport:
    """Live decoding of some prompts.

    tokens              all but the first token of each text, which is never drafted
    acceptance_length   tokens over rounds, with its 95 % bootstrap interval over prompts
    target_forwards     passes of the target after each prompt's own, those that replay accepted tokens of a
                        recurrent target included
    tokens_per_forward  tokens over these
    equal_texts         prompts whose text equals the target's own greedy text
    """

    prompts: int
    tokens: int
    rounds: int
    acceptance_length: float
    interval: tuple[float, float]
    target_forwards: int
    tokens_per_forward: float
    equal_texts: int


def read_prompts(store: Store, identity: Identity, path: Path, count: int) -> list[list[int]]:
    """The first `count` chats of a JSONL file as token ids up to where the assistant begins to answer.

    A line is an object with `messages` (role, content), and `tools` if any; answers at its end are left out.
    Rendered with the target's tokenizer and template, in the thinking mode that the run was prepared with.
    Raises UserError.
    """
    tokenizer = load_tokenizer(store)
    if not tokenizer.chat_template:
        raise UserError(f"the target of {store.url} has no chat template: live prompts cannot be rendered")
    variables = dict(identity.text.template_kwargs)
    if identity.text.thinking is not None:
        variables["enable_thinking"] = identity.text.thinking
    prompts = []
    for row, chat in _read_chats(path, count):
        try:
            text = tokenizer.apply_chat_template(
                chat["messages"],
                tools=chat.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except Exception as error:  # a template is a program of the model's author: anything may come out of it
            raise UserError(f"{path}, line {row}: chat template: {error or type(error).__name__}") from None
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not prompts:
        raise UserError(f"{path} has no chats: --live takes a JSONL file, one chat a line")
    return prompts


def _read_chats(path: Path, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, chat without answers at its end) of the first `count` chats."""
    try:
        lines = [(row, line) for row, line in enumerate(path.read_text().splitlines(), start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for row, line in lines[:count]:
        try:
            chat = json.loads(line)
            messages = list(chat["messages"])
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {row} is no chat with messages of role and content: "
                f"{type(error).__name__} {error}"
            ) from None
        if not messages:
            raise UserError(f"{path}, line {row}: no message that asks for an answer")
        yield row, chat | {"messages": messages}


def decode_live(
    store: Store,
    identity: Identity,
    settings: TargetSettings,
    drafter: Drafter,
    prompts: list[list[int]],
    new_tokens: int,
) -> LiveReport:
    """Decode each prompt to at most `new_tokens` tokens with drafts and without, in the dtype of `target.dtype`.

    What the settings leave out of the target is as in the run.

    UserError when the target is not the run's, when in float32 the two texts differ, or when no text has a
    second token.
    """
    settings = target_settings(identity, settings)
    if describe_target(settings).config_sha256 != identity.target.config_sha256:
        raise UserError(
            f"target.id {settings.id} is another model than {identity.target.id}, which {store.url} was "
            "prepared for: their configs differ. Name the same model"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, settings.dtype)
    target = load_target(settings, layers=identity.layers, whole=True, device=device)
    head = load_head(store, device=device, dtype=dtype)
    drafter = drafter.to(device, dtype).eval()
    tokens, rounds, forwards, equal = [], [], 0, 0
    for number, prompt in enumerate(prompts, start=1):
        made = speculative_generate(target, drafter, head, prompt, new_tokens)
        (greedy,) = target.greedy([prompt], new_tokens)
        if made.tokens != greedy and dtype is torch.float32:
            raise UserError(
                f"prompt {number}: decoding with drafts gave another text than the target alone"
                + _difference(made.tokens, greedy)
            )
        equal += made.tokens == greedy
        forwards += made.target_forwards
        if made.lengths:
            tokens.append(sum(made.lengths))
            rounds.append(len(made.lengths))
        counts = (len(made.tokens), len(made.lengths))
        log.info("decoded prompt %d of %d: %d tokens in %d rounds", number, len(prompts), *counts)
    if not rounds:
        raise UserError(
            "no live prompt was answered with more than one token: raise --new-tokens, or take other prompts"
        )
    draws = bootstrap(np.array(tokens), np.array(rounds))
    return LiveReport(
        prompts=len(prompts),
        tokens=sum(tokens),
        rounds=sum(rounds),
        acceptance_length=sum(tokens) / sum(rounds),
        interval=interval_of(draws),
        target_forwards=forwards,
        tokens_per_forward=sum(tokens) / forwards,
        equal_texts=equal,
    )


def _difference(text: list[int], other: list[int]) -> str:
    """Where two texts part, and what that can mean."""
    pairs = zip(text, other, strict=False)
    place = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(text), len(other)))
    return (
        f" from token {place} on (of {len(text)} and {len(other)}): two logits nearly tie there, or the cache "
        "of this target family is not taken back rightly; please report it with the model's name"
    )
