"""A small case of every unit, without pytest: ``compute-sanitizer --tool racecheck python -m kernelgen.testing.sm90_units``.

Arguments name units ("ring", "load", ...); none means all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from kernelgen.testing.sm90_units import copies, products, schedule, served

CASES: dict[str, Callable[[], None]] = {
    **{f"wgmma {element} {form}": lambda element=element, form=form: products.check_wgmma(  # type: ignore[misc]
        element, products.PARTS[0], form, True) for element in ("bf16", "e4m3") for form in products.forms_of(element)},
    **{f"load {box}": lambda box=box: copies.check_load(box) for box in copies.LOADS if box.rows <= 64},  # type: ignore[misc]
    **{f"save {box}": lambda box=box: copies.check_save(box) for box in copies.SAVES},  # type: ignore[misc]
    "stmatrix": copies.check_stmatrix,
    **{f"ring {case}": lambda case=case: schedule.check_ring(case, turns=4, per_turn=3, clusters=1)  # type: ignore[misc]
       for case in schedule.RINGS},
    "control": schedule.check_control, "cluster": lambda: schedule.check_cluster(1), "dependent": lambda: schedule.check_dependent(3, 1000),
    "walk": lambda: schedule.check_walk(8),
}


def main(words: list[str]) -> int:
    """Run the cases whose name begins with one of ``words``; 1 if one failed or none was found."""
    chosen = {name: check for name, check in CASES.items() if not words or any(name.startswith(word) for word in words)}
    failed = 0
    with served():
        for name, check in chosen.items():
            start = time.perf_counter()
            try:
                check()
                torch.cuda.synchronize()
                verdict = "ok"
            except AssertionError as error:
                verdict, failed = f"FAILED: {error}", failed + 1
            print(f"{name}: {verdict} ({time.perf_counter() - start:.2f} s)", flush=True)
    print(f"{len(chosen)} cases ran, {failed} failed")
    return int(failed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
