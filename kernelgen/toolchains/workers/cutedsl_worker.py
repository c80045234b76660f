"""Compiles one rendered CuTe-DSL file to objects. Runs in a process of its own and imports nothing of kernelgen.

Called with one argument, JSON: ``path`` (sys.path), ``source``, ``options`` of cute.compile, ``host_cpu`` and ``host_features``
of the host code, ``arch``. The file has ``entries()``: name -> (function, arguments), with fake tensors and a fake stream as arguments.
Writes NAME.o and NAME.cubin for each entry and report.json into the current folder.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(job: dict[str, Any]) -> None:
    start = time.perf_counter()
    sys.dont_write_bytecode = True
    sys.path[:] = [".", "include", *job["path"]]  # generated code finds its library beside itself
    import cutlass  # noqa: F401
    from cutlass import cute
    from cutlass.base_dsl.enums import Arch

    if job["arch"] not in Arch.__members__:
        known = ", ".join(name for name in Arch.__members__)
        sys.exit(f"error: architecture {job['arch']} is none that this CuTe-DSL can target; it knows {known}")
    imported = time.perf_counter()
    entries = importlib.import_module(pathlib.Path(job["source"]).stem).entries()
    traced, exported, objects = time.perf_counter(), 0.0, []
    for name, (function, arguments) in entries.items():
        compiled = cute.compile(function, *arguments, options=job["options"])
        begin = time.perf_counter()
        fix_host_code(compiled.ir_module, job["host_cpu"], job["host_features"])
        compiled.export_to_c(f"{name}.o", function_name=name)
        exported += time.perf_counter() - begin
        pathlib.Path(f"{name}.cubin").write_bytes(compiled.__cubin__)
        objects.append(name)
    report = {"entries": objects, "flavour": flavour(), "import_seconds": imported - start, "export_seconds": exported,
              "compile_seconds": time.perf_counter() - traced - exported}
    pathlib.Path("report.json").write_text(json.dumps(report))


def fix_host_code(module: Any, cpu: str, features: Sequence[str]) -> None:
    """Host code for a named processor level. Without it, it is made for the processor that compiles, and a bundle that was built on one
    with AVX-512 would end with an illegal instruction elsewhere."""
    if not cpu:
        return
    ir: Any = importlib.import_module("cutlass._mlir.ir")
    with module.context:
        listed = ir.Attribute.parse("#llvm.target_features<[" + ", ".join(f'"{f}"' for f in features) + "]>")
        level = ir.StringAttr.get(cpu)

        def visit(operation: Any) -> Any:
            if operation.name == "llvm.func":
                operation.attributes["target_cpu"], operation.attributes["target_features"] = level, listed
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)


def flavour() -> int | None:
    """The CUDA major version that this DSL was built for, as its compiler's file says: _cutlass_ir.cu13.cpython-312-...so."""
    for module in list(sys.modules.values()):
        found = re.search(r"_cutlass_ir\.cu(\d+)\.", getattr(module, "__file__", None) or "")
        if found:
            return int(found.group(1))
    return None


main(json.loads(sys.argv[1]))
