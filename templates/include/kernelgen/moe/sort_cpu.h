// Slots (token, k) grouped by expert: a counting sort that keeps their order within an expert. One task does it all.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernelgen/moe/expert_map.h"

namespace kernelgen {

struct MoeSortCpuParams {
  const void* ids;            // (tokens, k)
  const int32_t* expert_map;  // (mapped) or null
  int32_t* offsets;           // (experts)
  int32_t* token_of_row;      // (tokens * k)
  int32_t* row_of_slot;       // (tokens * k)
  int64_t ids_row;            // elements between tokens
  int64_t first;              // of a range of local ids
  int64_t tokens, k, experts, mapped;
};

// `next` (experts): the next row of each.
template <class Index, ExpertMap kMap>
void moe_sort_cpu(const MoeSortCpuParams& p, int32_t* next) {
  const auto expert_of = [&](int64_t token, int64_t s) {
    const Index id = static_cast<const Index*>(p.ids)[token * p.ids_row + s];
    return local_expert<kMap>(id, p.expert_map, p.mapped, p.first, static_cast<int>(p.experts));
  };
  std::memset(next, 0, sizeof(int32_t) * p.experts);
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t s = 0; s < p.k; ++s) {
      const int expert = expert_of(t, s);
      p.row_of_slot[t * p.k + s] = expert;  // until the rows are known
      if (expert >= 0) ++next[expert];
    }
  }
  int32_t used = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int32_t rows = next[e];
    next[e] = used;
    used += rows;
    p.offsets[e] = used;
  }
  for (int64_t i = 0; i < p.tokens * p.k; ++i) {
    const int32_t expert = p.row_of_slot[i];
    if (expert < 0) continue;
    const int32_t row = next[expert]++;
    p.row_of_slot[i] = row;
    p.token_of_row[row] = static_cast<int32_t>(i / p.k);
  }
  for (int64_t row = used; row < p.tokens * p.k; ++row) p.token_of_row[row] = -1;
}

}  // namespace kernelgen
