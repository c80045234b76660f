"""Random attention problems on generated CPU kernels, every layout and feature: half of the specs (the other half is beside)."""

from __future__ import annotations

import pytest

from kernelgen.testing.attention_cases import Spec, check_many, specs

COUNT, LONG = 20, 200  # problems of a spec, under --full


@pytest.mark.parametrize("spec", specs(156)[0::2], ids=str)
def test_random_problems(spec: Spec, request: pytest.FixtureRequest) -> None:
    check_many(spec, LONG if request.config.getoption("--full") else COUNT)
