"""What the tests of public bug cases share: one call through every backend that can run it, into poisoned outputs.

A case is named by its number, with " paged" or " mla" where it goes through a plan and a word more where it needs a
feature of its own ("B38 fp8 paged"). A generated kernel must be among the backends of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import kernelgen
from kernelgen import PageTable, reference
from kernelgen.reference.paged import split_cache
from kernelgen.reference.plain import attention_plain, attention_varlen_plain, mla_attention_plain, paged_attention_plain
from kernelgen.testing.data import PagedCase, make_paged_cache, poisoned_empty
from kernelgen.testing.tolerance import (
    assert_attention_close,
    assert_bits_equal,
    assert_lse_close,
    judge_orders,
    other_order,
    reordered,
)

# Every case; for each a generated kernel must be among the backends.
CASES = {
    "B01", "B02", "B03", "B06", "B07", "B09", "B14", "B16", "B17", "B18", "B19", "B22", "B25", "B31", "B33", "B41", "B47",
    "B01 paged", "B02 paged", "B03 mask", "B07 paged", "B09 paged", "B12 paged", "B13 paged", "B14 paged", "B16 paged", "B18 paged",
    "B25 paged", "B28 paged", "B29 paged", "B31 paged", "B33 paged", "B41 paged", "B43 paged", "B46 paged", "B47 paged",
    "B01 mla", "B09 mla", "B46 mla",
    "B09 fp8", "B14 fp8 paged", "B23 mask", "B23 mask paged", "B25 mask", "B25 mask paged", "B35 sinks", "B35 sinks paged", "B37 alibi",
    "B38 fp8", "B38 fp8 paged",
}


@dataclass(frozen=True)
class Result:
    """What one backend gave. ``lse`` None: it has none."""

    out: torch.Tensor
    lse: torch.Tensor | None


Results = dict[str, Result]


def main_dtype(device: str) -> torch.dtype:
    """The type of cases that name none: every kernel of the device has it."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def backends(case: str, op: str, *args: Any, device: str = "cpu", **kwargs: Any) -> list[str]:
    """Names of the backends that can run a call, as ``explain`` tells; AssertionError where a required kernel is missing."""
    if case not in CASES:
        raise AssertionError(f"{case!r} is not in CASES of {__name__}")
    decision = kernelgen.explain(op, *args, target="cpu" if device == "cpu" else None, **kwargs)
    names = sorted({c.backend for c in decision.candidates if c.verdict.ok})
    if "generated" not in names:
        raise AssertionError(f"{case}: no generated kernel runs\n{decision}")
    return names


def _chosen(names: list[str], skip: tuple[str, ...], case: str, device: str) -> list[str]:
    """On a GPU torch picks among libraries whose accuracy and limits are not ours: only cases with values by hand run it."""
    by_hand = device == "cpu" or case in ("B02", "B07")
    return [name for name in names if name not in skip and (name != "torch" or by_hand)]


def run(case: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cu: torch.Tensor, skip: tuple[str, ...] = (),
        **features: Any) -> Results:
    """attention, or attention_varlen if ``cu`` has the two arrays of starts, through every backend but those of ``skip``."""
    call: Any = kernelgen.attention_varlen if cu else kernelgen.attention
    lse_shape = q.shape[:2] if cu else (q.shape[0], q.shape[2], q.shape[1])
    op = "attention_varlen" if cu else "attention"
    names = backends(case, op, q, k, v, *cu, device=q.device.type, **features)
    with_lse = backends(case, op, q, k, v, *cu, device=q.device.type, return_lse=True, **features)
    out_dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    results = {}
    for name in _chosen(names, skip, case, q.device.type):
        out = poisoned_empty((*q.shape[:-1], v.shape[-1]), out_dtype, q.device)
        lse = poisoned_empty(lse_shape, torch.float32, q.device) if name in with_lse else None
        call(q, k, v, *cu, **features, out=out, lse=lse, return_lse=lse is not None, backend=name)
        results[name] = Result(out, lse)
    return results


def plan_sizes(q: torch.Tensor, kv_cache: Any, kv_layout: str = "NHD") -> dict[str, Any]:
    """The arguments of plan_attention that tensors tell."""
    k, v = (kv_cache[:, 0], kv_cache[:, 1]) if isinstance(kv_cache, torch.Tensor) else kv_cache
    heads = k.shape[2] if kv_layout == "NHD" else k.shape[1]
    return {"num_q_heads": q.shape[1], "num_kv_heads": heads, "head_dim": q.shape[2], "head_dim_v": v.shape[3], "q_dtype": q.dtype,
            "kv_dtype": k.dtype, "kv_layout": kv_layout}


