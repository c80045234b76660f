"""A model built ahead of time on this machine as on one without a GPU (--target), then run with KERNELGEN_JIT=0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernelgen.targets import target_of
from kernelgen.testing.aot_configs import tiny

ROOT = Path(__file__).parents[2]


def run(cache: Path, *words: str, **more: str) -> str:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "KERNELGEN_CACHE_DIR": str(cache), "PYTHONPATH": path, **more}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("model_type, layer", (("llama", "tiny_64"), ("qwen3_moe", "tiny_64_moe")))
def test_a_live_layer_compiles_nothing(model_type: str, layer: str, tmp_path: Path) -> None:
    """Lengths on the host and on the device, block tables of one column and of several; what was recorded is what was loaded."""
    config, cache, manifest = tmp_path / "config.json", tmp_path / "cache", tmp_path / "specs.jsonl"
    config.write_text(json.dumps(tiny(model_type, head_dim=64, torch_dtype="bfloat16")))
    arch = target_of(torch.device("cuda")).arch
    sizes = ["--max-tokens", "24", "--max-batch", "3", "--max-length", "48", "--page-size", "8"]
    built = json.loads(run(cache, "kernelgen", "prebuild", "--model", str(config), "--target", arch, "--json", *sizes))
    listed = {row["path"] for row in built["kernels"]}
    live = run(cache, "kernelgen.testing.aot_layer", "cuda", "bfloat16", layer, KERNELGEN_JIT="0", KERNELGEN_BACKEND="generated",
               KERNELGEN_RECORD=str(manifest))
    loaded = set(json.loads(live))
    assert loaded and loaded <= listed, loaded - listed
    again = json.loads(run(cache, "kernelgen", "prebuild", "--manifest", str(manifest), "--json"))
    assert {row["path"] for row in again["kernels"]} == loaded and again["total"]["built"] == 0
