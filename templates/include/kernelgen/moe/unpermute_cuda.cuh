// out[t] = the sum over slots s, in their order, of weights[t][s] * rows[row_of_slot[t][s]], in float32, written once.
//
// A warp owns a segment of the columns, one access of each lane wide, and walks tokens: rows of kAhead slots are on their way at a time,
// and the slots of its next token before it begins with those of this one, so that a row waits for memory once. Lane s has slot s. A
// slot without a row adds nothing, whatever its weight.
#pragma once

#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

struct MoeUnpermuteParams {
  const void* rows;            // (tokens * k, width)
  const int32_t* row_of_slot;  // (tokens, k), -1, or any that is none: no row
  void* out;                   // (tokens, width)
  const void* weights;         // (tokens, k), null: 1
  const void* addend;          // (tokens, width), added last, or null
  int64_t row_stride, out_stride, weight_stride, addend_stride;  // in elements
  int64_t tokens, width;
  int32_t k, together;  // tokens that the grid's warps work at together
};

template <int Bytes>
struct word_of {
  using type = uint32_t;
};
template <>
struct word_of<2> {
  using type = uint16_t;
};

// `Options`: Element (of rows), Out, Weight, Addend, kAccess (elements at a time), kWeighted, kHasAddend, kThreads,
// kAhead (rows that are on their way at a time).
template <class Options>
struct MoeUnpermuteCuda {
  using Element = typename Options::Element;
  static constexpr int kAccess = Options::kAccess, kAhead = Options::kAhead, kWarps = Options::kThreads / kWarpSize;
  static_assert(kWarpSize % kAhead == 0, "a lane for each slot that is on its way");

  // An access as words: as elements ptxas would give each of those a register.
  static constexpr int kBytes = kAccess * static_cast<int>(sizeof(Element)), kWordBytes = min_of(4, kBytes);
  struct alignas(min_of(16, kBytes)) Raw {
    typename word_of<kWordBytes>::type words[kBytes / kWordBytes];
  };

  __device__ static Element element(const Raw& raw, int j) {
    constexpr int kPerWord = kWordBytes / static_cast<int>(sizeof(Element));
    const uint32_t word = raw.words[j / kPerWord] >> (j % kPerWord * 16);
    Element x;
    if constexpr (sizeof(Element) == 4) {
      x = __uint_as_float(word);
    } else {
      *reinterpret_cast<uint16_t*>(&x) = static_cast<uint16_t>(word);
    }
    return x;
  }

  struct Slot {
    int row;
    float weight;
  };

  // Slot `base` + lane of a token.
  __device__ static Slot slot_of(const MoeUnpermuteParams& p, int64_t token, int base) {
    const int s = base + lane_id();
    Slot slot{-1, 1.0f};
    if (token < p.tokens && s < p.k) {
      const int64_t row = p.row_of_slot[token * p.k + s];
      slot.row = row < p.tokens * p.k ? static_cast<int>(row) : -1;
      if constexpr (Options::kWeighted) slot.weight = to_float(static_cast<const typename Options::Weight*>(p.weights)[token * p.weight_stride + s]);
    }
    return slot;
  }

  // sum += the rows of 32 slots, of which `count` exist, at column `c`. By whole warps. Instead of a row that is not there the first is
  // loaded and thrown away: a branch around loads would keep them from being in flight together.
  __device__ static void add_rows(float (&sum)[kAccess], const MoeUnpermuteParams& p, const Slot& slot, int count, int64_t c) {
    const Element* rows = static_cast<const Element*>(p.rows) + c;
    const uint32_t there = __ballot_sync(kFullWarp, slot.row >= 0);
#pragma unroll 1
    for (int from = 0; from < count; from += kAhead) {
      Raw value[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t row = max(0, __shfl_sync(kFullWarp, slot.row, from + i));
        if constexpr (kBytes == 16) {
          load_stream(value[i].words, rows + row * p.row_stride);
        } else {
          value[i] = *reinterpret_cast<const Raw*>(rows + row * p.row_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float weight = Options::kWeighted ? __shfl_sync(kFullWarp, slot.weight, from + i) : 1.0f;
        if (there >> (from + i) & 1) {
#pragma unroll
          for (int j = 0; j < kAccess; ++j) sum[j] = fmaf(weight, to_float(element(value[i], j)), sum[j]);
        }
      }
    }
  }

  __device__ static void finish(float (&sum)[kAccess], const MoeUnpermuteParams& p, int64_t token, int64_t c) {
    using Out = typename Options::Out;
    if constexpr (Options::kHasAddend) {
      float addend[kAccess];
      load_elements(addend, static_cast<const typename Options::Addend*>(p.addend) + token * p.addend_stride + c);
#pragma unroll
      for (int j = 0; j < kAccess; ++j) sum[j] += addend[j];
    }
    Out* out = static_cast<Out*>(p.out) + token * p.out_stride + c;
    if constexpr (sizeof(Out) == 2 && kAccess == 8) {
      const uint32_t words[4] = {pack_pair<Out>(sum[0], sum[1]), pack_pair<Out>(sum[2], sum[3]), pack_pair<Out>(sum[4], sum[5]),
                                 pack_pair<Out>(sum[6], sum[7])};
      store_whole_16(out, words);
    } else {
      store_elements(out, sum);
    }
  }

  __device__ static void run(const MoeUnpermuteParams& p) {
    join_previous_kernel();
    const int segments = static_cast<int>((p.width + kWarpSize * kAccess - 1) / (kWarpSize * kAccess));
    const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / kWarpSize), first = warp / segments;
    if (first >= p.together) return;
    const int64_t c = (static_cast<int64_t>(warp - first * segments) * kWarpSize + lane_id()) * kAccess;
    const bool inside = c < p.width;
    Slot next = slot_of(p, first, 0);
    for (int64_t token = first; token < p.tokens; token += p.together) {
      Slot slot = next;
      next = slot_of(p, token + p.together, 0);
      float sum[kAccess] = {};
      for (int base = 0; base < p.k; base += kWarpSize) {
        if (base > 0) slot = slot_of(p, token, base);
        add_rows(sum, p, slot, min(kWarpSize, p.k - base), inside ? c : 0);
      }
      if (inside) finish(sum, p, token, c);
    }
  }
};

}  // namespace kernelgen
