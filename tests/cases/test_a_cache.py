"""Group A of the public bug cases at the level of the store: building, caching, publishing and loading.

The compiler is a stub of 0.1 s, so that races are hit often; other files repeat some cases with real compilers.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.cache.entry import META, BrokenEntry, read_entry
from kernelgen.cache.keys import ToolchainId
from kernelgen.cache.locks import entry_lock
from kernelgen.cache.maintenance import prune
from kernelgen.cache.store import Artifact, BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, run_script, script_environment, stub_request
from kernelgen.errors import CompileError

fork = multiprocessing.get_context("fork")


def in_processes(count: int, work: Callable[[int], object], timeout: float = 60) -> list[object]:
    """Run ``work(i)`` in ``count`` forked processes at once; results in order. Fails if one of them did."""
    results: multiprocessing.Queue[tuple[int, object, str]] = fork.Queue()

    def body(index: int) -> None:
        try:
            results.put((index, work(index), ""))
        except BaseException as error:
            results.put((index, None, f"{type(error).__name__}: {error}"))
            raise

    processes = [fork.Process(target=body, args=(i,), daemon=True) for i in range(count)]
    for process in processes:
        process.start()
    found: dict[int, object] = {}
    for _ in processes:
        index, value, problem = results.get(timeout=timeout)
        assert not problem, f"process {index}: {problem}"
        found[index] = value
    for process in processes:
        process.join(timeout)
        assert process.exitcode == 0
    return [found[i] for i in range(count)]


@pytest.fixture
def compiler(tmp_path: Path) -> StubCompiler:
    return StubCompiler(tmp_path / "calls")


def hidden_folders(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.is_dir()]


# A01: sixteen ranks on an empty cache


def test_a01_sixteen_processes_one_build(tmp_path: Path) -> None:
    rounds, barrier = 20, fork.Barrier(16)
    compilers = [StubCompiler(tmp_path / f"calls{i}", seconds=0.1) for i in range(rounds)]

    def rank(index: int) -> list[bool]:
        built = []
        for i, stub in enumerate(compilers):
            barrier.wait(timeout=60)
            artifact, by_us = Store(tmp_path / f"root{i}").get_or_build(stub_request(), STUB_TOOLCHAIN, stub)
            assert artifact.read("kernel.bin") == b"compiled:" + stub_request().source.encode()
            built.append(by_us)
        return built

    answers = in_processes(16, rank)
    assert [stub.count for stub in compilers] == [1] * rounds
    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * rounds  # type: ignore[call-overload]


def test_a01_sixteen_specs_build_in_parallel(tmp_path: Path) -> None:
    rounds, barrier = 5, fork.Barrier(16)
    compilers = [StubCompiler(tmp_path / f"calls{i}", seconds=0.1) for i in range(rounds)]

    def rank(index: int) -> bytes:
        request = stub_request(f"int answer = {index};\n")
        for i, stub in enumerate(compilers):
            barrier.wait(timeout=60)
            artifact, by_us = Store(tmp_path / f"root{i}").get_or_build(request, STUB_TOOLCHAIN, stub)
            assert by_us
        return artifact.read("kernel.bin")

    answers = in_processes(16, rank)
    assert answers == [f"compiled:int answer = {i};\n".encode() for i in range(16)]
    for stub in compilers:
        assert stub.count == 16
        assert stub.most_at_once() >= 8


# A02: loading while somebody rebuilds


def test_a02_loader_never_sees_a_partial_entry(tmp_path: Path, compiler: StubCompiler) -> None:
    store, version, stop = Store(tmp_path / "root"), fork.Value("i", 0), fork.Event()

    def request(number: int) -> object:
        return stub_request(f"int answer = 42; // build {number}\n")

    def load(index: int) -> int:
        loads = 0
        while not stop.is_set():
            number = version.value
            artifact, _ = Store(store.root).get_or_build(request(number), STUB_TOOLCHAIN, compiler)  # type: ignore[arg-type]
            assert artifact.read("kernel.bin") == f"compiled:int answer = 42; // build {number}\n".encode()
            loads += 1
        return loads

    def rebuild(index: int) -> int:
        try:
            for number in range(1, 101):
                version.value = number
                store.get_or_build(request(number), STUB_TOOLCHAIN, compiler)  # type: ignore[arg-type]
                if number % 10 == 0:
                    prune(store, max_size=0)  # entries in use stay, whatever the limit
        finally:
            stop.set()
        return 0

    answers = in_processes(3, lambda i: rebuild(i) if i == 0 else load(i))
    assert min(answers[1:]) >= 5  # type: ignore[type-var]


# A04: a killed builder


def test_a04_killed_builder_does_not_block_the_next(tmp_path: Path, compiler: StubCompiler) -> None:
    script = """
        import subprocess, sys
        from pathlib import Path
        from kernelgen.cache.store import Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, stub_request
        def build(folder):
            (folder / "kernel.bin").write_bytes(b"half")
            Path(sys.argv[2]).touch()
            subprocess.run(["sleep", "60"])
        Store(Path(sys.argv[1])).get_or_build(stub_request(), STUB_TOOLCHAIN, build)
    """
    root, started = tmp_path / "root", tmp_path / "started"
    victim = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(root), str(started)],
                              start_new_session=True, env=script_environment())
    deadline = time.monotonic() + 60
    while not started.exists():
        assert victim.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert len(hidden_folders(root)) == 1  # what the killed builder left

    begin = time.monotonic()
    artifact, built = Store(root).get_or_build(stub_request(), STUB_TOOLCHAIN, compiler)
    assert time.monotonic() - begin < 2
    assert built and artifact.read("kernel.bin").startswith(b"compiled:")
    assert hidden_folders(root) == []


# A06: the lock holds out one holder


@pytest.mark.parametrize("overridden", [False, True], ids=["in the cache", "folder of the setting"])
def test_a06_never_two_holders(tmp_path: Path, overridden: bool) -> None:
    chosen = tmp_path / "elsewhere" if overridden else None
    folder = Store(tmp_path / "root", lock_dir=chosen).shelf.lock_dir
    witness, request = tmp_path / "witness", stub_request()

    def hold(index: int) -> int:
        own = str(os.getpid())
        for _ in range(500):
            with entry_lock(folder, request.key, STUB_TOOLCHAIN.key):
                witness.write_text(own)
                time.sleep(0.001)
                assert witness.read_text() == own
        return 500

    assert in_processes(3, hold) == [500] * 3
    assert len(list(folder.iterdir())) == 1  # the lock file stays in place
    assert folder.parent == (tmp_path if overridden else tmp_path / "root")


def test_a06_lock_folder_of_the_environment_is_honoured(tmp_path: Path) -> None:
    run_script("""
        import sys
        from pathlib import Path
        from kernelgen.cache.store import Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
        Store().get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(Path(sys.argv[1])))
    """, tmp_path / "calls", KERNELGEN_CACHE_DIR=str(tmp_path / "root"), KERNELGEN_LOCK_DIR=str(tmp_path / "locks"))
    assert [path.name for path in (tmp_path / "locks").iterdir()] == [f"{stub_request().key}.{STUB_TOOLCHAIN.key}.lock"]
    assert not (tmp_path / "root" / "locks").exists()


# A08: files of two writers never mix


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aabb"))), ids="".join)
def test_a08_reader_sees_nothing_or_a_matching_pair(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Each writer writes its binary in its first step and publishes in its second, in every order.

    The writers have lock folders of their own, as on two hosts: nothing but the publishing keeps them apart.
    """
    root, reader, request = tmp_path / "root", Store(tmp_path / "root"), stub_request()
    steps = {name: [threading.Event(), threading.Event()] for name in "ab"}
    written = {name: threading.Event() for name in "ab"}
    results: dict[str, tuple[Artifact, bool]] = {}

    def writer(name: str) -> None:
        def build(folder: Path) -> BuildOutput:
            assert steps[name][0].wait(30)
            (folder / "kernel.bin").write_bytes(f"binary of {name}".encode())
            written[name].set()
            assert steps[name][1].wait(30)
            return BuildOutput("kernel.bin", {"tag": name})

        store = Store(root, lock_dir=tmp_path / f"locks-{name}")
        results[name] = store.get_or_build(request, STUB_TOOLCHAIN, build)

    def check() -> str:
        artifact = reader.get(request, STUB_TOOLCHAIN)
        if artifact is None:
            return ""
        assert artifact.read("kernel.bin") == f"binary of {artifact.meta['tag']}".encode()
        return str(artifact.meta["tag"])

    threads = {name: threading.Thread(target=writer, args=(name,)) for name in "ab"}
    for thread in threads.values():
        thread.start()
    seen = []
    for position, name in enumerate(order):
        if name not in order[:position]:
            steps[name][0].set()
            assert written[name].wait(30)
        else:
            steps[name][1].set()
            threads[name].join(30)
        seen.append(check())
    first = next(name for position, name in enumerate(order) if name in order[:position])
    assert seen[-1] == first and all(tag in ("", first) for tag in seen)
    assert [results[name][1] for name in "ab"] == [name == first for name in "ab"]
    assert {artifact.meta["tag"] for artifact, _ in results.values()} == {first}
    assert hidden_folders(root) == []


