"""The launcher on a GPU: load and launch, streams, devices and threads, graph capture, TMA, clusters, and the fallback.

The kernels are tiny and rendered from templates in memory, so a failure here is the pipeline's and not a kernel's.
``specs`` is also compiled by tests/cpu, for sm_90a: a GPU host never meets one that NVRTC refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.errors import LaunchError
from kernelgen.launch.cuda import CudaKernel, TensorMapRecipe
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.testing import toy
from kernelgen.testing.data import poisoned_empty, random_tensor

_HEAD = "using uint32_t = unsigned int;\nusing uint64_t = unsigned long long;\n"

# Each block copies through dynamic shared memory in reverse order; the whole buffer must be there.
SHARED = """struct Params { const float* x; float* y; int n; };
{{ layout_assertions }}
extern "C" __global__ void reverse(const __grid_constant__ Params params) {
  extern __shared__ float buffer[];
  for (int i = threadIdx.x; i < params.n; i += blockDim.x) buffer[params.n - 1 - i] = params.x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < params.n; i += blockDim.x) params.y[i] = buffer[i];
}
"""

# Every block writes (size of its cluster, its rank, the number that its neighbour in the cluster left in shared memory).
CLUSTER = _HEAD + """struct Params { int* out; };
{{ layout_assertions }}
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\\n\\tbarrier.cluster.wait.aligned;" ::: "memory");
}
extern "C" __global__ void cluster_ranks(const __grid_constant__ Params params) {
  __shared__ int mine;
  uint32_t size, rank;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) mine = 1000 + static_cast<int>(blockIdx.x);
  cluster_barrier();  // every block's number is written before a neighbour reads it
  if (threadIdx.x == 0) {
    uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(&mine)), remote, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"((rank + 1) % size));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    int* out = params.out + 3 * blockIdx.x;
    out[0] = static_cast<int>(size), out[1] = static_cast<int>(rank), out[2] = static_cast<int>(value);
  }
  cluster_barrier();  // no block leaves while a neighbour still reads its shared memory
}
"""

# One 2-D box by TMA into shared memory, then out to a dense (grid_y * kRows, grid_x * kColumns) matrix.
TMA = _HEAD + """constexpr int kRows = {{ rows }}, kColumns = {{ columns }};
struct alignas(64) TensorMap { char bytes[128]; };
struct Params { TensorMap map; const float* source; float* out; int pitch; };
{{ layout_assertions }}
extern "C" __global__ void tma_tile(const __grid_constant__ Params params) {
  __shared__ alignas(128) float tile[kRows * kColumns];
  __shared__ alignas(8) uint64_t barrier;
  uint32_t bar = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  int x = blockIdx.x * kColumns, y = blockIdx.y * kRows;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    // The TMA unit is another proxy: it must see the initialised barrier.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(int(sizeof(tile))) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, { %2, %3 }], [%4];"
        ::"r"(target), "l"(&params.map), "r"(x), "r"(y), "r"(bar)
        : "memory");
  }
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\\n\\t.reg .pred p;\\n\\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\\n\\tselp.u32 %0, 1, 0, p;\\n\\t}"
        : "=r"(done) : "r"(bar) : "memory");
  for (int i = threadIdx.x; i < kRows * kColumns; i += blockDim.x)
    params.out[(y + i / kColumns) * static_cast<long long>(params.pitch) + x + i % kColumns] = tile[i];
}
"""

# y = x + 1 behind the programmatic dependency: what the kernel before wrote must be visible.
DEPENDENT = """struct Params { const float* x; float* y; long long n; };
{{ layout_assertions }}
extern "C" __global__ void add_one(const __grid_constant__ Params params) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i < params.n) params.y[i] = params.x[i] + 1.0f;
}
"""

TEMPLATES = {
    "pipeline/shared.cu.jinja": SHARED, "pipeline/cluster.cu.jinja": CLUSTER, "pipeline/tma.cu.jinja": TMA,
    "pipeline/dependent.cu.jinja": DEPENDENT,
}
ROWS, COLUMNS = 16, 32  # the TMA box, in elements
PARAMS = {
    "shared": ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i32"))),
    "cluster": ParamStruct((("out", "ptr"),)),
    "tma": ParamStruct((("source", "ptr"), ("out", "ptr"), ("pitch", "i32")), tensor_maps=("map",)),
    "dependent": ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i64"))),
}
_ENTRIES = {"shared": "reverse", "cluster": "cluster_ranks", "tma": "tma_tile", "dependent": "add_one"}


def spec_of(name: str, target: Target) -> KernelSpec:
    """The spec of one of TEMPLATES."""
    parameters = {"rows": ROWS, "columns": COLUMNS} if name == "tma" else {}
    return KernelSpec.make(f"pipeline_{name}", f"pipeline/{name}.cu.jinja", "nvrtc", parameters, params=PARAMS[name],
                           params_type="Params", entries=(_ENTRIES[name],), target=target)


def specs(target: Target) -> list[KernelSpec]:
    """Every kernel of this file for ``target`` (under ``toy.templates(TEMPLATES)``)."""
    return [toy.spec(str(target)), *(spec_of(name, target) for name in _ENTRIES)]


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


needs_sm90 = pytest.mark.skipif(
    _capability() < 90, reason=f"needs sm_90 or later, got {f'sm_{_capability()}' if _capability() else 'no CUDA device'}")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def served(fresh_cache: Path) -> Iterator[None]:
    """The in-memory templates, and a cache folder of this test's own."""
    with toy.templates(TEMPLATES):
        yield


