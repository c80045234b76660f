// Rows of weights on their way through a warp, for moe/small_cuda: each warp has a ring of its own in shared memory and no barrier
// with others.
//
//   stage   128 bytes of each of kRows rows (8 rows are 1,024 bytes), as many elements of kTokens rows of x, and
//           the scales of blocks; where rows of x are held (small_rows.cuh) none of these
//   copies  cp.async, kStages - 1 steps ahead of the products, over the ends of the units: a warp that begins a new expert has its
//           first rows already
//   product mma m16n8k16, rows of weights as A, tokens as its eight columns
//
// A copy of a warp is 128 bytes, a whole line, of four rows; a lane multiplies 16 bytes twice of each row, which others copied, so a warp
// meets once a step. Tokens that a unit does not have are copies of its last one: a column of a product sees no other column.
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/dependent.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/gemm/gate.cuh>
#include <kernelgen/moe/small_routing.cuh>
#include <kernelgen/moe/small_rows.cuh>
#include <kernelgen/moe/small_weights.cuh>

namespace kernelgen {

// `Options` is the rendered file's struct of compile-time constants: T (of x), Code (of w13, w2), Index, Weight, Bias13, Bias2; kMap,
// kGate, kActivation, kClamped, kOnInput; kBlocks13, kBlocks2 (scales of 128 x 128), kScale13, kScale2 (of rows), kBias13, kBias2; kTokens;
// kUpRows, kUpWarps, kUpSplit, kUpStages, kUpHeld; kDownRows, kDownWarps, kDownSplit, kDownStages, kDownHeld (held: rows of x, or of hidden
// values, of all tokens stay in shared memory), kDownOfUnit.
template <class Options, bool kUp>
struct SmallStream : Options {
  using T = typename Options::T;
  static constexpr bool kHeld = kUp ? Options::kUpHeld : Options::kDownHeld;
  using Weights = SmallWeights<T, typename Options::Code, kHeld>;
  using Operand = typename Weights::Operand;
  using Routing = SmallRouting<Options>;
  using Options::kTokens;

  static constexpr int kRows = kUp ? Options::kUpRows : Options::kDownRows;
  static constexpr int kWarps = kUp ? Options::kUpWarps : Options::kDownWarps;
  static constexpr int kStages = kUp ? Options::kUpStages : Options::kDownStages;
  static constexpr int kSplit = kUp ? Options::kUpSplit : Options::kDownSplit;  // warps of a team: they share K
  static constexpr bool kBlocks = kUp ? Options::kBlocks13 : Options::kBlocks2;
  static constexpr Gate kGate = kUp ? Options::kGate : Gate::kNone;
  static constexpr bool kGated = kGate != Gate::kNone;
  static constexpr int kOutputs = kGated ? kRows / 2 : kRows, kSides = kGated ? 2 : 1;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kEights = kRows / 8;             // of rows
  static constexpr int kTiles = ceil_div(kEights, 2);   // of sixteen
  static constexpr int kColumns = ceil_div(kTokens, 8); // of eight tokens
  static constexpr int kScales = !kBlocks ? 0 : kGated ? max_of(2, kEights) : kEights;
  static constexpr int kHalves = 2, kStepBytes = kHalves * 64;  // of a row
  static constexpr int kStepDepth = kHalves * Weights::kDepth;  // elements
  static constexpr int kTokenBytes = kTokens * 64;              // of a chunk of 8 elements of each lane
  static constexpr int kXAt = kEights * 1024, kStageBytes = kXAt + (kHeld ? 0 : kHalves * Weights::kChunksOfX * kTokenBytes);
  // Scales of 32 come work by work: a warp's steps are neighbours, so that its part of a row of scales is a few neighbouring bytes, which one
  // lane copies. Step by step they were a third of all that was asked for.
  static constexpr bool kFourBit = Weights::kFourBit;
  static constexpr int kScaleStep = kStepDepth / 32;  // of a row
  static_assert(!kFourBit || kScaleStep == 2 * 4, "four in each half of a step");
  static constexpr int kNext = kFourBit ? 1 : kSplit;  // from a warp's step to its next one
  // Scales lie behind the rings of all warps, so that stages begin at multiples of 64 bytes: a copy whose target lies otherwise to 32 bytes
  // than its source is half as many sectors again.
  static constexpr int kScaleBytes = round_up(4 * kScales, 16);
  // The step's scales of 32 as floats: each row's are made by one lane for its quad.
  static constexpr int kFloatBytes = kFourBit ? kScaleStep * 128 : 0;
  static constexpr int kRingBytes = kWarps * (kStages * (kStageBytes + kScaleBytes) + kFloatBytes);
  static_assert(kStageBytes % 64 == 0, "see above");
  static_assert(kRows == 8 || kRows == 16 || kRows == 32 || (kRows == 24 && !kUp), "parts of an mma's rows");
  static_assert(kWarps % kSplit == 0, "teams of warps");
  static constexpr int kTeams = kWarps / kSplit;
  // Hidden rows of one unit at a time are held by each warp for itself, instead of all of them by the block.
  static constexpr bool kOfUnit = !kUp && Options::kDownOfUnit;
  static_assert(!kOfUnit || (kHeld && kSplit == 1), "a warp has whole rows");

