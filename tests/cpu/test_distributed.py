"""kernelgen.distributed with two and three processes over gloo, and what one process can see of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernelgen
from kernelgen.distributed.ring import Block, Piece, pieces_of, schedule, visible
from kernelgen.errors import SettingsError
from kernelgen.testing.distributed_cases import CASES
from kernelgen.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=(2, 3), ids=("2 ranks", "3 ranks"))
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All cases in one start of the processes: importing torch is most of what they take."""
    return run_ranks("kernelgen.testing.distributed_cases", request.param, tmp_path_factory.mktemp("ranks"), device="cpu", timeout=150)


@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


def test_without_a_process_group() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(SettingsError, match="expected an initialised one; call torch.distributed.init_process_group first"):
        kernelgen.distributed.moe(x, torch.zeros(2, 8, 8), torch.zeros(2, 8, 4), torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(SettingsError, match="init_process_group"):
        kernelgen.distributed.ring_attention(*(torch.zeros(1, 2, 1, 8) for _ in range(3)))
    assert kernelgen.distributed.context_attention is kernelgen.distributed.ring_attention


def test_import_does_not_load_it() -> None:
    code = ("import torch, sys; before = set(sys.modules); import kernelgen\n"
            "new = [m for m in set(sys.modules) - before if m.startswith(('kernelgen.distributed', 'torch.distributed'))]\n"
            "assert not new, new\n"
            "kernelgen.distributed.moe; assert 'kernelgen.distributed' in sys.modules")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_blocks_of_the_ring_cover_the_mask(layout: str) -> None:
    """Every (query, key) of the causal mask is in exactly one block of some rank, and nothing else is."""
    for q_lens, k_lens in (([5, 5, 5], [5, 5, 5]), ([0, 7, 2, 4], [3, 0, 9, 1]), ([1, 1], [9, 8]), ([9, 8], [2, 3]), ([13], [13])):
        of_q, of_k, total_q, total_k = pieces_of(q_lens, layout), pieces_of(k_lens, layout), sum(q_lens), sum(k_lens)
        times = torch.zeros(total_q, total_k, dtype=torch.int64)
        for q in (p for pieces in of_q for p in pieces):
            for pieces in of_k:
                position = [p.start + i for p in pieces for i in range(p.length)]  # of each row of the rank's tensor
                for b in visible(q, pieces, True, total_k - total_q):
                    for i in range(q.length):
                        limit = b.keys if not b.causal and b.right is None else i + b.keys - q.length + 1 + (b.right or 0)
                        for j in range(min(limit, b.keys)):
                            times[q.start + i, position[b.row + j]] += 1
        assert torch.equal(times, torch.ones(total_q, total_k).tril(total_k - total_q).long()), (q_lens, k_lens)
    assert visible(Piece(0, 10, 4), [Piece(0, 2, 3), Piece(3, 5, 5)], True, 0) == [Block(0, 8)]


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_keys_travel_as_far_as_they_are_seen(layout: str) -> None:
    """Along the ring every rank has the keys it needs when it needs them, and the last rank to have them needs them."""
    for lengths in ((4, 4, 4, 4), (4, 0, 6, 1, 3), (0, 0, 5), (7,)):
        for causal in (False, True):
            plan, size = schedule(lengths, lengths, layout, causal), len(lengths)
            for owner in range(size):
                steps = sorted(step for step, sender in plan.travels if (sender - step) % size == owner)
                assert steps == list(range(len(steps))), "no gap on the way"
                needing = [n for n in range(1, size) if any(plan.seen[(owner + n) % size, owner])]
                assert len(steps) == max(needing, default=0)
    assert len(schedule((4,) * 4, (4,) * 4, "contiguous", True).travels) == 6  # of 12: nothing goes around the end