def run_paged(case: str, table: PageTable, q: torch.Tensor, kv_cache: Any, planned: dict[str, Any] | None = None, *,
              skip: tuple[str, ...] = (), **given: Any) -> Results:
    """plan_attention with the flags ``planned``, run with the tensors ``given``, through every backend; case + " paged"."""
    planned = planned or {}
    sizes = plan_sizes(q, kv_cache, planned.get("kv_layout", "NHD")) | planned
    device = q.device.type
    results = {}
    for name in _chosen(backends(f"{case} paged", "paged_attention", table, device=device, **sizes), skip, case, device):
        plan = kernelgen.plan_attention(table, **sizes, backend=name, device=q.device)
        out = poisoned_empty((q.shape[0], q.shape[1], sizes["head_dim_v"]), torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype, q.device)
        lse = poisoned_empty(q.shape[:2], torch.float32, q.device)
        plan.run(q, kv_cache, **given, out=out, lse=lse, return_lse=True)
        results[name] = Result(out, lse)
    return results


def run_mla(case: str, table: PageTable, q: torch.Tensor, cache: torch.Tensor, latent: int, **planned: Any) -> Results:
    """plan_mla over one cache (pages, page_size, latent + rope) with q (Tq, Hq, latent + rope); case + " mla"."""
    sizes: dict[str, Any] = dict(num_heads=q.shape[1], q_dtype=q.dtype, kv_dtype=cache.dtype, head_dim_latent=latent,
                                 head_dim_rope=q.shape[2] - latent, scale=0.1) | planned
    results = {}
    for name in backends(f"{case} mla", "mla", table, device=q.device.type, **sizes):
        plan = kernelgen.plan_mla(table, **sizes, backend=name, device=q.device)
        out, lse = poisoned_empty((*q.shape[:2], latent), q.dtype, q.device), poisoned_empty(q.shape[:2], torch.float32, q.device)
        plan.run(q[..., :latent], q[..., latent:], cache, out=out, lse=lse, return_lse=True)
        results[name] = Result(out, lse)
    return results


def assert_same(got: Results, want: Results, what: str) -> None:
    """The same backends gave the same bits, out and LSE."""
    if not got or set(got) != set(want):
        raise AssertionError(f"{what}: got results of {sorted(got)}, expected those of {sorted(want)}")
    for name, result in got.items():
        assert_bits_equal(result.out, want[name].out, what=f"{what} by {name}")
        other = want[name].lse
        if result.lse is not None and other is not None:
            assert_bits_equal(result.lse, other, what=f"{what} by {name}, lse")


def assert_finite_and_same(got: Results, want: Results, what: str) -> None:
    """:func:`assert_same`, and no NaN or inf in an output."""
    for name, result in got.items():
        if not bool(torch.isfinite(result.out).all()):
            raise AssertionError(f"{what} by {name}: the output is not finite")
    assert_same(got, want, what)


def weights_of(logits: torch.Tensor, v_dtype: torch.dtype) -> torch.Tensor:
    """Softmax over the last dimension by the formula. float32 logits: the exponentials are rounded to a 16-bit type of v, as kernels
    round them for their second product."""
    powers = torch.exp(logits - logits.amax(-1, keepdim=True))
    rounded = powers if logits.dtype == torch.float64 or v_dtype.itemsize > 2 else powers.to(v_dtype).to(logits.dtype)
    return rounded / powers.sum(-1, keepdim=True)


def check_results(results: Results, exact: Any, plain: Any, *, what: str, seed: int | None = None) -> Results:
    """Hold every backend's result against (out, lse) of the oracle under the derived tolerance.

    A dense decode (B, 1, H, D) is compared as (B, H, D), so that a tile is the rows of many requests and not one row.
    """
    if not results:
        raise AssertionError(f"{what}: no backend ran")
    fold = exact[0].dim() == 4 and exact[0].shape[1] == 1
    for name, got in results.items():
        if name == "reference":  # the oracle itself, rounded
            torch.testing.assert_close(got.out, exact[0].to(got.out.dtype), rtol=0, atol=0, equal_nan=True, msg=f"{what} by {name}")
            continue
        sides = [x.squeeze(1) if fold else x for x in (got.out, exact[0], plain[0].to(got.out.dtype))]
        assert_attention_close(*sides, what=f"{what} by {name}", seed=seed)
        if got.lse is not None:
            assert_lse_close(got.lse, exact[1], plain[1].float(), what=f"{what} by {name}", seed=seed)
    return results


