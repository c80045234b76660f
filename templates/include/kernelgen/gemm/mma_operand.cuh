// Tiles of operand_tile.cuh -> fragments of mma m16n8k16, whatever the elements' size.
//
// A load brings 16 outer indices and kStepK of k into kWords registers of a lane; fragment() turns them into the registers
// of one k16 product: a0 .. a3 of the a operand, or b0, b1 of two n8 tiles of b. Lanes 4g .. 4g + 3 hold outer index g of
// each half of the 16. The sum over k may run in any order that a and b share, so narrow elements are multiplied in the
// order in which a 32-bit register holds them:
//
//   16 bits                lane p of a quad holds k = 2p, 2p + 1 and 8 more of every 16: ldmatrix
//   8 bits                 k = 4p .. 4p + 3 of every 16: ldmatrix on pairs of bytes, then widened
//   4 bits                 k = 8p .. 8p + 7 of every 32: ldmatrix on quadruples, then decoded
//   16 bits, Octets        the a beside a 4-bit b in the same order: each lane reads 16 bytes of its row
//
// `outer_of` says which outer index of the 16 is at place g of a half: two of the forms permute them.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/four_bit.cuh>
#include <kernelgen/cuda/fp8.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/memory.cuh>

namespace kernelgen {

template <class Element>
constexpr int kBitsOf = is_same_v<Element, int4_code> || is_same_v<Element, e2m1> ? 4 : is_fp8_v<Element> ? 8 : 16;

// The upper and lower half of a fragment's outer indices, low and high half of its k, in the order of a's and b's registers.
template <bool IsA>
__device__ inline void set_fragment(uint32_t (&r)[4], uint32_t first_low, uint32_t first_high, uint32_t second_low,
                                    uint32_t second_high) {
  r[0] = first_low;
  r[1] = IsA ? second_low : first_high;
  r[2] = IsA ? first_high : second_low;
  r[3] = second_high;
}

__device__ inline int lane_of_warp() { return threadIdx.x % kWarpSize; }

template <class Tile, int Bits, bool AlongK, bool IsA, bool Octets>
struct MmaOperand;

// lane_offset: lane part of the address for the outer range that starts at `outer` (a multiple of a power of two that the
// range does not exceed) and the steps that start at `step`. load: outer range [16 * tile, 16 * tile + 16) and step `step`,
// both counted from lane_offset's.
template <class Tile, bool AlongK, bool IsA>
struct MmaOperand<Tile, 16, AlongK, IsA, false> {
  static constexpr int kStepK = 16, kWords = 4;
  static constexpr bool kInOrder = true;
  __device__ static constexpr int outer_of(int half, int g) { return 8 * half + g; }

  __device__ static int lane_offset(int outer, int step) {
    const int lane = lane_of_warp(), low = lane % 8, high = lane / 16, middle = lane / 8 % 2;
    if constexpr (AlongK) {
      const int row = IsA ? lane % 16 : low + high * 8;
      return Tile::chunk_step(Tile::offset(outer + row, IsA ? high : middle), 2 * step);
    } else {
      const int row = IsA ? low + high * 8 : lane % 16;
      return Tile::chunk_step(Tile::offset(step * 16 + row, IsA ? middle : high), outer / 8);
    }
  }

  __device__ static void load(uint32_t (&words)[kWords], uint32_t slot, int lane_offset, int tile, int step) {
    if constexpr (AlongK) {
      ldmatrix_x4(words, slot + Tile::chunk_step(lane_offset, 2 * step) + tile * 16 * Tile::kRowBytes);
    } else {
      ldmatrix_x4_trans(words, slot + Tile::chunk_step(lane_offset, 2 * tile) + step * 16 * Tile::kRowBytes);
    }
  }

  template <class Element, class Product>
  __device__ static void fragment(uint32_t (&r)[4], const uint32_t (&words)[kWords], int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = words[i];
  }
};

// Register 2 s + h of a load: AlongK half h of the outer indices, otherwise half h of each lane's k, of k16 product s.
template <class Tile, bool AlongK, bool IsA>
struct MmaOperand<Tile, 8, AlongK, IsA, false> {
  static constexpr int kStepK = 32, kWords = 4;
  static constexpr bool kInOrder = AlongK;
  // Stored rows of k hold neighbouring outer indices in the two bytes of an element of ldmatrix.
  __device__ static constexpr int outer_of(int half, int g) { return AlongK ? 8 * half + g : 2 * g + half; }

  __device__ static int lane_offset(int outer, int step) {
    const int lane = lane_of_warp();
    if constexpr (AlongK) {
      return Tile::chunk_step(Tile::offset(outer + lane % 16, lane / 16), 2 * step);
    } else {
      const int row = lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
      return Tile::chunk_step(Tile::offset(step * 32 + row, 0), outer / 16);
    }
  }

