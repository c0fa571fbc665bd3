"""Stream the hidden states of a prepared run into its store: one process a GPU, on as many machines as there are.

    accelerate launch extract.py --config configs/qwen3.6-27b.yaml
    accelerate launch extract.py --store.url s3://bucket/run1 --extract.tokens_per_batch 16384

Run it again to continue; a finished run is left as it is. `--help` shows every setting.
"""

from __future__ import annotations

from dflash_stream import config, entry


def main() -> None:
    """Read the settings, extract what is missing."""
    parser = config.command_line(
        "extract.py", "Stream the target's hidden states of a prepared run into its store."
    )
    settings, _ = config.load(parser, sections=("store", "target", "extract", "tracking"))
    from dflash_stream.extract import extract  # torch only now: mistakes are answered at once

    extract(settings)


if __name__ == "__main__":
    entry.run(main)
