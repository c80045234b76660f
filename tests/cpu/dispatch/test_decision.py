"""A Decision as a value: the same choice is equal, can be hashed, pickled and copied; what explain takes beside shapes."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import settings
from kernelgen.dispatch import select

_CALLS: dict[str, dict[str, Any]] = {
    "attention": {"q": (1, 8, 4, 64), "k": (1, 9, 2, 64), "v": (1, 9, 2, 64), "causal": True},
    "gemm": {"a": (8, 512), "b": (512, 256)},
    "grouped_gemm": {"a": (8, 32), "b": (3, 32, 16), "offsets": (3,)},
    "moe": {"x": (8, 64), "w13": (4, 128, 64), "w2": (4, 64, 64), "weights": (8, 2), "ids": (8, 2)},
}


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
@pytest.mark.parametrize("op", _CALLS)
def test_a_choice_made_again_is_the_same(op: str, target: str) -> None:
    shown = kernelgen.explain(op, target=target, **_CALLS[op])
    select.forget()
    chosen = select.choose(shown.problem, shown.target, live=False)
    select.forget()
    again = select.choose(shown.problem, shown.target, live=False)
    for decision, other in ((shown, kernelgen.explain(op, target=target, **_CALLS[op])), (chosen, again)):
        assert decision == other and hash(decision) == hash(other)
    for other in (pickle.loads(pickle.dumps(shown)), copy.deepcopy(shown)):  # noqa: S301 - its own
        assert other == shown and str(other) == str(shown) and other.as_dict() == shown.as_dict()
    rows = json.loads(json.dumps(shown.as_dict(), allow_nan=False))["candidates"]
    assert sum(row["chosen"] for row in rows) == 1 and len({(row["backend"], row["kernel"]) for row in rows}) == len(rows)


def test_who_named_a_backend_is_said() -> None:
    for backend, said in (("auto", "setting"), ("torch", "call")):
        with settings.override(backend="torch"):
            assert kernelgen.explain("gemm", backend=backend, target="cpu", **_CALLS["gemm"]).decided_by == said
    assert kernelgen.explain("gemm", backend="auto", target="cpu", **_CALLS["gemm"]).decided_by in ("rule", "model", "measurement")


@pytest.mark.parametrize("form", ["blocks", "csr"])
@pytest.mark.parametrize("target", [None, "sm_90a"])
def test_a_page_table_follows_the_shapes_that_are_given_with_it(form: str, target: str | None) -> None:
    table = kernelgen.PageTable.from_blocks(torch.zeros(2, 4, dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32), 16)
    if form == "csr":
        table = kernelgen.PageTable.from_csr([0, 1, 2], [0, 1], [5, 7], 16)
    decision = kernelgen.explain("append_kv", kv_cache=(8, 2, 16, 2, 64), k=(2, 2, 64), v=(2, 2, 64), page_table=table, target=target)
    assert decision.chosen is not None and table.device.type == "cpu"


def test_threads_choose_while_another_reconsiders() -> None:
    problem = kernelgen.explain("rmsnorm", (8, 64), target="cpu").problem
    target = kernelgen.explain("rmsnorm", (8, 64), target="cpu").target
    failures: list[Exception] = []
    stop = threading.Event()

    def choosing() -> None:
        rows = 1
        while not stop.is_set():
            rows += 1
            select.choose(type(problem)(**{**vars(problem), "rows": rows}), target, live=False)

    def reconsidering() -> None:
        try:
            for _ in range(100):
                select.reconsider_all("rmsnorm")
                select.reconsider(problem)
        except RuntimeError as error:
            failures.append(error)
        finally:
            stop.set()

    threads = [threading.Thread(target=choosing), threading.Thread(target=reconsidering)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
