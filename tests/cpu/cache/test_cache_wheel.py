"""Wheels of prebuilt kernels: what an installer makes of them is found without importing anything, and only at a miss."""

from __future__ import annotations

import base64
import hashlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelgen.cache.bundles import export_bundle
from kernelgen.cache.listing import MANIFEST
from kernelgen.cache.maintenance import ls
from kernelgen.cache.packaged import packaged_bundles
from kernelgen.cache.roots import _said
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
from kernelgen.cache.wheel import make_wheel
from kernelgen.errors import CacheError

REQUESTS = [stub_request(f"int answer = {i};\n", name=f"gemm_{i}") for i in range(2)]
PACKAGE = "kernelgen_kernels_llama_8b"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    store = Store(tmp_path / "builder")
    for request in REQUESTS:
        store.get_or_build(request, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"))
    return export_bundle(store, tmp_path / "bundle.tar").path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    packaged_bundles.cache_clear()
    _said.clear()
    yield folder
    packaged_bundles.cache_clear()


def unpacked(wheel: Path, site: Path) -> None:
    """What an installer does with a wheel of plain files."""
    zipfile.ZipFile(wheel).extractall(site)


def refuse(folder: Path) -> BuildOutput:
    raise AssertionError("must not build")


def test_pip_installs_it_and_every_store_finds_it(bundle: Path, site: Path, tmp_path: Path) -> None:
    report = make_wheel(bundle, tmp_path / "wheels", name="Llama-8B", version="2.1")
    assert report.path.name == f"{PACKAGE}-2.1-py3-none-linux_x86_64.whl" and report.entries == 2
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*pip, "--target", str(site), str(report.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert packaged_bundles() == (site / PACKAGE / "bundle",)
    store = Store(tmp_path / "own", packaged=packaged_bundles)
    for request in REQUESTS:
        artifact, built = store.get_or_build(request, STUB_TOOLCHAIN, refuse)
        assert not built and artifact.path.is_relative_to(site) and artifact.read("kernel.bin").endswith(request.source.encode())
        found = store.get(request, None, binding_abi=STUB_TOOLCHAIN.binding_abi)
        assert found is not None and found.path == artifact.path
    assert {info.location for info in ls(store)} == {site / PACKAGE / "bundle"}
    assert PACKAGE not in sys.modules and not (tmp_path / "own").exists()


def test_installed_bundles_are_asked_for_at_a_miss_only(bundle: Path, tmp_path: Path) -> None:
    asked: list[int] = []
    store = Store(tmp_path / "builder", packaged=lambda: asked.append(1) or ())  # type: ignore[func-returns-value]
    assert store.get(REQUESTS[0], STUB_TOOLCHAIN) and store.get(REQUESTS[1], None) and not asked
    assert store.get(stub_request("other"), STUB_TOOLCHAIN) is None and asked


def test_the_same_bundle_gives_the_same_bytes_and_a_sound_record(bundle: Path, tmp_path: Path) -> None:
    first, second = (make_wheel(bundle, tmp_path / name).path for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    archive = zipfile.ZipFile(first)
    names = archive.namelist()
    rows = [line.split(",") for line in archive.read(names[-1]).decode().splitlines()]
    assert names[-1].endswith(".dist-info/RECORD") and [row[0] for row in rows] == names
    for name, digest, size in rows[:-1]:
        data = archive.read(name)
        stated = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={stated}", len(data))


def test_what_is_unusable_is_skipped_and_said(bundle: Path, site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A removed package, another format, a changed binary."""
    for name in ("gone", "other", "fine"):
        unpacked(make_wheel(bundle, tmp_path / "wheels", name=name).path, site)
    (site / "kernelgen_kernels_gone" / "bundle" / MANIFEST).unlink()
    (site / "kernelgen_kernels_other" / "bundle" / MANIFEST).write_text('{"format": 99}')
    fine = site / "kernelgen_kernels_fine" / "bundle"
    (fine / REQUESTS[0].key / STUB_TOOLCHAIN.key / "kernel.bin").write_bytes(b"other code")
    with caplog.at_level(logging.WARNING, "kernelgen"):
        assert packaged_bundles() == (fine,)
        store = Store(tmp_path / "own", packaged=packaged_bundles)
        assert store.get(REQUESTS[0], STUB_TOOLCHAIN) is None and store.get(REQUESTS[1], STUB_TOOLCHAIN) is not None
    for text in ("'gone' are skipped: package 'kernelgen_kernels_gone' has no bundle/bundle.json", "'other' are skipped",
                 "bundle format 99", "is broken (kernel.bin has 10 bytes"):
        assert text in caplog.text, caplog.text


@pytest.mark.parametrize(("changes", "reason"), [
    ({"name": "../evil"}, "got the name '../evil'"), ({"name": ""}, "got the name"), ({"version": "latest"}, "got the version 'latest'"),
])
def test_names_that_no_wheel_can_have(bundle: Path, tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(CacheError, match=reason):
        make_wheel(bundle, tmp_path / "wheels", **changes)
    assert not (tmp_path / "wheels").exists()


def test_what_is_no_bundle_or_there_already(bundle: Path, tmp_path: Path) -> None:
    made = make_wheel(bundle, tmp_path / "wheels").path.read_bytes()
    with pytest.raises(CacheError, match="is there already; give another --version"):
        make_wheel(bundle, tmp_path / "wheels")
    bundle.write_bytes(bundle.read_bytes()[:3000])
    with pytest.raises(CacheError, match="damaged|is missing"):
        make_wheel(bundle, tmp_path / "wheels", version="2")
    assert [path.read_bytes() for path in (tmp_path / "wheels").iterdir()] == [made]
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be written"):
        make_wheel(export_bundle(Store(tmp_path / "builder"), tmp_path / "again").path, tmp_path / "file")
