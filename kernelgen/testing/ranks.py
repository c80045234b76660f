"""Several processes for tests: every rank runs the cases of one module, in order, and leaves a line for each.

    run_ranks("kernelgen.testing.distributed_cases", 3, folder, device="cpu", timeout=100) -> {case: "" or what went wrong}

A case is a function (rank, size, device) in the module's CASES. A rank that fails stops there, as the others are then out of step;
they end by the group's timeout, or are killed. No process outlives the call.
"""

from __future__ import annotations

import datetime
import importlib
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

GROUP_TIMEOUT = datetime.timedelta(seconds=45)
_DONE = "ok"


def run_ranks(module: str, size: int, folder: Path, *, device: str, timeout: float) -> dict[str, str]:
    """Run all cases of ``module`` on ``size`` processes of this machine; what they write lies in ``folder``, which must be empty."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    # One thread for each rank: they share the cores, and idle OpenMP threads would spin on them.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    processes = []
    for rank in range(size):
        log = (folder / f"{rank}.log").open("w")
        command = [sys.executable, "-m", __name__, module, str(rank), str(size), str(folder), device]
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    cases = list(importlib.import_module(module).CASES)
    return {case: "\n".join(filter(None, (_outcome(folder, case, rank) for rank in range(size)))) for case in cases}


def _outcome(folder: Path, case: str, rank: int) -> str:
    """"" where the rank did the case."""
    result = folder / f"{rank}.{case.replace(' ', '_')}"
    if not result.exists():
        return f"rank {rank} never came to the end of this case; its output:\n{(folder / f'{rank}.log').read_text()[-3000:]}"
    text = result.read_text()
    return "" if text == _DONE else f"rank {rank}:\n{text}"


def main(module: str, rank: int, size: int, folder: str, device: str) -> None:
    """One rank."""
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
                            timeout=GROUP_TIMEOUT)
    for name, case in importlib.import_module(module).CASES.items():
        result = Path(folder) / f"{rank}.{name.replace(' ', '_')}"
        begin = time.monotonic()
        try:
            case(rank, size, device)
        except BaseException:
            result.write_text(traceback.format_exc())
            raise
        result.write_text(_DONE)
        print(f"{name}: {time.monotonic() - begin:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
