"""A compiler never outlives the process that started it, however that ends; and what a compiler that cannot start says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernelgen import build
from kernelgen.cache.testing import in_mount_namespace, run_script
from kernelgen.errors import CacheError, LaunchError, ToolchainMissing
from kernelgen.launch.host import load_error
from kernelgen.settings import override
from kernelgen.testing import toy
from kernelgen.toolchains import cxx, nvrtc, process

ROOT = Path(__file__).parent.parent.parent

# A driver that starts a compiler proper, as g++ starts cc1plus; both note their numbers.
COMPILER = """#!/bin/sh
case "$*" in *-v*) exec g++ "$@";; esac
sleep 300 &
echo $$ $! > "{pids}.part" && mv "{pids}.part" "{pids}"
wait
"""
USE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that were started under nohup or in the background ignore both
signal.signal(signal.SIGINT, signal.default_int_handler)
from kernelgen.launch.host import start_launcher
if sys.argv[2] == "thread":
    start_launcher()
else:
    from kernelgen.launch.host import launcher
    launcher()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
{end}
"""


def started(tmp_path: Path, end: str, how: str = "thread") -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """A process whose compiler runs, the numbers of the driver and of its child, and the cache."""
    pids, compiler, cache = tmp_path / "pids", tmp_path / "slow c++", tmp_path / "cache"
    compiler.write_text(COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    environment = {**os.environ, "KERNELGEN_CACHE_DIR": str(cache), "CXX": f"'{compiler}'",
                   "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", USE.format(end=end), str(pids), how], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while not pids.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids.exists(), child.communicate()
    return child, [int(n) for n in pids.read_text().split()], cache


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_nothing_is_left(pids: list[int], cache: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (any(map(alive, pids)) or [*cache.glob("*/.tmp-*")]):
        time.sleep(0.02)
    assert not any(map(alive, pids))
    assert not [*cache.glob("*/.tmp-*")] and not [*cache.glob("failed/*")]


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('of the user')", "os._exit(0)"])
def test_a_background_build_ends_with_its_process(tmp_path: Path, end: str) -> None:
    child, pids, cache = started(tmp_path, end)
    _, said = child.communicate(timeout=60)
    assert b"CompileError" not in said and b"Exception in thread" not in said
    assert_nothing_is_left(pids, cache, 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("how", ["thread", "main"])
def test_a_build_ends_with_a_killed_process(tmp_path: Path, number: signal.Signals, how: str) -> None:
    child, pids, cache = started(tmp_path, "time.sleep(300)", how)
    child.send_signal(number)
    child.communicate(timeout=60)
    assert_nothing_is_left(pids, cache, 20)


def test_an_interrupted_build_stops_its_compiler(tmp_path: Path) -> None:
    child, pids, cache = started(tmp_path, "", "main")
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert not any(map(alive, pids)) and not [*cache.glob("*/.tmp-*")]


def test_a_fork_leaves_the_compilers_of_its_parent_alone(tmp_path: Path) -> None:
    child, pids, cache = started(tmp_path, """
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
time.sleep(0.5)
print("still", all(os.path.exists(f"/proc/{n}") for n in open(sys.argv[1]).read().split()), file=sys.stderr)
""")
    _, said = child.communicate(timeout=60)
    assert b"still True" in said
    assert_nothing_is_left(pids, cache, 20)


def test_what_the_compiler_prints_need_not_be_text(tmp_path: Path) -> None:
    code, output = process.run(["sh", "-c", r"printf 'a\377b'; printf c >&2; exit 3"], tmp_path, os.environ)
    assert code == 3 and output == "a\N{REPLACEMENT CHARACTER}bc"


def test_without_a_shell_the_compiler_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SHELL", "/no/such/shell")
    assert process.run(["true"], tmp_path, os.environ) == (0, "")


def test_a_compiler_reads_nothing_and_keeps_its_words_and_status(tmp_path: Path) -> None:
    script = 'cat; printf "<%s>" "$@"; exit 127'  # 127 is its own, not a shell's word for "not found"
    assert process.run(["sh", "-c", script, "sh", "a b", "", "$c", "-n"], tmp_path, os.environ) == (127, "<a b><><$c><-n>")


@pytest.mark.parametrize("command", ["no-such-compiler", "./gone/c++", "/etc"])
def test_a_compiler_that_cannot_be_started_is_an_error_of_the_system(tmp_path: Path, command: str) -> None:
    with pytest.raises(OSError, match=r"No such file|Permission denied"):
        process.run([command, "-v"], tmp_path, os.environ)
    with pytest.raises(FileNotFoundError):
        process.run(["true"], tmp_path / "gone", os.environ)


def test_a_gate_whose_process_died_starts_nothing_and_removes_the_folder(tmp_path: Path) -> None:
    folder, mark = tmp_path / "a folder", tmp_path / "started"
    folder.mkdir()
    (folder / "source.cc").touch()
    gate = [process._SHELL, "-c", process._GATE, "gate", str(folder), "touch", str(mark)]
    subprocess.run(gate, stdin=subprocess.DEVNULL, check=True, cwd=folder)
    assert not folder.exists() and not mark.exists()


def test_a_compiler_that_is_no_program_is_named(tmp_path: Path, fresh_cache: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    with override(cxx=str(broken)), toy.templates(), pytest.raises(ToolchainMissing, match="searched CXX="):
        build.build(toy.spec(factor=11))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cache_removed_while_the_compiler_runs(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    real = process.run

    def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
        if when == "before":
            shutil.rmtree(fresh_cache)
        result = real(command, folder, environment)
        shutil.rmtree(fresh_cache)
        return result

    monkeypatch.setattr(cxx.process, "run", run)
    with toy.templates(), pytest.raises(CacheError, match="was removed while .* was built"):
        build.build(toy.spec(factor=13))
    monkeypatch.undo()


def test_a_cache_removed_during_nvrtc(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvrtc._text

    def text(*arguments: object) -> bytes:
        shutil.rmtree(fresh_cache, ignore_errors=True)
        return real(*arguments)

    monkeypatch.setattr(nvrtc, "_text", text)
    with toy.templates(), pytest.raises(CacheError, match="was removed while .* was built"):
        build.build(toy.spec("sm_90a", factor=17))


def test_a_library_that_may_not_run_is_told_from_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = OSError(f"{tmp_path}/kernel.so: failed to map segment from shared object")
    for error in (load_error("k", tmp_path, refused), load_error("k", tmp_path / "gone", refused)):
        assert isinstance(error, LaunchError) and "noexec" in str(error) and "KERNELGEN_CACHE_DIR" in str(error)
        assert "verify" not in str(error)
    assert "kernelgen cache verify" in str(load_error("k", tmp_path, OSError("invalid ELF header")))


def test_a_noexec_cache_is_named(tmp_path: Path) -> None:
    mount = tmp_path / "noexec"
    mount.mkdir()
    prefix = in_mount_namespace(f"mount -t tmpfs -o noexec,mode=700 none '{mount}'")
    if prefix is None:
        pytest.skip("mount namespaces are forbidden here")
    script = """
        import sys
        import torch, kernelgen
        for _ in range(2):
            try:
                kernelgen.silu_and_mul(torch.randn(3, 16), backend="generated")
            except kernelgen.LaunchError as error:
                print(error)
    """
    said = run_script(script, KERNELGEN_CACHE_DIR=str(mount), prefix=prefix)
    assert said.count("noexec") >= 2 and said.count("KERNELGEN_CACHE_DIR") == 2 and "cache verify" not in said
