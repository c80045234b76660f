// Which expert of this device an id means.
#pragma once

namespace kernelgen {

enum class ExpertMap {
  kNone,   // ids are local
  kTable,  // local number of every global id
  kRange,  // local ids are first .. first + experts - 1
};

// `known`: entries of the table. -1 for an id that names no expert here.
template <ExpertMap kMap, class Index, class Entry>
inline int local_expert(Index id, const Entry* table, long long known, long long first, int experts) {
  long long local = id;
  if constexpr (kMap == ExpertMap::kTable) local = local >= 0 && local < known ? table[local] : -1;
  if constexpr (kMap == ExpertMap::kRange) local = local >= first && local < first + experts ? local - first : -1;
  return local >= 0 && local < experts ? static_cast<int>(local) : -1;
}

}  // namespace kernelgen
