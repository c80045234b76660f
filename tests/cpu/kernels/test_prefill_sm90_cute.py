"""attention/prefill_sm90_cute without a GPU: compiled for sm_90a within its resources, emulated from its PTX, what its verdicts refuse, and
variants as text for CuTe-DSL.

The table: registers at the launch, bytes of stack (spilled: none), shared memory. Everything else of its coverage compiles, too, but takes
a minute: ``python tests/cpu/kernels/test_prefill_sm90_cute.py`` does it, and prints such a table.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.errors import ToolchainMissing, VariantError
from kernelgen.kernels.attention import prefill_sm90_cute as kernel
from kernelgen.kernels.attention.prefill_sm90_cute import Config
from kernelgen.problems.attention import AttentionProblem
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.prefill_cases import CASES, CHANGES, run
from kernelgen.testing.ptx_emulator import EmulatedCute
from kernelgen.testing.resources import compiled, covered
from kernelgen.testing.sass import disassembler, loops
from kernelgen.toolchains import toolchain
from kernelgen.variants import trace
from kernelgen.variants.dsl import variant_functions

H200 = replace(Target.parse("sm_90a"), sm_count=132)
BASE = AttentionProblem("dense", 2, 4096, 4096, 16, 4, 128, 128, "bf16", "bf16", "bf16")
CAUSAL = replace(BASE, causal=True, return_lse=True)


def _installed() -> bool:
    try:
        toolchain("cutedsl").identity()
    except ToolchainMissing:
        return False
    return True


needs_dsl = pytest.mark.skipif(not _installed(), reason="needs CuTe-DSL")

# (problem, config) -> registers, stack, shared memory.
TABLE: tuple[tuple[AttentionProblem, Config, tuple[int, int, int]], ...] = (
    (CAUSAL, Config(2, 128), (168, 0, 197632)),
    (replace(CAUSAL, head_dim=256, head_dim_v=256), Config(2, 64, out_over_query=True, search=True), (168, 0, 198656)),
    (replace(BASE, head_dim=64, head_dim_v=64), Config(3, 128), (128, 0, 115712)),
)


def _spec(problem: AttentionProblem, config: Config) -> KernelSpec:
    return kernel.spec(problem, H200, config)


@needs_dsl
def test_resources() -> None:
    specs = [_spec(problem, config) for problem, config, _ in TABLE]
    reports = compiled(specs)
    for spec, (_, _, expected) in zip(specs, TABLE):
        meta = reports[spec.name]
        assert (meta["registers"], meta["stack_bytes"], dict(spec.parameters)["shared_memory"]) == expected, spec.name


@needs_dsl
@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm in PATH, CUDA_HOME or Triton")
def test_the_loop_over_key_tiles(tmp_path: Path) -> None:
    """Products of keys and of values right behind each other, none waiting for itself alone; no local memory; tiles come by TMA."""
    for problem, config, _ in TABLE:
        spec = _spec(problem, config)
        binary = build.build(spec)[0].binary.read_bytes()
        start = binary.index(b"\x7fELF", 4)  # the cubin in the library
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(binary[start:])
        sass = subprocess.run([str(disassembler()), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
        products = -(-problem.head_dim // 16) + config.block_k // 16
        loop = next((loop for loop in loops(sass) if sum("HGMMA" in i for i in loop) == products), [])
        assert any("MUFU.EX2" in i for i in loop), f"{spec.name}: no loop with {products} products and a softmax"
        assert sum("WARPGROUP.DEPBAR" in i for i in loop) == 2, spec.name
        assert not any(re.search(r"\b(LDL|STL)", i) for i in loop), spec.name
        assert any("UTMALDG" in i for other in loops(sass) for i in other), spec.name


@needs_dsl
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_emulated() -> None:
    """One kernel: two requests, values that are no numbers, logits that outgrow those before them by more than float32 holds."""
    folder = settings().cache_dir / "emulated_ptx"
    for change in (None, CHANGES["NaN"][1], CHANGES["growing"][1], CHANGES["near the end of float's range"][1]):
        case = replace(CASES["causal"], config=Config(2, 32))
        run(case, kernel, partial(EmulatedCute, folder=folder, lazy=True, stalls=True, seed=3), what="emulated", change=change)


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "e4m3", "kv_dtype": "e4m3", "out_dtype": "bf16"}, "e4m3/e4m3"), ({"alignment": 8}, "alignment 8"),
    ({"head_dim": 264}, "264/128"), ({"head_dim": 65}, "65"), ({"scales": "head"}, "scales"), ({"block_mask": True}, "block_mask"),
    ({"requires_grad": True}, "requires_grad: prefill_sm90_cute"), ({"variant": "mine"}, "variant mine"),
    ({"layout": "ragged", "mask": "packed", "sinks": True, "alibi": True, "soft_cap": True, "kv_lens": True}, ""), ({}, ""),
], ids=str)
def test_verdicts(change: dict[str, Any], words: str) -> None:
    verdict = kernel.supports(replace(BASE, **change), H200)
    assert verdict.ok == (not words) and words in verdict.reason, verdict
    assert "sm_90" in kernel.supports(BASE, Target.parse("sm_100")).reason


def test_configs() -> None:
    for config, words in ((Config(2, 128, 4), "bytes of shared memory"),
                          (Config(3, 128), "registers"), (Config(2, 72), "block_k 72"),
                          (Config(2, 64, early_keys=True, diagonal=1), "early_keys, diagonal of prefill_sm90 alone")):
        assert words in kernel.legal(BASE, H200, config).reason
    for d, dv in [(d, d) for d in range(8, 257, 8)] + [(192, 128), (8, 256), (256, 8)]:
        for causal in (False, True):
            problem = replace(BASE, head_dim=d, head_dim_v=dv, causal=causal)
            first, second = list(kernel.candidates(problem, H200))[:2]
            assert first.search == (d >= 192) and second == replace(first, search=not first.search), problem
    assert len({_spec(BASE, c).name for c in (Config(2, 64), Config(2, 64, search=True), Config(2, 80))}) == 3


def test_auto_does_not_take_it() -> None:
    """As fast as its sibling, whose build takes a quarter of the time: behind it, and there when it is asked for."""
    decision = kernelgen.explain("attention", (2, 4096, 32, 128), (2, 4096, 8, 128), (2, 4096, 8, 128), causal=True, target="sm_90a")
    row = next(c for c in decision.candidates if c.kernel == "attention/prefill_sm90_cute")
    assert row.verdict.ok == _installed() and decision.chosen is not None and decision.chosen.kernel == "attention/prefill_sm90"


def test_variants_as_text() -> None:
    def score(x: Any, ctx: Any) -> Any:
        return torch.where(ctx.q_pos % 7 > ctx.k_pos // 2, x * ctx.factor, ctx.table[ctx.head, ctx.k_pos - ctx.q_pos])

    def mask(ctx: Any) -> Any:
        return (ctx.ids[ctx.k_pos] == ctx.ids[ctx.q_index]) & ~(ctx.k_pos == 3)

    tensors = {"table": torch.zeros(2, 5, dtype=torch.bfloat16), "ids": torch.zeros(9, dtype=torch.int64)}
    text = variant_functions(trace(kernelgen.variant(score, mask, tensors=tensors, scalars={"factor": 0.5})))
    assert "def score(x, batch, head, kv_head, q_index, q_pos, k_pos, q_len, kv_len, words):" in text
    assert "functions.floor_mod(q_pos, Int32(7))" in text and "k_pos // Int32(2)" in text, "only q_pos may be negative"
    assert "functions.element(words, 3, cutlass.BFloat16, (Int64(head), False), (Int64(" in text
    assert "Int64(functions.element(words, 0, cutlass.Int64" in text and "x * functions.scalar_float(words, 8)" in text
    compile(text, "variant", "exec")
    with pytest.raises(VariantError, match="sinh.* not in CuTe-DSL variants"):
        variant_functions(trace(kernelgen.variant(lambda x, ctx: torch.sinh(x))))
    verdict = kernel.supports(replace(BASE, variant=trace(kernelgen.variant(lambda x, ctx: torch.sinh(x)))), H200)
    assert not verdict and "sinh" in verdict.reason


if __name__ == "__main__":
    for name, report in compiled([*covered(kernel.FAMILY, H200), *(_spec(p, c) for p, c, _ in TABLE)]).items():
        print(name, report["registers"], report["stack_bytes"])


def test_sections_of_heads_have_one_kernel() -> None:
    assert kernel.spec(BASE, H200, Config(2, 128, section=64)) == kernel.spec(BASE, H200, Config(2, 128))
