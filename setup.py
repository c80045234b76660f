"""Builds the launcher into the wheel, so that a user with a GPU needs no host compiler. Everything else: pyproject.toml."""

from __future__ import annotations

import ast
import bz2
import json
import re
import shutil
import subprocess
import sys
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

SHIPPED_OF_TESTING = ("__init__", "data", "moe_layer", "tolerance")
# What writes files of the sources, what tools/tune.py searches with, what tools/bench/dispatch.py fits the cost model with, what other
# tools there compare with, and what tests of the cache run.
OF_A_CHECKOUT = {("kernelgen.library", "write"), ("kernelgen.bench", "tuning"), ("kernelgen.dispatch", "fitting"),
                 ("kernelgen.bench", "targets"), ("kernelgen.cache", "testing")}
DECORATORS = {"dataclass", "property", "staticmethod", "cache", "lru_cache", "cached_property"}  # that read no docstring, or can do without
COMMENT = re.compile(r"(?:^[ \t]*//(?:(?!\{[{%#]).)*|[ \t]{2,}//(?:(?!\{[{%#]|[%}#]\})[^\"\n])*)$", re.MULTILINE)
# kernelgen/launch/host.py builds the same file with the same flags from a checkout.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-s"]


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
    command = [compiler, *FLAGS, "-Itemplates/include", "-I", libinfo.find_include_path(), "templates/host/launcher.cc",
               "-ldl", "-o", str(target)]
    subprocess.run(command, check=True)
    return True


def without_comments(path: str, text: str) -> str:
    """As kernelgen/render.py reads templates: nothing here may import the package. tests/cpu/test_import.py compares the two."""
    return text if path.endswith((".py", ".py.jinja")) else COMMENT.sub("", text)


def strip_modules(folder: Path) -> None:
    """Modules lose their comments, 28 KB of a wheel, and the docstrings of what is private, 18 KB, and of all that is in kernelgen.kernels,
    13 KB more; lines keep their numbers, which tracebacks name. Both stay in a checkout."""
    for path in folder.rglob("*.py"):
        with path.open(encoding="utf-8", newline="\n") as file:
            lines = file.readlines()
        comments = [t.start for t in tokenize.generate_tokens(iter(lines).__next__) if t.type == tokenize.COMMENT]
        internal = path.relative_to(folder).parts[0] == "kernels"  # their functions are called by dispatch alone
        private = list(docstrings_of_private(ast.parse("".join(lines)), internal))
        for line, column in comments:
            lines[line - 1] = lines[line - 1][:column].rstrip() + "\n"
        for first, last, keeps in private:
            if keeps:
                lines[first - 1] = lines[first - 1].rstrip() + '"""\n'
            for line in range(first + keeps, last + 1):
                lines[line - 1] = "\n"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")


def docstrings_of_private(tree: ast.Module, internal: bool) -> Iterator[tuple[int, int, bool]]:
    """(first line, last line, whether the first one stays) of docstrings of functions and classes with names like _this, or of the module
    and any (internal), which have more than that. Where another decorator may read it, it stays; dataclasses keep the first line: without
    any the decorator makes one, at every import."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) or ast.get_docstring(node, clean=False) is None:
            continue
        first, second = node.body[0], node.body[1] if len(node.body) > 1 else None
        last, begins, keeps = first.end_lineno or 0, 0, False
        if not isinstance(node, ast.Module):
            if node.name.endswith("__") or not (internal or node.name.startswith("_")):
                continue
            begins = node.lineno
            names = {ast.unparse(d).partition("(")[0] for d in node.decorator_list}
            if not names <= (DECORATORS if internal else set()):
                continue
            keeps = "dataclass" in names
        elif not internal:
            continue
        if second is not None and begins < first.lineno and last < second.lineno and (last > first.lineno or not keeps):
            yield first.lineno, last, keeps


def pack_templates(folder: Path) -> None:
    """All templates as one compressed file, in place of their folder: half of what they take in a wheel one by one, which has 1 MB.
    kernelgen/render.py reads it."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    texts = {name: without_comments(name, path.read_text(encoding="utf-8")) for name, path in names.items()}
    folder.with_name("templates.json.bz2").write_bytes(bz2.compress(json.dumps(texts, ensure_ascii=False).encode()))
    shutil.rmtree(folder)


def pack_tightly(wheel: Path) -> None:
    """The same files by zlib's best level, which setuptools does not ask for: 1.5 KB of 1 MB."""
    with zipfile.ZipFile(wheel) as made:
        files = [(entry, made.read(entry)) for entry in made.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for entry, content in files:
            packed.writestr(entry, content, compresslevel=9)


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
            strip_modules(package)


class PlatformWheel(bdist_wheel):
    """The launcher is a Linux x86-64 library but needs no particular Python."""

    def run(self) -> None:
        super().run()
        pack_tightly(Path(self.distribution.dist_files[-1][2]))

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithLauncher, "bdist_wheel": PlatformWheel})
