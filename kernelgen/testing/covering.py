"""Few cases that together contain every pair of values: what a test of many features compiles instead of all products."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

Case = dict[str, Any]


def covering_cases(axes: Mapping[str, tuple[Any, ...]], *, seed: int) -> list[Case]:
    """Cases such that each pair of values of two axes occurs in one; greedy, the same on every run."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}

    def covered(case: Case) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    cases: list[Case] = []
    while missing:
        a, x, b, y = rng.choice(sorted(missing, key=str))
        tries = [{name: rng.choice(values) for name, values in axes.items()} | {a: x, b: y} for _ in range(300)]
        best = max(tries, key=lambda case: len(covered(case) & missing))
        missing -= covered(best)
        cases.append(best)
    return cases