  using Sums = float[kTiles][kColumns][4];
  using Rows = SmallRows<T, Operand, Weights::kPerChunk, kSplit>;

  const MoeSmallParams& p;
  const Routing& routing;
  Rows held;
  uint32_t ring, scale_ring, floats, rows_of_scales;  // this warp's
  int scale_pitch, scale_slots;  // bytes of a row of scales of 32; works whose scales are there or on their way
  int lane, group, place;  // row or token of a fragment, and which of its quad
  int part;                // of K
  int steps, bytes;        // of a row of weights
  int pass_steps, passes;  // K in passes: down goes over all units with the hidden rows of one, then of the next
  int tiles, units;        // of outputs, of the routing
  uint32_t inverse;        // of `units`, in 2^-32
  int stage = 0, slot = 0;  // that are multiplied next

  // `rows`: where those that are held lie.
  __device__ SmallStream(const MoeSmallParams& p, const Routing& routing, uint32_t shared, uint32_t rows, int warp, int tiles)
      : p(p), routing(routing), ring(shared + warp * kStages * kStageBytes),
        scale_ring(shared + kWarps * kStages * kStageBytes + warp * kStages * kScaleBytes),
        floats(shared + kWarps * kStages * (kStageBytes + kScaleBytes) + warp * kFloatBytes), lane(lane_id()), group(lane / 4), place(lane % 4),
        part(warp % kSplit), tiles(tiles), units(*routing.units) {
    bytes = (kUp ? p.width : p.inner) / Weights::kPerChunk * 16;
    steps = ceil_div(bytes, kSplit * kStepBytes);
    passes = kUp || kOfUnit ? 1 : p.down_passes, pass_steps = ceil_div(steps, passes);
    scale_pitch = pitch_of_scales(pass_steps), scale_slots = ceil_div(kStages, pass_steps) + 1;
    inverse = ~0u / max(units, 1);
    held.pieces = rows, held.first_step = step_of(0), held.rows = kOfUnit ? kTokens : kUp ? p.tokens : p.tokens * p.k, held.steps = pass_steps, held.depth = kUp ? p.width : p.inner;
    if constexpr (kOfUnit) held.pieces += warp * held.bytes();
    rows_of_scales = rows + (kOfUnit ? kWarps : 1) * held.bytes() + warp * scale_slots * kRows * scale_pitch;
  }

  // Of those of `steps` steps and the bytes before them in the first 16: an odd number of these, as rows are read by neighbouring lanes.
  __device__ static int pitch_of_scales(int steps) { return (((kScaleStep * steps + 30) / 16) | 1) * 16; }

  // Of all warps that share K, the step that is this one's `step`-th.
  __device__ int step_of(int step) const { return kFourBit ? part * steps + step : step * kSplit + part; }

