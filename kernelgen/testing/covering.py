"""Few cases that together contain every pair of values: what a test of many features compiles instead of all products."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Case = dict[str, Any]


def covering_cases(axes: Mapping[str, tuple[Any, ...]], *, seed: int, legal: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Cases such that each pair of values of two axes occurs in one, if a legal case has it; greedy, the same on every run."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}

    def covered(case: Case) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    cases: list[Case] = []
    while missing:
        tries = []
        a, x, b, y = rng.choice(sorted(missing, key=str))
        for _ in range(200):
            case = {name: rng.choice(values) for name, values in axes.items()} | {a: x, b: y}
            if legal(case):
                tries.append((len(covered(case) & missing), case))
        if not tries:
            missing.discard((a, x, b, y))  # no legal case has this pair
            continue
        best = max(tries, key=lambda pair: pair[0])[1]
        missing -= covered(best)
        cases.append(best)
    return cases
