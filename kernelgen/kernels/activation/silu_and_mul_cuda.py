"""Host side of activation/silu_and_mul_cuda: silu of the first half of each row times the second, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rowwise import MAX_BLOCKS, LanesConfig, full_access, lane_configs, legal_lanes
from kernelgen.params import ParamStruct
from kernelgen.problems.rows import SiluAndMulProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import SiluAndMulTensors
from kernelgen.verdicts import Verdict, first_no

# struct SiluAndMulParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("out", "ptr"), ("rows", "i64"), ("width", "i64"), ("x_stride", "i64"), ("out_stride", "i64"),
))
ENTRY = "silu_and_mul_cuda"

_DTYPES = ("fp32", "bf16", "fp16")
_MAX_BLOCKS_Y = 65535


def _access(problem: SiluAndMulProblem) -> int:
    """Elements of one access, of either half of a row."""
    return full_access(problem.dtype, problem.alignment, problem.width)


def supports(problem: SiluAndMulProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"silu_and_mul_cuda needs sm_80 or later, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.rows <= MAX_BLOCKS, f"{p.rows} rows exceed the grid's {MAX_BLOCKS}"),
    )


def candidates(problem: SiluAndMulProblem, target: Target) -> Iterator[LanesConfig]:
    return lane_configs(-(-problem.width // _access(problem)), 256, (8, 32, 128, 256))


def spec(problem: SiluAndMulProblem, target: Target, config: LanesConfig) -> KernelSpec:
    """The specialisation: dtype, access width and config."""
    vector = _access(problem)
    parameters: dict[str, Any] = dict(
        element=DTYPES[problem.dtype].cuda, threads=config.threads, lanes=config.lanes, vector=vector)
    return KernelSpec.make(
        f"silu_and_mul_cuda_{problem.dtype}_v{vector}_{'_'.join(str(config).split())}",
        "activation/silu_and_mul_cuda.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::SiluAndMulParams", entries=(ENTRY,), target=target)


def bind(
    problem: SiluAndMulProblem, config: LanesConfig, kernel: Any, tensors: SiluAndMulTensors,
) -> Callable[[SiluAndMulTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    blocks = config.blocks(problem.rows)
    columns = min(-(-problem.width // (config.lanes * _access(problem))), _MAX_BLOCKS_Y)
    launch = kernel.prepare(tensors.x.device.index or 0, grid=(blocks, columns, 1), block=(config.threads, 1, 1))
    tail = PARAMS.pack_scalars({
        "rows": problem.rows, "width": problem.width, "x_stride": tensors.x.stride(0), "out_stride": tensors.out.stride(0)})
    pack = PARAMS.pointer_packer.pack

    def run(t: SiluAndMulTensors) -> None:
        launch(pack(t.x.data_ptr(), t.out.data_ptr()) + tail)

    return run


def coverage() -> Iterable[tuple[SiluAndMulProblem, LanesConfig | None]]:
    """Problems that together reach every branch of the template."""
    base = SiluAndMulProblem(64, 4096, "bf16")
    yield base, None
    yield replace(base, width=40, dtype="fp16"), None
    yield replace(base, width=1001, dtype="fp32", alignment=4), None


FAMILY = KernelFamily(
    name="activation/silu_and_mul_cuda", op="silu_and_mul", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal_lanes, spec=spec, bind=bind, coverage=coverage,
)
