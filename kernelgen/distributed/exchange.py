"""What the distributed calls ask of torch.distributed: who is in the group, rows to every rank, and a header that all ranks compare.

Rows travel as bytes, so that no backend has to know their dtype. ``all_to_all_single`` moves them where the backend has it
(ALL_TO_ALL; gloo has it for CPU tensors since torch 1.8, not the list form ``all_to_all``); otherwise, or with ``transport="p2p"``,
one ``batch_isend_irecv`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import no_backend_error
from kernelgen.errors import DeviceError, SettingsError
from kernelgen.settings import settings

ALL_TO_ALL = ("nccl", "gloo", "mpi", "ucc", "xccl")
TRANSPORTS = ("auto", "all_to_all", "p2p")


class Ranks(NamedTuple):
    """A process group as seen from this process. ``backends``: device type -> backend, such as {"cpu": "gloo"}."""

    group: Any
    rank: int
    size: int
    backends: dict[str, str]

    def peer(self, rank: int) -> int:
        """The global rank of a member."""
        return dist.get_global_rank(self.group, rank)

    def transport(self, device: torch.device, wish: str) -> str:
        """"all_to_all" or "p2p". Raises SettingsError for an unknown wish, DeviceError where no backend moves such tensors."""
        if wish not in TRANSPORTS:
            raise SettingsError(f"transport: got {wish!r}, expected one of {', '.join(TRANSPORTS)}")
        backend = self.backends.get(device.type)
        if backend is None:
            raise DeviceError(f"x: got a tensor on {device}, expected one on {' or '.join(self.backends)}, for which the process group "
                              "has a backend; move it, or make a group with one")
        return wish if wish != "auto" else "all_to_all" if backend in ALL_TO_ALL else "p2p"

    def some_device(self) -> torch.device:
        """Where a header can lie when the caller's tensors do not say."""
        if "cuda" in self.backends and self.backends["cuda"] != "gloo":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def ranks_of(group: Any) -> Ranks:
    """The group (None: the default one). Raises SettingsError where there is none, or this process is no member."""
    if not dist.is_available():
        raise SettingsError("group: got a torch without torch.distributed, expected one that is built with it")
    if not dist.is_initialized():
        raise SettingsError("group: got no process group, expected an initialised one; call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise SettingsError("group: got one that this process is no member of, expected its members alone to make the call")
    backends = {}
    for pair in str(dist.get_backend_config(group)).split(","):
        device, _, backend = pair.partition(":")
        backends[device] = backend
    return Ranks(group, rank, dist.get_world_size(group), backends)


class Pending(NamedTuple):
    """Rows on their way."""

    out: torch.Tensor
    works: list[Any]
    keep: Any  # what must live until they have arrived

    def wait(self) -> torch.Tensor:
        """The rows received: on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.out


def start_rows(
    ranks: Ranks, transport: str, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], out: torch.Tensor | None = None,
) -> Pending:
    """Begin to send the first send[0] rows of ``rows`` (N, W) to rank 0, the next send[1] to rank 1, ..; receive[r] come from r.

    ``out`` (sum(receive), W), contiguous, as ``rows`` must be; made where it is None.
    """
    rows = rows[: sum(send)]
    if out is None:
        out = rows.new_empty((sum(receive), rows.shape[1]))
    if rows.shape[1] == 0:
        return Pending(out, [], None)
    data, room = rows.view(torch.uint8), out.view(torch.uint8)
    if transport == "all_to_all":
        return Pending(out, [dist.all_to_all_single(room, data, list(receive), list(send), group=ranks.group, async_op=True)], data)
    sent, got = data.split(list(send)), room.split(list(receive))
    got[ranks.rank].copy_(sent[ranks.rank])
    others = [r for r in range(ranks.size) if r != ranks.rank]
    moves = [(dist.isend, sent[r], r) for r in others] + [(dist.irecv, got[r], r) for r in others]
    return Pending(out, start_moves(ranks, moves), data)


def start_moves(ranks: Ranks, moves: Sequence[tuple[Callable[..., Any], torch.Tensor, int]]) -> list[Any]:
    """One batch_isend_irecv of (isend or irecv, tensor, rank); what is empty stays at home."""
    ops = [dist.P2POp(op, t, ranks.peer(r), ranks.group) for op, t, r in moves if t.numel()]
    return dist.batch_isend_irecv(ops) if ops else []


# Numbers in a header, the same for all calls, so that two ranks in different calls can still tell each other. The first says which
# call, the second is REFUSED where a rank raises an error about its arguments, the last two are sizes.
WIDTH = 11
OK, REFUSED = 0, 1


def swap_headers(ranks: Ranks, sent: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """sent (size, WIDTH) int64, row r for rank r: (sent, received) as numbers. The one wait for the device, and one copy from it.

    They travel in one way whatever the caller wishes for the rows: a rank that refuses its arguments cannot know what the others wish.
    """
    ones = [1] * ranks.size
    received = start_rows(ranks, ranks.transport(sent.device, "auto"), sent, ones, ones).wait()
    both = torch.cat((sent, received)).tolist()
    return both[: ranks.size], both[ranks.size :]


def check_chosen(decision: Decision, backend: str) -> None:
    """A backend that cannot run what a call consists of is an error of its arguments: raised before others wait. Raises NoBackendError."""
    if decision.chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)


def refuse(ranks: Ranks, call: int, device: torch.device | None) -> None:
    """Tell every rank that this one raises an error, so that none waits for rows that never come."""
    usable = device if device is not None and device.type in ranks.backends else ranks.some_device()
    header = torch.tensor([[call, REFUSED] + [0] * (WIDTH - 2)] * ranks.size, dtype=torch.int64, device=usable)
    swap_headers(ranks, header)


def check_peers(
    ranks: Ranks, own: Sequence[int], received: Sequence[Sequence[int]], names: Sequence[tuple[str, type[Exception], Any]],
) -> None:
    """Compare every rank's header with one's own. All ranks see all headers, so all of them raise.

    ``names``: for each field that must be equal (what it is, the error, how a value is shown).
    """
    for r, theirs in enumerate(received):
        if theirs[0] != own[0]:
            raise SettingsError(f"rank {r} makes another call than rank {ranks.rank}, expected the same calls in the same order on all "
                                "ranks")
        if theirs[1] != OK:
            raise SettingsError(f"rank {r} refused its arguments; its own error says why")
        for (what, error, show), mine, other in zip(names, own[2:], theirs[2:]):
            if mine != other:
                raise error(f"{what}: got {show(other)} on rank {r} and {show(mine)} on rank {ranks.rank}, expected the same on all ranks")
