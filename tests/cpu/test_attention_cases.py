"""The generator behind the random suites: enough specs, the same on every run, failures that shrink."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kernelgen.testing import attention_cases
from kernelgen.testing.attention_cases import AXES, Outcome, Problem, Spec, check, check_many, make_problem, run, shrink, specs


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
    def wrong(p: Problem, device: str, backend: str) -> None:
        assert max(p.k_lens) < 5, f"{p}: wrong"

    spec = specs(156)[0]
    monkeypatch.setattr(attention_cases, "check", wrong)
    with pytest.raises(AssertionError, match=r"problem \d+ of (?s:.*)seed=(?s:.*)shrunk to") as error:
        check_many(spec, 20)
    shrunk = str(error.value).partition("shrunk to ")[2]
    assert "seed=" in shrunk


SCORE = Spec(dtype="fp32", kv="e4m3fn", dims=(8, 24), left=True, alibi=True, variant="score", kv_lens=True, scales="head",
             batch_invariant=True)


@pytest.mark.parametrize(("spec", "index"), [
    # The float64 oracle's running sums, of values and of a score, were off by more than the kernel.
    (Spec(dtype="fp64", kv="e4m3fn", dims=(64, 64), right="window", mask="dense", variant="sigmoid", scales="tensor"), 122),
    (Spec(dtype="fp64", dims=(256, 256), right="causal", left=True, alibi=True, mask="dense", variant="weight", kv_lens=True,
          batch_invariant=True), 169),
    (Spec(dtype="fp64", kv="e5m2", dims=(72, 40), right="window", variant="weight", scales="head"), 140),
    # One lucky plain evaluation: of a rest of ten rows, of heads with other slopes, of 216 rows in all.
    (Spec(layout="paged", dtype="fp32", kv="e5m2", dims=(72, 40), variant="sigmoid", scales="page", pages="any", kv_layout="HND",
          batch_invariant=True), 180),
    (Spec(dtype="fp32", dims=(192, 128), alibi=True, variant="score", kv_lens=True, lse=True), 22), (SCORE, 47), (SCORE, 144), (SCORE, 148),
    (Spec(layout="paged", dtype="fp32", dims=(192, 128), right="causal", left=True, alibi=True, mask="flat", variant="sigmoid",
          pages="contiguous"), 170),
    (Spec(layout="ragged", dtype="fp32", kv="e5m2", dims=(64, 64), mask="flat", variant="mask"), 5),
], ids=str)
def test_what_the_long_suite_found(spec: Spec, index: int) -> None:
    check(make_problem(spec, index))


@pytest.mark.parametrize("times", [0.0, 4.0])
@pytest.mark.parametrize("which", [0, 1])
def test_a_second_look_is_no_excuse(monkeypatch: pytest.MonkeyPatch, which: int, times: float) -> None:
    """A row that is off by four times the worst error of the plain evaluation anywhere is wrong, in the output as in the LSE."""
    problem = make_problem(SCORE, 47)
    problem = replace(problem, spec=replace(SCORE, lse=True))

    def off(p: Problem, device: str, backend: str) -> Outcome:
        r = run(p, device, backend)
        for i, got in ((0, r.out), (1, r.lse)):
            assert got is not None
            got.copy_(r.exact[i])
            if i == which:
                error = (r.plain[i] - r.exact[i]).nan_to_num(0, 0, 0).abs().max() + 2**-24
                got.view(-1)[3] += times * error
        return r

    monkeypatch.setattr(attention_cases, "run", off)
    if times:
        with pytest.raises(AssertionError, match="1 of .* rows beyond"):
            check(problem)
    else:
        check(problem)
