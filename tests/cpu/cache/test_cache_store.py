"""The store: look-ups with and without a compiler, layers, what is published, and what a failure leaves."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import pytest

from kernelgen import settings
from kernelgen.cache.bundles import export_bundle
from kernelgen.cache.entry import META
from kernelgen.cache.keys import ToolchainId
from kernelgen.cache.store import BuildOutput, Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, in_mount_namespace, run_script, stub_request
from kernelgen.errors import ArtifactMissingError, CacheError, CompileError

ABI = "kernelgen-params-1"
NVRTC = {text: ToolchainId("nvrtc", f"NVRTC {text}", ABI, cuda_major=int(text.split(".")[0]))
         for text in ("12.9.86", "13.0.88", "13.0.9", "13.2.1")}
REQUEST = stub_request(target="sm_90a")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "root")


def publish(store: Store, toolchain: ToolchainId, calls: Path) -> None:
    store.get_or_build(REQUEST, toolchain, StubCompiler(calls, payload=toolchain.compiler.encode()))


def refuse(folder: Path) -> BuildOutput:
    raise AssertionError("must not build")


def test_nothing_is_created_by_a_miss(store: Store) -> None:
    assert store.get(REQUEST, STUB_TOOLCHAIN) is None and store.get(REQUEST, None) is None
    assert not store.root.exists()


def test_published_entry_is_complete(store: Store, tmp_path: Path) -> None:
    artifact, built = store.get_or_build(REQUEST, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"), banner="// by\n",
                                         source_name="kernel.cc")
    assert built and artifact == store.get(REQUEST, STUB_TOOLCHAIN)
    assert artifact.path == store.root / REQUEST.key / STUB_TOOLCHAIN.key
    assert sorted(path.name for path in artifact.path.iterdir()) == ["build.log", "kernel.bin", "kernel.cc", META]
    assert artifact.read("kernel.cc") == b"// by\n" + REQUEST.source.encode()
    assert artifact.binary == artifact.path / "kernel.bin" and artifact.toolchain == STUB_TOOLCHAIN
    meta = json.loads((artifact.path / META).read_text())
    assert meta == dict(artifact.meta)
    assert (meta["registers"], meta["entry"], meta["name"], meta["target"]) == (32, "stub", REQUEST.name, "sm_90a")
    assert meta["flags"] == ["-O2"] and list(meta["includes"]) == ["kernelgen/stub.h"] and meta["seconds"] >= 0
    assert (store.root.stat().st_mode & 0o777, artifact.path.stat().st_mode & 0o777) == (0o700, 0o700)
    with pytest.raises(CacheError, match=r"no file 'x'; it has build\.log, kernel\.bin"):
        artifact.file("x")


def test_banner_is_not_content(store: Store, tmp_path: Path) -> None:
    stub = StubCompiler(tmp_path / "calls")
    store.get_or_build(REQUEST, STUB_TOOLCHAIN, stub, banner="// release 1\n")
    artifact, built = store.get_or_build(REQUEST, STUB_TOOLCHAIN, stub, banner="// release 2\n")
    assert not built and artifact.read("kernel.cu").startswith(b"// release 1\n")


def test_the_builders_own_log_and_nested_files_are_kept_and_verified(store: Store) -> None:
    def build(folder: Path) -> BuildOutput:
        (folder / "build.log").write_text("warning: unused\n")
        (folder / "parts").mkdir()
        (folder / "parts" / "host.o").write_bytes(b"object")
        (folder / "kernel.so").write_bytes(b"library")
        return BuildOutput("kernel.so", {"spills": (0, 0)})

    artifact, _ = store.get_or_build(REQUEST, STUB_TOOLCHAIN, build)
    assert artifact.read("build.log") == b"warning: unused\n" and artifact.read("parts/host.o") == b"object"
    assert artifact.meta["spills"] == [0, 0]  # as a later reader sees it
    artifact.file("parts/host.o").write_bytes(b"obJect")
    with pytest.raises(CacheError, match="changed since it was looked up"):
        artifact.read("parts/host.o")
    assert store.get(REQUEST, STUB_TOOLCHAIN) is None


@pytest.mark.parametrize(("output", "error", "text"), [
    (BuildOutput("kernel.bin", {"files": 1, "target": 2}), CacheError, "extra values named files, target"),
    (BuildOutput("../kernel.bin"), CacheError, "named its product '../kernel.bin'"),
    (BuildOutput("meta.json"), CacheError, "named its product 'meta.json'"),
    (BuildOutput("absent.so"), CompileError, r"absent\.so was not written"),
    (BuildOutput("kernel.bin", {"x": object()}), TypeError, "not JSON serializable"),
    (BuildOutput("kernel.bin", {"x": float("nan")}), ValueError, "not JSON compliant"),
], ids=lambda value: str(value)[:40])
def test_bad_build_output_publishes_nothing(store: Store, output: BuildOutput, error: type[Exception], text: str) -> None:
    def build(folder: Path) -> BuildOutput:
        (folder / "kernel.bin").write_bytes(b"binary")
        return output

    with pytest.raises(error, match=text):
        store.get_or_build(REQUEST, STUB_TOOLCHAIN, build)
    assert list((store.root / REQUEST.key).iterdir()) == []
    assert store.get(REQUEST, STUB_TOOLCHAIN) is None


def test_a_link_in_the_build_folder_is_refused(store: Store) -> None:
    def build(folder: Path) -> BuildOutput:
        (folder / "kernel.bin").write_bytes(b"binary")
        (folder / "cccl").symlink_to("/usr/include")
        return BuildOutput("kernel.bin")

    with pytest.raises(CacheError, match="neither a file nor a folder"):
        store.get_or_build(REQUEST, STUB_TOOLCHAIN, build)


def test_failed_build_keeps_source_and_log_and_passes_the_error_on(store: Store) -> None:
    failure = ZeroDivisionError("in the compiler")

    def build(folder: Path) -> BuildOutput:
        raise failure

    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            store.get_or_build(REQUEST, STUB_TOOLCHAIN, build, banner="// banner\n")
        assert caught.value is failure
    kept = store.failed_folder(REQUEST)
    assert kept == store.root / "failed" / REQUEST.key
    assert (kept / "kernel.cu").read_text() == "// banner\n" + REQUEST.source
    assert (kept / "build.log").read_text() == "ZeroDivisionError: in the compiler\n"


def test_interrupted_build_leaves_no_temporary_folder(store: Store) -> None:
    def build(folder: Path) -> BuildOutput:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_or_build(REQUEST, STUB_TOOLCHAIN, build)
    assert list((store.root / REQUEST.key).iterdir()) == []


def test_threads_of_one_process_build_once(store: Store, tmp_path: Path) -> None:
    stub, barrier, built = StubCompiler(tmp_path / "calls", seconds=0.1), threading.Barrier(8), []

    def ask() -> None:
        barrier.wait(10)
        built.append(store.get_or_build(REQUEST, STUB_TOOLCHAIN, stub)[1])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(built) == [False] * 7 + [True] and stub.count == 1


def test_a_broken_entry_that_was_repaired_meanwhile_is_not_set_aside(store: Store, tmp_path: Path) -> None:
    """A look-up that met the broken entry must not move away the sound one that took its place."""
    artifact, _ = store.get_or_build(REQUEST, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls", payload=b"sound"))
    artifact.binary.write_bytes(b"broken")
    found = []
    looker = threading.Thread(target=lambda: found.append(store.get(REQUEST, STUB_TOOLCHAIN)))
    with store.shelf.lock(REQUEST.key, STUB_TOOLCHAIN.key):
        looker.start()
        looker.join(0.3)
        assert looker.is_alive()  # it waits for us, who are repairing
        artifact.binary.write_bytes(b"sound")
    looker.join(30)
    assert found == [artifact] and not (store.root / "quarantine").exists()


# Without a compiler


def test_offline_takes_the_newest_toolchain_that_fits(store: Store, tmp_path: Path) -> None:
    for toolchain in (NVRTC["13.0.88"], NVRTC["13.2.1"], NVRTC["13.0.9"], NVRTC["12.9.86"]):
        publish(store, toolchain, tmp_path / "calls")
    other_abi = dataclasses.replace(NVRTC["13.2.1"], compiler="NVRTC 13.9.0", binding_abi="kernelgen-params-2")
    publish(store, other_abi, tmp_path / "calls")

    def served(**fit: object) -> bytes:
        artifact = store.get(REQUEST, None, **fit)  # type: ignore[arg-type]
        return b"" if artifact is None else artifact.read("kernel.bin")

    assert served(binding_abi=ABI, cuda_major=13) == b"NVRTC 13.2.1"
    assert served(binding_abi=ABI, cuda_major=12) == b"NVRTC 12.9.86"
    assert served(binding_abi=ABI, cuda_major=11) == b""
    assert served(binding_abi="kernelgen-params-3") == b""
    assert served() == b"NVRTC 13.9.0"
    store.shelf.remove(REQUEST.key, NVRTC["13.2.1"].key)
    assert served(binding_abi=ABI, cuda_major=13) == b"NVRTC 13.0.88"  # 88 is after 9
    assert store.get(stub_request(target="sm_100a"), None) is None


def test_offline_skips_a_broken_entry_and_sets_it_aside(store: Store, tmp_path: Path,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    for toolchain in (NVRTC["13.2.1"], NVRTC["13.0.88"]):
        publish(store, toolchain, tmp_path / "calls")
    (store.root / REQUEST.key / NVRTC["13.2.1"].key / "kernel.bin").write_bytes(b"short")
    for _ in range(2):
        artifact = store.get(REQUEST, None, binding_abi=ABI, cuda_major=13)
        assert artifact is not None and artifact.toolchain == NVRTC["13.0.88"]
    assert len(caplog.records) == 1 and "kernel.bin has 5 bytes, expected 12" in caplog.text


def test_cpu_entries_fit_any_cuda(store: Store, tmp_path: Path) -> None:
    publish(store, STUB_TOOLCHAIN, tmp_path / "calls")
    assert store.get(REQUEST, None, binding_abi=ABI, cuda_major=13) is not None


def test_jit_off_serves_what_fits_and_never_builds(store: Store, tmp_path: Path) -> None:
    with settings.override(jit=False):
        with pytest.raises(ArtifactMissingError) as missing:
            store.get_or_build(REQUEST, NVRTC["13.2.1"], refuse)
        for part in (REQUEST.name, "sm_90a", "NVRTC 13.2.1", "KERNELGEN_JIT=0", "kernelgen prebuild", str(store.root)):
            assert part in str(missing.value)
        assert not store.root.exists()
    publish(store, NVRTC["13.0.88"], tmp_path / "calls")
    with settings.override(jit=False):
        artifact, built = store.get_or_build(REQUEST, NVRTC["13.2.1"], refuse)
    assert not built and artifact.toolchain == NVRTC["13.0.88"]


# Layers


def test_layers_are_searched_in_order_before_the_root(tmp_path: Path) -> None:
    places = []
    for name in ("one", "two", "root"):
        maker = Store(tmp_path / f"make {name}")
        maker.get_or_build(REQUEST, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls", payload=name.encode()))
        places.append(export_bundle(maker, tmp_path / name).path)
    one, two, root = places
    root.chmod(0o700)

    def served(layers: list[Path]) -> bytes:
        return Store(root, layers).get_or_build(REQUEST, STUB_TOOLCHAIN, refuse)[0].read("kernel.bin")

    assert [served([one, two]), served([two, one]), served([])] == [b"one", b"two", b"root"]
    before = (one / REQUEST.key / STUB_TOOLCHAIN.key).stat().st_mtime_ns
    served([one])
    assert (one / REQUEST.key / STUB_TOOLCHAIN.key).stat().st_mtime_ns == before  # a layer is never written to


def test_broken_entry_of_a_layer_counts_as_missing_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    maker = Store(tmp_path / "make")
    publish(maker, STUB_TOOLCHAIN, tmp_path / "calls")
    layer = export_bundle(maker, tmp_path / "layer").path
    broken = layer / REQUEST.key / STUB_TOOLCHAIN.key / "kernel.bin"
    broken.write_bytes(b"stub 1.0.1")
    store = Store(tmp_path / "root", [layer])
    for expected in (True, False):
        assert store.get_or_build(REQUEST, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls"))[1] is expected
    assert broken.exists() and len(caplog.records) == 1 and "cannot be repaired" in caplog.text


def test_layers_that_are_missing_or_open_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent = tmp_path / "absent"
    for _ in range(2):
        assert Store(tmp_path / "root", [absent]).get(REQUEST, STUB_TOOLCHAIN) is None
    assert len(caplog.records) == 1 and str(absent) in caplog.text
    absent.mkdir(mode=0o777)
    absent.chmod(0o777)
    with pytest.raises(CacheError, match=r"others can write to it \(mode 0777\)"):
        Store(tmp_path / "root", [absent]).get(REQUEST, STUB_TOOLCHAIN)
    (tmp_path / "bundle.tar").touch()
    with pytest.raises(CacheError, match="is not a folder"):
        Store(tmp_path / "root", [tmp_path / "bundle.tar"]).get(REQUEST, STUB_TOOLCHAIN)


def test_settings_name_root_layers_and_locks(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    with settings.override(cache_dir=tmp_path / "root", cache_layers=(tmp_path / "layer",), lock_dir=tmp_path / "locks"):
        store = Store()
        again = Store(tmp_path / "root", (tmp_path / "layer",))
    assert store.search_path == again.search_path == (tmp_path / "layer", tmp_path / "root")
    assert store.shelf.lock_dir == tmp_path / "locks"


# Storage that fails


def namespace_or_skip(mount: str) -> tuple[str, ...]:
    prefix = in_mount_namespace(mount)
    if prefix is None:
        pytest.skip("mount namespaces are not allowed here")
    return prefix


def test_read_only_root_serves_what_it_has_and_names_itself(tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish(Store(root), STUB_TOOLCHAIN, tmp_path / "calls")
    script = """
        import sys
        from pathlib import Path
        from kernelgen.cache.store import Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
        from kernelgen.errors import CacheError
        store, stub = Store(Path(sys.argv[1])), StubCompiler(Path(sys.argv[2]))
        artifact, built = store.get_or_build(stub_request(target="sm_90a"), STUB_TOOLCHAIN, stub)
        assert not built and artifact.read("kernel.bin") == b"stub 1.0.0"
        try:
            store.get_or_build(stub_request("new"), STUB_TOOLCHAIN, stub)
        except CacheError as error:
            assert sys.argv[1] in str(error) and "Read-only file system" in str(error), error
        else:
            raise AssertionError("built on a read-only file system")
        artifact.file("kernel.bin")
        print("done")
    """
    namespace = namespace_or_skip(f"mount --bind {root} {root} && mount -o remount,bind,ro {root}")
    assert run_script(script, root, tmp_path / "calls", prefix=namespace) == "done\n"


def test_full_disk_is_named_and_leaves_the_cache_sound(tmp_path: Path) -> None:
    """The disk fills up while the compiler writes, between its product and meta.json, and before the source."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = """
        import sys
        from pathlib import Path
        from kernelgen.cache.maintenance import prune, verify
        from kernelgen.cache.store import BuildOutput, Store
        from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request
        from kernelgen.errors import CacheError
        disk, stub = Path(sys.argv[1]), StubCompiler(Path(sys.argv[2]))
        store, filler = Store(disk / "root"), disk / "filler"
        store.get_or_build(stub_request("first"), STUB_TOOLCHAIN, stub)
        def fill():
            with open(filler, "wb", buffering=0) as stream:
                try:
                    while True:
                        stream.write(bytes(4096))
                except OSError:
                    pass
        def too_large(folder):
            (folder / "kernel.bin").write_bytes(bytes(8 << 20))
        def fills_up(folder):
            output = stub(folder)
            fill()
            return output
        def full_before(folder):
            raise AssertionError("there was no room for the source")
        for i, build in enumerate((too_large, fills_up, full_before)):
            if build is full_before:
                fill()
            request = stub_request(f"number {i}")
            try:
                store.get_or_build(request, STUB_TOOLCHAIN, build)
            except CacheError as error:
                for part in (str(store.root), "MiB free of 2.0 MiB", "KERNELGEN_CACHE_DIR", "no space left"):
                    assert part in str(error), error
            else:
                raise AssertionError(f"{build.__name__} did not fail")
            filler.unlink(missing_ok=True)
            assert store.get(request, STUB_TOOLCHAIN) is None
            assert list((store.root / request.key).iterdir()) == []
            assert verify(store).problems == () and store.get(stub_request("first"), STUB_TOOLCHAIN) is not None
            assert store.get_or_build(request, STUB_TOOLCHAIN, stub)[1]
        print("done")
    """
    namespace = namespace_or_skip(f"mount -t tmpfs -o size=2m,mode=700 none {disk}")
    assert run_script(script, disk, tmp_path / "calls", prefix=namespace) == "done\n"


def test_lock_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="KERNELGEN_LOCK_DIR"):
        Store(tmp_path / "root", lock_dir=tmp_path / "file" / "locks").get_or_build(REQUEST, STUB_TOOLCHAIN, refuse)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CacheError, match="others can write to it"):
        Store(tmp_path / "root", lock_dir=tmp_path / "open").get_or_build(REQUEST, STUB_TOOLCHAIN, refuse)


def test_a_verified_look_up_of_ten_megabytes_is_fast(store: Store, tmp_path: Path) -> None:
    store.get_or_build(REQUEST, STUB_TOOLCHAIN, StubCompiler(tmp_path / "calls", payload=os.urandom(10 << 20)))
    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        assert store.get(REQUEST, STUB_TOOLCHAIN) is not None
        best = min(best, time.perf_counter() - begin)
    assert best < 0.1, f"{best * 1e3:.1f} ms"
