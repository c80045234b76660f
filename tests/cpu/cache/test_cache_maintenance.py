"""ls, show, verify, prune, and the command line over them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernelgen.cache.cli import cache
from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.locks import entry_lock
from kernelgen.cache.maintenance import EntryInfo, ls, prune, show, verify
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
from kernelgen.errors import CacheError

REQUESTS = [stub_request(f"int answer = {i};\n", name=f"gemm_{i}[bf16]") for i in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four entries of 1000 bytes and more, last used 4, 3, 2 and 1 hours ago."""
    made = Store(tmp_path / "root")
    stub = StubCompiler(tmp_path / "calls", payload=bytes(1000))
    for hours, request in zip((4, 3, 2, 1), REQUESTS, strict=True):
        artifact, _ = made.get_or_build(request, STUB_TOOLCHAIN, stub)
        os.utime(artifact.path, (time.time() - hours * 3600,) * 2)
    return made


def kept(store: Store) -> list[int]:
    return [i for i, request in enumerate(REQUESTS) if (store.root / request.key / STUB_TOOLCHAIN.key).exists()]


def break_entry(store: Store, request: Request, name: str = "kernel.bin") -> None:
    (store.root / request.key / STUB_TOOLCHAIN.key / name).write_bytes(b"broken")


def test_ls_lists_latest_use_first(store: Store) -> None:
    found = ls(store)
    assert [info.request for info in found] == [request.key for request in REQUESTS[::-1]]
    first = found[0]
    assert (first.name, first.target, first.compiler, first.binary) == ("gemm_3[bf16]", "cpu-x86-64-v3", "stub 1.0.0", "kernel.bin")
    assert first.bytes > 1000 and first.path.is_dir() and first.problem == ""


def test_ls_by_pattern(store: Store) -> None:
    def found(*patterns: str) -> list[str]:
        return sorted(info.name[5] for info in ls(store, patterns))

    assert found(REQUESTS[1].key[:8]) == ["1"]
    assert found("gemm_2[bf16]") == ["2"]  # a name is taken as it stands, brackets and all
    assert found("gemm_[01]*", "gemm_3*") == ["0", "1", "3"]
    assert found("moe*") == []


def test_a_look_up_stamps_the_use(store: Store) -> None:
    assert store.get(REQUESTS[0], STUB_TOOLCHAIN) is not None
    assert ls(store)[0].request == REQUESTS[0].key and time.time() - ls(store)[0].used < 60


def test_show(store: Store) -> None:
    detail = show(store, REQUESTS[2].key[:12])
    assert detail.info.name == "gemm_2[bf16]" and detail.meta["registers"] == 32 and detail.problem == ""
    assert detail.files == ("build.log", "kernel.bin", "kernel.cu", "meta.json")
    assert show(store, "gemm_2[bf16]") == detail
    break_entry(store, REQUESTS[2])
    assert show(store, REQUESTS[2].key).problem == "kernel.bin has 6 bytes, expected 1000"
    break_entry(store, REQUESTS[2], "meta.json")
    assert "meta.json cannot be understood" in show(store, REQUESTS[2].key).problem


def test_show_wants_one_entry(store: Store, tmp_path: Path) -> None:
    newer = ToolchainId("cxx", "stub 2.0.0", "kernelgen-params-1")
    store.get_or_build(REQUESTS[0], newer, StubCompiler(tmp_path / "calls"))
    with pytest.raises(CacheError, match=r"2 entries match .*expected one") as refusal:
        show(store, REQUESTS[0].key)
    assert newer.key in str(refusal.value) and STUB_TOOLCHAIN.key in str(refusal.value)
    assert show(store, f"{REQUESTS[0].key}/{newer.key}").info.compiler == "stub 2.0.0"
    with pytest.raises(CacheError, match="0 entries match 'nothing'"):
        show(store, "nothing")


