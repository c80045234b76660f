// The one launcher of kernelgen: loads cubins, launches them, and runs CPU kernels on a thread pool.
//
// Every input is data packed by Python (kernelgen/launch/*.py), so this file knows no kernel. It is built once.
// libcuda is opened at the first CUDA call: the same binary serves machines without a driver.

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#include "kernelgen/host/cuda_driver.h"
#include "kernelgen/host/plan.h"
#include "kernelgen/host/thread_pool.h"

namespace kernelgen {

using tvm::ffi::Bytes;

// ---- CUDA -----------------------------------------------------------------------------------------------------

// Mirrors kernelgen/launch/cuda.py: LAUNCH_HEADER.
struct LaunchHeader {
  uint64_t kernel;
  int32_t device;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_memory;
  uint32_t programmatic;  // programmatic dependent launch
  uint32_t num_tensor_maps;
  uint32_t params_bytes;
};
static_assert(sizeof(LaunchHeader) == 64, "LaunchHeader: keep in step with LAUNCH_HEADER in kernelgen/launch/cuda.py");

// Mirrors kernelgen/launch/cuda.py: TENSOR_MAP_RECIPE. Offsets are into the packed params.
struct TensorMapRecipe {
  uint32_t map_offset;      // where the 128-byte descriptor goes
  uint32_t pointer_offset;  // where the tensor's address is
  uint32_t data_type, rank, interleave, swizzle, l2_promotion, oob_fill;
  uint64_t dims[5];
  uint64_t strides[4];  // bytes, of dimensions 1 ..
  uint32_t box[5];
  uint32_t element_strides[5];
};
static_assert(sizeof(TensorMapRecipe) == 144, "TensorMapRecipe: keep in step with TENSOR_MAP_RECIPE");

// Largest kernel parameter block before CUDA 12.1's extension to 32 KB; every Params here is far below it.
constexpr size_t kMaxParamBytes = 4096;
constexpr size_t kMaxArguments = 64;

int64_t CudaLoad(const Bytes& image, const tvm::ffi::String& entry) {
  const Driver& driver = Driver::Get();
  // A first use may happen while a stream is being captured; loading is legal then only in relaxed mode.
  CaptureModeGuard relaxed(driver);
  CUlibrary library = nullptr;
  driver.Check(driver.LibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  CUkernel kernel = nullptr;
  driver.Check(driver.LibraryGetKernel(&kernel, library, entry.c_str()), "cuLibraryGetKernel");
  return reinterpret_cast<int64_t>(kernel);
}

// Dynamic shared memory above 48 KB has to be asked for, once per device.
void CudaAllowSharedMemory(int64_t kernel, int device, int bytes) {
  const Driver& driver = Driver::Get();
  CaptureModeGuard relaxed(driver);
  driver.Check(driver.KernelSetAttribute(kMaxDynamicSharedMemory, bytes, reinterpret_cast<CUkernel>(kernel), device),
               "cuKernelSetAttribute(max dynamic shared memory)");
}

// The part of an SM's memory that is shared memory rather than L1 while this kernel runs. Kernels that want different parts do not run
// beside each other on an SM.
void CudaPreferCarveout(int64_t kernel, int device, int percent) {
  const Driver& driver = Driver::Get();
  CaptureModeGuard relaxed(driver);
  driver.Check(driver.KernelSetAttribute(kPreferredCarveout, percent, reinterpret_cast<CUkernel>(kernel), device),
               "cuKernelSetAttribute(preferred carveout)");
}

// Puts a kernel on the device. The driver would do it at the first launch, which may be somebody's request.
void CudaMakeReady(int64_t kernel, int device) {
  const Driver& driver = Driver::Get();
  CaptureModeGuard relaxed(driver);
  ContextGuard context(driver, device, true);
  CUfunction function = nullptr;
  driver.Check(driver.KernelGetFunction(&function, reinterpret_cast<CUkernel>(kernel)), "cuKernelGetFunction");
  if (driver.FuncLoad) driver.Check(driver.FuncLoad(function), "cuFuncLoad");
}

void CudaLaunch(const Bytes& config, const Bytes& params, int64_t stream) {
  const Driver& driver = Driver::Get();
  LaunchHeader header;
  if (config.size() < sizeof(header)) TVM_FFI_THROW(LaunchError) << "launch config of " << config.size() << " bytes";
  std::memcpy(&header, config.data(), sizeof(header));
  // Behind the recipes: where each argument begins, of a kernel that takes them one by one; nothing where it takes one struct.
  const size_t maps_end = sizeof(header) + header.num_tensor_maps * sizeof(TensorMapRecipe);
  const size_t num_arguments = config.size() < maps_end ? kMaxArguments + 1 : (config.size() - maps_end) / sizeof(uint32_t);
  if (params.size() != header.params_bytes || params.size() > kMaxParamBytes || num_arguments > kMaxArguments)
    TVM_FFI_THROW(LaunchError) << "got " << params.size() << " bytes of parameters, expected " << header.params_bytes;

  alignas(64) char packed[kMaxParamBytes];
  std::memcpy(packed, params.data(), params.size());
  for (uint32_t i = 0; i < header.num_tensor_maps; ++i) {
    TensorMapRecipe recipe;
    std::memcpy(&recipe, config.data() + sizeof(header) + i * sizeof(recipe), sizeof(recipe));
    void* address;
    std::memcpy(&address, packed + recipe.pointer_offset, sizeof(address));
    driver.Check(driver.TensorMapEncodeTiled(packed + recipe.map_offset, recipe.data_type, recipe.rank, address, recipe.dims,
                                             recipe.strides, recipe.box, recipe.element_strides, recipe.interleave,
                                             recipe.swizzle, recipe.l2_promotion, recipe.oob_fill),
                 "cuTensorMapEncodeTiled");
  }

  LaunchAttribute attributes[2];
  unsigned count = 0;
  if (header.cluster[0] * header.cluster[1] * header.cluster[2] > 1) {
    attributes[count].id = kAttributeClusterDimension;
    std::memcpy(attributes[count].value, header.cluster, sizeof(header.cluster));
    ++count;
  }
  if (header.programmatic) {
    attributes[count].id = kAttributeProgrammaticStreamSerialization;
    const int on = 1;
    std::memcpy(attributes[count].value, &on, sizeof(on));
    ++count;
  }
  LaunchConfig launch{header.grid[0], header.grid[1], header.grid[2], header.block[0], header.block[1], header.block[2],
                      header.shared_memory, reinterpret_cast<CUstream>(stream), attributes, count};
  void* arguments[kMaxArguments];
  arguments[0] = packed;
  for (size_t i = 0; i < num_arguments; ++i) {
    uint32_t offset;
    std::memcpy(&offset, config.data() + maps_end + i * sizeof(offset), sizeof(offset));
    arguments[i] = packed + offset;
  }
  // The stream's own context is used, unless it is the null stream, which belongs to whatever context is current.
  ContextGuard guard(driver, header.device, stream == 0);
  int code = driver.LaunchKernelEx(&launch, reinterpret_cast<CUfunction>(header.kernel), arguments, nullptr);
  if (code != 0)
    TVM_FFI_THROW(LaunchError) << "cuLaunchKernelEx: " << driver.Describe(code) << " (grid " << header.grid[0] << "x"
                               << header.grid[1] << "x" << header.grid[2] << ", block " << header.block[0] << "x"
                               << header.block[1] << "x" << header.block[2] << ", shared memory "
                               << header.shared_memory << " bytes)";
}

// Host memory to the device, in the order of the stream. The driver has taken pageable memory over when it returns.
void CopyToDevice(int64_t target, const void* values, size_t bytes, int device, int64_t stream) {
  const Driver& driver = Driver::Get();
  ContextGuard guard(driver, device, stream == 0);
  driver.Check(driver.MemcpyHtoDAsync(static_cast<uint64_t>(target), values, bytes, reinterpret_cast<CUstream>(stream)),
               "cuMemcpyHtoDAsync");
}

// ---- CPU ------------------------------------------------------------------------------------------------------

// Mirrors kernelgen/launch/cpu.py: PHASE.
struct Phase {
  uint64_t entry;
  int64_t num_tasks;
};

void CpuLaunch(const Bytes& phases, const Bytes& params, int64_t num_threads, int64_t scratch_bytes) {
  const size_t count = phases.size() / sizeof(Phase);
  for (size_t i = 0; i < count; ++i) {
    Phase phase;
    std::memcpy(&phase, phases.data() + i * sizeof(Phase), sizeof(phase));
    ThreadPool::Run(reinterpret_cast<KernelEntry>(phase.entry), params.data(), phase.num_tasks, static_cast<int>(num_threads),
                    static_cast<size_t>(scratch_bytes));
  }
}

// ---- Plans of paged attention ---------------------------------------------------------------------------------

const int32_t* Values(int64_t address) { return reinterpret_cast<const int32_t*>(address); }

BatchLengths LengthsAt(int64_t starts, int64_t kv_indptr, int64_t last_page_len, int64_t seq_lens, int64_t batch, int64_t page_size) {
  return {Values(starts), Values(kv_indptr), Values(last_page_len), Values(seq_lens), batch, page_size};
}

// BatchSizes as its bytes; kernelgen/launch/plan.py: SIZES.
Bytes PlanSizes(int64_t starts, int64_t kv_indptr, int64_t last_page_len, int64_t seq_lens, int64_t batch, int64_t page_size) {
  const BatchSizes sizes = sizes_of(LengthsAt(starts, kv_indptr, last_page_len, seq_lens, batch, page_size));
  return Bytes(reinterpret_cast<const char*>(&sizes), sizeof(sizes));
}

// Arrays of a plan at `target`, on the host (device -1) or in the order of a stream on a device. `division`: its five numbers.
// Returns twice the number of items, plus 1 where a request is split.
int64_t PlanCut(int64_t target, int device, int64_t stream, int64_t starts, int64_t kv_indptr, int64_t last_page_len, int64_t seq_lens,
                int64_t batch, int64_t page_size, int64_t size, int64_t table_width, const Bytes& division_bytes) {
  Division division;
  if (division_bytes.size() != sizeof(division)) TVM_FFI_THROW(LaunchError) << "division of " << division_bytes.size() << " bytes";
  std::memcpy(&division, division_bytes.data(), sizeof(division));
  const BatchLengths lengths = LengthsAt(starts, kv_indptr, last_page_len, seq_lens, batch, page_size);
  std::vector<int32_t> staged(device < 0 ? 0 : 4 * size + 3);
  int32_t* const arrays = device < 0 ? reinterpret_cast<int32_t*>(target) : staged.data();
  const Items items = cut_batch(lengths, division, size, table_width, arrays);
  if (device >= 0) CopyToDevice(target, staged.data(), staged.size() * sizeof(int32_t), device, stream);
  return 2 * items.count + items.split;
}

bool AllWithin(int64_t values, int64_t count, int64_t low, int64_t high) { return all_within(Values(values), count, low, high); }

bool StartsFit(int64_t starts, int64_t count, int64_t total) { return starts_fit(Values(starts), count, total); }

bool CsrFits(int64_t kv_indptr, int64_t last_page_len, int64_t batch, int64_t num_indices, int64_t page_size) {
  return csr_fits(Values(kv_indptr), Values(last_page_len), batch, num_indices, page_size);
}

bool AccumulateLengths(int64_t lengths, int64_t count, int64_t starts) {
  return accumulate_lengths(Values(lengths), count, reinterpret_cast<int32_t*>(starts));
}

}  // namespace kernelgen

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_load, kernelgen::CudaLoad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_allow_shared_memory, kernelgen::CudaAllowSharedMemory);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_prefer_carveout, kernelgen::CudaPreferCarveout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_make_ready, kernelgen::CudaMakeReady);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_launch, kernelgen::CudaLaunch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_launch, kernelgen::CpuLaunch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_sizes, kernelgen::PlanSizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_cut, kernelgen::PlanCut);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_within, kernelgen::AllWithin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(starts_fit, kernelgen::StartsFit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(csr_fits, kernelgen::CsrFits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(accumulate_lengths, kernelgen::AccumulateLengths);
