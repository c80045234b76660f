// The scales of a CPU product: where they lie, and their values as floats.
//
//   Scales::kNone      nothing is scaled
//   Scales::kProduct   one scale per row of a and column of b, or one for all (stride 0): the finished sum is multiplied
//   Scales::kSegments  they change along k, every Options::kSegment elements: the sum of a segment is multiplied before it is
//                      added, so that what is summed up in one go never grows with k. kScaledA: a has scales, too
//
// b may have one for every Options::kScaleColumns columns, and zero points beside them (kZeroPoints).
#pragma once

#include "kernelgen/cpu/types.h"
#include "kernelgen/gemm/gemm_params.h"

namespace kernelgen {

enum class Scales { kNone, kProduct, kSegments };

// 2^(bits - 127), 255 being NaN: the scale of mxfp4.
struct E8M0 {
  uint8_t bits;
};
inline float widen(E8M0 x) {
  // 2^-127 is below the smallest normal number.
  const uint32_t word = x.bits == 255 ? 0x7fc00000u : x.bits ? uint32_t(x.bits) << 23 : 0x00400000u;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <class Options>
struct ScaleView {
  static float of_a(const GemmCpuParams& p, int64_t batch, int64_t segment, int64_t row) {
    return static_cast<const float*>(p.scale_a)[batch * p.scale_a_batch + segment * p.scale_a_segment + row * p.scale_a_row];
  }
  static float of_b(const GemmCpuParams& p, int64_t batch, int64_t segment, int64_t column) {
    return widen(static_cast<const typename Options::Scale*>(p.scale_b)[batch * p.scale_b_batch + segment * p.scale_b_segment +
                                                                       column / Options::kScaleColumns * p.scale_b_column]);
  }
  // What a code of 0 stands for, as a positive number: 8 for symmetric codes.
  static float zero_of_b(const GemmCpuParams& p, int64_t batch, int64_t segment, int64_t column) {
    if constexpr (!Options::kZeroPoints) return 8;
    return static_cast<const uint8_t*>(p.zero_b)[batch * p.zero_b_batch + segment * p.zero_b_segment + column * p.zero_b_column];
  }
};

}  // namespace kernelgen
