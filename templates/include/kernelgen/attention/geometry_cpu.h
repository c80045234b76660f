// Types, sizes and scratch of CPU attention: what every other header here is parametrised by.
#pragma once

#include "kernelgen/attention/params_cpu.h"
#include "kernelgen/cpu/fp8.h"
#include "kernelgen/cpu/microkernel.h"

namespace kernelgen {

enum class Mask { kNone, kStrided, kFlat, kPacked };  // bool with four strides; per request bytes, or bits
enum class Scales { kNone, kHead, kPage };            // of queries, keys and values; kPage: keys and values per page
enum class Pages { kNone, kContiguous, kPowerOfTwo, kAny };

// A kernel without a variant.
struct NoVariant {};

// How queries and keys are multiplied: in their own way where they are of one type and no scale has to enter, else widened.
template <class Query, class KeyValue, bool kScaled>
struct ProductFor {
  using type = FmaProduct<Accumulator<Query>>;
};
template <class T>
struct ProductFor<T, T, false> {
  using type = typename ProductOf<T>::type;
};

template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

template <bool kFirst, class T, class U>
struct Either {
  using type = T;
};
template <class T, class U>
struct Either<false, T, U> {
  using type = U;
};

constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

template <class Options_>
struct Geometry {
  using Options = Options_;
  using Query = typename Options::Query;
  using KeyValue = typename Options::KeyValue;
  using Rope = typename Options::Rope;
  using Output = typename Options::Output;
  using Product = typename ProductFor<Query, KeyValue, Options::kScales != Scales::kNone>::type;
  using Operand = typename Product::Element;
  using V = typename Product::V;
  using Reg = typename V::Reg;
  using Scalar = typename V::Scalar;

  static constexpr int kHeadDim = Options::kHeadDim, kHeadDimV = Options::kHeadDimV, kBlockK = Options::kBlockK;
  static constexpr int kRopeDim = Options::kRopeDim;  // MLA: the end of kHeadDim, from a tensor of its own
  // Scales of keys are of fp8 parts of the cache: a rope part of another type stays as it is.
  static constexpr bool kPlainRope = kRopeDim > 0 && is_fp8<KeyValue> && !is_fp8<Rope>;
  using Second = typename Either<(kRopeDim > 0), Rope, KeyValue>::type;  // of a plan's second cache
  static constexpr int kRows = kTileRows;        // keys, or value columns, of one register tile
  static constexpr int kVecs = kTileVecs;        // registers across a panel
  static constexpr int kLanes = V::kLanes;
  static constexpr int kWidth = kVecs * kLanes;  // query rows of a panel
  static constexpr int kDepth = Product::kDepth;
  // Outputs of 16 bits keep 8 or 11 of them: the shorter polynomial's error of 9e-8 is far below that.
  static constexpr int kExpDegree = sizeof(Output) == 2 ? 5 : 6;
  // One more cache line between the column strips of V, else they all begin in the same L1 set.
  static constexpr int kValueStrip = kBlockK * kRows + 64 / int(sizeof(Operand));
  static_assert(kHeadDim % 8 == 0 && kHeadDimV % 8 == 0 && kRopeDim % 8 == 0, "head dimensions");
  static_assert(kBlockK % kRows == 0 && 8 % kRows == 0 && kWidth <= 32, "tile shape");

  static constexpr bool kMasked = Options::kMask != Mask::kNone;
  static constexpr bool kVariant = !is_same<typename Options::Variant, NoVariant>;
  static constexpr bool kSoftmax = Options::kSoftmax;  // false: the scores of a variant are the weights themselves
  static_assert(kSoftmax || !(Options::kLse || Options::kSinks), "an LSE and sinks are parts of a softmax");
  static constexpr bool kPageScales = Options::kScales == Scales::kPage;
  // Visibility beyond ranges: a bit for each row and key of a tile.
  static constexpr bool kBits = kMasked || kVariant;
  // A bias needs logits in their natural units; without one they are kept unscaled.
  static constexpr bool kNatural = Options::kAlibi || kVariant;

  // Scratch: one tile of keys and values, one panel's scores and weights, then the panels of the task.
  static constexpr int64_t kKeyBytes = int64_t(sizeof(Operand)) * kBlockK * kHeadDim;
  static constexpr int64_t kValueBytes = int64_t(sizeof(Operand)) * (kHeadDimV / kRows) * kValueStrip;
  static constexpr int64_t kScoreBytes = int64_t(sizeof(Scalar)) * kBlockK * kWidth;
  static constexpr int64_t kWeightBytes = kDepth == 1 ? 0 : int64_t(sizeof(Operand)) * kBlockK * kWidth;
  static constexpr int64_t kTileBytes = kKeyBytes + kValueBytes + kScoreBytes + kWeightBytes;
  static_assert(kTileBytes % 64 == 0, "the panels begin at a cache line");

  // Which keys a set of rows sees: every row those in [every_first, every_end), some row those in [any_first, any_end).
  struct Range {
    int64_t any_first, any_end, every_first, every_end;

    static Range of_no_row(int64_t keys) { return {keys, 0, 0, keys}; }
    void join(const Range& other) {
      any_first = other.any_first < any_first ? other.any_first : any_first;
      any_end = other.any_end > any_end ? other.any_end : any_end;
      every_first = other.every_first > every_first ? other.every_first : every_first;
      every_end = other.every_end < every_end ? other.every_end : every_end;
    }
  };

  // Which query row and head a lane holds; only kernels with a bias, mask or variant ask.
  template <bool kOn, int = 0>
  struct LaneIds {
    Scalar slope[kWidth];
    int32_t query[kWidth], head[kWidth];
  };
  template <int kNothing>
  struct LaneIds<false, kNothing> {};

  struct alignas(64) Panel {
    Operand queries[kHeadDim * kWidth];   // Q^T [D / kDepth][row][kDepth]
    Scalar output[kHeadDimV * kWidth];    // O^T [Dv][row], not yet divided by total
    Scalar peak[kWidth], total[kWidth];   // running maximum of S and sum of P
    int64_t first[kWidth], end[kWidth];   // keys that each row sees; rows past the last repeat its range
    Range range;
    int64_t rows;                         // how many of the lanes hold a row
    LaneIds<kBits || kNatural> ids;
  };
  static constexpr int64_t kPanelBytes = sizeof(Panel);

  struct Task {
    int64_t batch, head;         // request and key head
    int64_t row, rows;           // of the request's rows: the first of this task, and how many
    int64_t q_begin, q_len, k_begin, k_len;
    int64_t chunk_begin, chunk_end;  // keys of this task
  };

  struct Buffers {
    Operand* keys;
    Operand* values;
    Scalar* scores;
    Operand* weights;
    Panel* panels;

    explicit Buffers(void* scratch) {
      char* at = static_cast<char*>(scratch);
      keys = reinterpret_cast<Operand*>(at);
      values = reinterpret_cast<Operand*>(at + kKeyBytes);
      scores = reinterpret_cast<Scalar*>(at + kKeyBytes + kValueBytes);
      weights = reinterpret_cast<Operand*>(at + kKeyBytes + kValueBytes + (kDepth == 1 ? 0 : kScoreBytes));
      panels = reinterpret_cast<Panel*>(at + kTileBytes);
    }
  };

  static constexpr Scalar kMinusInfinity = -__builtin_inf();
};

}  // namespace kernelgen
