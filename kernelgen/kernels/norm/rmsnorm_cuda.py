"""Host side of norm/rmsnorm_cuda: row-wise RMS normalisation with an optional residual, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rowwise import MAX_BLOCKS, full_access
from kernelgen.params import ParamStruct
from kernelgen.problems.rows import RmsNormProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import RmsNormTensors
from kernelgen.verdicts import Verdict, first_no

# struct RmsNormParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("weight", "ptr"), ("out", "ptr"), ("residual", "ptr"),
    ("rows", "i64"), ("width", "i64"), ("x_stride", "i64"), ("out_stride", "i64"), ("residual_stride", "i64"),
    ("eps", "f32"),
))
ENTRY = "rmsnorm_cuda"

_DTYPES = ("fp32", "bf16", "fp16")
_REGISTERS_PER_SM = 65536
_OTHER_REGISTERS = 32  # besides the kept floats; with it ptxas 13.0 spills in no config of _SHAPES


@dataclass(frozen=True)
class Config:
    """``lanes`` of a block's ``threads`` own a row; ``kept`` vectors of it per thread stay in registers (0: any width)."""

    threads: int
    lanes: int
    kept: int

    def __str__(self) -> str:
        return f"t{self.threads} l{self.lanes} k{self.kept}"


def _access(problem: RmsNormProblem) -> int:
    """Elements of one access of x; a vector."""
    return full_access(problem.dtype, problem.alignment, problem.width)


def supports(problem: RmsNormProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"rmsnorm_cuda needs sm_80 or later, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.weight_dtype in _DTYPES, f"weight dtype {p.weight_dtype} is not one of {', '.join(_DTYPES)}"),
        (p.rows <= MAX_BLOCKS, f"{p.rows} rows exceed the grid's {MAX_BLOCKS}"),
    )


def legal(problem: RmsNormProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem: a row within the kept registers, lanes a warp or the block?"""
    c = config
    held = c.lanes * c.kept * _access(problem)
    registers = c.kept * _access(problem) + _OTHER_REGISTERS
    return first_no(
        (c.threads % 32 == 0 and c.threads <= 1024, f"{c.threads} threads are not 1 to 32 whole warps"),
        (c.lanes in (32, c.threads), f"{c.lanes} lanes are neither a warp nor the block of {c.threads}"),
        (c.kept == 0 or held >= problem.width, f"config {c} keeps {held} elements of a row of {problem.width}"),
        (registers <= _REGISTERS_PER_SM // c.threads,
         f"config {c} needs about {registers} registers, {c.threads} threads have {_REGISTERS_PER_SM // c.threads} each"),
    )


# Narrow rows: a warp each, four to a block. Wider rows: the smallest block that keeps the row with few vectors each, so
# that the loads of one thread are in flight together.
_SHAPES = ((128, 32, 1), (128, 32, 2), (128, 32, 4), (128, 128, 2), (256, 256, 2), (256, 256, 4), (512, 512, 4), (1024, 1024, 4),
           (1024, 1024, 8), (1024, 1024, 0))


def candidates(problem: RmsNormProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    for shape in _SHAPES:
        config = Config(*shape)
        if (config.kept == 0 or _access(problem) > 1) and legal(problem, target, config):
            yield config


def spec(problem: RmsNormProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, residual, access width and config; not the width."""
    p, c = problem, config
    vector = _access(p)
    words = [p.dtype, *([f"w_{p.weight_dtype}"] if p.weight_dtype != p.dtype else []), *(["residual"] if p.residual else []),
             f"v{vector}", *str(c).split()]
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.dtype].cuda, weight=DTYPES[p.weight_dtype].cuda, residual=p.residual, threads=c.threads,
        lanes=c.lanes, vector=vector, kept=c.kept)
    return KernelSpec.make(
        "rmsnorm_cuda_" + "_".join(words), "norm/rmsnorm_cuda.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::RmsNormParams", entries=(ENTRY,), target=target)


def _tail(problem: RmsNormProblem, t: RmsNormTensors) -> bytes:
    return PARAMS.pack_scalars({
        "rows": problem.rows, "width": problem.width, "x_stride": t.x.stride(0), "out_stride": t.out.stride(0),
        "residual_stride": t.residual.stride(0) if t.residual is not None else 0, "eps": t.eps})


def bind(problem: RmsNormProblem, config: Config, kernel: Any, tensors: RmsNormTensors) -> Callable[[RmsNormTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    blocks = -(-problem.rows // (config.threads // config.lanes)) if problem.width else 0
    launch = kernel.prepare(tensors.x.device.index or 0, grid=(blocks, 1, 1), block=(config.threads, 1, 1))
    tail = _tail(problem, tensors)
    pack = PARAMS.pointer_packer.pack
    residual = problem.residual

    def run(t: RmsNormTensors) -> None:
        launch(pack(t.x.data_ptr(), t.weight.data_ptr(), t.out.data_ptr(),
                    t.residual.data_ptr() if residual else 0) + tail)  # type: ignore[union-attr]

    return run


def coverage() -> Iterable[tuple[RmsNormProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = RmsNormProblem(64, 4096, "bf16", "bf16")
    yield base, None
    yield replace(base, residual=True), None
    yield replace(base, width=256, dtype="fp16", weight_dtype="fp32", residual=True), None
    yield replace(base, width=128 * 1024, dtype="fp32", weight_dtype="fp32", residual=True), None
    yield replace(base, width=1001, alignment=2, residual=True), None


FAMILY = KernelFamily(
    name="norm/rmsnorm_cuda", op="rmsnorm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
