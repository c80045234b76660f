// A mixture-of-experts layer for few tokens in two launches: every weight of an expert that is used is read once, at memory speed.
//
//   up    works (unit, tile of outputs) are dealt to teams of warps that fill the chip; a team shares K, its sums meet in shared memory, those
//         of several works at a time: all threads add them up in the order of the warps, apply bias and activation and write the hidden rows
//         of the slots
//   down  a block owns a tile of outputs and walks over all units, whose results of each slot it keeps in shared memory: they are weighted
//         and added in the order of the slots, and written once. No workspace, no atomics
//
// Gate and up of an output are rows i and i + 8 of the same fragment, in any of their orders. x and the hidden rows (of x's type) are
// multiplied as they are, fp8 weights are widened, which is exact. Each block finds the routing for itself (small_routing.cuh). Blocks of
// down begin while up runs (programmatic dependent launch): ids and weights were there before up began, so their rings are full when
// the hidden rows come.
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/moe/small_stream.cuh>

namespace kernelgen {

constexpr int kSumFloats = 4096;  // of works that wait

template <class Options>
struct MoeSmallUp : SmallStream<Options, true> {
  using Stream = SmallStream<Options, true>;
  using T = typename Options::T;
  using Routing = typename Stream::Routing;
  using Sums = typename Stream::Sums;
  using Stream::kColumns;
  using Stream::kGated;
  using Stream::kRows;
  using Stream::kSplit;
  using Stream::kTeams;
  using Stream::kTiles;
  // Sums wait for each other: those of kSlots works of each team, [work][team][warp][row][token].
  static constexpr int kWarpFloats = kRows * Options::kTokens, kWorkFloats = kSplit * kWarpFloats;
  static constexpr int kSlots = max_of(1, min_of(8, kSumFloats / (kTeams * kWorkFloats)));
  static constexpr int kSumsAt = Stream::kRingBytes, kRoutingAt = kSumsAt + 4 * kSlots * kTeams * kWorkFloats;

  using Stream::Stream;

  // Of a row, in the product of slot `slot`.
  __device__ float completed(float sum, int expert, int row, int slot) const {
    const MoeSmallParams& p = this->p;
    if constexpr (Options::kScale13) sum *= static_cast<const float*>(p.scale13)[expert * p.scale13_expert + row * p.scale13_row];
    if constexpr (Options::kOnInput) sum *= this->routing.weights[slot];
    if constexpr (Options::kBias13) {
      sum += to_float(static_cast<const typename Options::Bias13*>(p.bias13)[expert * p.bias13_expert + row]);
    }
    return sum;
  }

  // The hidden value of an output for one token; ungated, `gate` is all of it.
  __device__ void store(float gate, float up, const typename Routing::Unit& unit, int token, int output, int row, int row_of_up) const {
    const MoeSmallParams& p = this->p;
    if (token >= unit.count || output >= p.inner) return;
    const int slot = this->routing.sorted[unit.first + token];
    gate = completed(gate, unit.expert, row, slot);
    if constexpr (kGated) {
      up = completed(up, unit.expert, row_of_up, slot);
      gate = activate_gate<Options::kActivation, Options::kClamped>(gate, up, p.alpha, p.limit);
    } else {
      gate = activate<Options::kActivation>(gate);
    }
    static_cast<T*>(p.hidden)[static_cast<int64_t>(slot) * p.inner + output] = from_float<T>(gate);
  }

  __device__ void leave(const Sums& sums, float* mine) const {
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) {
      const int m = i / (kColumns * 4), t = i / 4 % kColumns, j = i % 4;
      const int token = 8 * t + 2 * this->place + j % 2, row = 16 * m + j / 2 * 8 + this->group;
      if (token < Options::kTokens && row < kRows) mine[row * Options::kTokens + token] = sums[m][t][j];
    }
  }

