"""cascade_attention with features that see joined keys: one planned call over a joined page table, against the oracle."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import AttentionFeatures, PageTable, reference, settings
from kernelgen.errors import DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.ops.joined import Joined, join_levels
from kernelgen.reference.paged import split_cache
from kernelgen.reference.plain import cascade_attention_plain
from kernelgen.testing.cascade import MIXES, check
from kernelgen.testing.data import random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference


@pytest.mark.parametrize("name", MIXES)
def test_features_over_random_levels(name: str) -> None:
    for index in range(25):
        check(MIXES[name], seed_of("cascade", name, index), name)


def two_levels(cache: torch.Tensor, prefix: int, layout: str = "NHD") -> tuple[torch.Tensor, list[Any]]:
    size = cache.shape[1 if layout == "NHD" else 2] if cache.dim() == 4 else cache.shape[2 if layout == "NHD" else 3]
    tables = [PageTable.from_blocks(torch.tensor(pages, dtype=torch.int32), lens, size)
              for pages, lens in (([[0, 1]], [prefix]), ([[2, 3], [4, 5]], [5, 7]))]
    return random_tensor((5, 4, 16), torch.bfloat16, seed=1), [(tables[0], [0, 5]), (tables[1], [0, 2, 5])]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_the_largest_that_levels_allow(layout: str) -> None:
    shape = (6, 2, 8, 3, 16) if layout == "NHD" else (6, 2, 3, 8, 16)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    for prefix, small in ((8, 8), (16, 8), (12, 4), (6, 2), (7, 1), (0, 8)):
        _, levels = two_levels(cache, prefix, layout)
        found = join_levels(levels, 5, *split_cache(cache, layout))
        assert isinstance(found, Joined) and found.table.page_size == small == found.k_cache.shape[1]
        assert found.k_cache.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert found.table.host_lengths() == [prefix + 5, prefix + 7]
        assert (found.per_page == 1) == (small == 8)


def test_a_last_level_may_end_anywhere_and_prefixes_of_nothing_too() -> None:
    """Only a level with keys behind it must end with a page: not one whose requests have no rows or no keys of their own."""
    cache = torch.zeros(6, 2, 8, 1, 16)
    table = lambda pages, lens: PageTable.from_blocks(torch.tensor(pages, dtype=torch.int32), lens, 8)  # noqa: E731
    levels = [(table([[0]], [5]), [0, 4]), (table([[1], [2]], [0, 3]), [0, 4, 4])]
    found = join_levels(levels, 4, *split_cache(cache, "NHD"))
    assert isinstance(found, Joined) and found.table.page_size == 8 and found.table.host_lengths() == [5, 3]


def test_irregular_pages_run_the_oracle_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    pair = tuple(random_tensor((6, 3 * 8 * 16 + 5), torch.bfloat16, seed=i)[:, :-5].unflatten(1, (8, 3, 16)) for i in (2, 3))
    q, levels = two_levels(pair[0], 6)
    q = q[:, :3]
    with pytest.raises(NoBackendError, match="window.*page stride.*got 389 and 48 and 389 and 48 elements"):
        kernelgen.cascade_attention(q, pair, levels, window=(3, 0), backend="generated")
    out = kernelgen.cascade_attention(q, pair, levels, window=(3, 0))
    torch.testing.assert_close(out, reference.cascade_attention(q, pair, levels, window=(3, 0)).to(torch.bfloat16))
    assert "float64 oracle" in caplog.text
    whole = two_levels(pair[0], 8)[1]  # whole pages need no others
    exact = reference.cascade_attention(q, pair, whole, window=(3, 0))
    out = kernelgen.cascade_attention(q, pair, whole, window=(3, 0), backend="generated")
    assert_close_to_reference(out, exact, cascade_attention_plain(q, pair, whole, window=(3, 0)), what="whole pages", tile_dim=-3)


def test_levels_that_do_not_fit_are_named() -> None:
    cache = torch.zeros(6, 2, 8, 2, 16, dtype=torch.bfloat16)
    q, levels = two_levels(cache, 8)
    inner = levels[1][0]
    other = PageTable.from_blocks(torch.zeros(1, 2, dtype=torch.int32), [3], 4)
    for wrong, words in (
        ([(inner, [0, 1, 5]), levels[1]], "rows 0 .. 1 of the innermost level lie in no single request of level 0"),
        ([levels[0], (inner, [0, 2, 4])], "got 5 rows, expected 4, the sum of the query lengths of level 1"),
        ([levels[0], (inner, [0, 3, 2])], "start at 0 and never fall"), ([(other, [0, 5]), levels[1]], "pages of 8 tokens, expected 4"),
        ([levels[0], (inner, [0, 5])], "got 1 query lengths, expected 2"),
    ):
        with pytest.raises(ShapeError, match=words):
            kernelgen.cascade_attention(q, cache, wrong, window=(3, 0))
    with settings.override(check=True), pytest.raises(ShapeError, match="got pages 0 .. 9, expected 0 .. 5"):
        junk = PageTable.from_blocks(torch.tensor([[0, 9]], dtype=torch.int32), [16], 8)
        kernelgen.cascade_attention(q, cache, [(junk, [0, 5]), levels[1]], window=(3, 0))


def test_70000_requests_are_joined_at_once() -> None:
    """70,000 requests of 8 groups behind one prefix, 20 pages each: well below a second beside the kernel."""
    batch, size = 70_000, 16
    cache = torch.zeros(64, 2, size, 1, 8, dtype=torch.bfloat16)
    blocks = torch.from_numpy(np.random.default_rng(1).integers(0, 64, (batch, 9)).astype(np.int32))
    levels: list[Any] = [(PageTable.from_blocks(blocks[:1], [8 * size], size), [0, batch]),
                         (PageTable.from_blocks(blocks[1:9], [4 * size] * 8, size), list(range(0, batch + 1, batch // 8))),
                         (PageTable.from_blocks(blocks, torch.full((batch,), 8 * size - 3, dtype=torch.int32), size),
                          torch.arange(batch + 1))]
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        found = join_levels(levels, batch, *split_cache(cache, "NHD"))
        times.append(time.perf_counter() - begin)
    assert isinstance(found, Joined) and found.table.kv_indices is not None and min(times) < 1, times
    b = 12_345
    assert found.table.kv_indices[20 * b:20 * b + 20].tolist() == [
        *blocks[0, :8].tolist(), *blocks[1 + b // (batch // 8), :4].tolist(), *blocks[b, :8].tolist()]


@pytest.mark.parametrize("prefix", [16, 13])
def test_batch_invariant_bits_are_those_of_a_request_alone(prefix: int) -> None:
    """Whoever else shares its prefix, or none: a request has the bits of a plan over its own pages."""
    cache = random_tensor((6, 2, 8, 2, 16), torch.bfloat16, seed=4)
    q, levels = two_levels(cache, prefix)
    out, lse = kernelgen.cascade_attention(q, cache, levels, batch_invariant=True, return_lse=True, backend="generated")
    exact = reference.cascade_attention(q, cache, levels)
    assert_close_to_reference(out, exact, cascade_attention_plain(q, cache, levels), what="batch_invariant", tile_dim=-3)
    for rows, pages, length in ((slice(0, 2), [2, 3], 5), (slice(2, 5), [4, 5], 7)):
        own = PageTable.from_blocks(torch.tensor([pages], dtype=torch.int32), [length], 8)
        n = rows.stop - rows.start
        alone = kernelgen.cascade_attention(q[rows], cache, [(levels[0][0], [0, n]), (own, [0, n])], batch_invariant=True,
                                            return_lse=True, backend="generated")
        assert torch.equal(alone[0], out[rows]) and torch.equal(alone[1], lse[rows])
        if prefix == 16:
            whole = PageTable.from_blocks(torch.tensor([[0, 1, *pages]], dtype=torch.int32), [prefix + length], 8)
            plan = kernelgen.plan_attention(whole, num_q_heads=4, num_kv_heads=2, head_dim=16, q_lens=[n], q_dtype=torch.bfloat16,
                                            batch_invariant=True, backend="generated")
            assert torch.equal(plan.run(q[rows], cache), out[rows])


def test_batch_invariant_never_runs_the_oracle_unasked() -> None:
    """Whether levels can be joined depends on where other requests' prefixes end."""
    pair = tuple(random_tensor((6, 3 * 8 * 16 + 5), torch.bfloat16, seed=i)[:, :-5].unflatten(1, (8, 3, 16)) for i in (2, 3))
    q, levels = two_levels(pair[0], 6)
    with pytest.raises(NoBackendError, match="with batch_invariant"):
        kernelgen.cascade_attention(q[:, :3], pair, levels, batch_invariant=True)


