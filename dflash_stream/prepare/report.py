"""What became of the rows: counts, the list of refused ones, and the limits over which `prepare` stops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dflash_stream.errors import UserError
from dflash_stream.prepare.samples import Rejection, Samples

LISTED = 20  # rejections printed
KEPT = 100_000  # lines of tokens/rejected.jsonl at most
PROBE_ROWS = 1_000  # when none of the first so many rows is good, the rest is not read
MIN_SHARE, MAX_SHARE = 0.01, 0.95
LONG_ANSWER_PROMPT_TOKENS = 32


class Report:
    """Counts while rows are read; the refused ones go to a file as they come."""

    def __init__(self, path: Path) -> None:
        self.rows = self.chats = self.samples = self.rejected = self.dropped = 0
        self.reasons: Counter[str] = Counter()
        self.first: list[Rejection] = []
        self.path = path
        self._file = path.open("w")

    def add(self, samples: Samples) -> None:
        """Count what one chunk became."""
        self.rows += samples.rows
        self.chats += samples.chats
        self.samples += len(samples.meta)
        for refusal in samples.refused:
            if self.rejected + self.dropped < KEPT:
                self._file.write(refusal.to_json() + "\n")
            self.reasons[refusal.reason] += 1
            if refusal.rejected:
                self.rejected += 1
                if len(self.first) < LISTED:
                    self.first.append(refusal)
            else:
                self.dropped += 1
            if len(self.reasons) > 1000:  # reasons may quote the row: keep the frequent ones
                self.reasons = Counter(dict(self.reasons.most_common(500)))

    def close(self) -> None:
        self._file.close()

    def check_early(self) -> None:
        """UserError once the first 1,000 rows and more are all bad: then the settings are wrong, not the rows."""
        if self.rows >= PROBE_ROWS and self.rejected == self.rows:
            raise UserError(f"all of the first {self.rows} rows are rejected:\n{self.listing()}")

    def check(self, max_rejected_fraction: float) -> None:
        """UserError when too many rows were bad, or none made a sample."""
        if self.rows and self.rejected > max_rejected_fraction * self.rows:
            raise UserError(
                f"{self.rejected} of {self.rows} rows are rejected ({self.rejected / self.rows:.1%}), more "
                f"than prepare.max_rejected_fraction {max_rejected_fraction:g} allows:\n{self.listing()}\n"
                "Mend the rows or the settings, or raise the limit to go on without these rows."
            )
        if not self.samples:
            why = self.listing() or "  the inputs have no rows"
            raise UserError(f"nothing to prepare: {self.rows} rows gave no sample\n{why}")

    def listing(self) -> str:
        """The most frequent reasons, then the first rejected rows."""
        lines = [f"  {count} × {reason}" for reason, count in self.reasons.most_common(5)]
        if self.first:
            lines.append("  first rejected rows, counted from 0:")
        lines += [f"  {refusal.source} row {refusal.row}: {refusal.reason}" for refusal in self.first]
        if self.rejected > len(self.first) > 0:
            lines.append(f"  … and {self.rejected - len(self.first)} more")
        return "\n".join(lines)


def check_share(samples: int, tokens: int, supervised: int, tokenised: bool) -> list[str]:
    """Warnings about the share of supervised tokens; UserError when it can only come from a wrong mask.

    Above 95 % is right for long answers to short prompts: it stops only where the unsupervised rest (on average
    below 32 tokens a sample) is less than the headers and a question of a chat. A dataset that came tokenised
    is never stopped.
    """
    share = supervised / tokens
    see = "look at the mask with dflash-stream prepare --show 5"
    if share < MIN_SHARE:
        text = f"only {share:.2%} of the tokens are supervised, below {MIN_SHARE:.0%}: {see}"
        if not tokenised:
            raise UserError(
                text + "; are the assistant's messages nearly empty, or cut off by prepare.max_tokens?"
            )
        return [text]
    if share > MAX_SHARE:
        text = f"{share:.2%} of the tokens are supervised, above {MAX_SHARE:.0%}: {see}"
        if not tokenised and (tokens - supervised) / samples < LONG_ANSWER_PROMPT_TOKENS:
            raise UserError(
                text + "; are the prompts empty, or is more than the assistant's text between the "
                "generation marks of the chat template?"
            )
        return [text]
    return []