  __device__ static float total_of(const float* sums, int row, int token) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kSplit; ++warp) total += sums[warp * kWarpFloats + row * Options::kTokens + token];
    return total;
  }

  // By all threads: a work of each team from `first` on, from first + stride on, ..., `count` of each.
  __device__ void finish(const float* sums, int first, int stride, int count, int total) const {
    const MoeSmallParams& p = this->p;
    constexpr int kEach = Stream::kOutputs * Options::kTokens;
    for (int i = threadIdx.x; i < count * kTeams * kEach; i += Stream::kThreads) {
      const int slot = i / kEach, j = i % kEach / Options::kTokens, token = i % Options::kTokens;
      const int at = first + slot / kTeams * stride + slot % kTeams;
      if (at >= total) break;
      const auto unit = this->unit_of(at);
      const int tile = this->tile_of(at) * Stream::kOutputs, output = tile + j;
      if (token >= unit.count || output >= p.inner) continue;
      // Gate and up are rows of neighbouring eights, or fours of one eight.
      constexpr int kApart = kRows == 8 ? 4 : 8;
      const int row = kGated ? j / kApart * 2 * kApart + j % kApart : j;
      const float* work = sums + slot * kWorkFloats;
      const float gate = total_of(work, row, token);
      const float up = kGated ? total_of(work, row + kApart, token) : 0.0f;
      store(gate, up, unit, token, output, Stream::row_of(p, tile, row / 8, row % 8), Stream::row_of(p, tile, (row + kApart) / 8, (row + kApart) % 8));
    }
  }

  __device__ void work(float* shared_sums, int warp) {
    const MoeSmallParams& p = this->p;
    const int total = this->tiles * this->units, stride = gridDim.x * kTeams, team = warp / kSplit;
    auto next = this->begin(blockIdx.x * kTeams + team, stride, total);
#pragma unroll 1
    for (int i = 0; i < Stream::kStages - 1; ++i) {
      this->copy_weights(next, i);
      this->copy_x(next, i);
      cp_async_commit();
      this->advance(next);
    }
    if constexpr (Stream::kHeld) {
      const T* x = static_cast<const T*>(p.x);
      this->held.bring([&](int row) { return x + row * p.x_row; }, this->part, 0, team, kTeams, p.tokens);
      // This warp's part of x is there; of several teams each brought some rows.
      if constexpr (kTeams == 1) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    }
    int first = blockIdx.x * kTeams, filled = 0;
    for (int at = first; at < total; at += stride) {
      if (at + team < total) {
        Sums sums;
        this->run(sums, next, at + team, 0);
        leave(sums, shared_sums + filled * kTeams * kWorkFloats + warp * kWarpFloats);
      }
      if (++filled == kSlots || at + stride >= total) {
        __syncthreads();  // sums of all warps are there
        finish(shared_sums, first, stride, filled, total);
        __syncthreads();  // and have been read
        first = at + stride, filled = 0;
      }
    }
    cp_async_wait<0>();
  }

  // While the kernel in front runs: what it may still write is on its way to L2 as well.
  __device__ static void prefetch(const MoeSmallParams& p) {
    constexpr int kLine = 128;
    const int lines = p.width * static_cast<int>(sizeof(T)) / kLine + 1, at = blockIdx.x * Stream::kThreads + threadIdx.x;
    if (at < p.tokens * lines) prefetch_l2(reinterpret_cast<const char*>(static_cast<const T*>(p.x) + at / lines * p.x_row) + at % lines * kLine);
    if (at < p.tokens) prefetch_l2(static_cast<const typename Options::Index*>(p.ids) + at * p.ids_row);
    if (at < p.tokens) prefetch_l2(static_cast<const typename Options::Weight*>(p.weights) + at * p.weights_row);
  }

  __device__ static void main(const MoeSmallParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    prefetch(p);
    join_previous_kernel();
    const Routing routing(shared_memory + kRoutingAt, p);
    routing.find(p, Stream::kThreads);
    const int warp = warp_id();
    MoeSmallUp(p, routing, shared, shared + kRoutingAt + Routing::bytes(p), warp, ceil_div(p.inner, Stream::kOutputs))
        .work(reinterpret_cast<float*>(shared_memory + kSumsAt), warp);
  }
};

template <class Options>
struct MoeSmallDown : SmallStream<Options, false> {
  using Stream = SmallStream<Options, false>;
  using T = typename Options::T;
  using Routing = typename Stream::Routing;
  using Sums = typename Stream::Sums;
  using Stream::kColumns;
  using Stream::kRows;
  using Stream::kSplit;
  using Stream::kTeams;
  using Stream::kTiles;
  static constexpr int kResultsAt = Stream::kRingBytes;

