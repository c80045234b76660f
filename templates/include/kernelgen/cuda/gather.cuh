// Parts of a 16-byte chunk of global memory in registers, zeros around them: for operands too little aligned for cp.async.
#pragma once

#include <kernelgen/cuda/types.cuh>

namespace kernelgen {

template <int Bytes>
struct loaded_unit {
  using type = uint8_t;
};
template <>
struct loaded_unit<2> {
  using type = uint16_t;
};

// The first `bytes` (0 .. 16, any number) of 16; `source` is aligned to `Alignment` bytes, 1 or 2. The unit in which an odd number
// of bytes ends is loaded whole, and its other byte dropped: it may be anything.
template <int Alignment>
__device__ inline void gather_prefix(uint32_t (&words)[4], const void* source, int bytes) {
  using Unit = typename loaded_unit<Alignment>::type;
  const Unit* from = static_cast<const Unit*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
#pragma unroll
  for (int i = 0; i < 16; i += Alignment) {
    if (i < bytes) {
      uint32_t unit = from[i / Alignment];
      if (Alignment == 2 && i + 1 == bytes) unit &= 0xffu;
      words[i / 4] |= unit << (i % 4 * 8);
    }
  }
}

// Bytes [first, end) of 16, of any alignment.
__device__ inline void gather_window(uint32_t (&words)[4], const void* source, int first, int end) {
  const uint8_t* from = static_cast<const uint8_t*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i >= first && i < end) words[i / 4] |= static_cast<uint32_t>(from[i]) << (i % 4 * 8);
  }
}

}  // namespace kernelgen
