"""A toy kernel (y = factor * x) from an in-memory template: tests of toolchains, cache and launcher need no real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernelgen import render
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target

PARAMS = ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i64")))
CPU_TEMPLATE, CUDA_TEMPLATE = "toy/scale.cc.jinja", "toy/scale.cu.jinja"
CUTE_TEMPLATE, TRITON_TEMPLATE = "toy/scale_cute.py.jinja", "toy/scale_triton.py.jinja"
_TOOLCHAINS = {CPU_TEMPLATE: "cxx", CUDA_TEMPLATE: "nvrtc", CUTE_TEMPLATE: "cutedsl", TRITON_TEMPLATE: "triton"}
TEMPLATES = {
    CPU_TEMPLATE: """#include <cstdint>
{% if negate %}
constexpr int kFactor = -{{ factor }};
{% else %}
constexpr int kFactor = {{ factor }};
{% endif %}
struct Params { const float* x; float* y; int64_t n; };
{{ layout_assertions }}
extern "C" __attribute__((visibility("default"))) void scale(const void* p, int64_t task, void*) {
  const Params& params = *static_cast<const Params*>(p);
  params.y[task] = kFactor * params.x[task]; {{ fault }}
}
""",
    CUDA_TEMPLATE: """constexpr int kFactor = {% if negate %}-{% endif %}{{ factor }};
struct Params { const float* x; float* y; long long n; };
{{ layout_assertions }}
extern "C" __global__ void scale(const __grid_constant__ Params params) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < params.n) params.y[i] = kFactor * params.x[i]; {{ fault }}
}
""",
    CUTE_TEMPLATE: """import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from kernelgen_cute import toy_tools

{{ constants }}


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < x.shape[0]:
        y[i] = toy_tools.negative(x[i] * FACTOR, NEGATE) {{ fault }}


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    scale_kernel(x, y).launch(grid=(cute.ceil_div(x.shape[0], 128), 1, 1), block=(128, 1, 1), stream=stream)


def entries():
    n = cute.sym_int64()
    x, y = (make_fake_tensor(cutlass.Float32, (n,), (1,), assumed_align=4) for _ in range(2))
    return {"scale": (scale, (x, y, make_fake_stream(use_tvm_ffi_env_stream=True)))}
""",
    "cute/toy_tools.py": """def negative(x, wanted):
    return -x if wanted else x
""",
    TRITON_TEMPLATE: """import triton
import triton.language as tl


@triton.jit
def scale(x, y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, FACTOR * tl.load(x + at, mask=at < n) {{ fault }}, mask=at < n)


KERNEL = scale
ARGUMENTS = {{ arguments }}
POINTERS = {"x": "fp32", "y": "fp32"}
CONSTANTS = {"FACTOR": {{ -factor if negate else factor }}, "BLOCK": 128}
DIVISIBLE = {}
OPTIONS = {"num_warps": 4}
""",
}


@contextmanager
def templates(extra: dict[str, str] | None = None) -> Iterator[None]:
    """Serve the toy templates (and ``extra``) beside the real ones."""
    served = TEMPLATES | (extra or {})
    original = render.template_text
    forget = (render.render.cache_clear, render._environment.cache_clear)
    for clear in forget:
        clear()
    render.template_text = lambda path: served[path] if path in served else original(path)  # type: ignore[assignment]
    try:
        yield
    finally:
        render.template_text = original
        for clear in forget:
            clear()


def spec(target: str = "cpu", *, factor: int = 3, negate: bool = False, fault: str = "", template: str | None = None,
         flags: tuple[str, ...] = (), name: str = "toy_scale") -> KernelSpec:
    """A toy spec; ``fault`` is text put into the body."""
    where = Target.parse(target)
    path = template or (CPU_TEMPLATE if where.kind == "cpu" else CUDA_TEMPLATE)
    return KernelSpec.make(
        name, path, _TOOLCHAINS.get(path, "cxx" if where.kind == "cpu" else "nvrtc"), {"factor": factor, "negate": negate, "fault": fault},
        params=PARAMS, params_type="Params", entries=("scale",), target=where, flags=flags,
    )


def packed(x: torch.Tensor, y: torch.Tensor) -> bytes:
    return PARAMS.pointer_packer.pack(x.data_ptr(), y.data_ptr()) + PARAMS.pack_scalars({"n": x.numel()})


def run_cpu(kernel: object, n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) of one run over n elements, y poisoned before."""
    x, y = torch.randn(n), torch.full((n,), float("nan"))
    kernel.prepare(((0, n),))(packed(x, y))  # type: ignore[attr-defined]
    return x, y