  // Row `i` of the eight rows `eight` of a tile whose first output is `output`.
  __device__ static int row_of(const MoeSmallParams& p, int output, int eight, int i) {
    if constexpr (!kGated) {
      return output + 8 * eight + i;
    } else {
      // 8 rows: four gates and their ups; more: eight of each in turn.
      const bool second = kRows == 8 ? i >= 4 : eight % 2 == 1;
      const int j = output + (kRows == 8 ? i % 4 : 8 * (eight / 2) + i);
      if constexpr (kGate == Gate::kInterleaved) {
        return 2 * j + second;
      } else {
        return j + (second == (kGate == Gate::kGateFirst) ? p.inner : 0);
      }
    }
  }
  __device__ int64_t row_bytes() const { return kUp ? p.w13_row : p.w2_row; }
  __device__ static int outputs(const MoeSmallParams& p) { return kUp ? p.inner : p.width; }
  __device__ static int last_row(const MoeSmallParams& p) { return (kGated ? 2 * p.inner : outputs(p)) - 1; }

  // What is copied next. Work `at` is a unit and a tile of outputs; a warp takes every `stride`-th, in each pass.
  struct Cursor {
    int first, at, stride, total, pass, step, end;
    const char* weights[kSides];  // of this lane's gate and up among the first four outputs; rows of others are so many strides further
    int outputs;                  // from this lane's to the end
    const T* x[kColumns];
    const float* scales;
    int slot = 0;  // of the next work's scales of 32
  };

  __device__ Cursor begin(int at, int stride, int total) const {
    Cursor c;
    c.first = c.at = at, c.stride = stride, c.total = total, c.pass = 0;
    if (at < total) aim(c);
    return c;
  }

  // Neighbours in time are units of the same tile: those of one expert meet in L2.
  __device__ int tile_of(int at) const {
    if constexpr (!kUp) return static_cast<int>(blockIdx.x);
    const int tile = static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(at)) * inverse >> 32);  // or one too few
    return tile + (at - tile * units >= units);
  }
  __device__ typename Routing::Unit unit_of(int at) const { return routing.unit(kUp ? at - tile_of(at) * units : at); }

  // The next work. Its scales of 32 are copied at once.
  __device__ void aim(Cursor& c) const {
    const auto unit = unit_of(c.at);
    const int output = tile_of(c.at) * kOutputs;
    c.step = c.pass * pass_steps, c.end = min(c.step + pass_steps, steps);
    const int before = step_of(c.step);
    const char* base = kUp ? p.w13 + unit.expert * p.w13_expert : p.w2 + unit.expert * p.w2_expert;
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      const int row = row_of(p, output, kRows == 8 ? 0 : side, (kRows == 8 ? 4 * side : 0) + lane / 8);
      c.weights[side] = base + row * row_bytes() + before * kStepBytes + lane % 8 * 16;
    }
    c.outputs = outputs(p) - output - lane / 8;
