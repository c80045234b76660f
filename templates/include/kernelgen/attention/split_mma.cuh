// Dense and ragged attention of few query rows over many keys with mma.sync tensor cores (sm_80 and later): the body of
// mma_body.cuh over the items of mma_split.cuh, and the second stage of paged_merge.cuh.
#pragma once

#include <kernelgen/attention/mma_body.cuh>
#include <kernelgen/attention/mma_split.cuh>

namespace kernelgen {

template <class Options>
using SplitMma = AttentionMma<Options, SplitLayout>;

template <class Options>
using SplitMerge = PagedMerge<Options, SplitRows<Options>>;

}  // namespace kernelgen
