"""What a training step costs with each attention of the drafter: forward, loss and backward on the CPU.

    python -m bench.step                               512 tokens, 64 anchors
    python -m bench.step --tokens 1024 --anchors 256

The drafter has five layers of width 576 and blocks of 16, as for the demo's target with the published depth. Rounds are
interleaved, CPU seconds on one thread are compared, and both ways must give the same loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch

from dflash_stream.stream.sample import Sample
from train.blocks import choose_anchors, collate
from train.drafter import Drafter, DrafterConfig
from train.objective import block_loss

HIDDEN, VOCABULARY, TAPS, BLOCK = 576, 49152, 5, 16
WAYS = ("sdpa", "grouped")


def drafter_config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=HIDDEN, vocab_size=VOCABULARY, num_target_layers=30, target_layer_ids=[1, 8, 14, 20, 27],
        dtype="bfloat16", target_id="bench", num_hidden_layers=5, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, intermediate_size=1536, block_size=BLOCK, mask_token_id=16, layer_types=["full_attention"] * 5,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drafter = Drafter(drafter_config()).initialize(0)
    table = torch.randn(VOCABULARY, HIDDEN) * 0.1
    mask = np.ones(arguments.tokens, np.bool_)
    sample = Sample(
        key="bench", row=0, epoch=0, input_ids=torch.randint(0, VOCABULARY, (arguments.tokens,)),
        loss_mask=torch.from_numpy(mask), hidden_states=torch.randn(arguments.tokens, TAPS, HIDDEN).bfloat16(),
    )  # fmt: skip
    anchors = choose_anchors(mask, arguments.anchors, seed=0, row=0, epoch=0)
    blocks = collate([sample], [anchors], block_size=BLOCK, mask_token_id=16, gamma=7.0)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = {}
    for number in range(arguments.rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            begun = time.process_time()
            context = drafter.project(blocks.hidden_states.float())
            hidden = drafter(table[blocks.block_ids], context, blocks.anchors, blocks.keep, attention=way)
            sums = block_loss(hidden, table, blocks.labels, blocks.weights, chunk_rows=2048)
            (sums.loss_sum / sums.weight_sum).backward()
            drafter.zero_grad()
            losses[way] = float(sums.loss_sum.detach() / sums.weight_sum)
            if number:
                seconds[way].append(time.process_time() - begun)
    if abs(losses["sdpa"] - losses["grouped"]) > 1e-4 * losses["sdpa"]:
        raise SystemExit(f"the two ways differ: {losses}")
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    print(f"{arguments.tokens} tokens, {len(anchors)} anchors, load {os.getloadavg()[0]:.1f}")
    print(f"{'':12}{'CPU s/step':>12}{'tokens/CPU s':>14}{'ratio':>8}")
    for way, cpu in medians.items():
        print(f"{way:12}{cpu:12.2f}{arguments.tokens / cpu:14.0f}{cpu / medians['sdpa']:8.2f}")


if __name__ == "__main__":
    main()
