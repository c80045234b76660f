// Addresses. Global, local and parameter memory: the processor's own pointers, and so are generic addresses. Shared memory: a place in the
// block's own, or behind kSharedBytes one of a block of the cluster, as mapa gives it.
#pragma once

#include "values.h"

namespace ptx {
constexpr uint32_t kDynamicShared = 1024;  // where the first shared variable of a kernel lies; what is before belongs to the system
inline uint32_t shared_end = 0;            // of what the launch asked for

struct Place {
  int block;
  uint32_t offset;
};
inline Place place_of(uint64_t address, int line) {
  const uint32_t at = static_cast<uint32_t>(address), block = at / emulator::kSharedBytes;
  if (block == 0) return {emulator::current->rank, at};
  if (static_cast<int>(block) > emulator::cluster_blocks) fault(line, "no such block in the cluster", address);
  if (emulator::block_barriers[block - 1].alive == 0) fault(line, "the shared memory of a block that has ended", block - 1);
  return {static_cast<int>(block) - 1, at % emulator::kSharedBytes};
}
inline uint32_t mapped(uint64_t address, uint32_t rank, int line) {
  if (static_cast<int>(rank) >= emulator::cluster_blocks) fault(line, "mapa names a block that the cluster has not", rank);
  return (rank + 1) * emulator::kSharedBytes + place_of(address, line).offset;
}
inline unsigned char* shared_at(uint64_t address, size_t bytes, int line) {
  const Place at = place_of(address, line);
  if (address >> 32 != 0 && address >> 32 != 0xffffffffu) fault(line, "no address in shared memory", address);
  if (at.offset % (bytes & -bytes) != 0) fault(line, "an unaligned address in shared memory", address);
  if (at.offset < kDynamicShared || at.offset + bytes > shared_end) fault(line, "an address outside of the block's shared memory", address);
  return emulator::cluster_shared[at.block] + at.offset;
}
inline unsigned char* pointer_at(uint64_t address, size_t bytes, int line) {
  if (address < 4096) fault(line, "a null pointer", address);
  if (address % (bytes & -bytes) != 0) fault(line, "an unaligned address", address);
  return reinterpret_cast<unsigned char*>(address);
}
// What the call may read and write: its tensors, where they are known, and what belongs to the kernel itself.
struct Range {
  uint64_t begin, end;
};
inline std::vector<Range> tensors, own;
inline bool lies_in(const std::vector<Range>& ranges, uint64_t address, size_t bytes) {
  for (const Range& r : ranges) {
    if (address >= r.begin && address + bytes <= r.end) return true;
  }
  return false;
}
inline bool is_shared(uint64_t generic) {
  return generic - reinterpret_cast<uint64_t>(emulator::cluster_shared) < sizeof(emulator::cluster_shared);
}
inline void require_known(uint64_t address, size_t bytes, int line) {
  constexpr size_t kStack = 256 * 1024;
  if (tensors.empty() || lies_in(tensors, address, bytes) || lies_in(own, address, bytes) || is_shared(address)) return;
  if (address - reinterpret_cast<uint64_t>(emulator::current->stack) < kStack) return;
  fault(line, "an address outside of every tensor of the call", address);
}
inline unsigned char* global_at(uint64_t address, size_t bytes, int line) {
  unsigned char* at = pointer_at(address, bytes, line);
  require_known(address, bytes, line);
  return at;
}
inline uint64_t generic_of_shared(uint64_t address, int line) {
  const Place at = place_of(address, line);
  return reinterpret_cast<uint64_t>(emulator::cluster_shared[at.block] + at.offset);
}
inline uint64_t shared_of_generic(uint64_t generic, int line) {
  const uint64_t at = generic - reinterpret_cast<uint64_t>(emulator::cluster_shared);
  if (at >= sizeof(emulator::cluster_shared)) fault(line, "a generic address that is none of shared memory", generic);
  const int block = static_cast<int>(at / emulator::kSharedBytes);
  const uint64_t offset = at % emulator::kSharedBytes;
  return block == emulator::current->rank ? offset : (block + 1) * emulator::kSharedBytes + offset;
}

// Who wrote 16 bytes of shared memory last by an ordinary store, and when: the copy engine and wgmma see that only behind a fence.proxy.async,
// of the thread that wrote or of the one that makes them read.
struct Written {
  uint32_t time, thread;
};
inline Written written[emulator::kMaxCluster][emulator::kSharedBytes / 16];
inline std::vector<uint32_t> fence_times;  // by thread of the cluster
inline uint32_t now = 0;
inline uint32_t thread_of_cluster() { return static_cast<uint32_t>(emulator::current->rank * emulator::block_threads + emulator::thread()); }
inline void forget_writes() {
  for (int block = 0; block < emulator::cluster_blocks; ++block) std::memset(written[block], 0, sizeof(written[block]));
  fence_times.assign(emulator::cluster_blocks * emulator::block_threads, 0);
}
inline void proxy_fence() { fence_times[thread_of_cluster()] = ++now; }
inline void mark_written(uint64_t address, size_t bytes, int line) {
  const Place at = place_of(address, line);
  for (size_t i = at.offset / 16; i <= (at.offset + bytes - 1) / 16; ++i) written[at.block][i] = {++now, thread_of_cluster()};
}
inline void require_fence(const Place& at, size_t bytes, int line) {
  for (size_t i = at.offset / 16; i <= (at.offset + bytes - 1) / 16; ++i) {
    const Written& by = written[at.block][i];
    if (by.time > fence_times[by.thread] && by.time > fence_times[thread_of_cluster()]) {
      fault(line, "the copy engine or wgmma reads what a thread stored without fence.proxy.async; the thread", by.thread);
    }
  }
}
inline void mark_copied(const Place& at, size_t bytes) { std::memset(&written[at.block][at.offset / 16], 0, (bytes + 15) / 16 * sizeof(Written)); }

template <class T, class... R>
inline void load(const unsigned char* from, R&... to) {
  auto one = [&](auto& r) {
    T x;
    std::memcpy(&x, from, sizeof(T));
    from += sizeof(T);
    set(r, x);
  };
  (one(to), ...);
}
template <class T, class... R>
inline void store(unsigned char* to, R... from) {
  auto one = [&](auto r) {
    const T x = as<T>(r);
    std::memcpy(to, &x, sizeof(T));
    to += sizeof(T);
  };
  (one(from), ...);
}

template <class T, class... R>
inline void store_shared(uint64_t address, int line, R... from) {
  store<T>(shared_at(address, sizeof...(R) * sizeof(T), line), from...);
  mark_written(address, sizeof...(R) * sizeof(T), line);
}

// Read, change and write in one: fibers do not interrupt each other.
template <class T>
inline T changed(unsigned char* at, T (*combine)(T, T), T value) {
  T old;
  std::memcpy(&old, at, sizeof(T));
  const T now = combine(old, value);
  std::memcpy(at, &now, sizeof(T));
  return old;
}
template <class T, class... R>
inline void each_changed(unsigned char* at, T (*combine)(T, T), R... values) {
  ((changed<T>(at, combine, values), at += sizeof(T)), ...);
}
template <class T>
inline T swapped(unsigned char* at, T expected, T value) {
  T old;
  std::memcpy(&old, at, sizeof(T));
  if (std::memcmp(&old, &expected, sizeof(T)) == 0) std::memcpy(at, &value, sizeof(T));
  return old;
}

inline void copy_async(uint64_t shared, uint64_t source, int size, int bytes, int line) {
  shared_at(shared, size, line);
  if (bytes < 0 || bytes > size) fault(line, "cp.async reads more than it copies", bytes);
  if (bytes > 0) pointer_at(source, size, line), require_known(source, bytes, line);
  emulator::copy_async(place_of(shared, line).offset, reinterpret_cast<const void*>(source), bytes, size);
}
inline void wait_all_copies() {
  emulator::commit();
  emulator::wait_groups(0);
}
}  // namespace ptx
