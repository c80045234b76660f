"""Builds the launcher into the wheel, so that a user with a GPU needs no host compiler. Everything else: pyproject.toml."""

from __future__ import annotations

import ast
import bz2
import io
import json
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

SHIPPED_OF_TESTING = ("__init__", "data", "moe_layer", "tolerance")
# What writes files of the sources, what tools/tune.py searches with, and what tools/bench/dispatch.py fits the cost model with.
OF_A_CHECKOUT = {("kernelgen.library", "write"), ("kernelgen.bench", "tuning"), ("kernelgen.dispatch", "fitting")}
# kernelgen/launch/host.py builds the same file with the same flags from a checkout.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-s"]
# 3 KB of the wheel, where compiler and linker can.
SMALLER = ["-flto", "-fvisibility-inlines-hidden", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Wl,-z,noseparate-code"]


def build_launcher(target: Path) -> bool:
    """Compile templates/host/launcher.cc. False, with a message, where there is no compiler or no TVM-FFI."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    try:
        from tvm_ffi import libinfo
    except ImportError:
        compiler = None
    if compiler is None:
        print("kernelgen: no C++ compiler or no apache-tvm-ffi: the launcher is built at first use instead", file=sys.stderr)
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    source = ["-Itemplates/include", "-I", libinfo.find_include_path(), "templates/host/launcher.cc", "-ldl", "-o", str(target)]
    if subprocess.run([compiler, *FLAGS, *SMALLER, *source], capture_output=True).returncode != 0:
        subprocess.run([compiler, *FLAGS, *source], check=True)
    return True


def pack_templates(folder: Path) -> None:
    """All templates as one compressed file, in place of their folder: half of what they take in a wheel one by one, which has 1 MB.
    kernelgen/render.py reads it."""
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*")) if path.is_file()}
    folder.with_name("templates.json.bz2").write_bytes(bz2.compress(json.dumps(texts, ensure_ascii=False).encode()))
    shutil.rmtree(folder)


def private_docstrings(tree: ast.AST) -> list[ast.stmt]:
    """Of private functions and classes, taken out of the tree: no help() shows them. A decorator may read its own (a command's help)."""
    found = []
    for node in ast.walk(tree):
        if (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name.startswith("_") and len(node.body) > 1
                and not node.name.startswith("__") and not node.decorator_list and ast.get_docstring(node) is not None):
            found.append(node.body.pop(0))
    return found


def without_notes(folder: Path) -> None:
    """Modules of the wheel without their comments and the docstrings of what is private: a twentieth of it, and for those who read the
    repository. Every line keeps its number, and what is compiled stays the same."""
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
        for note in private_docstrings(tree):
            lines[note.lineno - 1:note.end_lineno] = ["\n"] * (note.end_lineno - note.lineno + 1)
        shorter = "".join(lines)
        if ast.dump(ast.parse(shorter)) != ast.dump(tree):
            raise SystemExit(f"kernelgen: {path} would mean something else without its notes")
        path.write_text(shorter, encoding="utf-8")


class PlatformDistribution(Distribution):
    """Holds a compiled library although setuptools builds no extension: everything goes to the platform folder."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithLauncher(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Of kernelgen.testing only what the demo and the measurements import: the cases of the tests stay in a checkout."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [m for m in found if self.editable_mode or (
            (package != "kernelgen.testing" or m[1] in SHIPPED_OF_TESTING) and (package, m[1]) not in OF_A_CHECKOUT)]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "kernelgen"
            build_launcher(package / "_lib" / "launcher.so")
            pack_templates(package / "templates")
            without_notes(package)


class PlatformWheel(bdist_wheel):
    """The launcher is a Linux x86-64 library but needs no particular Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLauncher, "bdist_wheel": PlatformWheel})
