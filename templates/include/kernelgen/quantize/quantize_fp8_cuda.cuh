// fp8 codes and float32 scales of activation(x): scale = amax / largest code, code = round(x / scale), by true division.
//
// A unit is what shares a scale: a row, 128 columns of a row, 128 x 128. A team of kLanes threads owns it and keeps it in
// registers between finding its largest magnitude and writing its codes, so that x is read once and written once:
//
//   row           a team per row; kKept = 0 reads rows again that no block's registers hold
//   1 x 128       16 lanes, a piece of 8 elements each. With kUnits a block owns a row, and a team so many of its units, whose loads are in
//                 flight together and whose places take no divisions
//   128 x 128     the block, 8 pieces of 8 elements per thread
//   tensor        two kernels: the first leaves one largest magnitude per block, the second finds the largest of those and
//                 reads x again (a unit is then only a segment of a row that a warp takes at a time)
#pragma once

#include <kernelgen/activation/activations.cuh>
#include <kernelgen/cache/store.cuh>
#include <kernelgen/cuda/to_fp8.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/quantize/scale.cuh>

namespace kernelgen {

struct QuantizeParams {
  const void* x;
  void* codes;
  float* scale;
  uint32_t* partial;        // tensor: a largest magnitude per block of the first kernel
  const int32_t* row_ends;  // Limited: (batch) how many rows of each entry exist
  int64_t x_batch, x_row, codes_batch, codes_row;
  int64_t scale_batch, scale_row, scale_block;
  int64_t rows, width;  // of the codes, per batch entry
  int32_t batch;
  int32_t row_units, column_units;  // of a batch entry
  int32_t partials;
};

enum class Recipe { kTensor, kRow, kBlock1x128, kBlock128x128 };

// `Options` is the rendered file's struct of compile-time constants:
//   Element, Code; kRecipe, kActivation, kGate; kThreads, kLanes, kKept, kUnits; kLimited (rows end where row_ends says);
//   kAccessX, kAccessCodes (elements of one access)
template <class Options>
struct QuantizeFp8 : Options {
  using Element = typename Options::Element;
  using Code = typename Options::Code;
  using Options::kGate;
  using Options::kKept;
  using Options::kLanes;
  using Options::kRecipe;
  using Options::kThreads;
  using Options::kUnits;

  static constexpr int kPiece = 8;  // elements
  static constexpr int kBlock = 128;
  static constexpr int kTeams = kThreads / kLanes;
  static constexpr bool kSquare = kRecipe == Recipe::kBlock128x128;
  static constexpr bool kTensor = kRecipe == Recipe::kTensor;
  static constexpr bool kRereads = kKept == 0;
  static constexpr int kPieces = max_of(1, kKept);  // in registers
  static constexpr int kUnitRows = kSquare ? kBlock : 1;
  static constexpr float kLargest = is_same_v<Code, fp8_e4m3> ? 448.0f : 57344.0f;
  static_assert(kLanes == 16 || kLanes == kWarpSize || kLanes == kThreads, "a team is half a warp, a warp or the block");
  static_assert(kUnits == 0 || kRecipe == Recipe::kBlock1x128, "rows have several units");
  static_assert(!kSquare || (kLanes == kThreads && kThreads * kPieces * kPiece == kBlock * kBlock), "a block owns a square");

  using Values = float[kPieces][kPiece];

  // Where a unit begins, and the rows and columns that exist from there.
  struct Unit {
    const Element* x;
    Code* codes;
    float* scale;
    int64_t rows, column;
  };

  __device__ static int lane() { return threadIdx.x % kLanes; }

  __device__ static int64_t unit_columns(const QuantizeParams& p) {
    if constexpr (kRecipe == Recipe::kRow) {
      return p.width;
    } else {
      return kTensor ? kLanes * kPieces * kPiece : kBlock;
    }
  }

  __device__ static Unit unit_at(const QuantizeParams& p, int index) {
    const int column_unit = index % p.column_units, rest = index / p.column_units;
    const int64_t batch = rest / p.row_units, row_unit = rest % p.row_units, row = row_unit * kUnitRows;
    int64_t rows = p.rows;
    if constexpr (Options::kLimited) rows = min(rows, static_cast<int64_t>(p.row_ends[batch]));
    return {static_cast<const Element*>(p.x) + batch * p.x_batch + row * p.x_row,
            static_cast<Code*>(p.codes) + batch * p.codes_batch + row * p.codes_row,
            p.scale + batch * p.scale_batch + row_unit * p.scale_row + column_unit * p.scale_block, rows - row,
            column_unit * unit_columns(p)};
  }

