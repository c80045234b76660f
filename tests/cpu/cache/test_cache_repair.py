"""What is put, broken or taken away where the cache lies: garbage in meta.json, obstacles, a removed folder, a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelgen.cache import build, entry, roots
from kernelgen.cache.cli import cache
from kernelgen.cache.entry import META, BrokenEntry, meta_bytes, read_entry
from kernelgen.cache.keys import Request
from kernelgen.cache.locks import lock_path
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
from kernelgen.errors import CacheError, CompileError

REQUEST = stub_request()


@pytest.fixture
def stub(tmp_path: Path) -> StubCompiler:
    return StubCompiler(tmp_path / "calls")


def entry_of(root: Path, request: Request = REQUEST) -> Path:
    return root / request.key / STUB_TOOLCHAIN.key


def quarantined(root: Path) -> int:
    return len(list((root / "quarantine").iterdir()))


GARBAGE = {
    "nested lists": b"[" * 100_000, "nested maps": b'{"a":' * 100_000, "sound but nested": b"[" * 100_000 + b"]" * 100_000,
    "huge whole number": b'{"checksum": ' + b"9" * 10_000 + b"}", "huge float": b'{"created": 1e999, "checksum": "x"}',
    "NaN": b'{"created": NaN, "checksum": "x"}', "duplicate key": b'{"checksum": "x", "checksum": "x"}', "no UTF-8": b'{"name": "\xff"}',
    "a list": b"[]", "a string": b'"meta"', "a number": b"7", "null": b"null",
    "empty": b"", "zeros": bytes(4096), "UTF-16": "{}".encode("utf-16"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_in_meta_json_is_quarantined_and_rebuilt(tmp_path: Path, stub: StubCompiler, garbage: bytes) -> None:
    root = tmp_path / "root"
    Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    (entry_of(root) / META).write_bytes(garbage)
    for command in (["ls"], ["ls", "--json"], ["show", REQUEST.key], ["show", REQUEST.key, "--source"], ["prune", "--max-size", "1G"]):
        shown = CliRunner().invoke(cache, ["--root", str(root), *command])
        assert shown.exception is None or isinstance(shown.exception, SystemExit), (command, shown.exception)
    artifact, built = Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    assert built and quarantined(root) == 1 and artifact.read("kernel.bin")
    (entry_of(root) / META).write_bytes(garbage)
    shown = CliRunner().invoke(cache, ["--root", str(root), "verify"])
    assert shown.exit_code == 1 and "set aside" in shown.output and quarantined(root) == 2


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change ``meta.json`` and give it a checksum that fits, as a program would that only looks like ours."""
    meta = json.loads(path.read_bytes())
    meta.pop("checksum")
    change(meta)
    path.write_bytes(meta_bytes({**meta, "checksum": hashlib.sha256(meta_bytes(meta)).hexdigest()}))


OTHER: tuple[Any, ...] = (None, True, -1, 10**40, 1.5e300, "\ud800", "x", [], [1], {}, {"a": 1}, {"a": {"size": 1}})
SOUND: dict[str, tuple[Any, ...]] = {  # of these values the ones that the field may hold
    "name": ("x",), "target": ("x",), "flags": ([],), "includes": ({},), "created": (),
}


@pytest.mark.parametrize("name", ["format", "request", "toolchain", "toolchain_key", "name", "target", "flags", "includes", "source",
                                  "binary", "files", "created"])
def test_a_value_of_another_kind_is_no_entry(tmp_path: Path, stub: StubCompiler, name: str) -> None:
    root = tmp_path / "root"
    Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    sound = (entry_of(root) / META).read_bytes()
    for value in OTHER:
        (entry_of(root) / META).write_bytes(sound)
        rewritten(entry_of(root) / META, lambda meta, v=value: meta.update({name: v}))  # type: ignore[misc]
        for command in (["ls"], ["ls", "--json"], ["show", REQUEST.key], ["prune", "--max-size", "1G"]):
            shown = CliRunner().invoke(cache, ["--root", str(root), *command])
            assert shown.exception is None or isinstance(shown.exception, SystemExit), (command, value, shown.exception)
        if any(value == one and type(value) is type(one) for one in SOUND.get(name, ())):
            continue
        with pytest.raises(BrokenEntry):
            read_entry(entry_of(root), REQUEST.key, STUB_TOOLCHAIN.key)
    assert Store(root).get(REQUEST, None) is None or name in SOUND


@pytest.mark.parametrize("part", ["toolchain", "cxx_abi", "compiler", "binding_abi", "cuda_major", "size", "sha256"])
def test_a_value_of_another_kind_inside_is_no_entry(tmp_path: Path, stub: StubCompiler, part: str) -> None:
    root = tmp_path / "root"
    Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    sound = (entry_of(root) / META).read_bytes()

    def change(meta: dict[str, Any], value: object) -> None:
        place = meta["files"]["kernel.bin"] if part in ("size", "sha256") else meta["toolchain"]
        place[part] = value

    for value in (True, -1, 10**40, 0.5, "\ud800", [], {}):
        (entry_of(root) / META).write_bytes(sound)
        rewritten(entry_of(root) / META, lambda meta, v=value: change(meta, v))  # type: ignore[misc]
        assert Store(root).get(REQUEST, None) is None
        Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
        sound = (entry_of(root) / META).read_bytes()


