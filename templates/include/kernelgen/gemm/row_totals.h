// Whether a user's epilogue (epilogue_function.h) reduces over rows. Its kernel then leaves one partial for each total, tile of columns and
// row, (totals, batch, tiles, m), and a second pass adds these up (kernelgen/kernels/gemm/row_totals.py), in an order of its own.
#pragma once

namespace kernelgen {

template <class Function, class = int>
struct TotalsOf {
  static constexpr int kCount = 0;
};

template <class Function>
struct TotalsOf<Function, decltype(Function::kTotals + 0)> {
  static constexpr int kCount = Function::kTotals;
};

}  // namespace kernelgen
