// What rows of instructions.py call beside the other headers: comparisons, results of two registers, lists of registers.
#pragma once

#include "barriers.h"
#include "wgmma.h"

namespace ptx {
constexpr bool is_wrap = false, is_clamp = true;
constexpr __nv_fp8_interpretation_t fp8_e4m3 = __NV_E4M3, fp8_e5m2 = __NV_E5M2;
constexpr int bits_e4m3 = 3, bits_e5m2 = 2;

#define PTX_ORDER(name, expression)     \
  template <class T>                    \
  inline bool is_##name(T a, T b) {     \
    return expression;                  \
  }
PTX_ORDER(eq, a == b)
PTX_ORDER(ne, a < b || a > b)
PTX_ORDER(lt, a < b)
PTX_ORDER(le, a <= b)
PTX_ORDER(gt, a > b)
PTX_ORDER(ge, a >= b)
PTX_ORDER(lo, a < b)
PTX_ORDER(ls, a <= b)
PTX_ORDER(hi, a > b)
PTX_ORDER(hs, a >= b)
PTX_ORDER(num, a == a && b == b)
PTX_ORDER(nan, a != a || b != b)
PTX_ORDER(equ, !(a < b || a > b))
PTX_ORDER(neu, !(a == b))
PTX_ORDER(ltu, !(a >= b))
PTX_ORDER(leu, !(a > b))
PTX_ORDER(gtu, !(a <= b))
PTX_ORDER(geu, !(a < b))
#undef PTX_ORDER
inline bool test_finite(double x) { return std::isfinite(x); }
inline bool test_infinite(double x) { return std::isinf(x); }
inline bool test_number(double x) { return x == x; }
inline bool test_notanumber(double x) { return x != x; }
template <class T> constexpr T all_ones = static_cast<T>(-1);
template <> constexpr float all_ones<float> = 1.0f;

// The results come last in C++, since there may be one or two.
inline void predicate(bool& p, bool value) { p = value; }
inline void predicate(bool& p, bool& q, bool value) { p = value, q = !value; }
template <class P, class Q>
inline void predicates(P& p, Q& q, bool low, bool high) { set(p, low), set(q, high); }
template <class P, class Q>
inline void predicate(P& p, Q& q, bool value) { set(p, value), set(q, !value); }
#define PTX_COMBINED(name, op)                                                                   \
  inline void predicate_##name(bool& p, bool value, bool other) { p = value op other; }          \
  template <class P, class Q>                                                                    \
  inline void predicate_##name(P& p, Q& q, bool value, bool other) {                             \
    set(p, value op other), set(q, !value op other);                                             \
  }
PTX_COMBINED(and, &&)
PTX_COMBINED(or, ||)
PTX_COMBINED(xor, !=)
#undef PTX_COMBINED
inline void shuffle(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, int line, uint32_t& to) {
  Sink inside;
  to = shuffled(mode, value, b, c, mask, inside, line);
}
template <class R, class P>
inline void shuffle(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, int line, R& to, P& inside) {
  set(to, shuffled(mode, value, b, c, mask, inside, line));
}
inline bool alike(uint32_t votes, uint32_t mask) { return votes == 0 || votes == mask; }
template <class T, class R, class P>
inline void match_all(uint32_t mask, T value, int line, R& lanes, P& all) {
  const bool same = matching<T>(mask, value, line) == mask;
  const bool every = ballot(mask, same, line) == mask;
  set(lanes, every ? mask : 0u), set(all, every);
}
template <class T, class R>
inline void match_all(uint32_t mask, T value, int line, R& lanes) {
  Sink all;
  match_all(mask, value, line, lanes, all);
}
inline uint64_t barrier_arrive_state(uint64_t address, uint32_t bytes, uint32_t arrivals, int line) {
  const uint64_t state = barrier_state(address, line);
  barrier_arrive(address, bytes, arrivals, line);
  return state;
}

// Of atomics, whose x is what lies in memory, and of a warp's reductions.
#define PTX_COMBINE(name, expression)  \
  template <class T>                   \
  inline T combine_##name(T x, T y) {  \
    return static_cast<T>(expression); \
  }
PTX_COMBINE(add, x + y)
PTX_COMBINE(min, smaller<T>(x, y))
PTX_COMBINE(max, larger<T>(x, y))
PTX_COMBINE(and, x & y)
PTX_COMBINE(or, x | y)
PTX_COMBINE(xor, x ^ y)
PTX_COMBINE(exch, y)
PTX_COMBINE(inc, x >= y ? 0 : x + 1)
PTX_COMBINE(dec, x == 0 || x > y ? y : x - 1)
#undef PTX_COMBINE

template <class T> inline T apply_add(T a, T b) { return static_cast<T>(a + b); }
template <class T> inline T apply_sub(T a, T b) { return static_cast<T>(a - b); }
template <class T> inline T apply_mul(T a, T b) { return static_cast<T>(a * b); }
template <class T>
inline T added(T a, T b, bool in, bool& out) {
  using U = std::make_unsigned_t<T>;
  const unsigned __int128 sum = static_cast<unsigned __int128>(static_cast<U>(a)) + static_cast<U>(b) + in;
  out = sum >> (8 * sizeof(T)) & 1;
  return static_cast<T>(sum);
}
template <class H, class F>
inline Pair<H> each(Pair<H> x, F f) {
  return {H(f(x.lo)), H(f(x.hi))};
}
template <class T>
inline void bulk_add(unsigned char* to, const unsigned char* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T x, y;
    std::memcpy(&x, to + i, sizeof(T)), std::memcpy(&y, from + i, sizeof(T));
    x = static_cast<T>(x + y);
    std::memcpy(to + i, &x, sizeof(T));
  }
}
template <class... R>
inline std::array<uint32_t*, sizeof...(R)> pointers(R*... r) {
  return {r...};
}
template <class... R>
inline std::array<uint32_t, sizeof...(R)> values(R... r) {
  return {r...};
}

// `[register + number]`, in the register's width.
inline uint64_t address(uint32_t base, int64_t offset) { return static_cast<uint32_t>(base + static_cast<uint32_t>(offset)); }
inline uint64_t address(uint64_t base, int64_t offset) { return base + static_cast<uint64_t>(offset); }
}  // namespace ptx