# A09: a compiler that fails, lies or dies


def failing_compiler(kind: str) -> Callable[[Path], BuildOutput]:
    script = {
        "exits 1 with an empty output": ": > kernel.bin; echo 'stub: error: no such header' >&2; exit 1",
        "exits 0 without output": "echo 'stub: warning: nothing to do' >&2; exit 0",
        "exits 0 with an empty output": ": > kernel.bin; echo 'stub: warning: wrote nothing' >&2; exit 0",
        "is killed": "echo half > kernel.bin; echo 'stub: working' >&2; kill -KILL $$",
    }[kind]

    def build(folder: Path) -> BuildOutput:
        done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        (folder / "build.log").write_text(done.stderr)
        if done.returncode != 0:
            raise CompileError(f"stub failed ({done.returncode}): {done.stderr}", command=f"stub {folder}/kernel.cu",
                               output=done.stderr, source=str(folder / "kernel.cu"))
        return BuildOutput("kernel.bin")

    return build


@pytest.mark.parametrize(("kind", "text"), [
    ("exits 1 with an empty output", "no such header"), ("exits 0 without output", "nothing to do"),
    ("exits 0 with an empty output", "wrote nothing"), ("is killed", "working"),
])
def test_a09_failed_compiler_publishes_nothing(tmp_path: Path, compiler: StubCompiler, kind: str, text: str) -> None:
    store, request = Store(tmp_path / "root"), stub_request()
    with pytest.raises(CompileError, match=text) as failure:
        store.get_or_build(request, STUB_TOOLCHAIN, failing_compiler(kind), banner="// banner\n")
    assert store.get(request, STUB_TOOLCHAIN) is None and store.get(request, None) is None
    assert list((store.root / request.key).iterdir()) == []
    kept = Path(failure.value.source or "")
    assert kept.read_text() == "// banner\n" + request.source
    assert text in (kept.parent / "build.log").read_text()
    assert ".tmp-" not in f"{failure.value} {failure.value.command}"  # nothing that is gone is named

    artifact, built = store.get_or_build(request, STUB_TOOLCHAIN, compiler)
    assert built and artifact.read("kernel.bin") == b"compiled:" + request.source.encode()


