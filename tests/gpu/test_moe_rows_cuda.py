"""moe/sort_cuda, permute_cuda and unpermute_cuda on a GPU: the cases of the emulated test, sizes that fill the chip, repeats, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.moe import permute_cuda, sort_cuda, unpermute_cuda
from kernelgen.targets import target_of
from kernelgen.testing.data import random_tensor
from kernelgen.testing.moe_cases import PERMUTES, SORTS, UNPERMUTES, Rows, Sort, run_permute, run_sort, run_unpermute
from kernelgen.testing.tolerance import assert_bits_equal

LARGE = {
    "4096 tokens": Sort(4096, 8, 256), "32768 tokens": Sort(32768, 8, 128, "mixed"), "skewed": Sort(9001, 8, 256, "one"),
    "qwen3 next": Sort(4099, 10, 512, "repeated"), "1024 experts": Sort(5000, 8, 1024, "mixed", "int64", "table"),
}


@pytest.mark.parametrize("name", [*SORTS, *LARGE])
def test_sort(name: str) -> None:
    case = (SORTS | LARGE)[name]
    for config in (None, sort_cuda.Config(4, alone=0)):
        run_sort(case, sort_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda", config)


@pytest.mark.parametrize("name", PERMUTES)
def test_permute(name: str) -> None:
    run_permute(PERMUTES[name], permute_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")


@pytest.mark.parametrize("name", UNPERMUTES)
def test_unpermute(name: str) -> None:
    run_unpermute(UNPERMUTES[name], unpermute_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_large_rows(dtype: str) -> None:
    for case in (Rows(600, 8, 7168, dtype), Rows(600, 8, 7168, dtype, addend=True)):
        run_unpermute(case, unpermute_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")
    run_permute(replace(PERMUTES["codes"], tokens=300, width=7168, scales=56), permute_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")


def test_c18_rows_beyond_32_bits() -> None:
    """1,525,300 rows of 2,816: their product passes 2^32, and the last rows are where they belong."""
    tokens, k, width = 152_530, 10, 2_816
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    ids = torch.arange(tokens * k, dtype=torch.int32, device="cuda").view(tokens, k) % 64
    x = random_tensor((tokens, 1), torch.bfloat16, seed=1, device="cuda").expand(tokens, width).contiguous()
    sort = kernelgen.moe_sort(ids, 64, backend="generated")
    rows = kernelgen.moe_permute(x, sort, backend="generated")
    assert_bits_equal(rows[-1000:], x[sort.token_of_row[-1000:].long()], what="the last rows")
    back = kernelgen.moe_unpermute(rows, sort, None, backend="generated")
    assert_bits_equal(back[-1000:], (x[-1000:].float() * k).to(torch.bfloat16), what="the last tokens")


def test_repeats_and_graphs() -> None:
    """1,000 sorts give equal bits; a captured round trip follows new ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 128, (1500, 8), generator=generator, dtype=torch.int32).cuda()
    x, weights = random_tensor((1500, 512), torch.bfloat16, seed=1, device="cuda"), random_tensor((1500, 8), seed=2, device="cuda")

    def there_and_back() -> torch.Tensor:
        sort = kernelgen.moe_sort(ids, 128, backend="generated")
        return kernelgen.moe_unpermute(kernelgen.moe_permute(x, sort, backend="generated"), sort, weights, backend="generated")

    first = kernelgen.moe_sort(ids, 128, backend="generated")
    for _ in range(1000):
        again = kernelgen.moe_sort(ids, 128, backend="generated")
        assert all(torch.equal(a, b) for a, b in zip(again, first))
    there_and_back()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = there_and_back()
    ids.copy_(torch.randint(-1, 128, (1500, 8), generator=generator, dtype=torch.int32))
    graph.replay()
    replayed = captured.clone()
    assert_bits_equal(replayed, there_and_back(), what="replayed on new ids")
