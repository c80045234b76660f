// What the columns of b are to a gated activation, which makes two of them one output.
#pragma once

namespace kernelgen {

// Gate and up columns are halves of b, or its even and odd columns.
enum class Gate { kNone, kGateFirst, kUpFirst, kInterleaved };

}  // namespace kernelgen