# A10, A11, A12: what makes an entry fresh


def test_a10_changed_header_with_an_old_time_rebuilds(tmp_path: Path, compiler: StubCompiler) -> None:
    store, header = Store(tmp_path / "root"), tmp_path / "answer.h"

    def call() -> bool:
        request = stub_request(includes=(("kernelgen/answer.h", header.read_text()),))
        return store.get_or_build(request, STUB_TOOLCHAIN, compiler)[1]

    header.write_text("#define ANSWER 1\n")
    assert call() and not call()
    header.write_text("#define ANSWER 2\n")
    os.utime(header, (315532800, 315532800))  # 1980
    assert call()
    os.utime(header)
    assert not call()


def test_a11_moved_cache_and_other_path_spellings_hit(tmp_path: Path, compiler: StubCompiler) -> None:
    requests = [stub_request(f"int answer = {i};\n") for i in range(3)]
    for request in requests:
        Store(tmp_path / "root").get_or_build(request, STUB_TOOLCHAIN, compiler)
    subprocess.run(["tar", "cf", tmp_path / "cache.tar", "-C", tmp_path, "root"], check=True)
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "other place").mkdir()
    subprocess.run(["tar", "xf", tmp_path / "cache.tar", "-C", tmp_path / "other place"], check=True)
    moved = tmp_path / "other place" / "root"
    for path in moved.rglob("*"):
        os.utime(path)
    (tmp_path / "alias").symlink_to(moved)
    for root in (moved, tmp_path / "alias"):
        assert not any(Store(root).get_or_build(request, STUB_TOOLCHAIN, compiler)[1] for request in requests)
    assert compiler.count == 3


def test_a12_each_toolchain_has_its_own_artifact(tmp_path: Path) -> None:
    store, request = Store(tmp_path / "root"), stub_request()
    old = ToolchainId("nvrtc", "NVRTC 12.9.86", "kernelgen-params-1", cuda_major=12)
    new = ToolchainId("nvrtc", "NVRTC 13.0.88", "kernelgen-params-1", cuda_major=13)
    made = {tool: store.get_or_build(request, tool, StubCompiler(tmp_path / "calls", payload=tool.compiler.encode()))
            for tool in (new, old)}
    assert all(built for _, built in made.values())
    for tool in (old, new, old):
        artifact, built = store.get_or_build(request, tool, StubCompiler(tmp_path / "calls"))
        assert not built and artifact.read("kernel.bin") == tool.compiler.encode() and artifact.toolchain == tool
    served = store.get(request, None, binding_abi="kernelgen-params-1", cuda_major=12)
    assert served is not None and served.toolchain == old


# A27: long names


