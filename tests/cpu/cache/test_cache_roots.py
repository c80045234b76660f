"""Where the cache lies, and which folders are trusted."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelgen import settings
from kernelgen.cache import roots
from kernelgen.cache.roots import check_layer, check_trusted, create_private, default_root, storage_errors
from kernelgen.cache.store import Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
from kernelgen.errors import CacheError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a folder of temporary files of our own; no setting names the cache."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with settings.override(cache_dir=None, cache_layers=(), lock_dir=None):
        yield tmp_path / "home"


def test_user_cache_folder_is_the_default(home: Path) -> None:
    assert default_root() == (home / ".cache" / "kernelgen", ())
    assert stat.S_IMODE((home / ".cache" / "kernelgen").stat().st_mode) == 0o700


def test_xdg_cache_home_is_used_and_a_relative_one_is_not(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert default_root()[0] == home / "xdg" / "kernelgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_root()[0].is_absolute()


def test_setting_wins_over_the_home(home: Path, tmp_path: Path) -> None:
    with settings.override(cache_dir=tmp_path / "chosen"):
        assert Store().root == tmp_path / "chosen"
    assert list(home.iterdir()) == []


def test_unknown_user_without_home_gets_a_temporary_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for _ in range(2):
        assert default_root() == (tmp_path / "tmp" / f"kernelgen-{os.geteuid()}", ())
    assert len(caplog.records) == 1 and "KERNELGEN_CACHE_DIR" in caplog.text


def test_home_cache_that_cannot_be_written_is_still_read(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store().get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"))
    own = home / ".cache" / "kernelgen"
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != own and allowed(path, mode))
    store = Store()
    artifact = store.get(stub_request(), STUB_TOOLCHAIN)
    assert store.root == tmp_path / "tmp" / f"kernelgen-{os.geteuid()}" and store.layers == (own,)
    assert artifact is not None and artifact.path.is_relative_to(own)


def test_no_folder_at_all_is_one_clear_error(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent" / "file"))
    (tmp_path / "absent").touch()
    with pytest.raises(CacheError, match=r"'/nonexistent' does not exist, and no temporary folder .* KERNELGEN_CACHE_DIR"):
        Store().get(stub_request(), None)


def test_relative_root_does_not_follow_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(Path("relative"))
    monkeypatch.chdir("/")
    assert store.root == tmp_path / "relative"


def test_root_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="KERNELGEN_CACHE_DIR"):
        Store(tmp_path / "file" / "root").get_or_build(stub_request(), STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_folders_that_others_can_write_to_are_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(CacheError, match=rf"others can write to it \(mode {mode:04o}\)"):
        check_trusted(tmp_path)
    with pytest.raises(CacheError, match="others can write to it"):
        check_layer(tmp_path)
    tmp_path.chmod(0o755)
    check_trusted(tmp_path)
    check_layer(tmp_path)


def test_own_links_are_followed_except_for_the_predictable_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_trusted(tmp_path / "link")
    with pytest.raises(CacheError, match="symbolic link"):
        check_trusted(tmp_path / "link", strict=True)
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(CacheError, match="others can write"):
        check_trusted(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_layers_may_belong_to_anybody(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    check_layer(tmp_path)
    with pytest.raises(CacheError, match="owned by uid 12345"):
        check_trusted(tmp_path)
    os.chown(tmp_path, 0, 0)


def test_folder_that_is_there_keeps_its_content(tmp_path: Path) -> None:
    create_private(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "entry").touch()
    create_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "entry").exists()


@pytest.mark.parametrize(("number", "text"), [
    (errno.ENOSPC, "no space left"), (errno.EDQUOT, "a quota is used up"), (errno.EROFS, "cannot be written"),
    (errno.EACCES, "cannot be written"), (errno.EIO, "check the disk"),
])
def test_storage_errors_say_what_to_do(tmp_path: Path, number: int, text: str) -> None:
    with pytest.raises(CacheError, match=text) as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path) in str(caught.value) and "KERNELGEN_CACHE_DIR" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_warn_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        for _ in range(3):
            roots.warn_once(f"test {tmp_path}", "said of %s", "it")
    assert [record.getMessage() for record in caplog.records] == ["said of it"]