def test_verify_sets_broken_entries_of_the_root_aside(store: Store, tmp_path: Path) -> None:
    assert verify(store).problems == ()
    break_entry(store, REQUESTS[0])
    break_entry(store, REQUESTS[1], "meta.json")
    report = verify(store)
    assert report.checked == 4 and len(report.problems) == 2 and all(problem.set_aside for problem in report.problems)
    assert kept(store) == [2, 3] and len(list((store.root / "quarantine").iterdir())) == 2
    assert verify(store).problems == ()


def test_verify_leaves_layers_alone(store: Store, tmp_path: Path) -> None:
    break_entry(store, REQUESTS[0])
    report = verify(Store(tmp_path / "other", [store.root]))
    assert [problem.set_aside for problem in report.problems] == [False]
    assert kept(store) == [0, 1, 2, 3]


def test_prune_by_age(store: Store) -> None:
    report = prune(store, older_than=2.5 * 3600)
    assert kept(store) == [2, 3]
    assert {info.request for info in report.removed} == {request.key for request in REQUESTS[:2]}
    assert (report.kept, report.in_use) == (2, 0) and report.freed_bytes > 2000
    assert not (store.root / REQUESTS[0].key).exists()


def test_prune_by_size_removes_the_least_recently_used(store: Store) -> None:
    size = ls(store)[0].bytes
    assert prune(store, max_size=4 * size + 10).removed == ()
    report = prune(store, max_size=2 * size + 10)
    assert kept(store) == [2, 3] and report.kept_bytes <= 2 * size + 10
    assert prune(store, max_size=0).kept == 0 and kept(store) == []
    with pytest.raises(ValueError, match="limit of -1"):
        prune(store, max_size=-1)


def test_prune_without_limits_removes_no_entry(store: Store) -> None:
    assert prune(store).removed == () and kept(store) == [0, 1, 2, 3]


def test_prune_spares_what_is_in_use_or_locked(store: Store) -> None:
    assert store.get(REQUESTS[0], STUB_TOOLCHAIN) is not None  # a loader may be about to open it
    with entry_lock(store.shelf.lock_dir, REQUESTS[1].key, STUB_TOOLCHAIN.key):
        report = prune(store, max_size=0)
    assert kept(store) == [0, 1] and (report.in_use, report.kept) == (2, 2)


def test_prune_looks_at_the_use_again_under_the_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ls(store)
    monkeypatch.setattr("kernelgen.cache.maintenance.ls", lambda store: listed)
    assert store.get(REQUESTS[0], STUB_TOOLCHAIN) is not None
    prune(store, max_size=0)
    assert kept(store) == [0]


def test_prune_never_touches_layers(store: Store, tmp_path: Path) -> None:
    assert prune(Store(tmp_path / "other", [store.root]), max_size=0).removed == ()
    assert kept(store) == [0, 1, 2, 3]


def test_prune_removes_dead_temporary_folders_and_spares_live_ones(store: Store, tmp_path: Path) -> None:
    dead = store.shelf.temporary(REQUESTS[0].key, STUB_TOOLCHAIN.key)
    (dead / "kernel.bin").write_bytes(b"half")
    entered, leave = threading.Event(), threading.Event()

    def build(folder: Path) -> BuildOutput:
        entered.set()
        assert leave.wait(30)
        (folder / "kernel.bin").write_bytes(b"whole")
        return BuildOutput("kernel.bin")

    new = stub_request("int slow;\n")
    builder = threading.Thread(target=store.get_or_build, args=(new, STUB_TOOLCHAIN, build))
    builder.start()
    assert entered.wait(30)
    begin = time.monotonic()
    assert prune(store).leftovers == 1
    assert time.monotonic() - begin < 5  # it does not wait for the builder
    leave.set()
    builder.join(30)
    assert not dead.exists() and store.get(new, STUB_TOOLCHAIN) is not None


def test_prune_judges_temporary_folders_by_age_where_locks_are_elsewhere(store: Store, tmp_path: Path) -> None:
    remote = Store(store.root, lock_dir=tmp_path / "locks")  # does not see the locks of builders on other hosts
    folder = remote.shelf.temporary(REQUESTS[0].key, STUB_TOOLCHAIN.key)
    assert prune(remote).leftovers == 0 and folder.exists()
    os.utime(folder, (time.time() - 7200,) * 2)
    assert prune(remote).leftovers == 1 and not folder.exists()


