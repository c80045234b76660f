"""A model built ahead of time on this machine as on one without a GPU (--target), then run with KERNELGEN_JIT=0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen.targets import target_of
from kernelgen.testing.aot_configs import CONFIGS, tiny

ROOT = Path(__file__).parents[2]
SIZES = {False: dict(head_dim=64), True: dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)}


# No program is found, and neither NVRTC's bindings nor a CuTe-DSL: what runs does so without a compiler.
HIDDEN = """
import os, runpy, sys
os.environ["PATH"] = "/nowhere"
hidden = ("cuda.pathfinder", "cuda.bindings", "cuda.core", "cutlass")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in hidden or name.startswith(tuple(f"{part}." for part in hidden)):
            raise ImportError(f"{name} is hidden")
sys.meta_path.insert(0, Hide())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(cache: Path, *words: str, start: tuple[str, ...] = ("-m",), **more: Any) -> str:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "KERNELGEN_CACHE_DIR": str(cache), "PYTHONPATH": path, **more}
    done = subprocess.run([sys.executable, *start, *words], env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def request_of(path: str) -> str:
    """The request key in the path of an entry, wherever it lies."""
    return Path(path).parent.name


@pytest.mark.parametrize("model_type", [name if name in ("llama", "qwen3_moe") else pytest.param(name, marks=pytest.mark.full)
                                        for name in CONFIGS if name != "gemma3"])
def test_a_live_layer_compiles_nothing(model_type: str, tmp_path: Path) -> None:
    """From an exported bundle alone. Lengths on the host and on the device, block tables of one column and of several; what was recorded
    is what was loaded."""
    config, cache, prebuilt, manifest, bundle = (
        tmp_path / name for name in ("config.json", "cache", "prebuilt.jsonl", "specs.jsonl", "bundle"))
    config.write_text(json.dumps(tiny(model_type, torch_dtype="bfloat16", **SIZES[model_type.startswith("deepseek")])))
    arch = target_of(torch.device("cuda")).arch
    sizes = ["--max-tokens", "24", "--max-batch", "3", "--max-length", "48", "--page-size", "8"]
    built = json.loads(run(cache, "kernelgen", "prebuild", "--model", str(config), "--target", arch, "--json", "--record", str(prebuilt),
                           *sizes))
    listed = {request_of(row["path"]) for row in built["kernels"]}
    run(cache, "kernelgen", "cache", "export", "--manifest", str(prebuilt), str(bundle))
    offline = {"KERNELGEN_JIT": "0", "KERNELGEN_BACKEND": "generated", "KERNELGEN_CACHE_LAYERS": str(bundle), "start": ("-c", HIDDEN)}
    live = run(tmp_path / "none", "kernelgen.testing.aot_layer", "cuda", str(config), "tiny", KERNELGEN_RECORD=str(manifest), **offline)
    loaded = {request_of(path) for path in json.loads(live)}
    assert loaded and loaded <= listed and not (tmp_path / "none").exists()
    warm = json.loads(run(tmp_path / "none", "kernelgen", "warmup", "--manifest", str(prebuilt), "--json", **offline))
    assert warm["ok"] and {request_of(row["artifact"]) for row in warm["kernels"]} == listed
    again = json.loads(run(cache, "kernelgen", "prebuild", "--manifest", str(manifest), "--json"))
    assert {request_of(row["path"]) for row in again["kernels"]} == loaded and again["total"]["built"] == 0