def test_a27_long_names_make_short_files_and_own_entries(tmp_path: Path, compiler: StubCompiler) -> None:
    store, stem = Store(tmp_path / "root"), "attention_prefill_" + "option_" * 40
    first, second = (stub_request(f"int answer = {i};\n", name=f"{stem}{i}") for i in range(2))
    assert len(first.name) > 255 and first.name[:240] == second.name[:240]
    artifacts = [store.get_or_build(request, STUB_TOOLCHAIN, compiler)[0] for request in (first, second)]
    assert [artifact.read("kernel.bin")[-3:] for artifact in artifacts] == [b"0;\n", b"1;\n"]
    assert [artifact.meta["name"] for artifact in artifacts] == [first.name, second.name]
    with pytest.raises(CompileError):
        store.get_or_build(stub_request("broken", name=stem), STUB_TOOLCHAIN, failing_compiler("exits 0 without output"))
    assert max(len(os.fsencode(path.name)) for path in store.root.rglob("*")) < 143


# A30: keys do not depend on the process


def test_a30_same_key_in_every_process(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        from pathlib import Path
        from kernelgen.cache.keys import canonical_digest
        from kernelgen.cache.store import Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
        os.chdir(sys.argv[1]); os.umask(int(sys.argv[2], 8)); time.tzset()
        for other in sys.argv[3].split():
            Store(Path(sys.argv[1]) / "root").get_or_build(stub_request(other), STUB_TOOLCHAIN, StubCompiler(Path("calls")))
        print(stub_request().key, STUB_TOOLCHAIN.key, canonical_digest({"b": {1, 2, "x"}, "a": frozenset("hash seed")}))
    """
    for name in "ab":
        (tmp_path / name).mkdir()
    answers = {
        run_script(script, tmp_path / "a", "022", "", PYTHONHASHSEED="0"),
        run_script(script, tmp_path / "a", "077", "x y z", PYTHONHASHSEED="1", TZ="Asia/Tokyo", LC_ALL="C"),
        run_script(script, tmp_path / "b", "002", "z x y", PYTHONHASHSEED="7", TZ="UTC", LC_ALL="C.UTF-8"),
    }
    assert len(answers) == 1
    assert answers.pop().split()[:2] == [stub_request().key, STUB_TOOLCHAIN.key]


# A33: every corruption of every file


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, zero, flip, to_folder, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["kernel.bin", "kernel.cu", "build.log", META])
def test_a33_damaged_file_is_a_miss_and_rebuilt(tmp_path: Path, compiler: StubCompiler, name: str,
                                                damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    request = stub_request()
    artifact, _ = Store(tmp_path / "root").get_or_build(request, STUB_TOOLCHAIN, compiler)
    damage(artifact.path / name)
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        again, built = Store(tmp_path / "root").get_or_build(request, STUB_TOOLCHAIN, compiler)
    assert built and again.read("kernel.bin") == b"compiled:" + request.source.encode()
    assert len(caplog.records) == 1 and name in caplog.text
    assert len(list((tmp_path / "root" / "quarantine").iterdir())) == 1
    final, rebuilt = Store(tmp_path / "root").get_or_build(request, STUB_TOOLCHAIN, compiler)
    assert not rebuilt and final.path == artifact.path


def test_a33_every_single_byte_of_meta_json_is_covered(tmp_path: Path, compiler: StubCompiler) -> None:
    store, request = Store(tmp_path / "root"), stub_request()
    artifact, _ = store.get_or_build(request, STUB_TOOLCHAIN, compiler)
    meta = artifact.path / META
    sound = meta.read_bytes()
    assert json.loads(sound)["files"]["kernel.bin"]["size"] == len(artifact.read("kernel.bin"))
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        meta.write_bytes(damaged)
        with pytest.raises(BrokenEntry):
            read_entry(artifact.path, request.key, STUB_TOOLCHAIN.key)
    meta.write_bytes(sound + b" ")  # means the same, and was not written by us
    with pytest.raises(BrokenEntry):
        read_entry(artifact.path, request.key, STUB_TOOLCHAIN.key)
    meta.write_bytes(sound)
    assert read_entry(artifact.path, request.key, STUB_TOOLCHAIN.key) == artifact


def test_a33_many_processes_meet_a_damaged_entry_and_one_rebuilds(tmp_path: Path) -> None:
    stub, barrier = StubCompiler(tmp_path / "calls", seconds=0.1), fork.Barrier(8)
    artifact, _ = Store(tmp_path / "root").get_or_build(stub_request(), STUB_TOOLCHAIN, stub)
    flip(artifact.file("kernel.bin"))

    def rank(index: int) -> bytes:
        barrier.wait(timeout=60)
        return Store(tmp_path / "root").get_or_build(stub_request(), STUB_TOOLCHAIN, stub)[0].read("kernel.bin")

    assert set(in_processes(8, rank)) == {b"compiled:" + stub_request().source.encode()}
    assert stub.count == 2
    assert len(list((tmp_path / "root" / "quarantine").iterdir())) == 1
