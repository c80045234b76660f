// Barriers in shared memory, named ones, the cluster's; the copy engine. Their states are those of kernelgen/sm90.
#pragma once

#include <kernelgen/sm90/tma.cuh>

#include "memory.h"

namespace ptx {
using kernelgen::emulated_arrive;
using kernelgen::emulated_barrier;

inline Place barrier_at(uint64_t address, int line) {
  shared_at(address, 8, line);
  return place_of(address, line);
}
inline void barrier_init(uint64_t address, uint32_t count, int line) {
  kernelgen::barrier_init(barrier_at(address, line).offset, static_cast<int>(count));
}
inline void barrier_arrive(uint64_t address, uint32_t bytes, uint32_t arrivals, int line) {
  const Place at = barrier_at(address, line);
  if (emulated_barrier(at.offset, emulator::cluster_shared[at.block]).pending < arrivals) fault(line, "more arrivals than the mbarrier counts", address);
  emulated_arrive(at.offset, static_cast<int>(bytes), static_cast<int>(arrivals), emulator::cluster_shared[at.block]);
}
inline void barrier_expect(uint64_t address, int bytes, int line) {
  const Place at = barrier_at(address, line);
  emulated_barrier(at.offset, emulator::cluster_shared[at.block]).bytes += bytes;
}
// One try. A lane that tries in vain lets the others run.
inline bool barrier_passed(uint64_t address, uint32_t parity, int line) {
  emulator::Fiber& f = *emulator::current;
  const uint32_t offset = barrier_at(address, line).offset;
  if (kernelgen::emulated_passes(offset, parity & 1)) {
    f.polls = 0;
    return true;
  }
  emulator::yield_or_abort(f.polls, "the mbarrier that it tries at line", line);
  return false;
}
// The state that an arrival returns is the parity of the phase that it arrives in.
inline uint64_t barrier_state(uint64_t address, int line) {
  const Place at = barrier_at(address, line);
  return emulated_barrier(at.offset, emulator::cluster_shared[at.block]).parity;
}
// An arrival when what this thread has copied so far (cp.async) has landed; it is counted already (.noinc).
inline void barrier_arrive_by_copies(uint64_t address, bool counted, int line) {
  const Place at = barrier_at(address, line);
  unsigned char* memory = emulator::cluster_shared[at.block];
  if (!counted) emulated_barrier(at.offset, memory).pending += 1;
  emulator::Fiber& f = *emulator::current;
  std::vector<emulator::Copy> copies;
  for (auto& group : f.groups) copies.insert(copies.end(), group.begin(), group.end()), group.clear();
  copies.insert(copies.end(), f.open.begin(), f.open.end());
  f.open.clear();
  auto land = [=] {
    for (const emulator::Copy& copy : copies) emulator::land(copy);
    emulated_arrive(at.offset, 0, 1, memory);
  };
  if (emulator::lazy_copies) {
    emulator::boxes.push_back({emulator::in_cluster(at.block, at.offset), land});
  } else {
    land();
  }
}

inline emulator::Barrier& named(uint32_t id, uint32_t threads, int line) {
  if (id > 15 || threads % 32 != 0 || threads == 0) fault(line, "a named barrier", id);
  emulator::Barrier& barrier = emulator::named_barriers[emulator::current->rank][id];
  if (barrier.waiting > 0 && barrier.alive != static_cast<int>(threads)) fault(line, "a named barrier that others joined for another count", threads);
  barrier.alive = static_cast<int>(threads);
  return barrier;
}
inline void barrier_sync(uint32_t id, uint32_t threads, int line) { emulator::wait(named(id, threads, line), "a named barrier at line", line); }
inline void barrier_arrive_named(uint32_t id, uint32_t threads, int line) {
  emulator::Barrier& barrier = named(id, threads, line);
  ++barrier.waiting;
  emulator::release(barrier);
}
inline void block_sync(uint32_t id, int line) {
  if (id == 0) return emulator::wait(emulator::block_barriers[emulator::current->rank], "its block, at line", line);
  barrier_sync(id, emulator::block_threads, line);
}
// How many threads of the block say true.
inline uint32_t block_count(bool flag, int line) {
  static uint32_t counts[emulator::kMaxCluster];
  uint32_t& count = counts[emulator::current->rank];
  block_sync(0, line);
  count = 0;
  block_sync(0, line);
  count += flag;
  block_sync(0, line);
  const uint32_t result = count;
  block_sync(0, line);
  return result;
}
inline void cluster_arrive() {
  emulator::Barrier& barrier = emulator::cluster_barrier;
  emulator::current->cluster_phase = barrier.generation;
  ++barrier.waiting;
  emulator::release(barrier);
}
inline void cluster_wait(int line) {
  for (int turns = 0; emulator::cluster_barrier.generation == emulator::current->cluster_phase;) {
    emulator::yield_or_abort(turns, "its cluster, at line", line);
  }
}

// A tensor map as the driver encodes it for sm_90, and as CuTe-DSL's host code does by itself.
inline kernelgen::TensorMap decoded(uint64_t generic, int line) {
  constexpr int kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 4, 2, 4, 4, 4};
  const unsigned char* from = pointer_at(generic, 64, line);
  uint64_t w[8];
  std::memcpy(w, from, sizeof(w));
  kernelgen::TensorMap map{};
  const int type = static_cast<int>(w[1] >> 7 & 15);
  map.address = w[0];
  map.rank = static_cast<int>(w[1] >> 4 & 7) + 1;
  map.swizzle = static_cast<int>(w[1] >> 13 & 3);
  if ((w[1] & 0xf) != 2 || map.rank > 5 || type > 13 || (w[1] >> 11 & 3) != 0) fault(line, "no tiled tensor map of sm_90", w[1]);
  map.size = kBytes[type];
  const uint64_t low[4] = {w[1] >> 32, w[2] & 0xffffffff, w[2] >> 32, w[3] & 0xffffffff};
  const uint64_t dims[5] = {w[4] & 0xffffffff, w[4] >> 32, w[5] & 0xffffffff, w[5] >> 32, w[6] & 0xffffffff};
  const uint64_t box[5] = {w[6] >> 56, w[7] & 0xff, w[7] >> 8 & 0xff, w[7] >> 16 & 0xff, w[7] >> 24 & 0xff};
  for (int i = 0; i < 5; ++i) {
    map.dims[i] = i < map.rank ? static_cast<int>(dims[i]) + 1 : 1;
    map.box[i] = i < map.rank ? static_cast<int>(box[i]) + 1 : 1;
    if (i > 0 && i < map.rank) map.strides[i - 1] = (low[i - 1] | (w[3] >> (32 + 4 * (i - 1)) & 15) << 32) << 4;
  }
  return map;
}
using At = int[5];
// The rows of a box that lie in the tensor.
inline void require_rows(const kernelgen::TensorMap& map, const At& at, int line) {
  const int first = std::max(at[0], 0), end = std::min(at[0] + map.box[0], map.dims[0]);
  const int rows = kernelgen::emulated_box_bytes(map) / (map.box[0] * map.size);
  for (int r = 0; r < rows && first < end && !tensors.empty(); ++r) {
    uint64_t from = map.address + static_cast<uint64_t>(first) * map.size;
    bool inside = true;
    for (int d = 1, rest = r; d < 5; rest /= map.box[d++]) {
      const int place = at[d] + rest % map.box[d];
      inside = inside && place >= 0 && place < map.dims[d];
      from += place * map.strides[d - 1];
    }
    if (inside) require_known(from, static_cast<size_t>(end - first) * map.size, line);
  }
}
template <size_t N>
inline void tensor_load(uint64_t target, uint64_t map, std::array<int, N> at, uint64_t barrier, uint32_t blocks, int line) {
  const kernelgen::TensorMap tensor = decoded(map, line);
  const Place to = place_of(target, line), of = place_of(barrier, line);
  const At all = {N > 0 ? at[0] : 0, N > 1 ? at[1 % N] : 0, N > 2 ? at[2 % N] : 0, N > 3 ? at[3 % N] : 0, N > 4 ? at[4 % N] : 0};
  require_rows(tensor, all, line);
  for (int block = 0; block < emulator::cluster_blocks; ++block) {
    const bool named = blocks == 0 ? block == to.block : blocks >> block & 1;
    if (!named) continue;
    shared_at((block + 1) * emulator::kSharedBytes + to.offset, 128, line);
    shared_at((block + 1) * emulator::kSharedBytes + to.offset + kernelgen::emulated_box_bytes(tensor) - 16, 16, line);
    mark_copied({block, to.offset}, kernelgen::emulated_box_bytes(tensor));
    kernelgen::emulated_load(N, to.offset, tensor, of.offset, blocks == 0 ? of.block : block, all);
  }
  if (blocks != 0 && blocks >> emulator::cluster_blocks != 0) fault(line, "a copy to blocks that the cluster has not", blocks);
}
template <size_t N, class Put>
inline void tensor_store(uint64_t map, std::array<int, N> at, uint64_t source, int line, Put put) {
  const kernelgen::TensorMap tensor = decoded(map, line);
  const At all = {N > 0 ? at[0] : 0, N > 1 ? at[1 % N] : 0, N > 2 ? at[2 % N] : 0, N > 3 ? at[3 % N] : 0, N > 4 ? at[4 % N] : 0};
  require_rows(tensor, all, line);
  shared_at(source + kernelgen::emulated_box_bytes(tensor) - 16, 16, line);
  require_fence(place_of(source, line), kernelgen::emulated_box_bytes(tensor), line);
  kernelgen::emulated_store(N, tensor, place_of(source, line).offset, all, put);
}
template <size_t N>
inline void tensor_store(uint64_t map, std::array<int, N> at, uint64_t source, int line) {
  tensor_store(map, at, source, line, [](unsigned char* to, const unsigned char* from) { *to = *from; });
}
// Plain bytes.
inline void bulk_load(uint64_t target, uint64_t source, uint32_t bytes, uint64_t barrier, uint32_t blocks, int line) {
  if (bytes % 16 != 0) fault(line, "a bulk copy of no multiple of 16 bytes", bytes);
  pointer_at(source, 16, line);
  require_known(source, bytes, line);
  const Place to = place_of(target, line), of = place_of(barrier, line);
  for (int block = 0; block < emulator::cluster_blocks; ++block) {
    if (!(blocks == 0 ? block == to.block : blocks >> block & 1)) continue;
    shared_at((block + 1) * emulator::kSharedBytes + to.offset, 16, line);
    const int owner = blocks == 0 ? of.block : block;
    mark_copied({block, to.offset}, bytes);
    auto copy = [=] {
      std::memcpy(emulator::cluster_shared[block] + to.offset, reinterpret_cast<const void*>(source), bytes);
      kernelgen::EmulatedBarrier& b = emulated_barrier(of.offset, emulator::cluster_shared[owner]);
      b.bytes -= static_cast<int>(bytes);
      kernelgen::emulated_end_of_phase(b);
    };
    if (emulator::lazy_copies) {
      emulator::boxes.push_back({emulator::in_cluster(owner, of.offset), copy});
    } else {
      copy();
    }
  }
}
template <class Put>
inline void bulk_store(uint64_t target, uint64_t source, uint32_t bytes, int line, Put put) {
  if (bytes % 16 != 0) fault(line, "a bulk copy of no multiple of 16 bytes", bytes);
  const unsigned char* from = shared_at(source, 16, line);
  require_fence(place_of(source, line), bytes, line);
  unsigned char* to = pointer_at(target, 16, line);
  require_known(target, bytes, line);
  emulator::current->open_stores.push_back([=] { put(to, from, bytes); });
}
}  // namespace ptx
