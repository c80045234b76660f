// How a product is grouped: not at all; rows one group behind the other; the first rows of each entry; or groups of k.
#pragma once

namespace kernelgen {

enum class Grouping { kNone, kRows, kMasked, kDepth };

}  // namespace kernelgen
