"""Measured times: buckets, the file, what makes a time count, and whether it decides."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import kernelgen
from kernelgen.dispatch import measured, select
from kernelgen.dispatch.timings import Machine, Measurement, Timings, TimingsError
from kernelgen.kernels.base import families
from kernelgen.targets import Target, target_of

HERE = target_of("cpu")
_A, _B = torch.randn(40, 64), torch.randn(64, 96)


def _problem() -> object:
    return kernelgen.explain("gemm", _A, _B).problem


def _measurement(backend: str, kernel: str, us: float | None, config: dict[str, object] | None = None, release: str = "") -> Measurement:
    return Measurement(backend, kernel, config, us, release or measured.release_of(backend))


def _save(*found: Measurement) -> Path:
    name = measured.bucket(_problem())
    assert name is not None
    path = measured.save("gemm", Machine.here(HERE), {name: found})
    select.forget()
    return path


@pytest.fixture(autouse=True)
def _forget(fresh_cache: object) -> object:
    select.forget()
    yield
    select.forget()


def test_a_bucket_rounds_what_changes_from_call_to_call() -> None:
    problem = _problem()
    name = measured.bucket(problem)
    assert name is not None and "m=64" in name and "n=96" in name and "k=64" in name
    assert measured.bucket(replace(problem, m=33)) == name != measured.bucket(replace(problem, m=32))
    assert measured.bucket(replace(problem, bias=True)) != name
    assert [measured.rounded(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 1024, 2048]


def test_a_variant_has_no_bucket() -> None:
    q = torch.randn(1, 8, 2, 64)
    problem = kernelgen.explain("attention", q, q, q, variant=kernelgen.variant(lambda score, ctx: score * 2.0, name="twice")).problem
    assert measured.bucket(problem) is None


def test_the_fastest_wins_whatever_the_rules_say() -> None:
    before = kernelgen.explain("gemm", _A, _B)
    assert before.chosen is not None and before.chosen.backend == "generated" and before.decided_by == "rule"
    _save(_measurement("generated", "gemm/gemm_cpu", 80.0, measured.as_fields(before.chosen.config)), _measurement("torch", "", 20.0))
    after = kernelgen.explain("gemm", _A, _B)
    assert after.chosen is not None and after.chosen.backend == "torch" and after.decided_by == "measurement"
    assert "20 us measured" in str(after) and "measured here" in after.basis
    row = next(r for r in after.as_dict()["candidates"] if r["backend"] == "generated")
    assert row["measured_us"] == 80.0 and not row["chosen"]
    assert kernelgen.explain("gemm", _A, _B, backend="generated").decided_by == "call"


def test_the_measured_config_is_taken() -> None:
    first = kernelgen.explain("gemm", _A, _B).chosen
    assert first is not None
    from kernelgen.kernels.gemm import gemm_cpu

    other = next(c for c in gemm_cpu.FAMILY.candidates(_problem(), HERE) if c != first.config)
    _save(_measurement("generated", "gemm/gemm_cpu", 10.0, measured.as_fields(other)), _measurement("torch", "", 20.0))
    chosen = kernelgen.explain("gemm", _A, _B).chosen
    assert chosen is not None and chosen.config == other
    torch.testing.assert_close(kernelgen.gemm(_A, _B), _A @ _B)


def test_configs_that_mean_nothing_here_are_left_out() -> None:
    _save(_measurement("generated", "gemm/gemm_cpu", 10.0, {"no_such_field": 1}), _measurement("torch", "", 20.0))
    decision = kernelgen.explain("gemm", _A, _B)
    assert decision.chosen is not None and decision.chosen.backend == "torch"


def test_a_config_that_has_a_field_more_since() -> None:
    """What was measured before has its default: times stay those of the kernel that they were taken of."""
    from kernelgen.kernels.attention.prefill_sm90_configs import Config

    now = Config(2, 128, 2)
    before = {name: value for name, value in asdict(now).items() if name not in ("early_keys", "multicast")}
    assert measured._like(Config(3, 64), before) == now
    assert measured._like(now, {**before, "of_another_release": 1}) is None
    assert measured._like(now, {name: value for name, value in before.items() if name != "block_k"}) is None, "which has no default"


def test_a_config_that_has_a_field_less_since() -> None:
    """What was stored counts where it did what is left without that field, and is left out, without an error, where it did not."""
    from kernelgen.kernels.attention.prefill_sm90_configs import Config

    now = Config(2, 128, 2)
    before = asdict(now) | {"query_stages": 1, "polynomial": 0, "uniform": False, "longest_first": False}
    assert measured._like(Config(3, 64), before) == now
    for name, value in (("query_stages", 2), ("polynomial", 4), ("uniform", True), ("longest_first", True)):
        assert measured._like(now, before | {name: value}) is None


def test_every_config_that_ships_is_one_of_today() -> None:
    """By the table of an H200."""
    stored = json.loads((Path(measured.__file__).parent / "data" / "sm_90a-h200" / "attention.json").read_text())
    configs = [row["config"] for rows in stored["problems"].values() for row in rows if row["kernel"] == "attention/prefill_sm90"]
    assert len(configs) > 30
    from kernelgen.kernels.attention.prefill_sm90_configs import Config

    assert all(measured._like(Config(2, 128), config) for config in configs if config)


def test_another_release_makes_the_whole_bucket_stale() -> None:
    _save(_measurement("generated", "gemm/gemm_cpu", 80.0), _measurement("torch", "", 20.0, release="1.0"))
    decision = kernelgen.explain("gemm", _A, _B)
    assert decision.chosen is not None and decision.chosen.backend == "generated" and decision.decided_by == "rule"
    assert "measured with torch 1.0" in decision.basis and "kernelgen tune" in decision.basis


def test_a_kernel_that_came_after_what_ships_is_not_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was measured would always be taken before it. Kernels that do not run the problem are no reason."""
    hopper = replace(Target.parse("sm_90a"), sm_count=132)
    q, kv = (16, 1024, 16, 128), (16, 1024, 16, 128)
    problem = kernelgen.explain("attention", q, kv, kv, target=replace(hopper)).problem
    kernels = [f.name for f in families("attention", "cuda")]
    for left_out, counts in (("", True), ("attention/prefill_sm90", False)):
        rows = tuple(_measurement("generated", name, 90.0) for name in kernels if name != left_out)
        found = {"another problem": rows, str(measured.bucket(problem)): (_measurement("torch", "cudnn", 80.0),)}
        text = measured.dumps("attention", Machine("NVIDIA H200", 132, "", "", "", ""), found)
        monkeypatch.setattr(measured, "_shipped", lambda op, arch, text=text: (("attention.json", text),))
        select.forget()
        decision = kernelgen.explain("attention", q, kv, kv, target=replace(hopper))
        assert (decision.decided_by == "measurement") == counts, str(decision)
        assert counts or "measured before attention/prefill_sm90 was there: measure anew" in decision.basis
    select.forget()


