"""Bundles: same bytes for the same entries, usable anywhere, and nothing harmful comes in."""

from __future__ import annotations

import errno
import io
import lzma
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelgen import settings
from kernelgen.cache.bundles import export_bundle, import_bundle
from kernelgen.cache.listing import MANIFEST, SUMS, digest_of
from kernelgen.cache.maintenance import ls, verify
from kernelgen.cache.shelf import Shelf
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, run_script, shared_folder, stub_request
from kernelgen.errors import CacheError

REQUESTS = [stub_request(f"int answer = {i};\n", name=f"gemm_{i}") for i in range(3)]
KINDS = ["bundle.tar", "bundle.tar.gz", "bundle.tgz", "bundle"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "root")
    for request in REQUESTS:
        made.get_or_build(request, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"))
    return made


def refuse(folder: Path) -> BuildOutput:
    raise AssertionError("must not build")


@pytest.mark.parametrize("name", KINDS)
def test_round_trip(store: Store, tmp_path: Path, name: str) -> None:
    report = export_bundle(store, tmp_path / name)
    assert len(report.entries) == 3 and report.path == tmp_path / name
    shutil.rmtree(store.root)
    other = Store(tmp_path / "elsewhere" / "root")
    done = import_bundle(other, tmp_path / name)
    assert done.imported == report.entries and done.present == done.refused == ()
    for request in REQUESTS:
        artifact, built = other.get_or_build(request, STUB_TOOLCHAIN, refuse)
        assert not built and artifact.read("kernel.bin") == b"compiled:" + request.source.encode()
        assert stat.S_IMODE(artifact.path.stat().st_mode) == 0o700
    assert import_bundle(other, tmp_path / name).present == report.entries
    assert verify(other).problems == () and list(other.root.glob(".*")) == []


@pytest.mark.parametrize("name", KINDS[:3])
def test_same_entries_give_the_same_bytes(store: Store, tmp_path: Path, name: str) -> None:
    moved = Store(tmp_path / "moved")
    import_bundle(moved, export_bundle(store, tmp_path / "first").path)
    for i, place in enumerate((store, moved)):
        (tmp_path / str(i)).mkdir()
        before = os.umask((0o022, 0o077)[i])
        try:
            export_bundle(place, tmp_path / str(i) / name)
        finally:
            os.umask(before)
    assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "0" / name).read_bytes()


def test_chosen_entries_only(store: Store, tmp_path: Path) -> None:
    export_bundle(store, tmp_path / "some", [REQUESTS[0].key, "gemm_2"])
    assert sorted(info.name for info in ls(Store(tmp_path / "some"))) == ["gemm_0", "gemm_2"]


