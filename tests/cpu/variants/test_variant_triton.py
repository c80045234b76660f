"""The Triton text of traced variants: every case of test_variant_functions.py by Triton's interpreter against the Python function, and as
machine code. Triton is imported in processes of their own: run as a script, this file computes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen.cache.keys import Request
from kernelgen.dispatch.libraries import Library, release
from kernelgen.params import ParamStruct
from kernelgen.reference.masks import Grid, Variant, variant_context
from kernelgen.render import render
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing import toy
from kernelgen.testing.data import random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference
from kernelgen.toolchains import toolchain
from kernelgen.variants import argument_words, trace, variant
from kernelgen.variants.triton_text import FIELDS, triton_functions


def _beside(name: str) -> Any:
    """A module of this folder, which is no package."""
    found = importlib.util.spec_from_file_location(f"{name}_of_triton", Path(__file__).with_name(f"{name}.py"))
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


cases = _beside("test_variant_functions")
COUNT = cases.COUNT
ALL = {name: v for name, v in cases.ALL.items() if not name.startswith("integers_") or int(name.split("_")[1]) < 20}
FOUND = Library("triton", "triton").version()
KERNEL = '''import triton
import triton.language as tl
from triton.language.extra import libdevice
{% include "attention/variant_math_triton.py.jinja" %}


{{ functions }}


@triton.jit
def evaluate(scores, out, seen, contexts, words, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    score = tl.load(scores + i)
{{ calls }}


KERNEL = evaluate
ARGUMENTS = {{ arguments }}
POINTERS = {"scores": "fp32", "out": "fp32", "seen": "u8", "contexts": "i32", "words": "i64"}
CONSTANTS = {"COUNT": 128}
DIVISIBLE = {}
OPTIONS = {}
'''
_FIELDS = ", ".join(f"tl.load(contexts + i * {len(FIELDS)} + {n})" for n in range(len(FIELDS)))


def _calls(v: Variant, suffix: str, at: str) -> str:
    """Statements that evaluate a variant whose functions end in a suffix, and store at an offset."""
    score = f"variant_score{suffix}(score, {_FIELDS}, words)" if v.score is not None else "score"
    seen = f"variant_visible{suffix}({_FIELDS}, words)" if v.mask is not None else "(i >= 0)"
    return (f"    tl.store(out + i + {at}, tl.broadcast_to({score}, (COUNT,)))\n"
            f"    tl.store(seen + i + {at}, tl.broadcast_to({seen}, (COUNT,)).to(tl.uint8))")


def _spec(functions: str, calls: str) -> KernelSpec:
    params = ParamStruct(tuple((name, "ptr") for name in ("scores", "out", "seen", "contexts", "words")))
    return KernelSpec.make("variants", "toy/variants.py.jinja", "triton", {"functions": functions, "calls": calls}, params=params,
                           params_type="", entries=("evaluate",), target=Target.parse("sm_90a"))


@cache
def _rendered() -> str:
    with toy.templates({"toy/variants.py.jinja": KERNEL}):
        return render(_spec("# functions", "# calls")).text


def _text(functions: str, calls: str) -> str:
    return _rendered().replace("# functions", functions).replace("# calls", calls)


def _run(v: Variant, grid: Grid, scores: torch.Tensor, folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    from kernelgen.testing.interpreted import Libdevice

    traced = trace(v)
    path = folder / f"{name}_{scores.element_size()}.py"
    path.write_text(_text(triton_functions(traced, "double" if scores.dtype == torch.float64 else "float"), _calls(v, "", "0")))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module  # Triton looks for the source of its functions
    found.loader.exec_module(module)
    module.libdevice = Libdevice()
    contexts = torch.stack([getattr(grid, field) for field in FIELDS], 1).int()
    words = torch.tensor(argument_words(v, traced) or [0], dtype=torch.int64)
    out, seen = torch.empty_like(scores), torch.empty(scores.shape, dtype=torch.uint8)
    module.KERNEL[(1,)](scores, out, seen, contexts, words, COUNT=scores.numel())
    return out, seen.bool()


def _check(name: str, folder: Path) -> None:
    seed = seed_of("variants", name)
    v, grid = ALL[name], cases._grid(seed)
    scores = random_tensor((COUNT,), torch.float32, seed=seed, scale=2.0)
    scores[: len(cases.AWKWARD)] = torch.tensor(cases.AWKWARD)
    exact, plain = cases._by_torch(v, grid, scores.double())[:, None], cases._by_torch(v, grid, scores)[:, None].double()
    for dtype in (torch.float32, torch.float64):
        out, seen = _run(v, grid, scores.to(dtype), folder, name)
        assert_close_to_reference(out[:, None].double(), exact, plain, what=f"{name} in {dtype}", seed=seed,
                                  out_dtype=torch.float32 if name in cases.FLOAT32_FUNCTIONS else dtype)
        expected = torch.tensor(True) if v.mask is None else v.mask(variant_context(v, grid, dtype))
        assert torch.equal(seen, expected.expand(COUNT)), f"{name}: seed {seed}"


def _check_indices(folder: Path) -> None:
    """Outside of a tensor the nearest element is read, and a division by zero is zero."""
    v, grid = ALL["bias_4d"], cases._grid(1)
    wild = Grid(**{**vars(grid), "batch": grid.batch + 10**9, "head": grid.head - 2 * 10**9})
    out, _ = _run(v, wild, torch.zeros(COUNT), folder, "wild")
    torch.testing.assert_close(out, v.tensors["bias"][cases.BATCH - 1, 0, grid.k_pos % 5, grid.q_index % 4], rtol=0, atol=0)
    zero = variant(ALL["scalar_division"].score, scalars={"n": 0, "m": 0})
    out, _ = _run(zero, cases._grid(2), torch.ones(COUNT), folder, "zero")
    assert bool((out == 1).all())


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in (*ALL, ""):
            try:
                _check(case, folder) if case else _check_indices(folder)
            except Exception:  # noqa: BLE001 (the others are run all the same; the test shows every one)
                failed += 1
                print(f"FAILED {case}\n{traceback.format_exc()}")
    print(f"{len(ALL) + 1 - failed} right, {failed} wrong")
    return int(failed > 0)


@pytest.mark.skipif(FOUND is None or release(FOUND) < (3, 7), reason="the interpreter of Triton 3.6 does not run with NumPy 2.4")
def test_text_computes_what_the_function_computes() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " right, 0 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(FOUND is None, reason="needs triton")
def test_text_compiles(tmp_path: Path) -> None:
    """Every helper is called by one of these."""
    names = [*cases.LIBRARY, "activations", "integer_tensors", "integer_division", "division_by_values", "float_division", "fmod", "powers",
             "power_of_number", "shifts", "exponentials", "logarithms", "trigonometry", "hyperbolic", "tan", "softplus", "rounding",
             "tests", "casts", "minimum", "scalars", "wide_integers", "bias_bf16", "bias_fp16", "bias_fp64", "bias_from_the_end", "roots",
             "constants"]
    functions = [triton_functions(trace(ALL[name]), "float").replace("def variant_score(", f"def variant_score_{name}(")
                 .replace("def variant_visible(", f"def variant_visible_{name}(") for name in names]
    calls = [_calls(ALL[name], f"_{name}", f"{n} * COUNT") for n, name in enumerate(names)]
    spec = _spec("\n\n".join(functions), "\n".join(calls))
    with toy.templates({"toy/variants.py.jinja": KERNEL}):
        source = render(spec)
    triton = toolchain("triton")
    (tmp_path / source.file_name).write_text(source.text)
    triton.compile(source, Request("variants", source.text, source.includes, triton.flags(spec.target), str(spec.target)), tmp_path)
    assert (tmp_path / "kernel.cubin").stat().st_size > 0


if __name__ == "__main__":
    sys.exit(main())