def test_promises_are_flags() -> None:
    cache = torch.zeros(6, 2, 8, 2, 16, dtype=torch.bfloat16)
    q, levels = two_levels(cache, 8)
    for name in ("batch_invariant", "deterministic"):
        with pytest.raises(SettingsError, match=f"{name}: got 1, expected True or False"):
            kernelgen.cascade_attention(q, cache, levels, **{name: 1})
    assert torch.equal(kernelgen.cascade_attention(q, cache, levels, deterministic=False), kernelgen.cascade_attention(q, cache, levels))


def test_features_are_those_of_the_arguments() -> None:
    cache = random_tensor((6, 2, 8, 2, 16), torch.bfloat16, seed=4)
    q, levels = two_levels(cache, 13)
    sinks = random_tensor((4,), seed=5)
    features = AttentionFeatures.gpt_oss(sliding_window=9, soft_cap=5.0)
    want = kernelgen.cascade_attention(q, cache, levels, window=(8, 0), soft_cap=5.0, sinks=sinks)
    assert torch.equal(kernelgen.cascade_attention(q, cache, levels, features=features, sinks=sinks), want)
    with pytest.raises(SettingsError, match="sinks: got none, expected one: the features say so"):
        kernelgen.cascade_attention(q, cache, levels, features=features)
    with pytest.raises(SettingsError, match="window, soft_cap: got both in features and as an argument"):
        kernelgen.cascade_attention(q, cache, levels, features=features, sinks=sinks, window=(3, 0), soft_cap=2.0)
    mask = torch.ones(2 * 18 + 3 * 20, dtype=torch.bool)
    with pytest.raises(DtypeError, match="mask: got torch.bool, expected packed bits"):
        kernelgen.cascade_attention(q, cache, levels, features=AttentionFeatures(mask="packed"), mask=mask)
