"""The demo at a reduced size: every row checks, a second run compiles nothing, a wrong result is caught."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import kernelgen
from kernelgen import build, demo
from kernelgen.cli.demo import demo as command
from kernelgen.demo_cases import Sizes
from kernelgen.errors import DeviceError
from kernelgen.ops.memo import forget_calls

SMALL = Sizes(
    tokens=33, requests=(7, 1, 12), num_q_heads=4, num_kv_heads=2, head_dim=128, decode_lengths=(19, 3), page_size=4, hidden=96,
    intermediate=72, experts=4, moe_tokens=5, moe_hidden=32, moe_intermediate=24,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_WARM_SECONDS", 0.0)


def test_every_row_is_within_its_tolerance(tmp_path: Path) -> None:
    console = Console(width=180, record=True, file=io.StringIO())
    rows = demo.run(json_path=tmp_path / "demo.json", device="cpu", seed=3, sizes=SMALL, console=console)
    assert [row.op for row in rows] == [
        "attention prefill", "attention ragged", "attention decode, paged", "rmsnorm", "gemm, generated", "gemm, auto",
        "silu_and_mul", "route", "moe"]
    assert all(row.ok for row in rows), [row.message for row in rows]
    assert all(0 <= row.error <= row.tolerance and row.warm_us > 0 for row in rows)
    by_op = {row.op: row for row in rows}
    for op, family in (("attention prefill", "attention/prefill"), ("attention ragged", "attention/prefill"),
                       ("attention decode, paged", "attention/paged"), ("gemm, generated", "gemm/"), ("route", "moe/route_cpu"),
                       ("moe", "moe/layer")):
        assert by_op[op].backend.startswith(f"generated {family}")
    text = console.export_text()
    assert "seed 3" in text and "attention[b=1 hq=4" in text and "cache folder" in text
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["seed"] == 3 and len(written["rows"]) == len(rows) and written["rows"][0]["ok"] is True


def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    demo.run(device="cpu", sizes=SMALL)
    build.forget()  # as a new process would start, with the same cache folder
    forget_calls()
    rows = demo.run(json_path=tmp_path / "second.json", device="cpu", sizes=SMALL)
    written = json.loads((tmp_path / "second.json").read_text())
    assert written["compiled"] == 0 and written["loaded"] > 0
    assert rows[0].cold == "cached" and rows[0].load > 0


def test_a_wrong_result_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = kernelgen.rmsnorm
    monkeypatch.setattr(kernelgen, "rmsnorm", lambda x, weight: right(x, weight) * 1.05)
    rows = demo.run(device="cpu", sizes=SMALL)
    assert [row.op for row in rows if not row.ok] == ["rmsnorm"]
    assert "rows beyond their limit" in capsys.readouterr().out


def test_command_exits_non_zero_for_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    for ok in (True, False):
        row = demo.DemoRow("moe", "moe[]", "reference", "", ok=ok)
        monkeypatch.setattr(demo, "run", lambda row=row, **given: seen.update(given) or [row])
        result = CliRunner().invoke(command, ["--seed", "7", "--device", "cpu"])
        assert result.exit_code == (0 if ok else 1)
    assert seen == {"json_path": None, "device": "cpu", "seed": 7}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_unknown_device_is_a_clear_error() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        demo.run(device="cuda", sizes=SMALL)
    with pytest.raises(DeviceError, match="expected cpu, cuda or cuda:N"):
        demo.run(device="gpu", sizes=SMALL)