def check(case: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cu: torch.Tensor, seed: int | None = None,
          **features: Any) -> Results:
    """:func:`run` and the comparison with the oracle."""
    results = run(case, q, k, v, *cu, **features)
    oracle: Any
    plainly: Any
    oracle, plainly = ((reference.attention_varlen, attention_varlen_plain) if cu else (reference.attention, attention_plain))
    exact = oracle(q, k, v, *cu, **features, return_lse=True)

    def plain(q: torch.Tensor, k: torch.Tensor) -> Any:
        return plainly(q, k, v, *cu, **features, return_lse=True)

    return judge_orders(lambda p: check_results(results, exact, p, what=f"{case} {_text(features)}", seed=seed), exact, plain(q, k),
                        lambda i: plain(*_reordered(i, q, k)))


def check_paged(case: str, table: PageTable, q: torch.Tensor, kv_cache: Any, planned: dict[str, Any] | None = None, *,
                seed: int | None = None, **given: Any) -> Results:
    """:func:`run_paged` and the comparison with the oracle."""
    results = run_paged(case, table, q, kv_cache, planned, **given)
    flags = {n: x for n, x in (planned or {}).items() if n not in ("alibi", "sinks", "mask", "batch_invariant", "deterministic")}
    exact: Any = reference.paged_attention(q, kv_cache, table, **flags, **given, return_lse=True)

    features = flags | given
    k, v = split_cache(kv_cache, features.pop("kv_layout", "NHD"))

    def plain(q: torch.Tensor, k: torch.Tensor) -> Any:
        return paged_attention_plain(q, (k, v), table, **features, return_lse=True)

    def again(i: int) -> Any:
        return plain(*(_reordered(i, q, k) if "rotation" not in given else (q, k)))  # a rotation pairs the elements of a head

    return judge_orders(lambda p: check_results(results, exact, p, what=f"{case} paged {_text(planned or {})}", seed=seed), exact,
                        plain(q, k), again)


def _reordered(index: int, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same scores, whose sums run over the head dim in another order."""
    order = other_order(q.shape[-1], index, q.device)
    return reordered(q, order), reordered(k, order)


def check_mla(case: str, table: PageTable, q: torch.Tensor, cache: torch.Tensor, latent: int, **planned: Any) -> Results:
    """:func:`run_mla` and the comparison with the oracle."""
    results = run_mla(case, table, q, cache, latent, **planned)
    parts = q[..., :latent], q[..., latent:], cache, None, table
    features = {"scale": 0.1} | planned
    exact = reference.mla_attention(*parts, **features, return_lse=True)
    plain = mla_attention_plain(*parts, **features, return_lse=True)
    return check_results(results, exact, plain, what=f"{case} mla")


def _text(features: dict[str, Any]) -> str:
    return " ".join(f"{n}={'..' if isinstance(x, torch.Tensor) else x}" for n, x in features.items())


def tables(case: PagedCase) -> dict[str, PageTable]:
    """Both forms of a paged case's table."""
    return {"csr": PageTable.from_csr(case.kv_indptr, case.kv_indices, case.kv_last_page_len, case.page_size),
            "blocks": PageTable.from_blocks(case.block_tables, case.seq_lens, case.page_size)}


def paged_of(k: torch.Tensor, v: torch.Tensor, lens: list[int], page_size: int, *, seed: int = 1, **form: Any) -> PagedCase:
    """The keys of requests that lie one behind the other in k, v (Tk, H, D) as a paged cache with junk around them."""
    return make_paged_cache(list(zip(k.split(lens), v.split(lens))), page_size, seed=seed, **form)


def one_hot_values(keys: int, heads: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """v (keys, heads, width): key j is the unit vector j, so that an output lists the weights of the keys."""
    return torch.eye(keys, width, dtype=dtype, device=device)[:, None, :].repeat(1, heads, 1)
