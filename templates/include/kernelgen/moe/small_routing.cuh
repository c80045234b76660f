// Who goes where, found by every block of moe/small_cuda for itself: up to 2,048 slots, sorted in shared memory.
//
// Experts are numbered in the order in which the slots name them, and the slots of one keep theirs, so that nothing depends on
// which thread comes first. One warp walks over the slots, 32 at a time; nothing walks over experts. A unit is an expert with up to
// kTokens of its slots, the columns of one product.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/moe/expert_map.h>
#include <kernelgen/moe/small_params.cuh>

namespace kernelgen {

// Routing is read before the kernel in front has ended where an earlier one wrote it: from L2, as L1 may hold what was there before.
template <class T>
__device__ inline T load_routing(const T* source) {
#ifdef __CUDA_ARCH__
  return __ldcg(source);
#else
  return *source;
#endif
}

// `Options`: Index (of ids), Weight (of slots), kMap, kTokens.
template <class Options>
struct SmallRouting {
  // A unit in one word.
  static constexpr int kExpertBits = 10, kFirstBits = 12;
  struct Unit {
    int expert, first, count;  // slots sorted[first .. first + count - 1]
  };

  int* counts;     // (experts)
  int* experts;    // (slots) or -1
  int* ranks;      // (slots) how many slots in front have the same expert
  int* sorted;     // (slots)
  uint32_t* words; // (slots) of the units
  float* weights;  // (slots)
  int* units;      // how many

  __device__ SmallRouting(unsigned char* memory, const MoeSmallParams& p) {
    const int slots = p.tokens * p.k;
    counts = reinterpret_cast<int*>(memory);
    experts = counts + p.experts;
    ranks = experts + slots;
    sorted = ranks + slots;
    words = reinterpret_cast<uint32_t*>(sorted + slots);
    weights = reinterpret_cast<float*>(words + slots);
    units = reinterpret_cast<int*>(weights + slots);
  }

  __device__ static int bytes(const MoeSmallParams& p) { return round_up(4 * (p.experts + 5 * p.tokens * p.k + 1), 16); }

  __device__ Unit unit(int i) const {
    const uint32_t word = words[i];
    return {static_cast<int>(word & ((1u << kExpertBits) - 1)), static_cast<int>(word >> kExpertBits & ((1u << kFirstBits) - 1)),
            static_cast<int>(word >> (kExpertBits + kFirstBits)) + 1};
  }

  // A collective of the block.
  __device__ void find(const MoeSmallParams& p, int threads) const {
    const int slots = p.tokens * p.k;
    if (Options::kTokens > 1) {
      for (int e = threadIdx.x; e < p.experts; e += threads) counts[e] = 0;
    }
    for (int slot = threadIdx.x; slot < slots; slot += threads) {
      const int token = slot / p.k, s = slot - token * p.k;
      const auto id = load_routing(static_cast<const typename Options::Index*>(p.ids) + token * p.ids_row + s);
      weights[slot] = to_float(load_routing(static_cast<const typename Options::Weight*>(p.weights) + token * p.weights_row + s));
      experts[slot] = local_expert<Options::kMap>(id, p.expert_map, p.mapped, p.first, p.experts);
    }
    __syncthreads();  // counters are zero and all ids are there
    if (threadIdx.x < kWarpSize) {
      if constexpr (Options::kTokens == 1) {
        list(slots);
      } else {
        sort(slots);
      }
    }
    __syncthreads();  // the first warp has sorted them
  }

 private:
  __device__ static uint32_t word_of(int expert, int first, int count) {
    return static_cast<uint32_t>(expert) | static_cast<uint32_t>(first) << kExpertBits |
           static_cast<uint32_t>(count - 1) << (kExpertBits + kFirstBits);
  }

  // Units of one slot need no order: those that have an expert.
  __device__ void list(int slots) const {
    const int lane = lane_id();
    int found = 0;
    for (int from = 0; from < slots; from += kWarpSize) {
      const int slot = from + lane, expert = slot < slots ? experts[slot] : -1;
      const uint32_t chosen = __ballot_sync(kFullWarp, expert >= 0);
      const int at = found + __popc(chosen & ((1u << lane) - 1));
      if (expert >= 0) sorted[at] = slot, words[at] = word_of(expert, at, 1);
      found += __popc(chosen);
    }
    if (lane == 0) *units = found;
  }

  __device__ void sort(int slots) const {
    const int lane = lane_id();
    const uint32_t in_front = (1u << lane) - 1;
    int* listed = sorted;  // experts in the order of their first slots, until the slots are placed
    int active = 0;
    for (int from = 0; from < slots; from += kWarpSize) {
      const int slot = from + lane, expert = slot < slots ? experts[slot] : -1;
      const uint32_t peers = __match_any_sync(kFullWarp, expert);
      const int before = expert >= 0 ? counts[expert] : 0;
      const bool leads = expert >= 0 && (peers & in_front) == 0;
      const uint32_t fresh = __ballot_sync(kFullWarp, leads && before == 0);
      __syncwarp();  // every lane has read the count before the first of its peers raises it
      if (leads) counts[expert] = before + __popc(peers);
      if (leads && before == 0) listed[active + __popc(fresh & in_front)] = expert;
      if (slot < slots) ranks[slot] = before + __popc(peers & in_front);
      active += __popc(fresh);
      __syncwarp();  // it is raised before the next 32 slots read it
    }
    int slots_before = 0, units_before = 0;
    for (int from = 0; from < active; from += kWarpSize) {
      const bool exists = from + lane < active;
      const int expert = exists ? listed[from + lane] : 0;
      const int count = exists ? counts[expert] : 0, parts = ceil_div(count, Options::kTokens);
      const int slots_through = slots_before + warp_inclusive_scan(count), units_through = units_before + warp_inclusive_scan(parts);
      const int first = slots_through - count;
      if (exists) counts[expert] = first;
      for (int i = 0; i < parts; ++i) {
        const int in_unit = min(count - i * Options::kTokens, Options::kTokens);
        words[units_through - parts + i] = word_of(expert, first + i * Options::kTokens, in_unit);
      }
      slots_before = __shfl_sync(kFullWarp, slots_through, kWarpSize - 1);
      units_before = __shfl_sync(kFullWarp, units_through, kWarpSize - 1);
    }
    if (lane == 0) *units = units_before;
    __syncwarp();  // the list has been read before slots are written over it, and the starts are there
    for (int slot = lane; slot < slots; slot += kWarpSize) {
      const int expert = experts[slot];
      if (expert >= 0) sorted[counts[expert] + ranks[slot]] = slot;
    }
  }
};

}  // namespace kernelgen
