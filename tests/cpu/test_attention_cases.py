"""The generator behind the random suites: enough specs, the same on every run, failures that shrink."""

from __future__ import annotations

import itertools

import pytest

from kernelgen.testing import attention_cases
from kernelgen.testing.attention_cases import AXES, Problem, check_many, make_problem, shrink, specs


def test_specs_are_the_same_on_every_run() -> None:
    made = specs(156)
    assert made == specs(156) and len(set(made)) == len(made) >= 156
    layouts = {spec.layout for spec in made}
    assert layouts == set(AXES["layout"])


def test_problems_depend_on_spec_and_index_alone() -> None:
    one, other = specs(156)[:2]
    assert make_problem(one, 3) == make_problem(one, 3)
    assert len({make_problem(one, 0), make_problem(one, 1), make_problem(other, 0)}) == 3


def test_a_failure_shrinks_to_what_it_needs() -> None:
    """A fault that needs a soft cap and a request of two rows: everything else goes."""
    found = (make_problem(spec, index) for spec, index in itertools.product(specs(156), range(4)))

    def fails(p: Problem) -> bool:
        return p.spec.cap and max(p.q_lens) >= 2

    start = next(p for p in found if p.spec.layout == "paged" and len(p.q_lens) > 2 and p.spec.lse and fails(p))
    small = shrink(start, fails)
    assert fails(small) and len(small.q_lens) == 1 and max(small.q_lens) <= 3 and max(small.k_lens) == 0
    assert small.group == small.kv_heads == 1 and not (small.spec.alibi or small.spec.sinks or small.spec.left)


def test_a_wrong_result_is_reported_with_its_seed_and_a_smaller_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(p: Problem, device: str) -> None:
        assert max(p.k_lens) < 5, f"{p}: wrong"

    spec = specs(156)[0]
    monkeypatch.setattr(attention_cases, "check", wrong)
    with pytest.raises(AssertionError, match=r"problem \d+ of (?s:.*)seed=(?s:.*)shrunk to") as error:
        check_many(spec, 20)
    shrunk = str(error.value).partition("shrunk to ")[2]
    assert "seed=" in shrunk
