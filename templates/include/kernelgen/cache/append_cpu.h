// Writes new tokens into a paged cache: copied, or quantised to fp8; keys optionally rotated on the way, with the queries
// of the same tokens. A task owns task_tokens tokens.
#pragma once

#include "kernelgen/cache/fp8.h"
#include "kernelgen/cache/append_params.h"

namespace kernelgen {

// X and Code are equal for a copy: then they are words of the element's size, whatever it means.
template <class X, class Code>
KERNELGEN_INLINE void append_side(const AppendSide& side, const Slot& slot, int64_t token, int64_t heads) {
  const X* x = static_cast<const X*>(side.x) + token * side.token_stride;
  Code* cache = static_cast<Code*>(side.cache);
  if constexpr (kIsFp8<Code>) {
    for (int64_t h = 0; h < heads; ++h) {
      quantize_row(x + h * side.head_stride, cache + cache_offset(side, slot, h), side.width, scale_of(side, slot, h));
    }
  } else if (side.head_stride == side.width && side.cache_head_stride == side.width) {
    std::memcpy(cache + cache_offset(side, slot, 0), x, static_cast<size_t>(heads * side.width) * sizeof(X));
  } else {
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(cache + cache_offset(side, slot, h), x + h * side.head_stride, static_cast<size_t>(side.width) * sizeof(X));
    }
  }
}

template <class K, class KCode, class V, class VCode>
void append_cpu(const AppendParams& p, int64_t task) {
  const AppendSide keys = key_side(p), values = value_side(p);
  const int64_t first = task * p.task_tokens, end = first + p.task_tokens < p.tokens ? first + p.task_tokens : p.tokens;
  for (int64_t token = first; token < end; ++token) {
    const Slot slot = slot_of(p, token);
    if (!slot.live) continue;
    append_side<K, KCode>(keys, slot, token, p.heads);
    append_side<V, VCode>(values, slot, token, p.heads);
  }
}

}  // namespace kernelgen