#pragma unroll
    for (int t = 0; t < kColumns && !kHeld; ++t) {
      const int slot = slot_of(unit, 8 * t + group);
      c.x[t] = kUp ? static_cast<const T*>(p.x) + slot / p.k * p.x_row : static_cast<const T*>(p.hidden) + static_cast<int64_t>(slot) * p.inner;
      c.x[t] += before * kStepDepth + place * Weights::kPerChunk;
    }
    if constexpr (kBlocks) {
      const int entry = min(lane, kScales - 1), row = min(kRows == 8 ? row_of(p, output, 0, 4 * entry) : row_of(p, output, entry, 0), last_row(p));
      const auto* scale = static_cast<const float*>(kUp ? p.scale13 : p.scale2);
      c.scales = scale + unit.expert * (kUp ? p.scale13_expert : p.scale2_expert) + row / 128 * (kUp ? p.scale13_row : p.scale2_row);
    }
    if constexpr (kFourBit) {
      if (kRows == kWarpSize || lane < kRows) {
        const char *row = scales_of(unit.expert, output, lane / 8, lane % 8), *first = row + before * kScaleStep;
        const char* from = first - skew_of(first);
        const int end = static_cast<int>(row - from) + (kUp ? p.width : p.inner) / 32;
        const uint32_t target = rows_of_scales + (c.slot * kRows + lane) * scale_pitch;
#pragma unroll 1
        for (int at = 0; at < scale_pitch; at += 16) copy_prefix<16>(target + at, from + at, max(0, min(16, end - at)));
      }
      c.slot = c.slot + 1 == scale_slots ? 0 : c.slot + 1;
    }
  }

  // Of a column of a product; behind the unit's tokens the last one's.
  __device__ int slot_of(const typename Routing::Unit& unit, int column) const {
    return routing.sorted[unit.first + min(column, unit.count - 1)];
  }
  __device__ int held_row(const typename Routing::Unit& unit, int column) const {
    if constexpr (kOfUnit) return min(column, unit.count - 1);
    const int slot = slot_of(unit, column);
    return kUp ? slot / p.k : slot;
  }

  // E8M0 scales of a row.
  __device__ const char* scales_of(int expert, int output, int eight, int i) const {
    const int row = min(row_of(p, output, eight, i), last_row(p));
    const auto* scale = static_cast<const char*>(kUp ? p.scale13 : p.scale2);
    return scale + expert * (kUp ? p.scale13_expert : p.scale2_expert) + row * (kUp ? p.scale13_row : p.scale2_row);
  }
  // Bytes from the beginning of 16.
  __device__ static int skew_of(const char* address) { return static_cast<int>(reinterpret_cast<uint64_t>(address) & 15); }

  __device__ void advance(Cursor& c) const {
    if (c.at >= c.total) return;
    if (++c.step < c.end) {
#pragma unroll
      for (int side = 0; side < kSides; ++side) c.weights[side] += kNext * kStepBytes;
#pragma unroll
      for (int t = 0; t < kColumns && !kHeld; ++t) c.x[t] += kNext * kStepDepth;
      return;
    }
    c.at += c.stride;
    if (c.at >= c.total && ++c.pass < passes) c.at = c.first;
    if (c.at < c.total) aim(c);
  }

  __device__ uint32_t stage_at(int index) const { return ring + index * kStageBytes; }
  __device__ uint32_t scales_at(int index) const { return scale_ring + index * kScaleBytes; }

  // Where a row's 16 bytes `chunk` of its 128 lie among those of eight rows. All of a row, four chunks of two neighbouring rows (a quarter
  // of a warp's load), and for mxfp4 the same chunk of all rows (ldmatrix) come from different banks. Chunk + 4 is 64 bytes further or
  // before: ^ 64.
  __device__ static int chunk_at(int row, int chunk) { return row * 128 + (chunk ^ (row % 2 * 4 + (kFourBit ? row / 2 : 0))) * 16; }

  // Whether half `half` of the step has x for this lane.
  __device__ bool exists(const Cursor& c, int half) const {
    return step_of(c.step) * kStepBytes + half * 64 + place * 16 < bytes;
  }

  __device__ void copy_weights(const Cursor& c, int index) const {
    if (c.at >= c.total) return;
    const uint32_t stage = stage_at(index);
    const bool valid = step_of(c.step) * kStepBytes + lane % 8 * 16 < bytes;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {  // rows behind the last output are zeros
      const int eight = i / 2, side = kSides == 1 ? 0 : kRows == 8 ? i : eight % 2;
      const int further = kSides == 1 ? 4 * i : kRows == 8 ? 0 : eight / 2 * 8 + i % 2 * 4;
      const char* source = c.weights[side] + further * (kGate == Gate::kInterleaved ? 2 : 1) * row_bytes();
      cp_async_16(stage + eight * 1024 + chunk_at(i % 2 * 4 + lane / 8, lane % 8), source, valid && further < c.outputs);
    }
    if constexpr (kBlocks) {
      const int block = step_of(c.step) * kStepDepth / 128;
      if (lane < kScales) cp_async_4(scales_at(index) + 4 * lane, c.scales + block * (kUp ? p.scale13_block : p.scale2_block),
                                     step_of(c.step) * kStepBytes < bytes);
    }
  }

  __device__ void copy_x(const Cursor& c, int index) const {
    if constexpr (!kHeld) {
      const uint32_t stage = stage_at(index);
      constexpr int kChunks = Weights::kChunksOfX;
      if (c.at >= c.total) return;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const bool valid = exists(c, half);
#pragma unroll
        for (int i = 0; i < kColumns * kChunks; ++i) {
          const int t = i / kChunks, chunk = i % kChunks;
          const uint32_t target = stage + kXAt + (half * kChunks + chunk) * kTokenBytes + t * 512 + lane * 16;
          if (kTokens >= 8 || group < kTokens) cp_async_16(target, c.x[t] + half * Weights::kDepth + 8 * chunk, valid);
        }
      }
    }
  }

  __device__ void clear(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kTiles * kColumns * 4; ++i) sums[i / (kColumns * 4)][i / 4 % kColumns][i % 4] = 0.0f;
  }

  // Where a lane finds its piece of x of a step, and how far from it the next one is.
  struct X {
    uint32_t at[kColumns];
    int next;
  };

  // One half's products: rows and x as they lie in a stage. `fresh`: the sums are nothing yet.
  __device__ void multiply_half(Sums& sums, uint32_t from, const X& of_x, int half, bool fresh) const {
    uint32_t rows[2 * kTiles][4], x[kColumns][Weights::kChunksOfX][4];
#pragma unroll
    for (int i = 0; i < kEights; ++i) load_chunk(rows[i], from + i * 1024 + (chunk_at(group, place) ^ half * 64));
    if constexpr (kEights % 2 == 1) rows[kEights][0] = rows[kEights][1] = rows[kEights][2] = rows[kEights][3] = 0;
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
#pragma unroll
      for (int i = 0; i < Weights::kChunksOfX; ++i) load_chunk(x[t][i], of_x.at[t] + (half * Weights::kChunksOfX + i) * of_x.next);
    }
