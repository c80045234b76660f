"""The launcher on a machine without a GPU: a driver of some functions, which writes down what it is asked to launch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DRIVER = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#define OK extern "C" int
OK cuLibraryLoadData(void** l, const void*, void*, void**, unsigned, void*, void**, unsigned) { *l = (void*)1; return 0; }
OK cuLibraryGetKernel(void** k, void*, const char*) { *k = (void*)2; return 0; }
OK cuKernelSetAttribute(int, int, void*, int) { return 0; }
OK cuKernelGetFunction(void**, void*) { return 0; }
struct Config { unsigned grid[3], block[3], shared; void* stream; void* attributes; unsigned num_attributes; };
OK cuLaunchKernelEx(const Config* c, void*, void** a, void**) {
  uint64_t p[2], hidden[2];
  int32_t n;
  float s;
  std::memcpy(&p[0], a[0], 8);
  std::memcpy(&p[1], a[1], 8);
  std::memcpy(&n, a[2], 4);
  std::memcpy(&s, a[3], 4);
  std::memcpy(&hidden[0], a[4], 8);
  std::memcpy(&hidden[1], a[5], 8);
  std::printf("%u %u %u %lu %lu %d %g %lu %lu\n", c->grid[0], c->block[0], c->shared, p[0], p[1], n, s, hidden[0], hidden[1]);
  std::fflush(stdout);
  return 0;
}
OK cuMemcpyHtoDAsync_v2(uint64_t, const void*, size_t, void*) { return 0; }
OK cuTensorMapEncodeTiled() { return 0; }
OK cuThreadExchangeStreamCaptureMode(int*) { return 0; }
OK cuCtxGetCurrent(void** c) { *c = (void*)3; return 0; }
OK cuCtxGetDevice(int* d) { *d = 0; return 0; }
OK cuCtxPushCurrent_v2(void*) { return 0; }
OK cuCtxPopCurrent_v2(void**) { return 0; }
OK cuDevicePrimaryCtxRetain(void**, int) { return 0; }
OK cuGetErrorName(int, const char** s) { *s = "NONE"; return 0; }
OK cuGetErrorString(int, const char** s) { *s = "none"; return 0; }
"""

LAUNCH = """
import struct, torch
from kernelgen.launch.cuda import CudaKernel
from kernelgen.launch.host import launcher
from kernelgen.launch.triton import TritonKernel
from kernelgen.errors import LaunchError
from kernelgen.params import ParamStruct
from kernelgen.testing import toy
from dataclasses import replace
torch._C._cuda_getCurrentRawStream = lambda device: 7
spec = replace(toy.spec("sm_90a"), params=ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i32"), ("s", "f32"))))
binary = CudaKernel(spec, launcher().cuda_load(b"cubin", "scale"), b"cubin")
kernel = TritonKernel(spec, binary, threads=128, shared_memory=1024, blocks_per_cluster=1, programmatic=False, hidden=2, scratch=0)
packed = spec.params.pointer_packer.pack(11, 12) + spec.params.pack_scalars({"n": -5, "s": 0.5})
kernel.prepare(0, (9, 1, 1))(packed)
kernel.prepare(0, (0, 1, 1))(packed)
try:
    kernel.prepare(0, (9, 1, 1))(packed[:-4])
except LaunchError as error:
    print(str(error).splitlines()[0])
"""


def test_arguments_one_by_one_and_hidden_ones_behind_them(tmp_path: Path) -> None:
    (tmp_path / "driver.cc").write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "driver.cc")], check=True)
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=False,
                          env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.stdout.splitlines() == ["9 128 1024 11 12 -5 0.5 0 0", "got 36 bytes of parameters, expected 40"], done.stdout + done.stderr
