"""Public bug reports of group E that are about settings, errors and what "auto" picks: E01, E02, E03, E05, E16.

The table of E05 is golden_choices.txt; after a wanted change run ``python tests/cases/test_e_choice.py`` and commit the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernelgen
from kernelgen import settings
from kernelgen.dispatch import select
from kernelgen.errors import NoBackendError, SettingsError, ShapeError
from kernelgen.targets import Target

_SMS = {"sm_80": 108, "sm_90a": 132, "cpu-x86-64-v3": 8}  # threads of the CPU: this machine's would choose among kernels
_TABLE = Path(__file__).parent / "golden_choices.txt"


def test_e01_unknown_variables_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each unknown variable with our prefix, with the nearest known name."""
    given = {"KERNELGEN_BACKND": "torch", "KERNELGEN_ATTN_BACKEND": "torch", "KERNELGEN_backend": "torch", "KERNELGENX": "1", "OTHER": "1"}
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        read = settings.read(given)
    said = [record.getMessage() for record in caplog.records]
    assert read.backend == "auto" and len(said) == 3
    assert all(any(name in text for text in said) for name in list(given)[:3])
    assert any("KERNELGEN_BACKND" in text and "did you mean KERNELGEN_BACKEND" in text for text in said)


@pytest.mark.parametrize("value", ["FLASHH", "auto,cpu", "Torch"])
def test_e02_an_illegal_backend_is_an_error(value: str) -> None:
    with pytest.raises(SettingsError, match="expected one of auto, generated") as caught:
        settings.read({"KERNELGEN_BACKEND": value})
    assert value in str(caught.value)
    a = torch.randn(4, 8)
    with pytest.raises(ValueError, match="expected 'auto' or one of generated") as unknown:
        kernelgen.gemm(a, a.t(), backend=value)
    assert isinstance(unknown.value, NoBackendError)


def test_e02_an_empty_one_counts_as_unset_and_is_none_as_an_argument() -> None:
    assert settings.read({"KERNELGEN_BACKEND": ""}).backend == "auto"
    a = torch.randn(4, 8)
    with pytest.raises(NoBackendError, match="got backend=''"):
        kernelgen.gemm(a, a.t(), backend="")


def test_e02_a_valid_one_that_is_not_there_says_why_and_the_argument_wins() -> None:
    a = torch.randn(4, 8)
    with settings.override(backend="flash_attn_3"):
        with pytest.raises(NoBackendError, match="flash_attn_3"):
            kernelgen.gemm(a, a.t())
        torch.testing.assert_close(kernelgen.gemm(a, a.t(), backend="torch"), a @ a.t())
        decision = kernelgen.explain("gemm", a, a.t(), backend="torch")
        assert decision.chosen is not None and decision.chosen.backend == "torch"


def test_e03_nothing_can_run_it_is_one_error_with_a_line_for_each_candidate() -> None:
    q = torch.randn(1, 4, 2, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NoBackendError) as caught:
        kernelgen.attention(q, q, q, soft_cap=3.0, backend="generated")
    lines = str(caught.value).splitlines()
    kernels = [line.split()[1] for line in lines if line.startswith("  generated attention/")]
    assert len(kernels) == len(set(kernels)) >= 2 and all("requires_grad" in line for line in lines if "attention/" in line)
    assert "Backends that can: reference" in lines[-1]
    with pytest.raises(NoBackendError, match="soft-cap"):
        kernelgen.attention(q, q, q, soft_cap=3.0, backend="torch")


