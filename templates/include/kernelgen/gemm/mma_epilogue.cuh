// Sums of an mma tile -> out: row and column scales, bias, activation, c.
//
// A quad of lanes holds the columns of a row in pieces. Through shared memory, 16 rows of a warp at a time, a lane gets 8
// neighbouring outputs, stores them with one instruction, and the lanes of a warp fill whole rows.
#pragma once

#include <kernelgen/cuda/vector_io.cuh>
#include <kernelgen/gemm/mma_shape.cuh>
#include <kernelgen/gemm/row_totals.cuh>

namespace kernelgen {

template <class Options>
struct MmaEpilogue : MmaShape<Options> {
  using Shape = MmaShape<Options>;
  using Out = typename Options::Out;
  using Options::kGate;
  using Options::kWarpsK;
  using Options::kWarpsM;
  using Shape::kGated;
  using Shape::kTilesM;
  using Shape::kTilesN;
  using Shape::kWarpColumns;

  using Accumulators = float[kTilesM][kTilesN][4];

  // Slab of a warp: 16 rows of float32. 8 floats of padding keep a quad's row apart from the next in the banks.
  static constexpr int kSlabPitch = kWarpColumns + 8;
  static constexpr int kSlabFloats = 16 * kSlabPitch;
  static constexpr int kRun = Shape::TileB::kRun;  // gate columns in front of their up columns, where b is split

  // The product's column behind output `column`: its gate or its up column where it has both.
  __device__ static int gate_column(const GemmMmaParams& p, int column) {
    return kGate == Gate::kInterleaved ? 2 * column : kGate == Gate::kUpFirst ? column + p.n / 2 : column;
  }
  __device__ static int up_column(const GemmMmaParams& p, int column) {
    return kGate == Gate::kInterleaved ? 2 * column + 1 : kGate == Gate::kUpFirst ? column : column + p.n / 2;
  }

  // What is added and multiplied before the activation. `column` is the product's.
  struct Linear {
    const typename Options::Bias* bias;
    const float* scale_b;
    int64_t scale_b_column;
    float scale_a;

    __device__ Linear(const GemmMmaParams& p, int64_t batch, int64_t row)
        : bias(static_cast<const typename Options::Bias*>(p.bias) + batch * p.bias_batch) {
      if constexpr (Options::kRowScales) {
        scale_a = p.scale_a[batch * p.scale_a_batch + row * p.scale_a_row];
        scale_b = static_cast<const float*>(p.scale_b) + batch * p.scale_b_batch;
        scale_b_column = p.scale_b_column;
      }
    }
    __device__ float operator()(float sum, int column) const {
      if constexpr (Options::kRowScales) sum *= scale_a * scale_b[column * scale_b_column];
      if constexpr (Options::kBias) sum += to_float(bias[column]);
      return sum;
    }
  };

  static constexpr bool kFunction = !is_same_v<typename Options::Function, void>;  // the user's, whose arguments are where a bias would be

  using Parts = RowParts<typename Options::Function, 1>;

  // 8 outputs of one row from the 8 (16 when gated) sums they come from. `column` is the first output's, `count` how many
  // of the 8 exist.
  template <int Sums>
  __device__ static void finish(const GemmMmaParams& p, float (&sums)[Sums], int64_t batch, int64_t row, int column, int count, Parts& parts) {
    float values[8];
    const Linear linear(p, batch, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kGated) {
        float gate = sums[kGate == Gate::kInterleaved ? 2 * i : i], up = sums[kGate == Gate::kInterleaved ? 2 * i + 1 : i + 8];
        if ((Options::kBias || Options::kRowScales) && i < count) {
          gate = linear(gate, gate_column(p, column + i));
          up = linear(up, up_column(p, column + i));
        }
        if constexpr (kFunction) values[i] = parts.value(gate, up, batch, row, column + i, p.bias, i < count);
        else values[i] = activate_gate<Options::kActivation, Options::kClamped>(gate, up, p.alpha, p.limit);
      } else if constexpr (kFunction) {
        if (Options::kRowScales && i < count) sums[i] = linear(sums[i], column + i);
        values[i] = parts.value(sums[i], 0.0f, batch, row, column + i, p.bias, i < count);
      } else {
        if ((Options::kBias || Options::kRowScales) && i < count) sums[i] = linear(sums[i], column + i);
        values[i] = activate<Options::kActivation>(sums[i]);
      }
    }
    if constexpr (Options::kAccumulate) {
      // A zero beta means that c is not read, as in BLAS: 0 * NaN would be NaN.
      const auto* c = static_cast<const typename Options::C*>(p.c) + batch * p.c_batch + row * p.c_row + column;
      if (p.beta != 0.0f) {
        if (Options::kVectorOut && count == 8) {
          float addend[8];
          load_elements(addend, c);
#pragma unroll
          for (int i = 0; i < 8; ++i) values[i] = fmaf(p.beta, addend[i], values[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (i < count) values[i] = fmaf(p.beta, to_float(c[i]), values[i]);
          }
        }
      }
    }
    Out* out = static_cast<Out*>(p.out) + batch * p.out_batch + row * p.out_row + column;
    if (Options::kVectorOut && count == 8) {
      store_elements(out, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) out[i] = from_float<Out>(values[i]);
      }
    }
  }