def test_prune_forgets_old_failures_and_quarantined_entries(store: Store) -> None:
    break_entry(store, REQUESTS[0])
    verify(store)
    (store.root / "failed" / "x").mkdir(parents=True)
    assert prune(store).leftovers == 0
    for folder in (store.root / "failed" / "x", *(store.root / "quarantine").iterdir()):
        os.utime(folder, (time.time() - 30 * 86400,) * 2)
    assert prune(store).leftovers == 2


# The command line


def run(store: Store, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cache, ["--root", str(store.root), *arguments])
    assert result.exit_code == code, result.output
    return result


def test_cli_ls_prints_a_table_and_json(store: Store) -> None:
    output = run(store, "ls", "gemm_[01]*").output
    assert "gemm_0[bf16]" in output and "gemm_2" not in output and REQUESTS[0].key[:12] in output
    assert f"2 entries, {sum(info.bytes for info in ls(store)[2:]) / 1024:.1f} KiB in {store.root}" in output.replace("\n", " ")
    rows = json.loads(run(store, "ls", "--json").output)
    assert [row["name"] for row in rows] == [f"gemm_{i}[bf16]" for i in (3, 2, 1, 0)]
    assert set(rows[0]) == set(EntryInfo.__annotations__)


def test_cli_show(store: Store) -> None:
    output = run(store, "show", REQUESTS[1].key[:10]).output
    assert "sound" in output and "registers" in output and "gemm_1[bf16]" in output
    assert run(store, "show", REQUESTS[1].key[:10], "--source").output.strip() == REQUESTS[1].source.strip()
    assert json.loads(run(store, "show", REQUESTS[1].key[:10], "--json").output)["meta"]["registers"] == 32
    assert "0 entries match 'zzz'" in run(store, "show", "zzz", code=1).output


def test_cli_verify_exits_1_when_something_is_broken(store: Store) -> None:
    assert "4 entries" in run(store, "verify").output
    break_entry(store, REQUESTS[0])
    output = run(store, "verify", code=1).output
    assert "kernel.bin has 6 bytes, expected 1000 (set aside)" in output and "1 broken" in output
    assert json.loads(run(store, "verify", "--json").output)["checked"] == 3


@pytest.mark.parametrize(("arguments", "left"), [
    ([], [0, 1, 2, 3]), (["--older-than", "150m"], [2, 3]), (["--older-than", "1d"], [0, 1, 2, 3]),
    (["--max-size", "0"], []), (["--max-size", "1.5KiB"], [3]), (["--max-size", "1G"], [0, 1, 2, 3]),
])
def test_cli_prune(store: Store, arguments: list[str], left: list[int]) -> None:
    assert f"{len(left)} stay" in run(store, "prune", *arguments).output
    assert kept(store) == left


@pytest.mark.parametrize("arguments", [["--max-size", "big"], ["--max-size", "-1"], ["--older-than", "30"], ["--older-than", "d"]])
def test_cli_prune_refuses_what_it_cannot_read(store: Store, arguments: list[str]) -> None:
    assert "expected a number" in run(store, "prune", *arguments, code=2).output
    assert kept(store) == [0, 1, 2, 3]


def test_cli_export_and_import(store: Store, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar"
    assert "2 entries" in run(store, "export", str(bundle), "gemm_0*", "gemm_1*").output
    names = subprocess.run(["tar", "tf", bundle], capture_output=True, text=True, check=True).stdout.split()
    assert len(names) == 10 and names[:2] == ["bundle.json", "SHA256SUMS"]
    other = Store(tmp_path / "other")
    assert "2 new, 0 were there, 0 refused" in run(other, "import", str(bundle)).output
    assert len(json.loads(run(other, "import", str(bundle), "--json").output)["present"]) == 2
    assert "does not exist" in run(other, "import", str(tmp_path / "absent.tar"), code=1).output