@pytest.mark.parametrize("spoil", ["cut", "number", "schema", "empty", "not json"])
def test_a_file_that_is_not_as_it_was_written_is_not_believed(spoil: str, caplog: pytest.LogCaptureFixture) -> None:
    path = _save(_measurement("torch", "", 20.0))
    text = path.read_text()
    spoilt = {"cut": text[: len(text) // 2], "number": text.replace("20.0", "10.0"), "schema": text.replace('"schema": 1', '"schema": 7'),
              "empty": "", "not json": "[1, 2]"}[spoil]
    assert spoilt != text
    path.write_text(spoilt)
    select.forget()
    with caplog.at_level("WARNING"):
        decision = kernelgen.explain("gemm", _A, _B)
    assert decision.decided_by == "rule" and "kernelgen tune writes it anew" in caplog.text
    with pytest.raises(TimingsError):
        Timings.read(path)
    _save(_measurement("torch", "", 30.0))
    assert kernelgen.explain("gemm", _A, _B).decided_by == "measurement"
    assert path.with_suffix(".broken").read_text() == spoilt


_WRITER = """
import sys
from pathlib import Path
from kernelgen.dispatch.timings import Machine, Measurement, Timings
machine = Machine("GPU", 1, "", "", "", "")
for i in range(20):
    Timings.merge(Path(sys.argv[1]), "gemm", machine, {f"{sys.argv[2]} {i}": (Measurement("torch", "", None, 1.0, ""),)})
"""


def test_two_processes_merge_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name]) for name in ("a", "b")]
    assert [w.wait(120) for w in writers] == [0, 0]
    assert len(Timings.read(path).problems) == 40
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gemm.json", "gemm.lock"]


def test_times_of_another_machine_are_another_file() -> None:
    here = Machine.here(HERE)
    assert here.slug != replace(here, driver="1").slug != replace(here, torch="1.0").slug and " " not in here.slug


def test_defaults_round_trip() -> None:
    here, found = Machine.here(HERE), {"m=1": (_measurement("torch", "", 1.5), _measurement("generated", "x", None))}
    again = Timings.parse(measured.dumps("gemm", here, found), "gemm.json", "shipped")
    assert again.problems == found and again.machine == here and json.loads(measured.dumps("gemm", here, found))["schema"] == 1
    lines = measured.dumps("gemm", here, found).splitlines()
    assert sum('"backend"' in line for line in lines) == 2, "a line for each"
    assert not any('"note": ""' in line for line in lines), "with what it has"


def test_a_file_with_every_field_written_out_is_read() -> None:
    """As this release wrote them at first."""
    here, one = Machine.here(HERE), _measurement("torch", "", 1.5)
    content = {"machine": asdict(here), "problems": {"m=1": [asdict(one)]}}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    text = json.dumps({"schema": 1, "op": "gemm", **content, "sha256": digest})
    assert Timings.parse(text, "gemm.json", "shipped").problems == {"m=1": (one,)}


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(b"\xff\xfe\x00 no text"), lambda path: path.write_text("[" * 100_000), lambda path: path.write_text("[]"),
    lambda path: (path.unlink(), path.symlink_to(path)),
])
def test_whatever_lies_in_a_files_place_no_call_fails_for_it(spoil: Callable[[Path], object]) -> None:
    path = _save(_measurement("torch", "", 20.0))
    spoil(path)
    select.forget()
    decision = kernelgen.explain("gemm", _A, _B)
    assert decision.decided_by == "rule" and decision.chosen is not None


def test_a_folder_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _save(_measurement("torch", "", 20.0))
    monkeypatch.setattr(Path, "is_dir", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied", "tuning")))
    assert kernelgen.explain("gemm", _A, _B).decided_by == "rule"
    assert "cannot be read" in caplog.text
