"""Importing is cheap and touches nothing; every module and template is in the wheel."""

from __future__ import annotations

import ast
import bz2
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernelgen.render import without_comments

ROOT = Path(__file__).parents[2]


def _run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_creates_nothing_and_starts_no_cuda(tmp_path: Path) -> None:
    """A18 and A29: no folder appears and no CUDA context exists after import."""
    out = _run(
        "import torch, kernelgen, os; from kernelgen.dispatch import backends; from kernelgen.kernels.base import all_families\n"
        "print(torch.cuda.is_initialized(), os.listdir(os.environ['HOME']), os.path.exists(os.environ['KERNELGEN_CACHE_DIR']))",
        HOME=str(tmp_path), KERNELGEN_CACHE_DIR=str(tmp_path / "cache"), XDG_CACHE_HOME=str(tmp_path / "xdg"),
    )
    assert out.split() == ["False", "[]", "False"]


def test_import_is_quick_beyond_torch() -> None:
    """PEERS: at most 0.3 s beyond torch. CPU time and the best of three, as the machine is shared."""
    code = "import torch, time; t = time.process_time(); import kernelgen; kernelgen.attention; print(time.process_time() - t)"
    assert min(float(_run(code)) for _ in range(3)) < 0.3


def test_public_names_exist() -> None:
    import kernelgen

    for name in kernelgen.__all__:
        assert getattr(kernelgen, name) is not None
    assert set(kernelgen._PUBLIC) <= set(kernelgen.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        kernelgen.atention  # noqa: B018


def without_docstrings(tree: ast.Module, internal: bool) -> ast.Module:
    """The same without those of functions and classes that are private, or all and the module's."""
    for node in ast.walk(tree):
        private = internal if isinstance(node, ast.Module) else (
            isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (internal or node.name.startswith("_")))
        if private and ast.get_docstring(node):
            node.body = node.body[1:]
    return tree


def test_wheel_holds_every_module_template_and_the_launcher(tmp_path: Path) -> None:
    """Build the wheel as an installer would, from the files git tracks, and compare; at most 1 MB. What only tests run stays outside."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=True).stdout
    tracked = listed.split("\0")
    source = tmp_path / "source"
    for name in filter(None, tracked):
        origin, copy = ROOT / name, source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_symlink():
            copy.symlink_to(origin.readlink())
        elif origin.is_file():
            copy.write_bytes(origin.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= 1_000_000, f"{wheel.stat().st_size} bytes"
    assert "none-linux_x86_64" in wheel.name
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert "kernelgen/_lib/launcher.so" in names
    # Of kernelgen.testing: what others import, and what that imports.
    imported = {name for path in names if path.endswith(".py")
                for name in re.findall(r"from kernelgen\.testing\.(\w+) import", archive.read(path).decode())}
    of_tests = {name for name in names if name.startswith("kernelgen/testing/")}
    assert of_tests == {"kernelgen/testing/__init__.py", *(f"kernelgen/testing/{name}.py" for name in imported)}
    expected = set()
    for name in filter(None, tracked):
        path = Path(name)
        top = path.parts[0]
        if top in ("dispatch", "cache", "templates"):
            path = Path("kernelgen") / path
        elif top != "kernelgen":
            continue
        shipped = path.suffix in (".py", ".jinja", ".cuh", ".h", ".cc") and not str(path).startswith("kernelgen/testing/")
        if shipped and (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            expected.add(str(path))
    packed = json.loads(bz2.decompress(archive.read("kernelgen/templates.json.bz2")))
    assert packed == {path: without_comments(path, (ROOT / name).read_text()) for name in tracked
                      if name.startswith("templates/") and (ROOT / name).is_file() for path in (name.removeprefix("templates/"),)}
    expected -= {f"kernelgen/templates/{name}" for name in packed}
    left_out = {f"kernelgen/{name}.py" for name in ("library/write", "bench/tuning", "bench/targets", "dispatch/fitting", "cache/testing")}
    assert expected - names == left_out, "for those who change the sources"
    imports = {name for path in names if path.endswith(".py") for name in re.findall(r"^\s*(?:from|import) (kernelgen[\w.]*)",
                                                                                     archive.read(path).decode(), re.MULTILINE)}
    assert not imports & {name.removesuffix(".py").replace("/", ".") for name in left_out}
    compared = ("ops/gemm.py", "dispatch/select.py", "launch/cuda.py", "variants/trace.py", "kernels/gemm/gemm_mma.py",
                "kernels/attention/prefill_sm90_configs.py")
    for name in names & {f"kernelgen/{path}" for path in compared}:
        internal = name.startswith("kernelgen/kernels/")
        trees = [ast.dump(without_docstrings(ast.parse(text), internal), include_attributes=True)
                 for text in (archive.read(name), (ROOT / name).read_bytes())]
        assert trees[0] == trees[1], f"{name}: without its comments it is the same, line by line"
        assert internal or ast.get_docstring(ast.parse(archive.read(name))), f"{name}: what is public keeps its docstrings"
    configs = archive.read("kernelgen/kernels/attention/prefill_sm90_configs.py").decode()
    assert '"""Tile shape and schedule."""' in configs and "warpgroups that multiply" not in configs, "dataclasses keep the first line"
    archive.extractall(tmp_path / "installed")
    code = "import kernelgen, kernelgen.render as r; print(kernelgen.__file__, len(r.template_text('gemm/dense_sm90.cu.jinja')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path / "installed", check=True)
    assert done.stdout.split() == [str(tmp_path / "installed/kernelgen/__init__.py"), str(len(packed["gemm/dense_sm90.cu.jinja"]))]
