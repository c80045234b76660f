"""Fits the cost model's figures to measured times: for each candidate the launch, shares and tile with the least squared error of log t."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

from kernelgen.dispatch.cost import Fit, Machine, Work, kind, work_of

# The grids, in steps of some 15 %. What they choose was held against problems that they do not see (docs/design/dispatch.md).
_LAUNCH = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 13.0, 17.0, 22.0)
_SHARES = (0.03, 0.05, 0.08, 0.12, 0.17, 0.23, 0.3, 0.37, 0.45, 0.53, 0.6, 0.67, 0.74, 0.81, 0.88, 0.95, 1.0)
_LEFT = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
_TILES = ((0, 0), (64, 128), (128, 128), (128, 256), (256, 128))
_BOXES, _BEYOND = ((0, 0), (64, 64), (8, 128)), (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_PRIOR = Fit(5.0, 0.67, 0.53)  # what nothing says otherwise of
_WORTH = 1e-3
_TRUST = 0.01  # in it, beside a squared error: a figure that times tell is hardly moved by it
_ROW_TILES = ((0, 0), (64, 1), (128, 1))  # attention's outputs are tiled by rows


_LONG = 10.0  # launches: times beyond are a matter of the shares, and say nothing of the launch


def fit(machine: Machine, measured: Iterable[tuple[Any, str, float]]) -> Machine:
    """``measured``: (problem, label of the candidate, microseconds). Every op gets a fit of all its times, and a kind of problem with two
    times or more (``cost.kind``) one of its own, which keeps to the op's in what its times do not say: those of long problems know
    nothing of a launch, nor those of products that wait for the tensor core of bytes.
    """
    ops: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    kinds: dict[tuple[str, str], list[tuple[Work, float]]] = defaultdict(list)
    for problem, label, us in measured:
        work = work_of(problem)
        if work is not None:
            ops[f"{problem.op} {label}"].append((work, us))
            kinds[f"{problem.op} {label}", f"{kind(problem)} {label}"].append((work, us))
    fits = {name: _best(machine, found, _tiles(name), _PRIOR) for name, found in ops.items() if len(found) > 1}
    fits |= {name: _best(machine, found, _tiles(name), fits[op]) for (op, name), found in kinds.items() if len(found) > 1 and name != op}
    return replace(machine, fits=dict(sorted(fits.items())))


def _tiles(name: str) -> tuple[tuple[int, int], ...]:
    return _ROW_TILES if name.startswith("attention") else _TILES


def _best(machine: Machine, points: list[tuple[Work, float]], tiles: tuple[tuple[int, int], ...], prior: Fit) -> Fit:
    grids = {"peak": _SHARES, "bandwidth": _SHARES, "launch": _LAUNCH}
    if min(us for _, us in points) > _LONG * prior.launch:
        del grids["launch"]
    if any(work.uneven for work, _ in points):
        grids["uneven"] = _LEFT
    product = any(work.columns > 1 for work, _ in points)
    best, least = prior, math.inf
    for (tile_rows, tile_columns), boxes in itertools.product(tiles, _BOXES if product else _BOXES[:1]):
        # max(moved, multiplied) has no linear form; the figures are searched one after the other, which a few rounds settle.
        one = replace(prior, tile_rows=tile_rows, tile_columns=tile_columns, boxes=boxes, beyond=0.0)
        for _ in range(4):
            for name, grid in (grids | ({"beyond": _BEYOND} if boxes[1] else {})).items():
                one = min((replace(one, **{name: value}) for value in grid),  # type: ignore[arg-type]
                          key=lambda f: _error(machine, points, f, prior))
        error = _error(machine, points, one, prior)
        if error < least * (1 - _WORTH):  # a tile that explains nothing is none
            best, least = one, error
    return best


def _error(machine: Machine, points: list[tuple[Work, float]], f: Fit, prior: Fit) -> float:
    away = sum(math.log(getattr(f, name) / getattr(prior, name)) ** 2 for name in ("launch", "bandwidth", "peak"))
    return sum(math.log(f.us(work, machine) / us) ** 2 for work, us in points) + _TRUST * away


def as_dict(machine: Machine) -> dict[str, Any]:
    """The content of a cost.json."""
    data = asdict(machine)
    data["fits"] = {name: {k: v for k, v in values.items() if v != _DEFAULTS.get(k)}
                    for name, values in data["fits"].items()}
    return data


_DEFAULTS = {f.name: f.default for f in fields(Fit)}


def regret(times: dict[str, float], predicted: dict[str, float]) -> float:
    """Time of what the predictions would choose over the best time."""
    known = {label: us for label, us in predicted.items() if label in times}
    return times[min(known, key=lambda label: known[label])] / min(times.values()) if known else math.inf


