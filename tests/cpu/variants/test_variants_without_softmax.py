"""Variants whose scores are the weights, on generated CPU kernels: by hand where inf and NaN are concerned, and what is refused.

Random problems are in kernelgen/testing/attention_cases.py (variants "weight" and "sigmoid").
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import PageTable, variant, variants
from kernelgen.errors import SettingsError
from kernelgen.kernels.attention import paged_cpu, paged_mma, prefill_cpu, prefill_mma
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.plain import attention_plain
from kernelgen.targets import Target
from kernelgen.testing.data import make_paged_cache, random_tensor, random_tensors
from kernelgen.testing.tolerance import assert_attention_close
from kernelgen.variants import trace

INF, NAN = float("inf"), float("nan")
D = 16
# Key j weighs j - 2, whatever the score.
BY_POSITION = variant(lambda s, c: c.k_pos - 2.0, normalization="none")
# Rows 1, 5, 9, ... also see key 3, and nobody key 7.
PARTLY = variant(lambda s, c: c.k_pos - 2.0, lambda c: (c.k_pos != 7) & ((c.k_pos != 3) | (c.q_index % 4 == 1)), normalization="none")


def _values(keys: int) -> torch.Tensor:
    """Columns of value 1 but for an inf or NaN in some keys."""
    v = torch.ones(1, keys, 1, D)
    v[0, 0, 0, 1] = INF   # weight -2
    v[0, 2, 0, 2] = INF   # weight 0
    v[0, 5, 0, 3] = INF   # weight 3
    v[0, 3, 0, 4] = -INF  # weight 1, seen by some rows
    v[0, 7] = NAN         # seen by none
    return v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 5, 16, 40])
def test_an_inf_counts_with_the_sign_of_its_weight(queries: int, dtype: torch.dtype) -> None:
    keys = 10
    q, k = random_tensors([(1, queries, 1, D), (1, keys, 1, D)], dtype, seed=3)
    k[0, 7] = NAN
    v = _values(keys).to(dtype)
    out = kernelgen.attention(q, k, v, variant=PARTLY, backend="generated")[0, :, 0].float()
    weights = [j - 2.0 for j in range(keys) if j != 7]
    for i in range(queries):
        sees = i % 4 == 1
        plain = sum(weights) - (0 if sees else 1.0)
        expected = [plain, -INF, NAN, INF, -INF if sees else plain] + [plain] * (D - 5)
        torch.testing.assert_close(out[i], torch.tensor(expected), equal_nan=True)


def test_hidden_scores_are_dropped_in_plans_too() -> None:
    """The score is NaN or inf wherever the variant's own mask hides it."""
    hidden = variant(lambda s, c: s / (c.k_pos % 3), lambda c: c.k_pos % 3 != 0, normalization="none")
    keys = [tuple(random_tensors([(n, 2, D), (n, 2, D)], seed=n)) for n in (70, 1, 0, 33)]
    for k, v in keys:
        k[::3], v[::3] = NAN, INF
    case = make_paged_cache(keys, 8, seed=1)  # type: ignore[arg-type]
    q = random_tensor((8, 4, D), seed=5)
    table = PageTable.from_blocks(case.block_tables, case.seq_lens, 8)
    plan = kernelgen.plan_attention(table, num_q_heads=4, num_kv_heads=2, head_dim=D, q_lens=[2] * 4, q_dtype=q.dtype, variant=hidden,
                                    backend="generated")
    out = plan.run(q, case.kv_cache)
    oracle = kernelgen.plan_attention(table, num_q_heads=4, num_kv_heads=2, head_dim=D, q_lens=[2] * 4, q_dtype=q.dtype, variant=hidden,
                                      backend="reference").run(q, case.kv_cache)
    assert isinstance(out, torch.Tensor) and isinstance(oracle, torch.Tensor)
    assert bool(out.isfinite().all()) and not bool(out[2:6].any())  # one key that is hidden, and none
    torch.testing.assert_close(out, oracle)