#pragma unroll
    for (int i = 0; i < Weights::kProducts; ++i) {
      uint32_t b[kColumns][2];
#pragma unroll
      for (int t = 0; t < kColumns; ++t) Weights::columns(b[t][0], b[t][1], x[t], i);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t a[4];
        Weights::fragment(a, rows[2 * m], rows[2 * m + 1], i);
#pragma unroll
        for (int t = 0; t < kColumns; ++t) {
          if (fresh && i == 0) {
            mma_m16n8k16_fresh<Operand>(sums[m][t], a, b[t][0], b[t][1]);
          } else {
            mma_m16n8k16<Operand>(sums[m][t], a, b[t][0], b[t][1]);
          }
        }
      }
    }
  }

  // Where scale `i` of a step is as a float, of row `row` of each eight; those of four eights are neighbours.
  __device__ uint32_t floats_at(int i, int row) const { return floats + i * 128 + row * 16; }

  // A step's E8M0 scales of a lane's row, from byte `from` of shared memory on, become floats there; behind the row's end they are 0.
  __device__ void widen_scales(uint32_t from) const {
    if (kRows < kWarpSize && lane >= kRows) return;
    const uint32_t target = floats_at(0, lane % 8) + lane / 8 * 4;
    uint32_t words[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) words[j] = load_word((from & ~3u) + 4 * j);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint32_t four = static_cast<uint32_t>((static_cast<uint64_t>(words[half + 1]) << 32 | words[half]) >> 8 * (from & 3));
      // Bytes of equal bits: 2^-127, which is a subnormal, and 255, which means NaN.
      const uint32_t special = ~(((four ^ four >> 1) & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u;
#pragma unroll
      for (int i = 0; i < 4; ++i) store_word(target + (4 * half + i) * 128, (i == 3 ? four >> 1 : four << (23 - 8 * i)) & 0x7f800000u);
      if (special == 0) continue;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const uint32_t code = four >> (8 * i) & 0xff;
        if (code == 0 || code == 255) store_word(target + (4 * half + i) * 128, code == 0 ? 0x00400000u : 0x7fc00000u);
      }
    }
  }

  // A step's products with scales of 32.
  __device__ void multiply_scaled(Sums& sums, uint32_t from, const X& of_x) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      uint32_t rows[2 * kTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kEights; ++i) ldmatrix_x4(rows[i], from + i * 1024 + (chunk_at(lane % 8, lane / 8) ^ half * 64));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t scales[4], x[kColumns][4];
        load_chunk(scales, floats_at(4 * half + i, group));
