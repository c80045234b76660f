// A ring of stages in shared memory between one producer, which fills them by TMA, and the warps that consume them.
//
//   producer   wait_empty(s); expect(s, bytes); tma_load(..., full(s)) ...; s.advance()
//   consumer   wait_full(s); products ...; release(s) by every warp, once its products have read the stage; s.advance()
//
// Others may add to a stage by cp.async: `Fillers` counts the producer and each of their threads, which arrive by cp_async_arrive(full(s)).
//
// With multicast a stage is filled by several blocks of the cluster, so each producer waits for the consumers of all of them:
// `Blocks` is their number, and release() arrives at each.
#pragma once

#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/sm90/barrier.cuh>

namespace kernelgen {

// Where in the ring a thread is. The parity flips each time around.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if constexpr (Stages == 1) {
      parity ^= 1;
    } else if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // As advance() `steps` times.
  __device__ void skip(int steps) {
    const int to = stage + steps;
    parity ^= to / Stages & 1;
    stage = to % Stages;
  }
};

template <int Stages, int ConsumerWarps, int Blocks = 1, int Fillers = 1>
struct Pipeline {
  static constexpr int kBytes = 2 * Stages * 8;
  using Position = RingPosition<Stages>;

  uint32_t barriers;  // shared address of Stages full and Stages empty barriers

  __device__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ uint32_t empty(int stage) const { return barriers + (Stages + stage) * 8; }

  // By one thread; barrier_init_fence and a block (or cluster) barrier must follow.
  __device__ void init() const {
    for (int stage = 0; stage < Stages; ++stage) {
      barrier_init(full(stage), Fillers);
      barrier_init(empty(stage), ConsumerWarps * Blocks);
    }
  }

  __device__ void wait_full(const Position& at) const { barrier_wait(full(at.stage), at.parity); }

  // A fresh ring is empty: the phase before the first counts as over.
  __device__ void wait_empty(const Position& at) const { barrier_wait(empty(at.stage), at.parity ^ 1); }

  __device__ void expect(const Position& at, uint32_t bytes) const { barrier_arrive_expect(full(at.stage), bytes); }

  // By all lanes of a consumer warp.
  __device__ void release(int stage) const {
    if constexpr (Blocks == 1) {
      if (lane_id() == 0) barrier_arrive(empty(stage));
    } else {
      if (lane_id() < Blocks) barrier_arrive_cluster(empty(stage), lane_id());
    }
  }
};

}  // namespace kernelgen