def test_export_refuses_what_it_must_not_do(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no entry that matches moe"):
        export_bundle(store, tmp_path / "none.tar", ["moe"])
    for name in ("b.zip", "b.tar.xz", "b.TAR"):
        with pytest.raises(CacheError, match=r"another kind of archive, expected .tar, .tar.gz, .tgz, or a folder"):
            export_bundle(store, tmp_path / name)
    (tmp_path / "there.tar").write_text("precious")
    with pytest.raises(CacheError, match="is there already"):
        export_bundle(store, tmp_path / "there.tar")
    assert (tmp_path / "there.tar").read_text() == "precious"
    (store.root / REQUESTS[0].key / STUB_TOOLCHAIN.key / "kernel.bin").write_bytes(b"broken")
    with pytest.raises(CacheError, match="is broken"):
        export_bundle(store, tmp_path / "broken.tar")
    assert not (tmp_path / "broken.tar").exists() and list(tmp_path.glob(".broken*")) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user id of a child, which takes root")
def test_folder_bundle_is_a_layer_for_another_user(store: Store, open_folder: Path) -> None:
    before = os.umask(0o077)
    try:
        layer = export_bundle(store, open_folder / "layer").path
    finally:
        os.umask(before)
    script = """
        import os, sys
        from pathlib import Path
        from kernelgen import settings
        from kernelgen.cache.bundles import import_bundle
        from kernelgen.cache.maintenance import prune, verify
        from kernelgen.cache.store import Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, stub_request
        layer, own = map(Path, sys.argv[1:])
        os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
        store, request = Store(own, [layer]), stub_request("int answer = 1;\\n")
        artifact, built = store.get_or_build(request, STUB_TOOLCHAIN, None)
        assert not built and artifact.path.is_relative_to(layer) and artifact.read("kernel.bin").endswith(b"1;\\n")
        assert store.get(request, None).path.is_relative_to(layer)
        assert verify(store).checked == 3 and not verify(store).problems
        assert len(import_bundle(Store(own), layer).imported) == 3
        assert len(prune(Store(own), max_size=0, in_use=0).removed) == 3
    """
    run_script(script, layer, open_folder / "own")


def test_bundle_on_a_read_only_place_is_imported_with_own_modes(store: Store, tmp_path: Path) -> None:
    layer = export_bundle(store, tmp_path / "layer").path
    for path in (*layer.rglob("*"), layer):
        path.chmod(0o555 if path.is_dir() else 0o444)
    other = Store(tmp_path / "other")
    import_bundle(other, layer)
    assert all(path.stat().st_mode & 0o200 for path in other.root.rglob("*"))
    for path in (layer, *layer.rglob("*")):
        path.chmod(0o755)


def test_files_that_an_entry_does_not_list_stay_behind(store: Store, tmp_path: Path) -> None:
    layer = export_bundle(store, tmp_path / "layer").path
    entry = layer / REQUESTS[0].key / STUB_TOOLCHAIN.key
    (entry / "sitecustomize.py").write_text("raise SystemExit")
    other = Store(tmp_path / "other")
    import_bundle(other, layer)
    assert list(other.root.rglob("sitecustomize.py")) == []


def packed(folder: Path, name: str) -> Path:
    """A folder bundle as it is, or as `tar cf bundle.tar .` packs it."""
    target = folder.with_name(name)
    if name.endswith(".tar"):
        with tarfile.open(target, "w") as archive:
            archive.add(folder, ".")
    else:
        folder.rename(target)
    return target


@pytest.mark.parametrize("name", ["bundle.tar", "bundle"])
@pytest.mark.parametrize("damage", ["changed", "missing", "link"])
def test_a_file_that_is_not_the_listed_one_refuses_the_bundle(store: Store, tmp_path: Path, name: str, damage: str) -> None:
    """The list covers every file; nothing is taken of a bundle that is not as it was exported."""
    layer = export_bundle(store, tmp_path / "layer").path
    victim = layer / REQUESTS[0].key / STUB_TOOLCHAIN.key / "kernel.bin"
    data = victim.read_bytes()
    victim.unlink()
    if damage == "changed":
        victim.write_bytes(b"x" + data[1:])
    elif damage == "link":
        (tmp_path / "same").write_bytes(data)
        victim.symlink_to(tmp_path / "same")
    other = Store(tmp_path / "other")
    with pytest.raises(CacheError, match="does not match its checksum|is missing|is not a file|is a link") as refusal:
        import_bundle(other, packed(layer, name))
    assert "kernel.bin" in str(refusal.value) and list(other.root.iterdir()) == []


def test_the_list_is_that_of_sha256sum_and_its_digest_names_the_bundle(store: Store, tmp_path: Path) -> None:
    report = export_bundle(store, tmp_path / "layer")
    check = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
    done = subprocess.run(check, cwd=report.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = {line.split("  ")[1] for line in (report.path / SUMS).read_text().splitlines()}
    assert listed == {str(p.relative_to(report.path)) for p in report.path.rglob("*") if p.is_file()} - {SUMS}
    other = Store(tmp_path / "other")
    with pytest.raises(CacheError, match=f"its digest is {report.digest}, expected {'0' * 64}"):
        import_bundle(other, report.path, expect="0" * 64)
    assert list(other.root.iterdir()) == [] and import_bundle(other, report.path, expect=report.digest).digest == report.digest


def test_a_consistent_list_does_not_save_a_broken_entry(store: Store, tmp_path: Path) -> None:
    """Made by hand, with sums that fit: the entry's own checksums refuse it, the others come in."""
    layer = export_bundle(store, tmp_path / "layer").path
    broken = layer / REQUESTS[0].key / STUB_TOOLCHAIN.key / "kernel.bin"
    old = digest_of(broken.read_bytes())
    broken.write_bytes(b"changed")
    (layer / SUMS).write_text((layer / SUMS).read_text().replace(old, digest_of(b"changed")))
    other = Store(tmp_path / "other")
    report = import_bundle(other, layer)
    assert len(report.imported) == 2
    assert report.refused == ((f"{REQUESTS[0].key}/{STUB_TOOLCHAIN.key}",
                               f"kernel.bin has 7 bytes, expected {9 + len(REQUESTS[0].source)}"),)
    assert other.get(REQUESTS[0], STUB_TOOLCHAIN) is None and other.get(REQUESTS[1], STUB_TOOLCHAIN) is not None


@pytest.mark.parametrize("edit", [
    lambda text: text.replace("  ", " ", 1), lambda text: text + text, lambda text: text[:-1], lambda text: "",
    lambda text: text + f"{'0' * 64}  ../evil\n", lambda text: text + f"{'0' * 64}  /etc/passwd\n", lambda text: "\ud800".join(text[:9]),
])
def test_a_list_that_is_none_is_refused(store: Store, tmp_path: Path, edit: Callable[[str], str]) -> None:
    layer = export_bundle(store, tmp_path / "layer").path
    (layer / SUMS).write_text(edit((layer / SUMS).read_text()), errors="surrogatepass")
    other = Store(tmp_path / "other")
    with pytest.raises(CacheError, match="is refused"):
        import_bundle(other, layer)
    assert list(other.root.iterdir()) == []


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the parent looks at the status
            os._exit(1)
    return pid


def test_two_importers_and_a_killed_one(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is published once and whole; what the killed one left is no entry, and the next import completes it."""
    bundle, root = export_bundle(store, tmp_path / "bundle.tar").path, tmp_path / "other"
    adopt, count = Shelf.adopt, iter(range(9))

    def killed(shelf: Shelf, folder: Path, request: str, toolchain: str) -> bool:
        if next(count) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return adopt(shelf, folder, request, toolchain)

    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "adopt", killed)
        assert os.waitstatus_to_exitcode(os.waitpid(in_child(lambda: void(import_bundle(Store(root), bundle))), 0)[1]) == -signal.SIGKILL
    assert len(ls(Store(root))) == 1 and verify(Store(root)).problems == ()
    pids = [in_child(lambda: void(import_bundle(Store(root), bundle))) for _ in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert verify(Store(root)).checked == 3 and verify(Store(root)).problems == ()
    assert len(import_bundle(Store(root), bundle).present) == 3


def void(value: object) -> None:
    pass


def test_a_full_disk_and_places_that_cannot_be_written(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = export_bundle(store, tmp_path / "bundle.tar").path
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=9, used=9, free=100))
        with pytest.raises(CacheError, match="no space left"):
            import_bundle(Store(tmp_path / "full"), bundle)
    assert list((tmp_path / "full").iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x.tar", tmp_path / "nowhere" / "x.tar", tmp_path / "file" / "x"):
        with pytest.raises(CacheError, match=f"{place} cannot be written"):
            export_bundle(store, place)
    with pytest.raises(CacheError, match="cannot be (read|written)|does not exist|failed"):
        import_bundle(Store(tmp_path / "new"), tmp_path / "file" / "x.tar")


@pytest.mark.parametrize("length", [0, 511, 512, 1024, 5000])
def test_a_tar_cut_anywhere_imports_nothing(store: Store, tmp_path: Path, length: int) -> None:
    bundle = export_bundle(store, tmp_path / "bundle.tar").path
    bundle.write_bytes(bundle.read_bytes()[:length])
    other = Store(tmp_path / "other")
    with pytest.raises(CacheError):
        import_bundle(other, bundle)
    assert list(other.root.iterdir()) == []


def test_a_layer_of_another_bundle_format_is_an_error(store: Store, tmp_path: Path) -> None:
    layer = export_bundle(store, tmp_path / "layer").path
    (layer / MANIFEST).write_text('{"format": 99}')
    with pytest.raises(CacheError, match="bundle format 99; this release reads 2"):
        Store(tmp_path / "own", [layer]).get(REQUESTS[0], STUB_TOOLCHAIN)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
    return info


ENTRY = f"{REQUESTS[0].key}/{STUB_TOOLCHAIN.key}"


@pytest.mark.parametrize(("bad", "reason"), [
    (member("../evil"), "it holds '../evil'"),
    (member("/etc/evil"), "it holds '/etc/evil'"),
    (member(f"{ENTRY}/../../../evil"), "it holds"),
    (member(f"{ENTRY}/./x"), "it holds"),
    (member("locks/evil"), "it holds 'locks/evil'"),
    (member(f"{REQUESTS[0].key}/evil"), "it holds"),
    (member(f"{ENTRY}/link", tarfile.SYMTYPE, "/etc"), "is a link or a device"),
    (member(f"{ENTRY}/hard", tarfile.LNKTYPE, "/etc/passwd"), "is a link or a device"),
    (member(f"{ENTRY}/pipe", tarfile.FIFOTYPE), "is a link or a device"),
    (member(f"{ENTRY}/kernel.bin"), "twice"),
], ids=lambda value: value if isinstance(value, str) else value.name[-12:])
def test_hostile_tar_files_are_refused_as_a_whole(store: Store, tmp_path: Path, bad: tarfile.TarInfo, reason: str) -> None:
    bundle = export_bundle(store, tmp_path / "bundle.tar").path
    with tarfile.open(bundle, "a") as archive:
        archive.addfile(bad, io.BytesIO(b"evil") if bad.isfile() else None)
    other = Store(tmp_path / "deep" / "other")
    with pytest.raises(CacheError, match=reason):
        import_bundle(other, bundle)
    assert list(other.root.iterdir()) == [] and list(tmp_path.rglob("evil")) == []


def no_tar(path: Path) -> None:
    path.write_bytes(b"no tar file")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def without_manifest(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(member(f"{ENTRY}/x"), io.BytesIO(b"1234"))


def other_format(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(b'{"format": 99}')
        archive.addfile(info, io.BytesIO(b'{"format": 99}'))


def packed_and_damaged(path: Path) -> None:
    data = bytearray(lzma.compress(path.read_bytes()))
    data[len(data) // 2 : len(data) // 2 + 4] = b"\0\1\2\3"
    path.write_bytes(data)


def sparse_without_numbers(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(MANIFEST)
        info.pax_headers = {"GNU.sparse.map": "x,y"}
        archive.addfile(info)


@pytest.mark.parametrize(("damage", "reason"), [
    (packed_and_damaged, "damaged or no tar file"), (sparse_without_numbers, "damaged or no tar file"),
    (no_tar, "damaged or no tar file"), (truncated, "damaged or no tar file|cannot be understood"),
    (without_manifest, f"has no {MANIFEST}"), (other_format, "bundle format 99; this release reads 2"),
])
def test_files_that_are_no_bundle_are_named(store: Store, tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    bundle = export_bundle(store, tmp_path / "bundle.tar").path
    damage(bundle)
    with pytest.raises(CacheError, match=reason) as refusal:
        import_bundle(Store(tmp_path / "other"), bundle)
    assert str(bundle) in str(refusal.value)


def test_a_folder_that_is_no_bundle_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=f"{MANIFEST} cannot be read"):
        import_bundle(Store(tmp_path / "other"), store.root)


def test_without_any_place_to_write_layers_serve_offline(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is read-only throughout: with KERNELGEN_JIT=0 no root is needed, otherwise that is the error."""
    layer = export_bundle(store, tmp_path / "layer").path

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with settings.override(cache_dir=None, jit=False):
        bare = Store(layers=[layer])
        assert bare.get(REQUESTS[0], None) is not None and bare.get(stub_request("other"), None) is None
        assert bare.search_path == (layer,) and len(ls(bare)) == 3
    with settings.override(cache_dir=None), pytest.raises(CacheError, match="no folder for the kernel cache"):
        Store(layers=[layer]).get(REQUESTS[0], None)
