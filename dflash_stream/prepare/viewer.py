"""Prints samples as the trainer will see them: supervised tokens coloured, the rest dim."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.hub import read_tokenizer
from dflash_stream.prepare.identity import Draft
from dflash_stream.prepare.inputs import decode
from dflash_stream.prepare.pipeline import find_inputs
from dflash_stream.prepare.samples import Record, records
from dflash_stream.prepare.workers import make_maker


def show(config: Config, count: int, *, console: Console | None = None) -> None:
    """The first `count` samples of the inputs, in the order of the files, and what is refused on the way.

    Where there are no colours, ⟦ ⟧ mark what is supervised. Raises UserError when no row makes a sample.
    """
    console = console or Console()
    inputs = find_inputs(config)
    maker = make_maker(config.target, config.prepare, Draft.from_settings(config).limits)
    tokenizer = read_tokenizer(config.target)
    shown = 0
    for chunk in inputs.chunks():
        for number, row in decode(chunk):
            samples = maker.make(chunk.source, chunk.name, [(number, row)])
            for refusal in samples.refused:
                console.print(Text(f"{refusal.source} row {refusal.row}: {refusal.reason}", "red"))
            for record in records(samples.meta, samples.payload):
                if shown == count:
                    return
                _show(console, tokenizer, chunk.name, record)
                shown += 1
    if not shown:
        raise UserError("no row of the inputs makes a sample")


def _show(console: Console, tokenizer: Any, name: str, record: Record) -> None:
    meta = record.meta
    title = f"{name} row {meta['row']}: {meta['tokens']} tokens, {meta['supervised']} supervised"
    console.rule(title, align="left")
    plain = console.color_system is None
    console.print(coloured(tokenizer, record.input_ids.tolist(), record.loss_mask.tolist(), plain=plain))


def coloured(tokenizer: Any, ids: list[int], mask: list[int], *, plain: bool) -> Text:
    """The text of the tokens; with `plain`, brackets in place of colours."""
    text = Text()
    place = 0
    for supervised, group in groupby(mask):
        size = len(list(group))
        piece = tokenizer.decode(ids[place : place + size], skip_special_tokens=False)
        if supervised:
            text.append(f"⟦{piece}⟧" if plain else piece, "bold green")
        else:
            text.append(piece, "dim")
        place += size
    return text
