// The grouped products of the CPU: each group by what its rows are, few or many.
#pragma once

#include "kernelgen/gemm/gemm_cpu.h"
#include "kernelgen/gemm/gemm_thin.h"

namespace kernelgen {

template <class Options>
struct GemmGroupedCpu : GemmCpu<Options> {
  using Thin = GemmThinCpu<Options>;

  static void run(const GemmCpuParams& p, const GemmTask& t, char* scratch) {
    if (t.all_rows <= Thin::kMaxRows) {
      Thin::run(p, t, scratch);
    } else {
      GemmCpu<Options>::run(p, t, scratch);
    }
  }
};

}  // namespace kernelgen
