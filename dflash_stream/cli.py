"""The `dflash-stream` command: one subcommand a task, each taking --config and any setting.

The two long jobs are not here: `accelerate launch extract.py` and `accelerate launch train_drafter.py` start
them on every GPU. A subcommand parses its arguments, calls one function of its room, and prints what came back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dflash_stream import __version__, config, entry
from dflash_stream.errors import UserError

Command = Callable[[list[str]], int | None]


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return config.command_line(f"dflash-stream {name}", about)


def prepare(argv: list[str]) -> None:
    """chats → samples, units, run.json and the target's head"""
    parser = _parser("prepare", "Turn chats into samples and units of a run, and write its identity.")
    parser.add_argument(
        "--show", type=int, metavar="N", help="only print N samples, supervised tokens coloured"
    )
    settings, arguments = config.load(parser, argv, sections=("store", "target", "prepare"))
    from dflash_stream.prepare import prepare, show

    if arguments.show is not None:
        show(settings, arguments.show)
    else:
        prepare(settings)


def evaluate(argv: list[str]) -> None:
    """acceptance length of the drafter on held-out samples, or live against the target"""
    parser = _parser("eval", "Measure the acceptance length of the untrained and the trained drafter.")
    parser.add_argument(
        "--live", type=Path, metavar="JSONL", help="decode these prompts with the target itself"
    )
    parser.add_argument(
        "--live-samples", type=int, default=8, metavar="N", help="prompts to decode (default 8)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=128, metavar="N", help="tokens for each (default 128)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    sections = ("store", "target", "drafter", "train", "stream")
    settings, arguments = config.load(parser, argv, sections=sections)
    from train.evaluate import evaluate

    report = evaluate(
        settings,
        live_prompts=arguments.live,
        live_samples=arguments.live_samples,
        new_tokens=arguments.new_tokens,
    )
    print(report.to_json() if arguments.json else report.to_text())


def export(argv: list[str]) -> None:
    """the trained drafter as a published DFlash checkpoint"""
    parser = _parser(
        "export", "Write the newest checkpoint in the published DFlash layout, for vLLM and SGLang."
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write it to this directory")
    settings, arguments = config.load(parser, argv, sections=("store", "drafter", "train"))
    from train.export import export

    for place in export(settings, destination=arguments.output):
        print(place)


COMMANDS: dict[str, Command] = {"prepare": prepare, "eval": evaluate, "export": export}


def main() -> None:
    """Entry point of the console script."""
    entry.run(lambda: dispatch(sys.argv[1:]))


def dispatch(argv: list[str]) -> int | None:
    """Run one subcommand; without one, or with --help, list them."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print("usage: dflash-stream COMMAND [--config YAML] [--section.name value …]\n")
        for name, command in COMMANDS.items():
            print(f"  {name:<10}{command.__doc__}")
        print("\nand, on every GPU:\n  accelerate launch extract.py        chats → hidden states in the store")
        print("  accelerate launch train_drafter.py  hidden states → drafter")
        return None if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return None
    if argv[0] not in COMMANDS:
        raise UserError(f"unknown command {argv[0]!r}: there are {', '.join(COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])