def put_file(path: Path) -> None:
    path.write_bytes(b"in the way")


def put_dead_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "at all")


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"in the way")


PLACES: dict[str, Callable[[Path], Path]] = {
    "request": lambda root: root / REQUEST.key, "toolchain": entry_of, "locks": lambda root: root / "locks",
    "quarantine": lambda root: root / "quarantine", "failed": lambda root: root / "failed",
    "lock": lambda root: lock_path(root / "locks", REQUEST.key, STUB_TOOLCHAIN.key),
}


@pytest.mark.parametrize("put", [put_file, put_dead_link, put_folder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", [False, True], ids=["new", "used"])
def test_what_lies_in_the_way_is_moved(tmp_path: Path, stub: StubCompiler, place: str, put: Callable[[Path], None], before: bool) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    if before:
        Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
        shutil.rmtree(entry_of(root))
    path = PLACES[place](root)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    put(path)
    for request in (REQUEST, stub_request("another")):
        artifact, _ = Store(root).get_or_build(request, STUB_TOOLCHAIN, stub)
        assert artifact.read("kernel.bin").startswith(b"compiled:")
        assert Store(root).get_or_build(request, STUB_TOOLCHAIN, stub)[1] is False
    assert stub.count == 2 + before
    # A broken entry and a failed build find their folders too.
    (entry_of(root) / "kernel.bin").write_bytes(b"broken")
    assert Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)[1] and quarantined(root) >= 1

    def fails(folder: Path) -> BuildOutput:
        raise CompileError(f"in {folder}")

    with pytest.raises(CompileError) as caught:
        Store(root).get_or_build(stub_request("fails"), STUB_TOOLCHAIN, fails)
    assert Path(str(caught.value).removeprefix("in ")).is_dir()


def test_a_file_of_the_user_is_kept(tmp_path: Path, stub: StubCompiler) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    put_file(root / REQUEST.key)
    put_file(root / "quarantine")
    Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    kept = [path.read_bytes() for path in (root / "quarantine").iterdir()]
    assert kept == [b"in the way"] * 2


def test_many_threads_meet_an_obstacle_and_one_builds(tmp_path: Path) -> None:
    root, stub = tmp_path / "root", StubCompiler(tmp_path / "calls", seconds=0.05)
    root.mkdir(mode=0o700)
    for path in (root / REQUEST.key, root / "locks", root / "quarantine"):
        put_file(path)
    barrier, failures = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        try:
            Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
        except CacheError as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and stub.count == 1


@pytest.mark.parametrize("what", ["root", "request", "folder"])
@pytest.mark.parametrize("after", [False, True], ids=["no product", "product"])
def test_a_cache_that_is_removed_during_a_build_says_so(tmp_path: Path, stub: StubCompiler, what: str, after: bool) -> None:
    root = tmp_path / "root"

    def removed(folder: Path) -> BuildOutput:
        output = stub(folder)
        shutil.rmtree({"root": root, "request": root / REQUEST.key, "folder": folder}[what])
        if not after:
            (folder / "build.log").write_text("too late")
        return output

    with pytest.raises(CacheError, match=r"was removed while stub_d64_fp32 was built"):
        Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, removed)
    assert Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)[1]


def test_a_file_error_of_a_build_is_a_cache_error(tmp_path: Path) -> None:
    def refused(folder: Path) -> BuildOutput:
        raise PermissionError(13, "Permission denied", str(folder / "kernel.bin"))

    def other(folder: Path) -> BuildOutput:
        raise PermissionError(13, "Permission denied", "/opt/compiler")

    with pytest.raises(CacheError, match="cannot be written .*kernel.bin: Permission denied"):
        Store(tmp_path / "root").get_or_build(REQUEST, STUB_TOOLCHAIN, refused)
    with pytest.raises(PermissionError):
        Store(tmp_path / "root").get_or_build(REQUEST, STUB_TOOLCHAIN, other)


def test_inodes_are_named_when_they_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    assert "space left" in str(roots.full_disk(tmp_path)) and "space left" in str(roots.full_disk(tmp_path / "gone" / "away"))
    fields = list(real)
    fields[5:8] = [1000, 0, 0]  # f_files, f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    text = str(roots.full_disk(tmp_path))
    assert "no inodes left" in text and "0 free of 1000" in text and "KERNELGEN_CACHE_DIR" in text and "no space left" not in text
    fields[5:8] = [0, 0, 0]  # a file system without a fixed number of them
    assert "no space left" in str(roots.full_disk(tmp_path))


def test_leftovers_of_other_entries_go_with_the_next_build(tmp_path: Path, stub: StubCompiler) -> None:
    root = tmp_path / "root"
    Store(root).get_or_build(REQUEST, STUB_TOOLCHAIN, stub)
    dead = root / stub_request("never built again").key / f".tmp-{STUB_TOOLCHAIN.key}-1-abcd"
    dead.mkdir(parents=True)
    os.utime(dead, (1, 1))
    build._swept.clear()  # as in the next process
    Store(root).get_or_build(stub_request("another"), STUB_TOOLCHAIN, stub)
    assert not dead.exists()


def test_every_field_of_meta_json_is_checked() -> None:
    assert entry._FIELDS.keys() | {"format", "checksum"} == entry._OWN_FIELDS
