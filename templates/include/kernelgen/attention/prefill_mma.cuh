// Attention forward over dense or ragged queries with mma.sync tensor cores (sm_80 and later): the body of mma_body.cuh
// over the rows of mma_dense.cuh.
#pragma once

#include <kernelgen/attention/mma_body.cuh>
#include <kernelgen/attention/mma_dense.cuh>

namespace kernelgen {

template <class Options>
using PrefillMma = AttentionMma<Options, DenseLayout>;

}  // namespace kernelgen
