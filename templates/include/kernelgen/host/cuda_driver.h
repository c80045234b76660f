// The few driver functions the launcher needs, found with dlopen so that no CUDA header or library is linked.
// Types and numbers are those of the CUDA driver API reference (12.0 and later).
#pragma once

#include <tvm/ffi/error.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include <dlfcn.h>

namespace kernelgen {

using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUcontext = struct CUctx_st*;

constexpr int kMaxDynamicSharedMemory = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kPreferredCarveout = 9;        // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
constexpr unsigned kAttributeClusterDimension = 4;
constexpr unsigned kAttributeProgrammaticStreamSerialization = 6;
constexpr int kCaptureModeRelaxed = 2;

struct LaunchAttribute {  // CUlaunchAttribute: id, padding to 8, 64 bytes of value
  unsigned id = 0;
  unsigned padding = 0;
  char value[64] = {};
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_memory;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

class Driver {
 public:
  int (*LibraryLoadData)(CUlibrary*, const void*, void*, void**, unsigned, void*, void**, unsigned);
  int (*LibraryGetKernel)(CUkernel*, CUlibrary, const char*);
  int (*KernelSetAttribute)(int, int, CUkernel, int);
  int (*KernelGetFunction)(CUfunction*, CUkernel);
  int (*FuncLoad)(CUfunction);  // null before CUDA 12.4
  int (*LaunchKernelEx)(const LaunchConfig*, CUfunction, void**, void**);
  int (*MemcpyHtoDAsync)(uint64_t, const void*, size_t, CUstream);
  int (*TensorMapEncodeTiled)(void*, unsigned, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                              const uint32_t*, unsigned, unsigned, unsigned, unsigned);
  int (*ExchangeCaptureMode)(int*);
  int (*CtxGetCurrent)(CUcontext*);
  int (*CtxGetDevice)(int*);
  int (*CtxPushCurrent)(CUcontext);
  int (*CtxPopCurrent)(CUcontext*);
  int (*PrimaryCtxRetain)(CUcontext*, int);
  int (*GetErrorName)(int, const char**);
  int (*GetErrorString)(int, const char**);

  static const Driver& Get() {
    static Driver driver;
    return driver;
  }

  std::string Describe(int code) const {
    const char *name = nullptr, *text = nullptr;
    GetErrorName(code, &name);
    GetErrorString(code, &text);
    return std::string(name ? name : "unknown error") + " (" + (text ? text : "no text") + ")";
  }

  void Check(int code, const char* what) const {
    if (code != 0) TVM_FFI_THROW(LaunchError) << what << ": " << Describe(code);
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
      const char* reason = dlerror();  // clears itself when read
      TVM_FFI_THROW(LaunchError) << "libcuda.so.1 cannot be opened: " << (reason ? reason : "no reason given")
                                 << "; install the NVIDIA driver";
    }
    auto find = [&](auto& slot, const char* name) {
      void* symbol = dlsym(library, name);
      if (!symbol) TVM_FFI_THROW(LaunchError) << "the NVIDIA driver lacks " << name << "; expected CUDA 12.0 or later";
      slot = reinterpret_cast<std::decay_t<decltype(slot)>>(symbol);
    };
    find(LibraryLoadData, "cuLibraryLoadData");
    find(LibraryGetKernel, "cuLibraryGetKernel");
    find(KernelSetAttribute, "cuKernelSetAttribute");
    find(KernelGetFunction, "cuKernelGetFunction");
    FuncLoad = reinterpret_cast<decltype(FuncLoad)>(dlsym(library, "cuFuncLoad"));
    find(LaunchKernelEx, "cuLaunchKernelEx");
    find(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
    find(TensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    find(ExchangeCaptureMode, "cuThreadExchangeStreamCaptureMode");
    find(CtxGetCurrent, "cuCtxGetCurrent");
    find(CtxGetDevice, "cuCtxGetDevice");
    find(CtxPushCurrent, "cuCtxPushCurrent_v2");
    find(CtxPopCurrent, "cuCtxPopCurrent_v2");
    find(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(GetErrorName, "cuGetErrorName");
    find(GetErrorString, "cuGetErrorString");
  }
};

// Makes the device's primary context current for a launch on the null stream; leaves the caller's as it was.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, int device, bool needed) : driver_(driver) {
    if (!needed) return;
    CUcontext current = nullptr;
    int current_device = -1;
    if (driver.CtxGetCurrent(&current) == 0 && current && driver.CtxGetDevice(&current_device) == 0 && current_device == device)
      return;
    CUcontext primary = nullptr;  // kept for the life of the process, as the CUDA runtime does
    driver.Check(driver.PrimaryCtxRetain(&primary, device), "cuDevicePrimaryCtxRetain");
    driver.Check(driver.CtxPushCurrent(primary), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~ContextGuard() {
    CUcontext popped;
    if (pushed_) driver_.CtxPopCurrent(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

class CaptureModeGuard {
 public:
  explicit CaptureModeGuard(const Driver& driver) : driver_(driver) { driver_.ExchangeCaptureMode(&mode_); }
  ~CaptureModeGuard() { driver_.ExchangeCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  int mode_ = kCaptureModeRelaxed;
};

}  // namespace kernelgen
