"""The processes that train together: who this one is, on which device, and the three things they do in common.

One process is a group of one and never touches torch.distributed. The group itself is formed by accelerate, so
that `accelerate launch` and its config files work; without a GPU it runs over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from dflash_stream.errors import ToldElsewhere, UserError
from dflash_stream.launched import cpu_threads, number

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that publishes and reports."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def broadcast_(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by that of rank 0."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank. A UserError there is raised on all: nobody waits in vain."""
        if self.world == 1:
            return make()
        outcome: list[tuple[T | None, str | None]] = [(None, None)]
        failure: UserError | None = None
        if self.first:
            try:
                outcome = [(make(), None)]
            except UserError as error:
                failure = error
                outcome = [(None, str(error))]
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if failure is not None:
            raise failure
        made, message = outcome[0]
        if message is not None:
            raise ToldElsewhere(message)
        return made  # type: ignore[return-value]

    def on_all(self, make: Callable[[], T]) -> T:
        """What `make` returns, called on every rank. A UserError on one is raised on all: nobody waits in vain."""
        if self.world == 1:
            return make()
        failure: UserError | None = None
        try:
            made = make()
        except UserError as error:
            failure = error
        messages: list[str | None] = [None] * self.world
        dist.all_gather_object(messages, None if failure is None else str(failure))
        teller = next((rank for rank, message in enumerate(messages) if message is not None), None)
        if teller is None:
            return made
        if failure is not None and (teller == self.rank or messages[teller] != str(failure)):
            raise failure
        raise ToldElsewhere(messages[teller])

    def leave(self) -> None:
        """End the group, so that no rank is left waiting for another one."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join(*, patience_s: float) -> Ranks:
    """Form the group that the launcher describes in the environment.

    patience_s: longest time that one rank may wait for another, for instance for one whose store does not
    answer.
    """
    on_gpu = torch.cuda.is_available()
    wait = InitProcessGroupKwargs(timeout=timedelta(seconds=patience_s))
    accelerator = Accelerator(cpu=not on_gpu, kwargs_handlers=[wait])
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, accelerator.device)
    if not on_gpu:
        torch.set_num_threads(cpu_threads())
    launched = number("WORLD_SIZE", 1)
    if ranks.world != launched:
        raise UserError(
            f"the launcher started {launched} processes, but this one sees a group of {ranks.world}: "
            "start with `accelerate launch --multi_gpu --num_processes N` (also without a GPU) or `torchrun`"
        )
    return ranks
