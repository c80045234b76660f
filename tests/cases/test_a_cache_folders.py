"""Group A of the public bug cases that are about folders: whose they are, where they lie, and what they are called."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelgen import settings
from kernelgen.cache.maintenance import prune
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import (
    STUB_TOOLCHAIN,
    StubCompiler,
    in_mount_namespace,
    run_script,
    shared_folder,
    stub_request,
)
from kernelgen.errors import CacheError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user id of a child, which takes root")


@pytest.fixture
def compiler(tmp_path: Path) -> StubCompiler:
    return StubCompiler(tmp_path / "calls")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def no_home(open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Neither a setting nor a home names the cache; yields the folder of temporary files.

    ``tmp_path`` comes first: pytest makes its own folder of temporary files at the first use.
    """
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with settings.override(cache_dir=None, cache_layers=(), lock_dir=None):
        yield open_folder


AS_OTHER_USER = """
    import logging, os, sys, tempfile
    from pathlib import Path
    from kernelgen.cache.store import Store
    from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
    os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
"""


@needs_root
def test_a16_other_user_writes_below_the_root_only(open_folder: Path) -> None:
    script = AS_OTHER_USER + """
    writes = []
    def watch(event, args):
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            writes.append(args[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.truncate", "os.symlink"):
            writes.append(args[0])
        elif event in ("os.rename", "os.link"):
            writes.extend(args[:2])
    sys.addaudithook(watch)
    root = Path(sys.argv[1])
    for _ in range(2):
        artifact, built = Store(root).get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(root.parent / "calls"))
    assert not built and artifact.read("kernel.bin").startswith(b"compiled:")
    paths = {str(path) for path in writes if not isinstance(path, int)}
    print("\\n".join(sorted(path for path in paths if not Path(path).is_relative_to(root))))
    """
    output = run_script(script, open_folder / "root", HOME=str(open_folder / "home"))
    assert output.split() == [str(open_folder / "calls")]  # the stub's own list of calls
    assert stat.S_IMODE((open_folder / "root").stat().st_mode) == 0o700


@needs_root
def test_a17_user_without_passwd_entry_gets_a_private_temporary_cache(open_folder: Path) -> None:
    script = AS_OTHER_USER + """
    for _ in range(2):
        store = Store()
        artifact, built = store.get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(Path(sys.argv[1])))
    assert not built and artifact.read("kernel.bin").startswith(b"compiled:")
    print("root", store.root)
    """
    output = run_script(script, open_folder / "calls", TMPDIR=str(open_folder))  # no HOME, no USER
    root = open_folder / "kernelgen-54321"
    assert f"root {root}" in output
    assert output.count("KERNELGEN_CACHE_DIR") == 1
    assert (root.stat().st_uid, stat.S_IMODE(root.stat().st_mode)) == (54321, 0o700)


BUILD_ONE = """
    import sys
    from pathlib import Path
    from kernelgen.cache.store import Store
    from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
    store = Store()
    artifact, built = store.get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(Path(sys.argv[1])))
    print("root", store.root)
"""


