"""Expressions to Triton: ``variant_score`` and ``variant_visible`` as functions under triton.jit, for kernels rendered into a Python file.

Helpers are those of templates/attention/variant_math_triton.py.jinja, by the names that variant_math.h gives them. Arguments broadcast
against each other: rows are (rows, 1), keys (1, keys), what a request has alone is a number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernelgen.variants.emit import Body, as_float32

if TYPE_CHECKING:
    from kernelgen.variants.traced import TracedVariant

FIELDS = ("batch", "head", "kv_head", "q_index", "q_pos", "k_pos", "q_len", "kv_len")
_TYPES = {"bool": "tl.int1", "int32_t": "tl.int32", "int64_t": "tl.int64", "float": "tl.float32", "double": "tl.float64"}


def triton_functions(traced: TracedVariant, scalar: str) -> str:
    """The functions that a variant has, for kernels that compute in ``scalar`` ("float" or "double")."""
    parts = ((traced.score, scalar, "def variant_score(score, "), (traced.mask, "bool", "def variant_visible("))
    return "\n\n".join("\n".join(["@triton.jit", f"{head}{', '.join(FIELDS)}, args):", *_Body(traced, scalar).lines(result, out)])
                       for result, out, head in parts if result is not None)


class _Body(Body):
    helpers = "math_"
    quotient = "//"

    def field(self, name: str) -> str:
        return name

    def statement(self, kind: str, name: str, text: str) -> str:
        return f"    {name} = {text}"

    def returned(self, text: str) -> str:
        return f"    return {text}"

    def literal(self, value: int | float, wanted: str) -> str:
        """With its type: a number alone would take that of what stands beside it."""
        if wanted == "bool":
            text = str(bool(value))
        elif wanted in ("int32_t", "int64_t"):
            text = str(int(value))
        else:
            real = as_float32(float(value)) if wanted == "float" else float(value)
            text = repr(real) if math.isfinite(real) else f'float("{real}")'
        return f"tl.full((), {text}, {_TYPES[wanted]})"

    def converted(self, text: str, wanted: str) -> str:
        return f"(({text}) != 0)" if wanted == "bool" else f"({text}).to({_TYPES[wanted]})"

    def word(self, offset: int) -> str:
        return f"tl.load(args + {offset})"

    def chosen(self, condition: str, a: str, b: str) -> str:
        return f"tl.where({condition}, {a}, {b})"

    def negative(self, value: str, kind: str) -> str:
        """Triton's own minus is 0 - x, which loses the sign of 0."""
        return f"{value} * -1.0" if kind in ("float", "double") else f"-{value}"

    def opposite(self, value: str) -> str:
        return f"({value} == 0)"
