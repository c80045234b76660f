// What lanes of a warp do together. They meet twice: when all have said what they give, and when all have read it. Those of a full warp must
// be at the same instruction, since what is .aligned or reads registers of other lanes means nothing otherwise.
#pragma once

#include <map>

#include "memory.h"

namespace ptx {
inline std::vector<std::array<int, 32>> lines;                    // at which lanes of a warp are
inline std::map<std::pair<int, uint32_t>, emulator::Barrier> parts;  // of a warp that meet by themselves

inline int lane() { return emulator::thread() % 32; }
inline auto& slots() { return emulator::warp_slots[emulator::warp()]; }

inline void meet(uint32_t mask, int line) {
  const int warp = emulator::warp();
  if ((mask >> lane() & 1) == 0) fault(line, "a lane outside of the mask of its collective", mask);
  if (lines.size() < emulator::warp_slots.size()) lines.resize(emulator::warp_slots.size());
  lines[warp][lane()] = line;
  if (mask != 0xffffffffu) {
    emulator::Barrier& barrier = parts[{warp, mask}];
    barrier.alive = __builtin_popcount(mask);
    emulator::wait(barrier, "lanes of its warp", line);
    return;
  }
  emulator::wait(emulator::warp_barriers[warp], "its warp, at line", line);
  if (emulator::warp_barriers[warp].alive == 32 && lines[warp][(lane() + 1) % 32] != line) {
    std::fprintf(stderr, "ptx_emulator: lanes of a warp meet at lines %d and %d of the PTX\n", line, lines[warp][(lane() + 1) % 32]), std::abort();
  }
  emulator::wait(emulator::warp_barriers[warp], "its warp, at line", line);  // that all have compared
}

enum Shuffle { up, down, bfly, idx };
template <class P>
inline uint32_t shuffled(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, P& inside, int line) {
  const int own = lane(), by = b & 31, segment = c >> 8 & 31, least = own & segment, most = least | (c & 31 & ~segment);
  int from = mode == up ? own - by : mode == down ? own + by : mode == bfly ? own ^ by : least | (by & ~segment);
  const bool found = mode == up ? from >= most : from <= most;
  if (!found) from = own;
  slots().value[own] = value;
  meet(mask, line);
  const uint32_t got = static_cast<uint32_t>(slots().value[from]);
  if ((mask >> from & 1) == 0) fault(line, "a shuffle from a lane that does not take part", from);
  meet(mask, line);
  set(inside, as<std::conditional_t<std::is_same_v<P, Sink>, uint8_t, bool>>(static_cast<uint8_t>(found)));
  return got;
}
inline uint32_t ballot(uint32_t mask, bool flag, int line) {
  slots().value[lane()] = flag;
  meet(mask, line);
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) all |= static_cast<uint32_t>((mask >> i & 1) && slots().value[i] != 0) << i;
  meet(mask, line);
  return all;
}
template <class T>
inline uint32_t matching(uint32_t mask, T value, int line) {
  slots().value[lane()] = value;
  meet(mask, line);
  uint32_t same = 0;
  for (int i = 0; i < 32; ++i) same |= static_cast<uint32_t>((mask >> i & 1) && static_cast<T>(slots().value[i]) == value) << i;
  meet(mask, line);
  return same;
}
template <class T, class F>
inline T reduced(uint32_t mask, T value, int line, F f) {
  slots().value[lane()] = value;
  meet(mask, line);
  T all = value;
  bool first = true;
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) all = first ? static_cast<T>(slots().value[i]) : f(all, static_cast<T>(slots().value[i]));
    if (mask >> i & 1) first = false;
  }
  meet(mask, line);
  return all;
}
// The first lane of the mask.
template <class R, class P>
inline void elect(R& leader, P& chosen, uint32_t mask, int line) {
  meet(mask, line);
  set(leader, static_cast<std::conditional_t<std::is_same_v<R, Sink>, uint8_t, uint32_t>>(__builtin_ctz(mask)));
  set(chosen, lane() == __builtin_ctz(mask));
}