#pragma unroll
        for (int t = 0; t < kColumns; ++t) load_chunk(x[t], of_x.at[t] + (half * 4 + i) * of_x.next);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          uint32_t low[4], high[4];
          Weights::widen_four_bit(low, rows[2 * m][i]);
          Weights::widen_four_bit(high, rows[2 * m + 1][i]);
          const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
          const float scale[2] = {__uint_as_float(scales[2 * m]), __uint_as_float(scales[2 * m + 1])};
#pragma unroll
          for (int t = 0; t < kColumns; ++t) {
            float block[4];
            mma_m16n8k16_fresh<Operand>(block, first, x[t][0], x[t][1]);
            mma_m16n8k16<Operand>(block, second, x[t][2], x[t][3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[m][t][j] = fmaf(block[j], scale[j / 2], sums[m][t][j]);
          }
        }
      }
    }
  }

  __device__ void multiply(Sums& sums, int index, const X& of_x) const {
    const uint32_t from = stage_at(index), from_scales = scales_at(index);
    if constexpr (kFourBit) {
      multiply_scaled(sums, from, of_x);
    } else if constexpr (!kBlocks) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_half(sums, from, of_x, half, false);
    } else {
      Sums block;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_half(block, from, of_x, half, half == 0);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int entry = kRows == 8 ? (kGated ? group / 4 : 0) : 2 * m + half;
          scale[half] = __uint_as_float(load_word(from_scales + 4 * entry));
        }
#pragma unroll
        for (int t = 0; t < kColumns; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][t][i] = fmaf(block[m][t][i], scale[i / 2], sums[m][t][i]);
        }
      }
    }
  }

  // Back to x as it was.
  __device__ void unscale(Sums& sums, const typename Routing::Unit& unit) const {
#pragma unroll
    for (int i = 0; i < kColumns * 2; ++i) {
      const int t = i / 2, j = i % 2, row = held_row(unit, 8 * t + 2 * place + j);
      const float factor = __uint_as_float(load_word(held.factor_at(row, part)));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) sums[m][t][j] *= factor, sums[m][t][2 + j] *= factor;
    }
  }

  // One work's products, of this warp's part of K; `next` is what is copied meanwhile.
  __device__ void run(Sums& sums, Cursor& next, int at, int pass) {
    clear(sums);
    uint32_t scales = 0;
    if constexpr (kFourBit) {
      const char* row = scales_of(unit_of(at).expert, tile_of(at) * kOutputs, lane % kRows / 8, lane % 8);
      scales = rows_of_scales + (slot * kRows + lane) * scale_pitch + skew_of(row + step_of(pass * pass_steps) * kScaleStep);
      slot = slot + 1 == scale_slots ? 0 : slot + 1;
    }
    X of_x;
    const int token = (kTokens >= 8 ? group : group % kTokens) * 4 + place;
    of_x.next = kHeld ? held.piece_bytes() : kTokenBytes;
    if constexpr (kHeld) {
      const auto unit = unit_of(at);
#pragma unroll
      for (int t = 0; t < kColumns; ++t) of_x.at[t] = held.address(part, 0, held_row(unit, 8 * t + group), place);
    }
#pragma unroll 1
    for (int step = pass * pass_steps; step < min((pass + 1) * pass_steps, steps); ++step) {
      cp_async_wait<kStages - 2>();
      __syncwarp();  // every lane's copies have landed, and all have read the stage that is filled now
      const int from = step_of(step) * kStepBytes;
      if constexpr (kFourBit) widen_scales(scales), scales += kScaleStep;
      const int target = stage == 0 ? kStages - 1 : stage - 1;
      copy_weights(next, target);
      copy_x(next, target);
      cp_async_commit();
      advance(next);
#pragma unroll
      for (int t = 0; t < kColumns && !kHeld; ++t) of_x.at[t] = stage_at(stage) + kXAt + t * 512 + token * 16;
      if constexpr (kFourBit) __syncwarp();  // scales are there as floats
      if (from < bytes) multiply(sums, stage, of_x);
#pragma unroll
      for (int t = 0; t < kColumns && kHeld; ++t) of_x.at[t] += Rows::kPerStep * of_x.next;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if constexpr (Rows::kConverted) unscale(sums, unit_of(at));
  }
};

}  // namespace kernelgen