  __device__ static void load(uint32_t (&words)[kWords], uint32_t slot, int lane_offset, int tile, int step) {
    if constexpr (AlongK) {
      ldmatrix_x4(words, slot + Tile::chunk_step(lane_offset, 2 * step) + tile * 16 * Tile::kRowBytes);
    } else {
      ldmatrix_x4_trans(words, slot + Tile::chunk_step(lane_offset, tile) + step * 32 * Tile::kRowBytes);
    }
  }

  template <class Element, class Product>
  __device__ static void fragment(uint32_t (&r)[4], const uint32_t (&words)[kWords], int product) {
    uint32_t x[2], y[2];
    if constexpr (AlongK) {
      widen_word_fp16<Element>(x[0], x[1], words[2 * product]);
      widen_word_fp16<Element>(y[0], y[1], words[2 * product + 1]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) widen_word_fp16<Element>(x[h], y[h], __byte_perm(words[2 * product + h], 0, 0x3120));
    }
    set_fragment<IsA>(r, x[0], x[1], y[0], y[1]);
  }
};

// Register h of a load: half h of the outer indices.
template <class Tile, bool IsA>
struct MmaOperand<Tile, 4, true, IsA, true> {
  static_assert(!IsA, "only b is packed");
  static constexpr int kStepK = 32, kWords = 2;
  static constexpr bool kInOrder = true;
  __device__ static constexpr int outer_of(int half, int g) { return 8 * half + g; }

  __device__ static int lane_offset(int outer, int step) {
    return Tile::chunk_step(Tile::offset(outer + lane_of_warp() % 16, 0), step);
  }

  __device__ static void load(uint32_t (&words)[kWords], uint32_t slot, int lane_offset, int tile, int step) {
    ldmatrix_x2(words[0], words[1], slot + Tile::chunk_step(lane_offset, step) + tile * 16 * Tile::kRowBytes);
  }

  // `negative_zero`: of each half, as int4_pair takes it; without meaning unless Zero.
  template <class Element, class Product, bool Zero>
  __device__ static void fragment(uint32_t (&r)[4], const uint32_t (&words)[kWords], int product, const uint32_t (&negative_zero)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, pair = 2 * product + i % 2;
      if constexpr (is_same_v<Element, int4_code>) {
        r[i] = int4_pair<Product, Zero>(words[half], pair, negative_zero[half]);
      } else {
        r[i] = e2m1_pair<Product>(words[half], pair);
      }
    }
  }
};

// AlongK: registers 4 h .. 4 h + 3 are 8 elements of k of half h. Otherwise 4 s .. 4 s + 3 are the fragment of product s.
template <class Tile, bool AlongK, bool IsA>
struct MmaOperand<Tile, 16, AlongK, IsA, true> {
  static_assert(IsA, "b is packed");
  static constexpr int kStepK = 32, kWords = 8;
  static constexpr bool kInOrder = !AlongK;
  // The eight lanes that one phase of a 16-byte read serves are of two places g: rows 4 apart, whose swizzles differ in the
  // third bit, put their four chunks each into different banks.
  __device__ static constexpr int outer_of(int half, int g) { return 8 * half + (AlongK ? g % 2 * 4 + g / 2 : g); }

  __device__ static int lane_offset(int outer, int step) {
    const int lane = lane_of_warp();
    if constexpr (AlongK) {
      return Tile::chunk_step(Tile::offset(outer + outer_of(0, lane / 4), lane % 4), 4 * step);
    } else {
      const int row = lane % 8 / 2 * 8 + lane / 16 * 2 + lane % 2;
      return Tile::chunk_step(Tile::offset(step * 32 + row, lane / 8 % 2), outer / 8);
    }
  }

  __device__ static void load(uint32_t (&words)[kWords], uint32_t slot, int lane_offset, int tile, int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t part[4];
      if constexpr (AlongK) {
        load_chunk(part, slot + Tile::chunk_step(lane_offset, 4 * step) + (tile * 16 + 8 * i) * Tile::kRowBytes);
      } else {
        // Rows of k16 product 1 are 4 below those of product 0, which lie in the upper halves of groups of 8.
        const int row_offset = Tile::kSwizzled ? (lane_offset ^ (i * 64)) : lane_offset;
        ldmatrix_x4_trans(part, slot + Tile::chunk_step(row_offset, 2 * tile) + (step * 32 + 4 * i) * Tile::kRowBytes);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) words[4 * i + j] = part[j];
    }
  }

  template <class Element, class Product>
  __device__ static void fragment(uint32_t (&r)[4], const uint32_t (&words)[kWords], int product) {
    if constexpr (AlongK) {
      set_fragment<IsA>(r, words[2 * product], words[2 * product + 1], words[4 + 2 * product], words[5 + 2 * product]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = words[4 * product + i];
    }
  }
};

}  // namespace kernelgen
