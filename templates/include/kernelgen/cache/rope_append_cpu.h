// append_cpu with rotation: the queries of a token are rotated to q_out, its keys on their way into the cache, its values
// copied or quantised. A rotated key is rounded once, to the cache's type.
#pragma once

#include "kernelgen/cache/append_cpu.h"
#include "kernelgen/rope/rotate.h"

namespace kernelgen {

// Scratch: the angles of a token, then a row of float.
template <class T, class KCode, class V, class VCode, class Table, bool Cached, bool Interleaved>
void rope_append_cpu(const AppendParams& p, int64_t task, void* scratch) {
  using Sum = Accumulator<T>;
  using Angles = TokenAngles<Sum, Interleaved>;
  const Angles angles{static_cast<Sum*>(scratch), p.rotary_dim};
  float* row = reinterpret_cast<float*>(static_cast<char*>(scratch) + Angles::bytes(p.rotary_dim));
  const AppendSide keys = key_side(p), values = value_side(p);
  const int64_t first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
  for (int64_t token = first; token < end; ++token) {
    const int64_t position = position_of(p, token);
    if constexpr (Cached) angles.look_up(static_cast<const Table*>(p.angles), p.angle_rows, p.angle_stride, position);
    else angles.fill(static_cast<const Table*>(p.angles), position);
    const T* q = static_cast<const T*>(p.q) + token * p.q_token_stride;
    T* q_out = static_cast<T*>(p.q_out) + token * p.q_out_token_stride;
    for (int64_t h = 0; h < p.q_heads; ++h) {
      rotate_row<T, T>(q + h * p.q_head_stride, q_out + h * p.q_out_head_stride, angles, p.head_dim);
    }
    const Slot slot = slot_of(p, token);
    if (!slot.live) continue;
    const T* k = static_cast<const T*>(p.k) + token * p.k_token_stride;
    for (int64_t h = 0; h < p.heads; ++h) {
      KCode* target = static_cast<KCode*>(p.k_cache) + cache_offset(keys, slot, h);
      if constexpr (kIsFp8<KCode>) {
        rotate_row<T, float>(k + h * p.k_head_stride, row, angles, p.head_dim);
        quantize_row(row, target, p.head_dim, scale_of(keys, slot, h));
      } else {
        rotate_row<T, T>(k + h * p.k_head_stride, target, angles, p.head_dim);
      }
    }
    append_side<V, VCode>(values, slot, token, p.heads);
  }
}

}  // namespace kernelgen
