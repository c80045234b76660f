// Writes new tokens into a paged cache: a block per token, bound by memory.
//
// Every thread finds the token's slot by itself, from loads that the whole block shares, and walks units of one access:
// first those of the keys' heads, then those of the values'. A token without a slot is left out.
#pragma once

#include <kernelgen/cache/store.cuh>
#include <kernelgen/cache/append_params.h>

namespace kernelgen {

// Unit u of one side. X and Code are equal for a copy: then they are words of the element's size, whatever it means.
template <class X, class Code, int Access>
__device__ inline void append_unit(const AppendSide& side, const Slot& slot, int64_t token, int u) {
  const int per_head = static_cast<int>(side.width) / Access;
  const int head = u / per_head, c = (u - head * per_head) * Access;
  const X* x = static_cast<const X*>(side.x) + token * side.token_stride + head * side.head_stride + c;
  Code* target = static_cast<Code*>(side.cache) + cache_offset(side, slot, head) + c;
  if constexpr (is_same_v<X, Code>) {
    *reinterpret_cast<Elements<X, Access>*>(target) = *reinterpret_cast<const Elements<X, Access>*>(x);
  } else {
    const float scale = scale_of(side, slot, head);
    float v[Access];
    load_run<Access>(v, x);
#pragma unroll
    for (int i = 0; i < Access; ++i) v[i] /= scale;
    store_run<Access>(target, v);
  }
}

template <class K, class KCode, int KAccess, class V, class VCode, int VAccess>
__device__ void append_cuda(const AppendParams& p) {
  const int64_t token = blockIdx.x;
  const Slot slot = slot_of(p, token);
  if (!slot.live) return;
  const AppendSide keys = key_side(p), values = value_side(p);
  const int heads = static_cast<int>(p.heads);
  const int key_units = heads * (static_cast<int>(p.head_dim) / KAccess);
  const int units = key_units + heads * (static_cast<int>(p.head_dim_v) / VAccess);
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    if (u < key_units) append_unit<K, KCode, KAccess>(keys, slot, token, u);
    else append_unit<V, VCode, VAccess>(values, slot, token, u - key_units);
  }
}

}  // namespace kernelgen
