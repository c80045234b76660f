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
inline uint64_t generic_of_shared(uint64_t address, int line) {
  const Place at = place_of(address, line);
  return reinterpret_cast<uint64_t>(emulator::cluster_shared[at.block] + at.offset);
}
inline bool is_shared(uint64_t generic) {
  return generic - reinterpret_cast<uint64_t>(emulator::cluster_shared) < sizeof(emulator::cluster_shared);
}
inline uint64_t shared_of_generic(uint64_t generic, int line) {
  const uint64_t at = generic - reinterpret_cast<uint64_t>(emulator::cluster_shared);
  if (at >= sizeof(emulator::cluster_shared)) fault(line, "a generic address that is none of shared memory", generic);
  const int block = static_cast<int>(at / emulator::kSharedBytes);
  const uint64_t offset = at % emulator::kSharedBytes;
  return block == emulator::current->rank ? offset : (block + 1) * emulator::kSharedBytes + offset;
}

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
  if (bytes > 0) pointer_at(source, size, line);
  emulator::copy_async(place_of(shared, line).offset, reinterpret_cast<const void*>(source), bytes, size);
}
inline void wait_all_copies() {
  emulator::commit();
  emulator::wait_groups(0);
}
}  // namespace ptx