def test_rows_that_see_nothing_are_0() -> None:
    q, k, v = random_tensors([(1, 6, 2, D), (1, 4, 2, D), (1, 4, 2, D)], seed=8)
    out = kernelgen.attention(q, k, v, variant=variants.sigmoid(), causal=True, backend="generated")
    assert not bool(out[:, :2].any()) and bool(out[:, 2:].any())  # queries 0 and 1 stand in front of the first key
    none = kernelgen.attention(q, k[:, :0], v[:, :0], variant=variants.sigmoid(), backend="generated")
    assert not bool(none.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_beyond_the_range_of_fp16(dtype: torch.dtype) -> None:
    """The plain evaluation rounds its weights in a unit that fp16 can hold."""
    def weights(unit: float) -> Any:
        return variant(lambda s, c: s * torch.exp2(c.k_pos * 0.3) / c.unit, scalars={"unit": unit}, normalization="none")

    q, k, v = random_tensors([(1, 50, 3, 64), (1, 70, 3, 64), (1, 70, 3, 64)], dtype, seed=11)
    v *= 2.0**-12
    out = kernelgen.attention(q, k, v, variant=weights(1.0), backend="generated")
    exact = kernelgen.reference.attention(q, k, v, variant=weights(1.0))
    plain = attention_plain(q, k, v, variant=weights(2.0**10))
    assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_attention_close(out, exact, plain * 2.0**10, what=f"large weights {dtype}", seed=11)  # type: ignore[arg-type]


@pytest.mark.parametrize("ragged", [False, True])
def test_an_lse_and_sinks_are_refused(ragged: bool) -> None:
    q = random_tensor((3, 2, D) if ragged else (1, 3, 2, D), seed=1)
    starts = (torch.tensor([0, 3], dtype=torch.int32),) * 2 if ragged else ()
    call: Any = kernelgen.attention_varlen if ragged else kernelgen.attention
    for given, words in (({"return_lse": True}, "return_lse: got True with a variant of normalization 'none'"),
                         ({"sinks": torch.zeros(2)}, "sinks: got some with a variant of normalization 'none'")):
        for backend in ("auto", "generated", "reference"):
            with pytest.raises(SettingsError, match=words):
                call(q, q, q, *starts, variant=variants.sigmoid(), backend=backend, **given)


def test_plans_refuse_them() -> None:
    table = PageTable.contiguous([4, 4], 4)
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": D, "q_dtype": torch.float32}
    with pytest.raises(SettingsError, match="sinks: got some"):
        kernelgen.plan_attention(table, **sizes, variant=variants.sigmoid(), sinks=True)
    plan = kernelgen.plan_attention(table, **sizes, variant=variants.sigmoid())
    q, k, v = random_tensors([(2, 2, D), (2, 4, 2, D), (2, 4, 2, D)], seed=2)
    with pytest.raises(SettingsError, match="return_lse: got True"):
        plan.run(q, (k, v), return_lse=True)
    with pytest.raises(SettingsError, match="return_lse: got True"):
        kernelgen.cascade_attention(q, (k, v), [(table, [0, 1, 2])], variant=variants.sigmoid(), return_lse=True)


@pytest.mark.parametrize("change, words", [({"return_lse": True}, "no softmax and therefore no LSE"), ({"sinks": True}, "sinks")])
def test_kernels_refuse_them(change: dict[str, Any], words: str) -> None:
    """Where a problem is made by hand."""
    dense: dict[str, Any] = {"variant": trace(variants.sigmoid())}
    for family, dtype, target in ((prefill_cpu, "fp32", "cpu-x86-64-v3"), (prefill_mma, "bf16", "sm_80")):
        problem = AttentionProblem("dense", 2, 8, 8, 2, 2, 64, 64, dtype, dtype, dtype, **dense)
        assert family.supports(problem, Target.parse(target))
        verdict = family.supports(AttentionProblem(**(vars(problem) | change)), Target.parse(target))
        assert not verdict and words in verdict.reason and "sigmoid" in verdict.reason
    for planned, dtype, target in ((paged_cpu, "fp32", "cpu-x86-64-v3"), (paged_mma, "bf16", "sm_80")):
        paged = PagedAttentionProblem(2, 2, 1, 8, 2, 2, 64, 64, 4, dtype, dtype, **dense)
        assert planned.supports(paged, Target.parse(target))
        verdict = planned.supports(PagedAttentionProblem(**(vars(paged) | change)), Target.parse(target))
        assert not verdict and words in verdict.reason