def test_e03_what_no_backend_may_be_asked_is_refused_in_front_of_them() -> None:
    wide = torch.randn(1, 4, 2, 1000)
    with pytest.raises(ShapeError, match="got head dim 1000.*expected a multiple of 8 from 8 to 512"):
        kernelgen.attention(wide, wide, wide)
    with pytest.raises(ShapeError, match="q: got shape"):
        kernelgen.attention(wide[0], wide, wide)


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 100, 256, 768])
@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
def test_e16_every_page_size_that_a_backend_runs_is_accepted(page_size: int, target: str) -> None:
    """The front check takes what at least one backend takes: here any page size, powers of two or not."""
    table = kernelgen.PageTable.from_blocks(torch.zeros(2, 3, dtype=torch.int32), [page_size, 2 * page_size], page_size)
    decision = kernelgen.explain("paged_attention", page_table=table, num_q_heads=4, num_kv_heads=2, head_dim=64, target=target)
    assert decision.chosen is not None and decision.chosen.backend == "generated", str(decision)


def _line(text: str) -> str:
    """A call as ``kernelgen explain`` takes it, with its target last, and what is chosen for it."""
    from kernelgen.aot.plan import parse_call
    from kernelgen.cli.decide import decide

    call, _, target = text.partition(" @ ")
    op, options = parse_call(call)
    decision = decide(op, options, replace(Target.parse(target), sm_count=_SMS[target]), "auto")[0]
    chosen = decision.chosen
    return f"{text} -> {'nothing' if chosen is None else f'{chosen.label} {decision.decided_by}'}"


def _calls() -> Iterator[str]:
    attention = ("--q 4,4096,16,128", "--q 4,4096,16,128 --causal", "--q 4,4096,32,64", "--q 2,4096,8,256 --causal --dtype fp16",
                 "--q 2,777,16,96 --causal", "--q 1,1,32,128 --kv-heads 8 --kv-len 8192",
                 "--q 16,1,32,128 --kv-heads 8 --kv-len 8192 --causal", "--q 2,512,8,64 --dtype fp32", "--q 2,512,8,128 --lse",
                 "--q 2,512,8,128 --causal --window 127,0", "--q 2,512,8,128 --soft-cap 30 --causal")
    products = ("--mnk 1,4096,7168 --b-order col", "--mnk 64,4096,7168 --b-order col", "--mnk 128,2112,7168 --b-order col",
                "--mnk 256,4096,7168 --b-order col", "--mnk 512,4096,7168 --b-order col", "--mnk 4096,4096,7168 --b-order col",
                "--mnk 4096,576,7168 --b-order col", "--mnk 512,14336,4096 --b-order col --activation silu --bias",
                "--mnk 16,4096,7168 --b-order col --dtype e4m3 --scales row",
                "--mnk 4096,4096,7168 --b-order col --dtype e4m3 --scales block_128x128", "--mnk 64,512,512 --dtype fp32",
                "--mnk 1,8192,8192 --weight int4 --b-order col", "--mnk 512,8192,8192 --weight int4 --b-order col")
    others = ("paged_attention --batch 16 --q-heads 32 --kv-heads 8 --head-dim 128 --page-size 16 --kv-len 8192",
              "grouped_gemm --mnk 8192,4096,4096 --groups 8 --b-order col", "rmsnorm --x 512,4096", "silu_and_mul --x 512,4096",
              "attention_varlen --q 8192,32,128 --kv-heads 8 --batch 8 --causal")
    for target in ("sm_80", "sm_90a"):
        yield from (f"attention {words} @ {target}" for words in attention)
        yield from (f"gemm {words} @ {target}" for words in products)
        yield from (f"{line} @ {target}" for line in others)
    on_cpu = (f"attention {attention[1]}", f"attention {attention[5]}", f"gemm {products[0]}", *others)
    yield from (f"{line} @ cpu-x86-64-v3" for line in on_cpu)


def test_e05_what_auto_picks_changes_on_purpose_only() -> None:
    select.forget()
    expected = _TABLE.read_text().splitlines()
    assert len(expected) >= 60
    assert [_line(text) for text in _calls()] == expected, "after a wanted change: python tests/cases/test_e_choice.py"


if __name__ == "__main__":
    _TABLE.write_text("".join(f"{_line(text)}\n" for text in _calls()))