  // The 16 rows of sums[m] into the warp's slab.
  __device__ static void write_slab(float* slab, const float (&sums)[kTilesN][4], int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = slab + Shape::row_of(0, half, lane / 4) * kSlabPitch;
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        if constexpr (Shape::OperandB::kInOrder) {
          *reinterpret_cast<float2*>(row + lane % 4 * 2 + 8 * n) = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) row[Shape::column_of(n, lane % 4 * 2 + i)] = sums[n][2 * half + i];
        }
      }
    }
  }

  // Where the sums of a row's i-th piece of 8 outputs begin in the slab.
  __device__ static int piece_column(int i) {
    return !kGated ? 8 * i : kGate == Gate::kInterleaved ? 16 * i : 8 * i / kRun * 2 * kRun + 8 * i % kRun;
  }

  __device__ static void store(const GemmMmaParams& p, const MmaWork& work, const Accumulators& sums, float* slabs) {
    constexpr int kSums = kGated ? 16 : 8;
    constexpr int kPieces = kWarpColumns / kSums;  // of 8 outputs in a row of the slab
    // Unrolling this loop only pays where several loads of c can be in flight; elsewhere it only costs compile time
    // (1.8 s instead of 0.9 s with bias and silu).
    constexpr int kPiecesAhead = Options::kAccumulate ? 4 : 1;
    const auto warp = Shape::warp_position();
    const int lane = lane_id(), outputs = kGated ? p.n / 2 : p.n;
    // Slabs of the kWarpsK warps of one position lie behind each other in the order in which they are added.
    float* position = slabs + (warp.n * kWarpsM + warp.m) * kWarpsK * kSlabFloats;
    auto sync = [] {
      if constexpr (kWarpsK == 1) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    };
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
      write_slab(position + warp.k * kSlabFloats, sums[m], lane);
      sync();  // the slab (all slabs of the position) is written before its rows are read
#pragma unroll kPiecesAhead
      for (int first = 0; first < 16 * kPieces; first += kWarpSize * kWarpsK) {
        const int piece = first + warp.k * kWarpSize + lane;
        const int r = piece / kPieces, in_row = piece % kPieces;
        const int64_t row = work.row + warp.m * Shape::kWarpRows + m * 16 + r;
        const int column = work.column + (warp.n * kPieces + in_row) * 8;
        Parts parts;
        if (piece < 16 * kPieces && row < work.row_end && column < outputs) {
          float total[kSums];
          const float* part = position + r * kSlabPitch + piece_column(in_row);
          constexpr int kUp = Shape::kSplit ? kRun : 8;  // from a gate sum to its up sum
#pragma unroll
          for (int i = 0; i < kSums; ++i) total[i] = part[i / 8 * kUp + i % 8];
#pragma unroll
          for (int k = 1; k < kWarpsK; ++k) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) total[i] += part[k * kSlabFloats + i / 8 * kUp + i % 8];
          }
          finish(p, total, work.batch, row, column, min(8, outputs - column), parts);
        }
        if constexpr (TotalsOf<typename Options::Function>::kCount > 0) {  // to memory that is where c would be
          constexpr int kLanes = (kPieces & (kPieces - 1)) == 0 ? kPieces : 1;
          const int64_t step = static_cast<int64_t>(ceil_div(outputs, 8 * kLanes)) * p.m;
          parts.template leave<kLanes>(p.c, work.batch * step + static_cast<int64_t>(column / (8 * kLanes)) * p.m + row, p.groups * step,
                                       piece < 16 * kPieces && row < work.row_end && column < outputs);
        }
      }
      sync();  // every lane has read the slab before the next 16 rows overwrite it
    }
  }
};

}  // namespace kernelgen
