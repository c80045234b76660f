// append_cuda with rotation: the queries of a token are rotated to q_out, its keys on their way into the cache, its values
// copied or quantised. A rotated key is rounded once, to the cache's type.
#pragma once

#include <kernelgen/cache/append_cuda.cuh>
#include <kernelgen/rope/rotate.cuh>

namespace kernelgen {

// T is the type of q and of k; KCode that of the key cache. KAccess holds for q too.
template <class T, class KCode, int KAccess, class V, class VCode, int VAccess, class Table, bool Cached, bool Interleaved>
__device__ void rope_append_cuda(const AppendParams& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using S = Sum<T>;
  S* table = reinterpret_cast<S*>(shared);
  const int64_t token = blockIdx.x;
  const Slot slot = slot_of(p, token);
  fill_angles<S, Table, Cached>(table, p.angles, p.rotary_dim / 2, p.angle_rows, p.angle_stride, position_of(p, token));
  __syncthreads();  // every thread reads angles that others wrote; written once, so nothing to guard after

  const AppendSide keys = key_side(p), values = value_side(p);
  const RotateUnits<T, Interleaved, KAccess> rotate{table, static_cast<int>(p.rotary_dim / 2), static_cast<int>(p.head_dim)};
  const int per_head = rotate.rotating() + rotate.passing();
  const int q_heads = static_cast<int>(p.q_heads), heads = slot.live ? static_cast<int>(p.heads) : 0;
  const int rotated = (q_heads + heads) * per_head;
  const int units = rotated + heads * (static_cast<int>(p.head_dim_v) / VAccess);
  const T* q = static_cast<const T*>(p.q) + token * p.q_token_stride;
  T* q_out = static_cast<T*>(p.q_out) + token * p.q_out_token_stride;
  const T* k = static_cast<const T*>(p.k) + token * p.k_token_stride;
  for (int u = threadIdx.x; u < units; u += blockDim.x) {
    if (u >= rotated) {
      append_unit<V, VCode, VAccess>(values, slot, token, u - rotated);
      continue;
    }
    const int head = u / per_head, unit = u - head * per_head;
    if (head < q_heads) {
      rotate.run(q + head * p.q_head_stride, q_out + head * p.q_out_head_stride, unit, 1.0f);
    } else {
      const int kv_head = head - q_heads;
      rotate.run(k + kv_head * p.k_head_stride, static_cast<KCode*>(p.k_cache) + cache_offset(keys, slot, kv_head), unit,
                 scale_of(keys, slot, kv_head));
    }
  }
}

}  // namespace kernelgen
