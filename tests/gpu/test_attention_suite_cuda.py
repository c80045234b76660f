"""The random attention problems of the CPU suite, from the same generator, on generated CUDA kernels."""

from __future__ import annotations

import pytest
import torch

from kernelgen.testing.attention_cases import Spec, check_many, specs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

COUNT, LONG = 3, 30  # problems of a spec, under --full


@pytest.mark.parametrize("spec", specs(120, axes={"dtype": ("bf16", "fp16", "e4m3fn")}), ids=str)
def test_random_problems(spec: Spec, request: pytest.FixtureRequest) -> None:
    check_many(spec, LONG if request.config.getoption("--full") else COUNT, "cuda")