@pytest.fixture(params=["launcher", "fallback"])
def load(request: pytest.FixtureRequest, served: None) -> Callable[[KernelSpec], CudaKernel]:
    """Load a spec for the C++ launcher, or for the fallback through cuda-core: handle 0 selects it."""
    if request.param == "fallback":
        pytest.importorskip("cuda.core", reason="the fallback needs cuda-core")

    def loaded(spec: KernelSpec) -> CudaKernel:
        kernel = build.kernel(spec)
        assert isinstance(kernel, CudaKernel) and kernel.handle != 0
        return replace(kernel, handle=0) if request.param == "fallback" else kernel

    return loaded


def here() -> Target:
    return target_of("cuda")


def scale_spec(factor: int = 3) -> KernelSpec:
    return toy.spec(str(here()), factor=factor, name=f"toy_scale_{factor}")


def scale_kernel(factor: int = 3) -> CudaKernel:
    kernel = build.kernel(scale_spec(factor))
    assert isinstance(kernel, CudaKernel)
    return kernel


def prepare_scale(kernel: CudaKernel, n: int, device: int = 0) -> Callable[[bytes], None]:
    return kernel.prepare(device, grid=(-(-n // 256), 1, 1), block=(256, 1, 1))


def test_launch_gives_the_numbers(load: Callable[[KernelSpec], CudaKernel], seed: int) -> None:
    x = random_tensor((1003,), seed=seed, device="cuda")
    y = poisoned_empty((1003,), device="cuda")
    prepare_scale(load(scale_spec()), 1003)(toy.packed(x, y))
    assert torch.equal(y, 3 * x)


def test_launch_uses_the_current_stream(load: Callable[[KernelSpec], CudaKernel], seed: int) -> None:
    """On a side stream behind a long wait: a launch on another stream would read x before it is written."""
    launch, stream = prepare_scale(load(scale_spec()), 1003), torch.cuda.Stream()
    want = random_tensor((1003,), seed=seed, device="cuda")
    x, y = torch.zeros(1003, device="cuda"), poisoned_empty((1003,), device="cuda")
    launch(toy.packed(x, y))  # loads lazily here, so that nothing below waits for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(want)
        launch(toy.packed(x, y))
    stream.synchronize()
    assert torch.equal(y, 3 * want)


def test_launch_from_a_thread_without_a_context(served: None, seed: int) -> None:
    """A new thread has no current context; the null stream belongs to whatever context is current."""
    launch = prepare_scale(scale_kernel(), 1003)
    x, y = random_tensor((1003,), seed=seed, device="cuda"), poisoned_empty((1003,), device="cuda")
    params, failures = toy.packed(x, y), []

    def work() -> None:
        try:
            launch(params)
        except LaunchError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures and torch.equal(y, 3 * x)


@needs_two_gpus
@pytest.mark.parametrize("side_stream", [False, True])
def test_launch_on_a_device_that_is_not_current(load: Callable[[KernelSpec], CudaKernel], side_stream: bool, seed: int) -> None:
    """The work runs on the tensors' device, whichever is current, and the current one stays current."""
    kernel = load(scale_spec())
    stream = torch.cuda.Stream("cuda:1") if side_stream else torch.cuda.default_stream("cuda:1")
    x, y = random_tensor((1003,), seed=seed, device="cuda:1"), poisoned_empty((1003,), device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)
        try:
            prepare_scale(kernel, 1003, device=1)(toy.packed(x, y))
            assert torch.cuda.current_device() == 0
            assert torch.equal(torch.zeros(2, device="cuda") + 1, torch.ones(2, device="cuda"))
        finally:
            torch.cuda.synchronize("cuda:1")
    assert torch.equal(y, 3 * x)


def test_an_empty_grid_launches_nothing(load: Callable[[KernelSpec], CudaKernel]) -> None:
    y = poisoned_empty((8,), device="cuda")
    load(scale_spec()).prepare(0, grid=(0, 1, 1), block=(256, 1, 1))(toy.packed(y, y))
    assert bool(torch.isnan(y).all())


def test_a_refused_launch_names_the_driver_error_and_leaves_the_device_usable(
    load: Callable[[KernelSpec], CudaKernel], seed: int,
) -> None:
    x, y = random_tensor((1003,), seed=seed, device="cuda"), poisoned_empty((1003,), device="cuda")
    kernel = load(scale_spec())
    with pytest.raises(LaunchError, match="cuLaunchKernelEx.*CUDA_ERROR_INVALID_VALUE"):
        kernel.prepare(0, grid=(1, 1, 1), block=(2048, 1, 1))(toy.packed(x, y))
    prepare_scale(kernel, 1003)(toy.packed(x, y))
    assert torch.equal(y, 3 * x)


def test_parameters_of_the_wrong_size_are_refused(served: None) -> None:
    with pytest.raises(LaunchError, match="got 8 bytes of parameters, expected 24"):
        prepare_scale(scale_kernel(), 8)(bytes(8))


@pytest.mark.parametrize("kib", [16, 48, 96])
def test_dynamic_shared_memory(load: Callable[[KernelSpec], CudaKernel], kib: int, seed: int) -> None:
    """Above 48 KiB a kernel has to ask for it, once per device."""
    n = kib * 256
    x, y = random_tensor((n,), seed=seed, device="cuda"), poisoned_empty((n,), device="cuda")
    launch = load(spec_of("shared", here())).prepare(0, grid=(1, 1, 1), block=(256, 1, 1), shared_memory=kib * 1024)
    packer = PARAMS["shared"]
    launch(packer.pointer_packer.pack(x.data_ptr(), y.data_ptr()) + packer.pack_scalars({"n": n}))
    assert torch.equal(y, x.flip(0))


def test_too_much_shared_memory_is_a_launch_error(load: Callable[[KernelSpec], CudaKernel]) -> None:
    with pytest.raises(LaunchError, match="cuKernelSetAttribute"):
        load(spec_of("shared", here())).prepare(0, grid=(1, 1, 1), block=(256, 1, 1), shared_memory=1024 * 1024)


@needs_sm90
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cluster_launch(load: Callable[[KernelSpec], CudaKernel], size: int) -> None:
    blocks = 8
    out = torch.full((blocks, 3), -1, dtype=torch.int32, device="cuda")
    launch = load(spec_of("cluster", here())).prepare(0, grid=(blocks, 1, 1), block=(32, 1, 1), cluster=(size, 1, 1))
    launch(PARAMS["cluster"].pointer_packer.pack(out.data_ptr()))
    want = [[size, b % size, 1000 + b // size * size + (b % size + 1) % size] for b in range(blocks)]
    assert out.tolist() == want


def _tma_launch(kernel: CudaKernel, source: torch.Tensor, grid: tuple[int, int, int]) -> tuple[Callable[[bytes], None], Any]:
    rows, columns = source.shape
    recipe = TensorMapRecipe(
        "map", "source", data_type=7, dims=(columns, rows), strides=(source.stride(0) * 4,), box=(COLUMNS, ROWS), swizzle=0)
    launch = kernel.prepare(0, grid=grid, block=(128, 1, 1), tensor_maps=(recipe,))
    packer = PARAMS["tma"]

    def packed(out: torch.Tensor) -> bytes:
        # The descriptor's 128 bytes come first; the launcher encodes them there.
        pointers = packer.pointer_packer.pack(source.data_ptr(), out.data_ptr())
        return bytes(128) + pointers + packer.pack_scalars({"pitch": out.stride(0)})

    return launch, packed


@needs_sm90
@pytest.mark.parametrize("rows, columns", [(16, 32), (48, 96), (37, 76)])
def test_tma_tile(load: Callable[[KernelSpec], CudaKernel], rows: int, columns: int, seed: int) -> None:
    """A strided matrix by TMA boxes: what lies outside is filled with 0, also past the last row and column."""
    wide = random_tensor((rows, columns + 4), seed=seed, device="cuda")
    wide[:, columns:] = float("nan")  # inside the pitch, outside the tensor
    grid = (-(-columns // COLUMNS), -(-rows // ROWS), 1)
    out = poisoned_empty((grid[1] * ROWS, grid[0] * COLUMNS), device="cuda")
    launch, packed = _tma_launch(load(spec_of("tma", here())), wide[:, :columns], grid)
    launch(packed(out))
    want = torch.zeros_like(out)
    want[:rows, :columns] = wide[:, :columns]
    assert torch.equal(out, want)


@needs_sm90
def test_tensor_map_follows_the_pointer_of_each_call(load: Callable[[KernelSpec], CudaKernel], seed: int) -> None:
    """The same prepared launch on another tensor: the descriptor must not be remembered."""
    first, second = (random_tensor((16, 32), seed=seed + i, device="cuda") for i in range(2))
    launch, packed = _tma_launch(load(spec_of("tma", here())), first, (1, 1, 1))
    out = poisoned_empty((2, 16, 32), device="cuda")
    launch(packed(out[0]))
    params = bytearray(packed(out[1]))
    params[128:136] = second.data_ptr().to_bytes(8, "little")
    launch(bytes(params))
    assert torch.equal(out[0], first) and torch.equal(out[1], second)


@needs_sm90
def test_a_tensor_map_that_the_driver_refuses_is_a_launch_error(load: Callable[[KernelSpec], CudaKernel]) -> None:
    odd = torch.zeros(16, 33, device="cuda")[:, :32]  # a pitch of 132 bytes is no multiple of 16
    launch, packed = _tma_launch(load(spec_of("tma", here())), odd, (1, 1, 1))
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled"):
        launch(packed(poisoned_empty((16, 32), device="cuda")))


@needs_sm90
def test_programmatic_dependent_launch_keeps_the_order(load: Callable[[KernelSpec], CudaKernel]) -> None:
    n, steps = 1 << 16, 50
    launch = load(spec_of("dependent", here())).prepare(0, grid=(n // 256, 1, 1), block=(256, 1, 1), programmatic=True)
    buffers = [torch.zeros(n, device="cuda"), poisoned_empty((n,), device="cuda")]
    for i in range(steps):
        x, y = buffers[i % 2], buffers[(i + 1) % 2]
        launch(toy.packed(x, y))
    assert torch.equal(buffers[steps % 2], torch.full((n,), float(steps), device="cuda"))


@pytest.mark.parametrize("cached", [False, True])
def test_first_build_and_launch_inside_a_capture(served: None, cached: bool, seed: int) -> None:
    """Loading a module is forbidden in a strict capture; the launcher relaxes the mode for the load alone."""
    if cached:
        build.build(scale_spec(7))
    x, y = random_tensor((1003,), seed=seed, device="cuda"), poisoned_empty((1003,), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare_scale(scale_kernel(7), 1003)(toy.packed(x, y))
    assert bool(torch.isnan(y).all()), "captured work must not run before the replay"
    graph.replay()
    assert torch.equal(y, 7 * x)
    x.mul_(2)
    graph.replay()
    assert torch.equal(y, 7 * x)


# Case A37: the first use of an op in the process happens while a CUDA graph is captured.
FIRST_USE = """
import torch, kernelgen
torch.manual_seed(37)
a, b = torch.randn(64, 128, device="cuda").bfloat16(), torch.randn(128, 256, device="cuda").bfloat16()
q, k, v = (torch.randn(1, 128, 2, 64, device="cuda").bfloat16() for _ in range(3))
product = torch.full((64, 256), float("nan"), device="cuda", dtype=torch.bfloat16)
mixed = torch.full_like(q, float("nan"))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kernelgen.gemm(a, b, out=product, backend="generated")
    kernelgen.attention(q, k, v, causal=True, out=mixed, backend="generated")
assert product.isnan().all() and mixed.isnan().all()
graph.replay()
torch.cuda.synchronize()
want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).float() for t in (q, k, v)), is_causal=True)
torch.testing.assert_close(product.float(), a.float() @ b.float(), rtol=2e-2, atol=5e-2)
torch.testing.assert_close(mixed.float(), want.transpose(1, 2), rtol=2e-2, atol=2e-2)
# The stream and the capture state are usable: another capture, and an eager call.
again = torch.cuda.CUDAGraph()
with torch.cuda.graph(again):
    doubled = a * 2
again.replay()
assert torch.equal(doubled, a * 2)
eager = kernelgen.gemm(a, b, backend="generated")
assert torch.equal(eager, product)
from kernelgen.build import reports
print("kernels", len(reports()), "compiled", sum(r.compiled for r in reports()))
"""


def test_a37_first_use_of_public_ops_inside_a_capture(fresh_process: Callable[..., str], tmp_path: Path) -> None:
    """DeepGEMM issue 443: first a cold cache, then a warm disk cache in another process."""
    for expected in ("all", "none"):
        words = fresh_process(FIRST_USE, cache=tmp_path / "shared").split()
        assert words[-4::2] == ["kernels", "compiled"], words
        kernels, compiled = words[-3::2]
        assert int(kernels) >= 2 and int(compiled) == (int(kernels) if expected == "all" else 0)


def test_threads_share_one_build(served: None, seed: int) -> None:
    """Eight threads ask for one new kernel at once: one is built, all get it, all launch."""
    found: list[CudaKernel] = []
    gate = threading.Barrier(8)
    x = random_tensor((1003,), seed=seed, device="cuda")
    outs = [poisoned_empty((1003,), device="cuda") for _ in range(8)]

    def work(i: int) -> None:
        gate.wait()
        kernel = scale_kernel(11)
        found.append(kernel)
        prepare_scale(kernel, 1003)(toy.packed(x, outs[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 8 and all(kernel is found[0] for kernel in found)
    assert all(torch.equal(out, 11 * x) for out in outs)
