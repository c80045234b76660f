// Rotary position embedding of the heads of q and k. A task owns task_tokens tokens; the angles of a token are made once,
// in the thread's scratch, and used by all of its heads.
#pragma once

#include "kernelgen/rope/rotate.h"
#include "kernelgen/rope/rope_params.h"

namespace kernelgen {

// Table: double for frequencies (Cached = false), else the element type of the cosine and sine cache.
template <class T, class Table, bool Cached, bool Interleaved>
void rope_cpu(const RopeParams& p, int64_t task, void* scratch) {
  using Sum = Accumulator<T>;
  const TokenAngles<Sum, Interleaved> angles{static_cast<Sum*>(scratch), p.rotary_dim};
  const int64_t first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
  for (int64_t token = first; token < end; ++token) {
    const int64_t outer = token / p.inner, inner = token % p.inner;
    const int64_t at = outer * p.position_outer_stride + inner * p.position_inner_stride;
    const int64_t position =
        p.wide_positions ? static_cast<const int64_t*>(p.positions)[at] : static_cast<const int32_t*>(p.positions)[at];
    if constexpr (Cached) angles.look_up(static_cast<const Table*>(p.angles), p.angle_rows, p.angle_stride, position);
    else angles.fill(static_cast<const Table*>(p.angles), position);

    const T* q = static_cast<const T*>(p.q) + outer * p.q_outer_stride + inner * p.q_inner_stride;
    T* q_out = static_cast<T*>(p.q_out) + outer * p.q_out_outer_stride + inner * p.q_out_inner_stride;
    for (int64_t h = 0; h < p.q_heads; ++h) {
      rotate_row<T, T>(q + h * p.q_head_stride, q_out + h * p.q_out_head_stride, angles, p.head_dim);
    }
    const T* k = static_cast<const T*>(p.k) + outer * p.k_outer_stride + inner * p.k_inner_stride;
    T* k_out = static_cast<T*>(p.k_out) + outer * p.k_out_outer_stride + inner * p.k_out_inner_stride;
    for (int64_t h = 0; h < p.k_heads; ++h) {
      rotate_row<T, T>(k + h * p.k_head_stride, k_out + h * p.k_out_head_stride, angles, p.head_dim);
    }
  }
}

}  // namespace kernelgen
