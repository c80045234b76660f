// Planned attention over paged caches with mma.sync tensor cores (sm_80 and later): the body of mma_body.cuh over the items
// of mma_paged.cuh, and the second stage of paged_merge.cuh.
#pragma once

#include <kernelgen/attention/mma_body.cuh>
#include <kernelgen/attention/mma_paged.cuh>
#include <kernelgen/attention/paged_merge.cuh>

namespace kernelgen {

template <class Options>
using PagedMma = AttentionMma<Options, PagedLayout>;

}  // namespace kernelgen