  // Row, from the unit's first, and column of this thread's i-th piece.
  __device__ static int64_t piece_row(int i) { return kSquare ? i * (kThreads / 16) + lane() / 16 : 0; }
  __device__ static int64_t piece_column(const Unit& unit, int i) {
    return unit.column + (kSquare ? lane() % 16 : i * static_cast<int64_t>(kLanes) + lane()) * kPiece;
  }
  // How many of its elements exist, 8 at most.
  __device__ static int piece_count(const QuantizeParams& p, const Unit& unit, int i) {
    const int64_t left = p.width - piece_column(unit, i);
    return piece_row(i) < unit.rows && left > 0 ? static_cast<int>(min(left, static_cast<int64_t>(kPiece))) : 0;
  }

  template <int Step, int First>
  __device__ static void load_part(float (&v)[kPiece], const Element* source, int count) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v[i] = i < count ? to_float(source[i * Step + First]) : 0.0f;
  }

  // Elements of a row from `column` on, activated; zeros behind the `count` that exist. Whole: all do, and no branch keeps
  // the loads of several pieces from being in flight together.
  template <bool Whole>
  __device__ static void load(float (&v)[kPiece], const QuantizeParams& p, const Element* row, int64_t column, int count) {
    if constexpr (kGate == Gate::kNone) {
      if (Whole || count == kPiece) {
        load_run<Options::kAccessX>(v, row + column);
      } else {
        load_part<1, 0>(v, row + column, count);
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) v[i] = activate<Options::kActivation>(v[i]);
    } else {
      float up[kPiece];
      if constexpr (kGate == Gate::kInterleaved) {
        if (Whole || count == kPiece) {
          float both[2 * kPiece];
          load_run<Options::kAccessX>(both, row + 2 * column);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) v[i] = both[2 * i], up[i] = both[2 * i + 1];
        } else {
          load_part<2, 0>(v, row + 2 * column, count);
          load_part<2, 1>(up, row + 2 * column, count);
        }
      } else {
        const Element* gate_half = row + (kGate == Gate::kUpFirst ? p.width : 0) + column;
        const Element* up_half = row + (kGate == Gate::kUpFirst ? 0 : p.width) + column;
        if (Whole || count == kPiece) {
          load_run<Options::kAccessX>(v, gate_half);
          load_run<Options::kAccessX>(up, up_half);
        } else {
          load_part<1, 0>(v, gate_half, count);
          load_part<1, 0>(up, up_half, count);
        }
      }
#pragma unroll
      for (int i = 0; i < kPiece; ++i) v[i] = activate<Options::kActivation>(v[i]) * up[i];
    }
  }

  __device__ static void store(const float (&v)[kPiece], Code* row, int64_t column, int count, float scale) {
    Code codes[kPiece];
    const Divisor by(scale);
#pragma unroll
    for (int i = 0; i < kPiece; i += 2) {
      const uint32_t pair = fp8_pair<Code>(by.divide(v[i]), by.divide(v[i + 1]));
      codes[i].__x = static_cast<uint8_t>(pair);
      codes[i + 1].__x = static_cast<uint8_t>(pair >> 8);
    }
    constexpr int kAccess = Options::kAccessCodes;
    if (count == kPiece) {
#pragma unroll
      for (int i = 0; i < kPiece; i += kAccess) {
        Elements<Code, kAccess> part;
#pragma unroll
        for (int j = 0; j < kAccess; ++j) part.value[j] = codes[i + j];
        *reinterpret_cast<Elements<Code, kAccess>*>(row + column + i) = part;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        if (i < count) row[column + i] = codes[i];
      }
    }
  }

  __device__ static uint32_t largest_of(uint32_t amax, const float (&v)[kPiece]) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) amax = larger_magnitude(amax, v[i]);
    return amax;
  }

  // Over the threads of a team, the same in each of them. One call per block where a team is the block.
  template <int Lanes>
  __device__ static uint32_t team_max(uint32_t amax) {
#pragma unroll
    for (int step = min_of(Lanes, kWarpSize) / 2; step > 0; step /= 2) amax = max(amax, __shfl_xor_sync(kFullWarp, amax, step));
    if constexpr (Lanes > kWarpSize) {
      __shared__ uint32_t of_warps[Lanes / kWarpSize];
      if (lane_id() == 0) of_warps[threadIdx.x / kWarpSize] = amax;
      __syncthreads();  // every warp's largest is there before any thread compares them
#pragma unroll
      for (int i = 0; i < Lanes / kWarpSize; ++i) amax = max(amax, of_warps[i]);
    }
    return amax;
  }

  __device__ static float scale_of(uint32_t amax) { return fp8_scale(amax, kLargest); }

  template <bool Whole>
  __device__ static void load_pieces(Values& values, const QuantizeParams& p, const Unit& unit) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load<Whole>(values[i], p, unit.x + piece_row(i) * p.x_row, piece_column(unit, i), Whole ? kPiece : piece_count(p, unit, i));
    }
  }

  __device__ static void load_unit(Values& values, const QuantizeParams& p, const Unit& unit, uint32_t& amax) {
    if (piece_count(p, unit, kPieces - 1) == kPiece) {  // the last one: then all are whole
      load_pieces<true>(values, p, unit);
    } else {
      load_pieces<false>(values, p, unit);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) amax = largest_of(amax, values[i]);
  }

  __device__ static void store_unit(const Values& values, const QuantizeParams& p, const Unit& unit, float scale) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int count = piece_count(p, unit, i);
      if (count > 0) store(values[i], unit.codes + piece_row(i) * p.codes_row, piece_column(unit, i), count, scale);
    }
  }

  // A row that is read again: pieces from this thread's first on.
  template <class Do>
  __device__ static void for_pieces(const QuantizeParams& p, const Unit& unit, Do&& piece) {
    for (int64_t column = piece_column(unit, 0); column < p.width; column += kLanes * kPiece) {
      piece(column, static_cast<int>(min(p.width - column, static_cast<int64_t>(kPiece))));
    }
  }

  // Recipes whose units lie in one team's hands.
  __device__ static void run(const QuantizeParams& p) {
    const int64_t units = static_cast<int64_t>(p.batch) * p.row_units * p.column_units;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes;
    // A team without a unit stays: its warp's other half needs it for the shuffles.
    constexpr int kPlaces = max_of(1, kUnits);
    Unit every[kPlaces];
    if constexpr (kUnits > 0) {
      every[0] = unit_at(p, static_cast<int>(blockIdx.x) * p.column_units);  // the row's first
#pragma unroll
      for (int u = kPlaces - 1; u >= 0; --u) {
        const int column_unit = static_cast<int>(threadIdx.x) / kLanes + u * kTeams;
        every[u] = every[0];
        every[u].column = static_cast<int64_t>(column_unit) * kBlock;
        every[u].scale += column_unit * p.scale_block;
        if (column_unit >= p.column_units) every[u].rows = 0;
      }
    } else {
      every[0] = unit_at(p, static_cast<int>(min(index, units - 1)));
      if (index >= units) every[0].rows = 0;
    }
    if constexpr (kRereads) {
      const Unit& unit = every[0];
      if (unit.rows <= 0) return;  // a whole warp or block
      uint32_t amax = 0;
      float v[kPiece];
      for_pieces(p, unit, [&](int64_t column, int count) {
        load<false>(v, p, unit.x, column, count);
        amax = largest_of(amax, v);
      });
      const float scale = scale_of(team_max<kLanes>(amax));
      for_pieces(p, unit, [&](int64_t column, int count) {
        load<false>(v, p, unit.x, column, count);
        store(v, unit.codes, column, count, scale);
      });
      if (lane() == 0) *unit.scale = scale;
    } else {
      Values values[kPlaces];
      bool whole = true;
#pragma unroll
      for (int u = 0; u < kPlaces; ++u) whole = whole && piece_count(p, every[u], kPieces - 1) == kPiece;  // the last one: then all are
      if (whole) {
#pragma unroll
        for (int u = 0; u < kPlaces; ++u) load_pieces<true>(values[u], p, every[u]);
      } else {
#pragma unroll
        for (int u = 0; u < kPlaces; ++u) load_pieces<false>(values[u], p, every[u]);
      }
#pragma unroll
      for (int u = 0; u < kPlaces; ++u) {
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) amax = largest_of(amax, values[u][i]);
        const float scale = scale_of(team_max<kLanes>(amax));
        store_unit(values[u], p, every[u], scale);
        if (lane() == 0 && every[u].rows > 0) *every[u].scale = scale;
      }
    }
  }

  // Per tensor: the units of this block's teams, one after another.
  template <class Do>
  __device__ static void for_units(const QuantizeParams& p, Do&& each) {
    const int64_t units = static_cast<int64_t>(p.batch) * p.row_units * p.column_units;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kTeams;
    for (int64_t u = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes; u < units; u += step) {
      each(unit_at(p, static_cast<int>(u)));
    }
  }

  __device__ static void find_partials(const QuantizeParams& p) {
    uint32_t amax = 0;
    Values values;
    for_units(p, [&](const Unit& unit) { load_unit(values, p, unit, amax); });
    amax = team_max<kThreads>(amax);
    if (threadIdx.x == 0) p.partial[blockIdx.x] = amax;
  }

  __device__ static void quantize_tensor(const QuantizeParams& p) {
    uint32_t amax = 0;
    for (int i = threadIdx.x; i < p.partials; i += kThreads) amax = max(amax, p.partial[i]);
    const float scale = scale_of(team_max<kThreads>(amax));
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = scale;
    Values values;
    for_units(p, [&](const Unit& unit) {
      load_unit(values, p, unit, amax);
      store_unit(values, p, unit, scale);
    });
  }
};

}  // namespace kernelgen
