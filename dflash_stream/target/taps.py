"""Reads the outputs of decoder layers during a forward pass, and ends the pass after the last one that is wanted.

Samples are padded on the right under an attention mask, never packed: the state of linear-attention layers
runs on across packed samples. The states leave the device on a stream of their own while the next batch
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_stream.errors import UserError

Tokens = Sequence[int] | np.ndarray[Any, Any] | Tensor


class _LastTapSeen(Exception):  # noqa: N818 - not an error: it ends the forward pass
    pass


@contextmanager
def tapped(
    layers: nn.ModuleList, ids: Sequence[int], receive: Callable[[int, Tensor], None], *, stop: bool = False
) -> Iterator[None]:
    """Within the context, `receive(place, output)` gets the output [B, S, H] of each decoder layer in `ids`.

    `ids` ascend, `place` is the position in them. With `stop`, the forward pass ends after the last one;
    the context swallows that, so what follows the call to the model is not reached: let the call be the
    last statement.
    """

    def hook(place: int) -> Callable[..., None]:
        def call(module: nn.Module, inputs: Any, output: Any) -> None:
            receive(place, output[0] if isinstance(output, tuple) else output)
            if stop and place == len(ids) - 1:
                raise _LastTapSeen

        return call

    handles = [layers[layer].register_forward_hook(hook(place)) for place, layer in enumerate(ids)]
    try:
        yield
    except _LastTapSeen:
        pass
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class States:
    """The states of one sample on the host: hidden_states [T, K, H] bf16, final_state [T, H] bf16 if asked for.

    problem: why they cannot be used (not finite, or the same at every position), empty when they can.
    """

    hidden_states: Tensor
    final_state: Tensor | None
    problem: str


class PendingStates:
    """A batch whose states are on their way to the host."""

    def __init__(
        self, host: Tensor, flags: Tensor, lengths: list[int], ids: list[int], final: bool, copied: Any
    ) -> None:
        self._host, self._flags, self._lengths = host, flags, lengths
        self._ids, self._final, self._copied = ids, final, copied

    def wait(self) -> list[States]:
        """The states of each sample, in the order of the batch: views of one host buffer."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(self._ids) - self._final
        found = []
        for row, length in enumerate(self._lengths):
            states = self._host[row, :length]
            found.append(
                States(
                    hidden_states=states[:, :count].contiguous(),
                    final_state=states[:, count] if self._final else None,
                    problem=self._problem(row),
                )
            )
        return found

    def _problem(self, row: int) -> str:
        finite, varies = self._flags[0, row].tolist(), self._flags[1, row].tolist()
        for what, good in (("not finite", finite), ("the same at every position", varies)):
            bad = [layer for layer, fine in zip(self._ids, good, strict=True) if not fine]
            if bad:
                return f"states of layer {', '.join(map(str, bad))} are {what}"
        return ""


def pad(batch: Sequence[Tokens], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask (1 = token), [B, S] int64 each, padded on the right or on the left."""
    width = max(len(tokens) for tokens in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        start = width - len(tokens) if left else 0
        ids[row, start : start + len(tokens)] = torch.tensor(np.asarray(tokens), dtype=torch.int64)
        mask[row, start : start + len(tokens)] = 1
    if device.type == "cuda":  # from pinned memory, so that the host does not wait for the batch before
        ids, mask = ids.pin_memory(), mask.pin_memory()
    return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)


class Tapper:
    """Taps one model: the decoder layers `ids` and, with `final`, the last layer's output before the norm."""

    def __init__(
        self, backbone: nn.Module, layers: nn.ModuleList, ids: list[int], final: bool, device: torch.device
    ) -> None:
        self._backbone, self._layers, self._final, self._device = backbone, layers, final, device
        self._ids = [*ids, len(layers) - 1] if final else ids
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def submit(self, batch: Sequence[Tokens]) -> PendingStates:
        """Start the forward pass of a batch of token sequences; on CUDA this returns before it is done."""
        ids, mask = pad(batch, self._device)
        valid = mask.bool()[:, :, None]
        states: list[Tensor] = []  # one [B, S, K, H], made when the first layer tells its width
        flags = torch.empty(2, len(batch), len(self._ids), dtype=torch.bool, device=self._device)

        def receive(place: int, output: Tensor) -> None:
            if not states:
                if output.shape[:2] != ids.shape:
                    raise UserError(
                        f"the target gave states of shape {list(output.shape)} for {list(ids.shape)} tokens: "
                        "a model that shortens or extends its input cannot be tapped"
                    )
                shape = (*ids.shape, len(self._ids), output.shape[2])
                states.append(torch.empty(shape, dtype=torch.bfloat16, device=self._device))
            kept = states[0][:, :, place]
            kept.copy_(output)
            flags[0, :, place] = (kept.isfinite() | ~valid).all(dim=(1, 2))
            flags[1, :, place] = ((kept != kept[:, :1]) & valid).any(dim=(1, 2))

        with tapped(self._layers, self._ids, receive, stop=True):
            self._backbone(input_ids=ids, attention_mask=mask, use_cache=False)
        flags[1] |= mask.sum(1)[:, None] < 2  # one position cannot vary
        host, host_flags, copied = self._to_host(states[0], flags)
        return PendingStates(
            host, host_flags, [len(tokens) for tokens in batch], self._ids, self._final, copied
        )

    def _to_host(self, states: Tensor, flags: Tensor) -> tuple[Tensor, Tensor, Any]:
        """The same on the host. On CUDA: pinned memory, copied on the side stream, and an event at its end."""
        if self._side is None:
            return states, flags, None
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        host_flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            host.copy_(states, non_blocking=True)
            host_flags.copy_(flags, non_blocking=True)
            for tensor in (states, flags):
                tensor.record_stream(self._side)  # its memory stays taken until the copy has read it
            copied = torch.cuda.Event()
            copied.record(self._side)
        return host, host_flags, copied