def test_a18_import_creates_nothing(tmp_path: Path) -> None:
    for name in ("home", "tmp", "cwd"):
        (tmp_path / name).mkdir()
    run_script("""
        import os, sys
        os.chdir(sys.argv[1])
        import kernelgen.cache.bundles, kernelgen.cache.cli, kernelgen.cache.jobs, kernelgen.cache.maintenance
        from kernelgen.cache.store import Store
        Store()
    """, tmp_path / "cwd", HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path / "tmp"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cwd", "home", "tmp"]


def test_a18_missing_home_falls_back_and_the_override_is_used(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    lost = {"HOME": "/nonexistent", "TMPDIR": str(tmp_path / "tmp")}
    output = run_script(BUILD_ONE, tmp_path / "calls", **lost)
    assert f"root {tmp_path}/tmp/kernelgen-{os.geteuid()}" in output
    assert "'/nonexistent' does not exist" in output and output.count("KERNELGEN_CACHE_DIR") == 1
    output = run_script(BUILD_ONE, tmp_path / "calls", KERNELGEN_CACHE_DIR=str(tmp_path / "chosen"), **lost)
    assert output == f"root {tmp_path}/chosen\n"
    assert not Path("/nonexistent").exists()


def test_a18_read_only_home_falls_back_and_its_cache_is_still_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    namespace = in_mount_namespace(f"mount --bind {home} {home} && mount -o remount,bind,ro {home}")
    if namespace is None:
        pytest.skip("mount namespaces are not allowed here")
    places = {"HOME": str(home), "TMPDIR": str(tmp_path / "tmp")}
    output = run_script(BUILD_ONE, tmp_path / "calls", prefix=namespace, **places)
    assert f"root {tmp_path}/tmp/kernelgen-" in output and "Read-only file system" in output
    shutil.rmtree(next((tmp_path / "tmp").glob("kernelgen-*")))
    run_script(BUILD_ONE, tmp_path / "calls", **places)  # now the home cache has it
    run_script(BUILD_ONE, tmp_path / "calls", prefix=namespace, **places)
    assert StubCompiler(tmp_path / "calls").count == 2


def plant(root: Path, owner: int | None = None, mode: int = 0o700) -> None:
    """A cache that somebody else made, with a sound entry under the right key."""
    Store(root).get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(root.with_name("planter"), payload=b"planted"))
    root.chmod(mode)
    if owner is not None:
        os.chown(root, owner, owner)


@pytest.mark.parametrize("planted", ["mode 0777", "owner", "link", "file"])
def test_a28_planted_fallback_is_refused(no_home: Path, planted: str) -> None:
    root = no_home / f"kernelgen-{os.geteuid()}"
    if planted == "mode 0777":
        plant(root, mode=0o777)
        reason = "others can write to it (mode 0777)"
    elif planted == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        plant(root, owner=12345)
        reason = "owned by uid 12345"
    elif planted == "link":
        plant(no_home / "elsewhere")
        root.symlink_to(no_home / "elsewhere")
        reason = "symbolic link"
    else:
        root.write_text("")
        reason = "not a folder"

    def build(folder: Path) -> BuildOutput:
        raise AssertionError("must not get as far as building")

    for call in (lambda: Store().get(stub_request(), STUB_TOOLCHAIN), lambda: Store().get(stub_request(), None),
                 lambda: Store().get_or_build(stub_request(), STUB_TOOLCHAIN, build)):
        with pytest.raises(CacheError) as refusal:
            call()
        assert reason in str(refusal.value) and "KERNELGEN_CACHE_DIR" in str(refusal.value)


def test_a28_own_fallback_is_private_whatever_the_umask(no_home: Path, compiler: StubCompiler) -> None:
    before = os.umask(0)
    try:
        store = Store()
        store.get_or_build(stub_request(), STUB_TOOLCHAIN, compiler)
    finally:
        os.umask(before)
    assert store.root.parent == no_home and stat.S_IMODE(store.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("planted", ["mode 0777", "mode 0770", "owner", "foreign link"])
def test_a28_planted_root_of_the_setting_is_refused(tmp_path: Path, planted: str) -> None:
    root = tmp_path / "root"
    if planted in ("owner", "foreign link") and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    if planted == "foreign link":
        plant(tmp_path / "real")
        root.symlink_to(tmp_path / "real")
        os.lchown(root, 12345, 12345)
        reason = "symbolic link, made by uid 12345"
    elif planted == "owner":
        plant(root, owner=12345)
        reason = "owned by uid 12345"
    else:
        plant(root, mode=int(planted[-3:], 8))
        reason = f"({planted})"
    with pytest.raises(CacheError) as refusal:
        Store(root).get(stub_request(), STUB_TOOLCHAIN)
    assert reason in str(refusal.value)


# A25: odd names


@pytest.mark.parametrize("name", ["my cache $x #1 (a)", "a:b", "[brackets] {x} *?", "quote'\"`", "line\nbreak", "ünïcode"])
def test_a25_odd_characters_in_the_root(tmp_path: Path, compiler: StubCompiler, name: str) -> None:
    root = tmp_path / name
    _, built = Store(root).get_or_build(stub_request(), STUB_TOOLCHAIN, compiler)
    artifact, again = Store(root).get_or_build(stub_request(), STUB_TOOLCHAIN, compiler)
    assert built and not again and artifact.path.is_relative_to(root)
    served = Store(tmp_path / "other", [root]).get(stub_request(), None)
    assert served is not None and served.path.is_relative_to(root)
    assert prune(Store(root), max_size=0, in_use=0).freed_bytes > 0
