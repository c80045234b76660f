"""Compiles one rendered Triton file to a cubin. Runs in a process of its own and imports nothing of kernelgen.

Called with one argument, JSON: ``path`` (sys.path), ``source``, ``capability``, ``fp_fusion``. The file says what to compile:

    KERNEL     the function under triton.jit
    ARGUMENTS  (name, kind) of its arguments that are no constants, in order; a kind is "ptr", "i64", "i32", "f64" or "f32"
    POINTERS   name -> what a pointer points to ("bf16", "fp32", ...)
    CONSTANTS  name -> value of each tl.constexpr
    DIVISIBLE  name -> number that divides an address or a value, where that is known (16 for aligned pointers)
    OPTIONS    num_warps, num_stages and further options of triton.compile

Writes kernel.cubin and report.json into the current folder.
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

KINDS = {"i64": "i64", "i32": "i32", "f64": "fp64", "f32": "fp32"}
BYTES = {"u64": 8, "b64": 8, "s64": 8, "f64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4, "u16": 2, "b16": 2, "u8": 1, "b8": 1, "s8": 1}


def main(job: dict[str, Any]) -> None:
    start = time.perf_counter()
    sys.dont_write_bytecode = True
    sys.path[:] = [".", *job["path"]]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    imported = time.perf_counter()
    kernel: Any = importlib.import_module(pathlib.Path(job["source"]).stem)
    arguments, constants = dict(kernel.ARGUMENTS), dict(kernel.CONSTANTS)
    takes = tuple(p.name for p in kernel.KERNEL.params)
    given = tuple(name for name in takes if name not in constants)
    if given != tuple(arguments) or set(takes) != {*arguments, *constants}:
        sys.exit(f"error: {kernel.KERNEL.__name__} takes {', '.join(takes)}; expected the arguments {', '.join(arguments)} in this order "
                 f"and the constants {', '.join(constants)}")
    types = {name: "*" + kernel.POINTERS[name] if kind == "ptr" else KINDS[kind] for name, kind in arguments.items()}
    signature = {name: types.get(name, "constexpr") for name in takes}
    attributes = {(takes.index(name),): [["tt.divisibility", number]] for name, number in kernel.DIVISIBLE.items()}
    source = ASTSource(kernel.KERNEL, signature, {(takes.index(name),): value for name, value in constants.items()}, attributes)
    options = {"enable_fp_fusion": job["fp_fusion"], **kernel.OPTIONS}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", job["capability"], 32), options=options)
    except CompilationError as error:
        sys.exit(described(error, pathlib.Path(job["source"]).read_text(encoding="utf-8"), job["source"]))
    hidden = hidden_pointers(compiled.asm["ptx"], compiled.metadata.name, [arguments[name] for name in given])
    pathlib.Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    meta = compiled.metadata
    report = {
        "entry": meta.name, "num_warps": meta.num_warps, "num_ctas": meta.num_ctas, "shared_memory": meta.shared, "hidden_pointers": hidden,
        **{f"{kind}_scratch_bytes": getattr(meta, f"{kind}_scratch_size", 0) or 0 for kind in ("global", "profile")},
        "programmatic": bool(getattr(meta, "launch_pdl", False)), "cooperative": bool(getattr(meta, "launch_cooperative_grid", False)),
        "import_seconds": imported - start, "compile_seconds": time.perf_counter() - imported,
    }
    pathlib.Path("report.json").write_text(json.dumps(report))


def described(failed: BaseException, text: str, name: str) -> str:
    """What Triton says, with lines of the file: its own count from the function that it was in, which may be one of Triton's."""
    lines, said = [], str(failed)
    error: BaseException | None = failed
    while error is not None:
        source, node = getattr(error, "src", None), getattr(error, "node", None)
        if source is not None and node is not None and source in text:
            line = text.count("\n", 0, text.index(source)) + node.lineno
            lines.append(f'  File "{name}", line {line}\n    {text.splitlines()[line - 1].strip()}')
        said = getattr(error, "error_message", None) or str(error)
        error = error.__cause__
    return "\n".join([*lines, f"error: {said}"])


def hidden_pointers(ptx: str, entry: str, kinds: Sequence[str]) -> int:
    """How many pointers the compiled kernel takes behind its own arguments (scratch memory). Read from the PTX, since it differs between
    releases; arguments of other sizes than ours are an error here and not a wrong launch later."""
    listed = re.search(r"\.entry\s+" + re.escape(entry) + r"\s*\((.*?)\)", ptx, re.DOTALL)
    sizes = [BYTES[kind] for kind in re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)", listed.group(1) if listed else "")]
    own = [8 if kind in ("ptr", "i64", "f64") else 4 for kind in kinds]
    if sizes[:len(own)] != own or any(size != 8 for size in sizes[len(own):]):
        sys.exit(f"error: {entry} takes parameters of {sizes} bytes, expected {own} and pointers behind them")
    return len(sizes) - len(own)


main(json.loads(sys.argv[1]))
