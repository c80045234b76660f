// Scales and zero points of a packed b on their way to the lanes that decode its codes: mixed_sm90.cuh.
//
// A quad of lanes has two columns of b, and blocks of 64 of k go in pairs: so each lane loads what one column and block need, straight
// from global memory, two pairs ahead, whatever strides they have; when their pair begins they become 16-bit floats, and shuffles bring
// them to the quad. Beside 16 codes a lane and column that costs little, and no shared memory.
#pragma once

#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/mixed_epilogue.cuh>
#include <kernelgen/gemm/mma_scales.cuh>

namespace kernelgen {

// Two E8M0 exponents, 16 bits apart, as a pair of bf16: 2^-127 is a subnormal one, 255 is NaN. Both have the bit below the exponent's
// field set, and no other does: of x + 1 all bits but the lowest of eight are zero for them alone.
__device__ inline uint32_t e8m0_pair(uint32_t x) {
  const uint32_t others = ((x + 0x00010001u) & 0x00fe00feu) + 0x00fe00feu;  // bit 8 set
  return x << 7 | (~(others >> 2) & 0x00400040u);
}

template <class Options>
struct MixedScales {
  using T = typename Options::Element;
  using ScaleB = typename Options::ScaleB;
  static constexpr bool kZero = Options::kZero;
  static constexpr int kGroup = Options::kGroup, kBlock = 64, kGroups = kGroup < kBlock ? kBlock / kGroup : 1;  // of a block
  static_assert(kGroup == 32 || kGroup % kBlock == 0, "a block has two groups, or a group whole blocks");

  // Of one column and block, as they lie in memory.
  struct Raw {
    ScaleB scales[kGroups];
    uint8_t zeros[kGroups];
  };
  // The same as pairs of T: two groups, or one twice. Of this lane's column and block; the quad has those of a pair of blocks.
  struct Pair {
    uint32_t scales, zeros;
  };

  // What a lane decodes with: each scale and negated zero point twice.
  struct Block {
    uint32_t scales[kGroups], zeros[kGroups];

    // Of half `half` of a fragment, block `block` of the pair.
    __device__ void find(const Pair& pair, int half, int block) {
      const int source = lane_id() / 4 * 4 + 2 * half + block;
      spread(scales, __shfl_sync(kFullWarp, pair.scales, source));
      if constexpr (kZero) {
        spread(zeros, __shfl_sync(kFullWarp, pair.zeros, source));
      } else {
        for (int i = 0; i < kGroups; ++i) zeros[i] = 0;
      }
    }

    __device__ static void spread(uint32_t (&to)[kGroups], uint32_t from) {
      if constexpr (kGroups == 1) {
        to[0] = from;
      } else {
        to[0] = __byte_perm(from, 0, 0x1010);
        to[1] = __byte_perm(from, 0, 0x3232);
      }
    }
  };

  const ScaleB* scales;
  const uint8_t* zeros;
  Raw ahead[2];
  int block, last;  // of this lane, that is loaded next; of groups

  // Of lane `place` of a quad: half place / 2, block place % 2.
  __device__ void begin(const DenseSm90Params& p, const OutputTile& tile, const int (&rows)[2]) {
    const int place = lane_id() % 4;
    const int64_t column = min(MixedEpilogue<Options>::column_of_b(p, tile.n, rows[place / 2]), p.n - 1);
    scales = static_cast<const ScaleB*>(static_cast<const void*>(p.scale_b)) + tile.batch_b * p.scale_b_batch + column * p.scale_b_column;
    if constexpr (kZero) {
      zeros = static_cast<const uint8_t*>(static_cast<const void*>(p.scale_a)) + tile.batch_b * p.scale_a_batch + column * p.scale_a_row;
    }
    block = place % 2;
    last = (p.k - 1) / kGroup;
#pragma unroll
    for (int i = 0; i < 2; ++i) load(ahead[i], p);
  }

  __device__ void load(Raw& raw, const DenseSm90Params& p) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t group = min(kGroup < kBlock ? block * kGroups + i : block / max_of(kGroup / kBlock, 1), last);
      raw.scales[i] = scales[group * p.scale_b_block];
      if constexpr (kZero) raw.zeros[i] = zeros[group * p.scale_a_block];
    }
    block += 2;
  }

  __device__ static uint32_t as_pair(ScaleB first, ScaleB second) {
    if constexpr (is_same_v<ScaleB, uint8_t>) {
      return e8m0_pair(first | static_cast<uint32_t>(second) << 16);
    } else {
      return pack_pair<T>(to_float(first), to_float(second));
    }
  }

  // Those of the next pair of blocks.
  __device__ void next(Pair& pair, const DenseSm90Params& p) {
    const Raw& raw = ahead[0];
    pair.scales = as_pair(raw.scales[0], raw.scales[kGroups - 1]);
    pair.zeros = 0;
    if constexpr (kZero) pair.zeros = pack_pair<T>(-static_cast<float>(raw.zeros[0]), -static_cast<float>(raw.zeros[kGroups - 1]));
    ahead[0] = ahead[1];
    load(ahead[1], p);
  }
};

}  // namespace kernelgen
