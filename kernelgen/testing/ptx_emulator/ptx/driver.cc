// The functions that are called from outside: by the tests, and by the host code of CuTe-DSL in the place of its run-time library.
#include "driver.h"

extern "C" {
void ptx_mode(int mode, unsigned seed) { ptx::mode = mode, ptx::seed = seed; }
// What the next launches may read and write: (begin, end) of each tensor; none: anything.
void ptx_tensors(const uint64_t* ranges, int count) {
  ptx::tensors.clear();
  for (int i = 0; i < count; ++i) ptx::tensors.push_back({ranges[2 * i], ranges[2 * i + 1]});
}
const char* ptx_error() { return ptx::error.c_str(); }
// A launch of packed parameters at `offsets`.
int ptx_launch(const char* name, const unsigned* grid, const unsigned* block, const unsigned* cluster, uint32_t dynamic_bytes,
               const unsigned char* packed, const uint32_t* offsets, int count) {
  const ptx::Kernel* kernel = ptx::find(name);
  if (kernel == nullptr || static_cast<int>(kernel->parameters.size()) != count) {
    ptx::error = kernel == nullptr ? "no such kernel" : "it takes " + std::to_string(kernel->parameters.size()) + " parameters, and not " + std::to_string(count);
    return 1;
  }
  return ptx::launch(*kernel, grid, block, cluster, dynamic_bytes, [=](size_t i) { return packed + offsets[i]; });
}

// cudaLaunchConfig_t and cudaLaunchAttribute.
struct Attribute {
  int id;
  char pad[4];
  unsigned value[16];
};
struct Config {
  unsigned grid[3], block[3];
  size_t shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
int _cudaLaunchKernelEx(const Config* config, const void* kernel, void** arguments) {
  unsigned cluster[3] = {1, 1, 1};
  for (unsigned i = 0; i < config->count; ++i) {
    if (config->attributes[i].id == 4) std::memcpy(cluster, config->attributes[i].value, sizeof(cluster));  // cudaLaunchAttributeClusterDimension
  }
  for (unsigned extent : config->grid) {
    if (extent == 0) {
      ptx::error = "a grid without blocks";
      return 9;  // cudaErrorInvalidConfiguration
    }
  }
  return ptx::launch(*static_cast<const ptx::Kernel*>(kernel), config->grid, config->block, cluster, static_cast<uint32_t>(config->shared),
                     [=](size_t i) { return arguments[i]; });
}
int _cudaLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) { return *library = library, 0; }
int _cudaLibraryGetKernel(const void** kernel, void*, const char* name) {
  *kernel = ptx::find(name);
  if (*kernel == nullptr) ptx::error = std::string("no kernel ") + name;
  return *kernel == nullptr;
}
int _cuKernelGetAttribute(int* value, int, const void*, int) { return *value = 0, 0; }
int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 97 ? 232448 : attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
  return 0;
}
int _cudaGetDevice(int* device) { return *device = 0, 0; }
int _cudaSetDevice(int) { return 0; }
int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
int _cudaFuncSetAttribute(const void*, int, int) { return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { return *blocks = 1, 0; }
// state: where the libraries are kept; they are loaded once, onto the one device.
int cuda_dialect_init_library_once(void** state, int (*load)(void**), int (*load_to_device)(void**, int), void*) {
  if (*state != nullptr) return 0;
  static void* libraries[16];
  *state = libraries;
  return load(libraries) || load_to_device(libraries, 0) ? -1 : 0;
}
void cuda_dialect_unload_library_once(void**) {}
const char* cuda_dialect_get_error_name(int) { return "an error of the emulated driver"; }

void* TVMFFIEnvGetStream(int, int) { return nullptr; }
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) { ptx::error = std::string(kind) + ": " + message; }
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int count) {
  ptx::error = std::string(kind) + ": ";
  for (int i = 0; i < count; ++i) ptx::error += parts[i] != nullptr ? parts[i] : "";
}
void CuteDSLRT_TVMFFISetRaisedCudaError(const char*, int code) { ptx::error = "launch error " + std::to_string(code) + ": " + ptx::error; }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(const char*, int code) { ptx::error = "launch error " + std::to_string(code) + ": " + ptx::error; }
}