  using Stream::Stream;

  // Results: [part of K][slot][row].
  __device__ void leave(const Sums& sums, const typename Routing::Unit& unit, float* results, bool more) const {
    const int slots = this->p.tokens * this->p.k;
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) {
      const int m = i / (kColumns * 4), t = i / 4 % kColumns, j = i % 4;
      const int token = 8 * t + 2 * this->place + j % 2, row = 16 * m + j / 2 * 8 + this->group;
      if (token < unit.count && row < kRows) {
        float& result = results[(this->part * slots + this->routing.sorted[unit.first + token]) * kRows + row];
        result = more ? result + sums[m][t][j] : sums[m][t][j];
      }
    }
  }

  __device__ void combine(const float* results) const {
    const MoeSmallParams& p = this->p;
    const int slots = p.tokens * p.k;
    for (int i = threadIdx.x; i < p.tokens * kRows; i += Stream::kThreads) {
      const int token = i / kRows, row = i % kRows, output = blockIdx.x * kRows + row;
      if (output >= p.width) continue;
      float total = 0.0f;
#pragma unroll 4
      for (int s = 0; s < p.k; ++s) {
        const int slot = token * p.k + s, expert = this->routing.experts[slot];
        if (expert < 0) continue;
        float y = 0.0f;
#pragma unroll
        for (int part = 0; part < kSplit; ++part) y += results[(part * slots + slot) * kRows + row];
        if constexpr (Options::kScale2) y *= static_cast<const float*>(p.scale2)[expert * p.scale2_expert + output * p.scale2_row];
        if constexpr (Options::kBias2) {
          y += to_float(static_cast<const typename Options::Bias2*>(p.bias2)[expert * p.bias2_expert + output]);
        }
        total = fmaf(Options::kOnInput ? 1.0f : this->routing.weights[slot], y, total);
      }
      static_cast<T*>(p.out)[token * p.out_row + output] = from_float<T>(total);
    }
  }

  __device__ void work(float* results, int warp) {
    constexpr int kAhead = Stream::kStages - 1;
    const int team = warp / kSplit;
    auto next = this->begin(team, kTeams, this->units), behind = next;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      this->copy_weights(next, i);
      if (Stream::kHeld) cp_async_commit();
      this->advance(next);
    }
    join_previous_kernel();
    if constexpr (!Stream::kHeld) {
#pragma unroll 1
      for (int i = 0; i < kAhead; ++i) {
        this->copy_x(behind, i);
        cp_async_commit();
        this->advance(behind);
      }
    }
#pragma unroll 1
    for (int pass = 0; pass < this->passes; ++pass) {
      const T* hidden = static_cast<const T*>(this->p.hidden);
      const int64_t inner = this->p.inner;
      if constexpr (Stream::kHeld && !Stream::kOfUnit) {
        if (pass > 0) __syncthreads();  // hidden rows of the pass before have been read
        this->held.bring([&](int slot) { return hidden + slot * inner; }, this->part, pass * this->pass_steps, team, kTeams, this->held.rows);
        __syncthreads();  // those of this one are there
      }
      for (int at = team; at < this->units; at += kTeams) {
        if constexpr (Stream::kOfUnit) {
          const auto unit = this->unit_of(at);
          __syncwarp();  // rows of the unit before have been read
          this->held.bring([&](int row) { return hidden + this->slot_of(unit, row) * inner; }, 0, 0, 0, 1, unit.count);
          __syncwarp();  // those of this one are there
        }
        Sums sums;
        this->run(sums, next, at, pass);
        leave(sums, this->unit_of(at), results, pass > 0);
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // the results of all units are there
    combine(results);
  }

  __device__ static void main(const MoeSmallParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    const int results = kSplit * p.tokens * p.k * kRows;  // floats
    const Routing routing(shared_memory + kResultsAt + 4 * results, p);
    routing.find(p, Stream::kThreads);  // what it reads was there before the kernel in front began
    const int warp = warp_id();
    MoeSmallDown(p, routing, shared, shared + kResultsAt + 4 * results + Routing::bytes(p), warp, 0).work(reinterpret_cast<float*>(shared_memory + kResultsAt), warp);
  }
};

}  // namespace kernelgen
