"""WGMMA of every N and type, both sources of a, all major orders, bit for bit against a plain product of small integers."""

from __future__ import annotations

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.testing.data import poisoned_empty, seed_of
from kernelgen.testing.sm90_units import Unit, generator

WGMMA = Unit("wgmma", ParamStruct((("a", "ptr"), ("b", "ptr"), ("d", "ptr"), ("form", "i32"), ("keep", "i32"))))
TYPES = ("bf16", "fp16", "e4m3", "e5m2")
# Every N is in one part; parts are as good as equal in work, so that several processes compile side by side.
PARTS = tuple(tuple(range(8 + 8 * i, 257, 32)) for i in range(4))
_ROWS_A, _ROWS_B, _ROW_BYTES = 128, 256, 128
# What UnitParams::form of wgmma.cu.jinja names.
FORMS = {"shared": 0, "shared, a transposed": 1, "shared, b transposed": 2, "shared, both transposed": 3, "registers": 4,
         "registers, b transposed": 6}


def forms_of(element: str) -> tuple[str, ...]:
    """fp8 tiles cannot be transposed."""
    return tuple(name for name in FORMS if DTYPES[element].bytes == 2 or "transposed" not in name)


def wgmma_spec(element: str, columns: tuple[int, ...]) -> KernelSpec:
    return WGMMA.spec(element=element, mma_columns=" ".join(str(n) for n in columns))


def check_wgmma(element: str, columns: tuple[int, ...], form: str, keep: bool) -> None:
    """d (+)= a b^T for each N of ``columns``. Sums stay below 2^13, which even the fp8 accumulator holds exactly.

    ``keep``: d holds whole numbers before; otherwise NaN, which must not reach the result. Columns past N stay NaN.
    """
    kind, depth = DTYPES[element].torch, _ROW_BYTES // DTYPES[element].bytes
    g = generator(seed_of(element, columns, form, keep))
    a, b = (torch.randint(-3, 4, (rows, depth), generator=g).to(torch.float32) for rows in (_ROWS_A, _ROWS_B))
    before = torch.randint(-99, 100, (len(columns), _ROWS_A, _ROWS_B), generator=g).to(torch.float32)
    d, exact = poisoned_empty(before.shape, device="cuda"), poisoned_empty(before.shape)
    for i, n in enumerate(columns):
        product = (a.double() @ b[:n].double().T).float()
        exact[i, :, :n] = product + before[i, :, :n] if keep else product
        if keep:
            d[i, :, :n] = before[i, :, :n].cuda()
    WGMMA.launch(wgmma_spec(element, columns), {"a": a.to(kind).cuda(), "b": b.to(kind).cuda(), "d": d},
                 {"form": FORMS[form], "keep": int(keep)}, grid=len(columns), block=256, shared_memory=(_ROWS_A + _ROWS_B) * _ROW_BYTES)
    got = d.cpu()
    for i, n in enumerate(columns):
        wrong = ((got[i] != exact[i]) & ~(got[i].isnan() & exact[i].isnan())).nonzero()
        assert not len(wrong), f"{element} N={n} {form} keep={keep}: {len(wrong)} wrong, first at {wrong[0].tolist()}: " \
                               f"got {got[i][tuple(wrong[0])]}, expected {exact[i][tuple(wrong[0])]}"