template <size_t N>
inline void load_matrices(bool transposed, int line, uint64_t address, std::array<uint32_t*, N> to) {
  slots().value[lane()] = address;
  meet(0xffffffffu, line);
  auto element = [&](int matrix, int row, int column) {
    uint16_t value;
    std::memcpy(&value, shared_at(slots().value[matrix * 8 + row], 16, line) + column * 2, 2);
    return static_cast<uint32_t>(value);
  };
  const int row = lane() / 4, column = lane() % 4 * 2;
  uint32_t got[N];
  for (size_t i = 0; i < N; ++i) {
    got[i] = transposed ? element(i, column, row) | (element(i, column + 1, row) << 16)
                        : element(i, row, column) | (element(i, row, column + 1) << 16);
  }
  meet(0xffffffffu, line);
  for (size_t i = 0; i < N; ++i) *to[i] = got[i];
}
template <size_t N>
inline void store_matrices(bool transposed, int line, uint64_t address, std::array<uint32_t, N> from) {
  const int own = lane();
  for (size_t i = 0; i < N; ++i) slots().a[own][i] = from[i];
  meet(0xffffffffu, line);
  if (own < static_cast<int>(8 * N)) {
    unsigned char* to = shared_at(address, 16, line);
    mark_written(address, 16, line);
    for (int c = 0; c < 8; ++c) {
      const int row = transposed ? c : own % 8, column = transposed ? own % 8 : c;
      const uint32_t pair = slots().a[row * 4 + column / 2][own / 8];
      const uint16_t value = static_cast<uint16_t>(column % 2 ? pair >> 16 : pair);
      std::memcpy(to + 2 * c, &value, 2);
    }
  }
  meet(0xffffffffu, line);
}

// Elements of an operand of a product, as floats. A register holds `per` of them.
struct Tf32 {};
struct E4m3 {};
struct E5m2 {};
template <class T> constexpr int per = 2;
template <> constexpr int per<Tf32> = 1;
template <> constexpr int per<E4m3> = 4;
template <> constexpr int per<E5m2> = 4;
template <class T>
inline float element_of(uint32_t word, int i) {
  if constexpr (std::is_same_v<T, Tf32>) return as<float>(word & 0xffffe000u);
  else if constexpr (std::is_same_v<T, E4m3>) return fp8_value(word >> (8 * i) & 0xff, 3);
  else if constexpr (std::is_same_v<T, E5m2>) return fp8_value(word >> (8 * i) & 0xff, 2);
  else return as<T>(static_cast<uint16_t>(word >> (16 * i)));
}

// d = a b + c, 16 x 8 x K, sums in float32 or, two in a register, in fp16.
template <class A, class B, int K, size_t NA, size_t NB, size_t ND>
inline void multiply(int line, std::array<uint32_t*, ND> d, std::array<uint32_t, NA> a, std::array<uint32_t, NB> b, std::array<uint32_t, ND> c) {
  static_assert(per<A> == per<B> && NB * 4 * per<A> == K && NA == 2 * NB);
  const int own = lane(), group = own / 4, quad = own % 4;
  for (size_t i = 0; i < NA; ++i) slots().a[own][i] = a[i];
  for (size_t i = 0; i < NB; ++i) slots().b[own][i] = b[i];
  meet(0xffffffffu, line);
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, column = 2 * quad + i % 2;
    float sum = ND == 4 ? as<float>(c[i % ND]) : element_of<f16>(c[half % ND], i % 2);
    for (int k = 0; k < K; ++k) {
      const int from = k % (4 * per<A>) / per<A>, word = k / (4 * per<A>);
      sum += element_of<A>(slots().a[group * 4 + from][word * 2 + half], k % per<A>) * element_of<B>(slots().b[column * 4 + from][word], k % per<A>);
    }
    sums[i] = sum;
  }
  meet(0xffffffffu, line);
  if constexpr (ND == 4) {
    for (int i = 0; i < 4; ++i) *d[i] = as<uint32_t>(sums[i]);
  } else {
    for (int i = 0; i < 2; ++i) *d[i] = as<uint32_t>(f16x2{f16(sums[2 * i]), f16(sums[2 * i + 1])});
  }
}
inline void multiply_f64(int line, std::array<uint64_t*, 2> d, uint64_t a, uint64_t b, std::array<uint64_t, 2> c) {
  const int own = lane();
  std::memcpy(slots().a[own], &a, 8);
  std::memcpy(slots().b[own], &b, 8);
  meet(0xffffffffu, line);
  double sums[2];
  for (int i = 0; i < 2; ++i) {
    sums[i] = as<double>(c[i]);
    for (int k = 0; k < 4; ++k) {
      double x, y;
      std::memcpy(&x, slots().a[own / 4 * 4 + k], 8);
      std::memcpy(&y, slots().b[(own % 4 * 2 + i) * 4 + k], 8);
      sums[i] = std::fma(x, y, sums[i]);
    }
  }
  meet(0xffffffffu, line);
  for (int i = 0; i < 2; ++i) *d[i] = as<uint64_t>(sums[i]);
}
}  // namespace ptx
