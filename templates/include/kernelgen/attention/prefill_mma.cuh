// Attention forward over dense or ragged queries with mma.sync tensor cores (sm_80 and later).
//
//   out[i] = sum_j softmax_j(scale * q[i].k[j]) v[j]       lse[i] = ln sum_j exp(scale * q[i].k[j])
//
// One block owns kBlockQ queries of one head and walks the keys they may attend to in tiles of kBlockK, keeping for
// each query a running maximum, a running sum and the unnormalised output in registers (online softmax). A warp owns
// kBlockQ / kWarps whole rows, so that the softmax never leaves a warp:
//
//   Q (kBlockQ x kDepth)                            global -> shared, once
//   K (kBlockK x kDepth), V (kBlockK x kSplitColumns)  global -> shared, each through a ring of kStages slots
//   S = Q K^T  (kWarpRows x kBlockK)                float32 accumulator fragments
//   S -> soft-cap -> mask -> P = 2^(S - max)        packed to 16 bits: the accumulator layout is the A operand's
//   O += P V   (kWarpRows x kSplitColumns)          float32 accumulator fragments
//
// Query i of a request has position i + seq_k - seq_q. It attends to the interval of keys [position - left,
// position + right] within [0, seq_k): causal attention is right = 0. Everything about masks below is therefore about
// one interval per row.
//
// Values that a row may not attend to must not reach it even if they are NaN or inf, and 0 * NaN is NaN. Rows past
// seq_k are zero-filled on the way to shared memory. In a tile that some rows see in part, each thread checks the
// values it copied; if any is not finite, absorb_nonfinite() adds those to the rows that may see them and replaces
// them by 0 before the product. Tiles that every row sees in full pay nothing.
#pragma once

#include <kernelgen/cuda/conversions.cuh>
#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/ldmatrix.cuh>
#include <kernelgen/cuda/math.cuh>
#include <kernelgen/cuda/memory.cuh>
#include <kernelgen/cuda/mma.cuh>
#include <kernelgen/cuda/shared_tile.cuh>
#include <kernelgen/cuda/types.cuh>
#include <kernelgen/cuda/warp.cuh>

namespace kernelgen {

// Strides are in elements. Ragged tensors have no batch stride (0).
struct PrefillMmaParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                   // null when not asked for
  const int32_t* cu_seqlens_q;  // (batch + 1), null when dense
  const int32_t* cu_seqlens_k;
  const int32_t* kv_lens;       // (batch), null when every key counts
  int64_t q_batch, q_row, q_head;
  int64_t k_batch, k_row, k_head;
  int64_t v_batch, v_row, v_head;
  int64_t out_batch, out_row, out_head;
  int64_t lse_batch, lse_row, lse_head;
  int32_t seq_q, seq_k;  // dense lengths; ragged requests read theirs from cu_seqlens
  int32_t batch;
  int32_t group_size;  // query heads per key/value head
  int32_t window_left, window_right;
  uint32_t q_keep, q_flip;  // bit masks applied to each query element: negates for a negative scale, clears for 0
  float logit_scale;        // float32 logits to base-2 exponents: |scale| * log2(e), or soft_cap * log2(e)
  float cap_scale;          // |scale| / soft_cap
};

// `Options` is the rendered file's struct of compile-time constants:
//   Element; kHeadDim, kHeadDimV; kBlockQ, kBlockK, kWarps, kStages, kQueryInRegisters, kValueSplits;
//   kRagged, kKvLens, kBoundedLeft, kBoundedRight, kSoftCap, kLse; kAlignment
template <class Options>
struct PrefillMma : Options {
  using T = typename Options::Element;
  using Options::kBlockK;
  using Options::kBlockQ;
  using Options::kHeadDim;
  using Options::kHeadDimV;
  using Options::kStages;
  using Options::kValueSplits;
  using Options::kWarps;

  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = kBlockQ / kWarps;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kDepth = round_up(kHeadDim, 16);
  static constexpr int kSplitColumns = round_up(ceil_div(kHeadDimV, kValueSplits), 16);  // value columns of a block
  static constexpr int kKeyTiles = kBlockK / 8;
  static constexpr int kValueTiles = kSplitColumns / 8;
  // Only a bounded side makes rows of one tile see different keys.
  static constexpr bool kWindowed = Options::kBoundedLeft || Options::kBoundedRight;

  static_assert(kBlockQ % (16 * kWarps) == 0, "a warp owns whole 16-row tiles");
  static_assert(kBlockK % 16 == 0, "P is the A operand of k16 steps");

  using QueryTile = SharedTile<kBlockQ, kDepth>;
  using KeyTile = SharedTile<kBlockK, kDepth>;
  using ValueTile = SharedTile<kBlockK, kSplitColumns>;
  using OutTile = SharedTile<kBlockQ, kSplitColumns>;

  // Shared memory: Q, then kStages key tiles, then kStages value tiles. The output tile reuses the front at the end.
  static constexpr int kKeyBase = QueryTile::kBytes;
  static constexpr int kValueBase = kKeyBase + kStages * KeyTile::kBytes;
  static constexpr int kSharedBytes = max_of(kValueBase + kStages * ValueTile::kBytes, OutTile::kBytes);

  using Scores = float[kRowTiles][kKeyTiles][4];
  using Weights = uint32_t[kRowTiles][kBlockK / 16][4];  // P as A fragments
  using Output = float[kRowTiles][kValueTiles][4];

  // What this block works on.
  struct Work {
    int warp;                // of this thread
    int request, head, value_column;
    int first_query;         // of the tile, within the request
    int seq_q, seq_k;        // of the request
    int q_start, k_start;    // rows in front of the request (ragged)
  };

  // A lane holds two rows of each 16-row tile: row_half 0 is row lane / 4, row_half 1 is 8 below.
  static constexpr int kLaneRows = 2 * kRowTiles;
  __device__ static int row_in_block(const Work& work, int lane_row) {
    return work.warp * kWarpRows + (lane_row / 2) * 16 + (lane_row % 2) * 8 + lane_id() / 4;
  }

  // Keys [first, last) that the query may attend to.
  struct Interval {
    int first, last;
  };
  __device__ static Interval visible_keys(const PrefillMmaParams& p, const Work& work, int query) {
    const int position = query + work.seq_k - work.seq_q;
    Interval keys{0, work.seq_k};
    if constexpr (Options::kBoundedLeft) keys.first = max(0, position - p.window_left);
    if constexpr (Options::kBoundedRight) keys.last = min(work.seq_k, position + p.window_right + 1);
    return keys;
  }

  // Copies between global rows and a shared tile: a thread keeps its column of chunks and walks down the rows.
  template <class Tile>
  struct Copier {
    static constexpr int kAcross =
        Tile::kChunks % 8 == 0 ? 8 : Tile::kChunks % 4 == 0 ? 4 : Tile::kChunks % 2 == 0 ? 2 : 1;
    static constexpr int kRowStep = kThreads / kAcross;

    __device__ static int chunk() { return threadIdx.x % kAcross; }
    __device__ static int row() { return threadIdx.x / kAcross; }

    // f(down, right) for every chunk (row() + down, chunk() + right) of this thread.
    template <class Function>
    __device__ static void each(Function f) {
#pragma unroll
      for (int down = 0; down < Tile::kRows; down += kRowStep) {
        if (Tile::kRows % kRowStep != 0 && row() >= Tile::kRows - down) break;
#pragma unroll
        for (int right = 0; right < Tile::kChunks; right += kAcross) f(down, right);
      }
    }
    __device__ static int offset(int down, int right) { return Tile::offset(row() + down, chunk() + right); }

    // Where this thread's first chunk comes from, in the tile at `source`.
    __device__ static const T* start(const T* source, int64_t row_stride) {
      return source + row() * row_stride + chunk() * 8;
    }

    // Starts copying rows [0, rows) x columns [0, columns) of the tile at `from` (see start) and moves `from` to the
    // next tile; the rest of the shared tile becomes 0.
    __device__ static void load(uint32_t shared, const T*& from, int64_t row_stride, int rows, int columns) {
      each([&](int down, int right) {
        const bool valid = down < rows - row() && (Tile::kChunks * 8 == columns || chunk() * 8 < columns - right * 8);
        copy_16_aligned<Options::kAlignment>(shared + offset(down, right), from + down * row_stride + right * 8, valid);
      });
      from += Tile::kRows * row_stride;
    }

    // Replaces each 16-byte chunk w of this thread by f(w).
    template <class Function>
    __device__ static void rewrite(uint32_t shared, Function f) {
#pragma unroll 1
      for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += kThreads) {
        uint32_t w[4];
        const uint32_t address = shared + Tile::offset(i / Tile::kChunks, i % Tile::kChunks);
        load_chunk(w, address);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = f(w[j]);
        store_chunk(address, w);
      }
    }
  };

  // Finds this block's request, head and query tile. The grid is (query tiles, heads x value splits, requests), for a
  // ragged batch (a bound on the query tiles of all requests, heads x value splits, 1). False past the last tile.
  __device__ static bool find_work(const PrefillMmaParams& p, Work& work) {
    work.warp = warp_id();
    int tile = blockIdx.x;
    work.head = blockIdx.y / kValueSplits;
    work.value_column = blockIdx.y % kValueSplits * kSplitColumns;
    work.request = blockIdx.z;
    work.seq_q = p.seq_q;
    work.seq_k = p.seq_k;
    work.q_start = work.k_start = 0;
    int tiles = gridDim.x;
    if constexpr (Options::kRagged) {
      // The tile is found by a prefix sum of ceil(length / kBlockQ), 32 requests at a time, in every warp alike.
      int before = 0;
      int first = 0;
      for (;; first += kWarpSize) {
        if (first >= p.batch) return false;
        const int b = first + lane_id();
        const int length = b < p.batch ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : 0;
        const int own = (length + kBlockQ - 1) / kBlockQ;
        const int through = before + warp_inclusive_scan(own);
        const uint32_t past = __ballot_sync(kFullWarp, through > tile);
        if (past != 0) {
          const int lane = __ffs(past) - 1;
          work.request = first + lane;
          tiles = __shfl_sync(kFullWarp, own, lane);
          tile -= __shfl_sync(kFullWarp, through, lane) - tiles;
          break;
        }
        before = __shfl_sync(kFullWarp, through, kWarpSize - 1);
      }
      work.q_start = p.cu_seqlens_q[work.request];
      work.k_start = p.cu_seqlens_k[work.request];
      work.seq_q = p.cu_seqlens_q[work.request + 1] - work.q_start;
      work.seq_k = p.cu_seqlens_k[work.request + 1] - work.k_start;
    }
    if constexpr (Options::kKvLens) work.seq_k = min(max(p.kv_lens[work.request], 0), work.seq_k);
    // Under a right bound later tiles see more keys: they start first, so that the last wave is of short ones.
    if constexpr (Options::kBoundedRight) tile = tiles - 1 - tile;
    work.first_query = tile * kBlockQ;
    return true;
  }

  // A fragments of the warp's query rows for k16 step `step`.
  __device__ static void load_queries(uint32_t (&fragments)[kRowTiles][4], uint32_t q_lane, int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ldmatrix_x4(fragments[m], QueryTile::chunk_step(q_lane, 2 * step) + m * 16 * QueryTile::kRowBytes);
    }
  }

  // scores = Q K^T for the warp's rows.
  __device__ static void multiply_keys(
      Scores& scores, const uint32_t (&q_registers)[kDepth / 16][kRowTiles][4], uint32_t q_lane, uint32_t k_lane) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      uint32_t a[kRowTiles][4];
      if constexpr (Options::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) a[i / 4][i % 4] = q_registers[step][i / 4][i % 4];
      } else {
        load_queries(a, q_lane, step);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, KeyTile::chunk_step(k_lane, 2 * step) + n * 8 * KeyTile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(scores[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<T>(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // output += P V
  __device__ static void multiply_values(Output& output, const Weights& weights, uint32_t v_lane) {
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, ValueTile::chunk_step(v_lane, n) + step * 16 * ValueTile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(output[m][n], weights[m][step], b[0], b[1]);
          mma_m16n8k16<T>(output[m][n + 1], weights[m][step], b[2], b[3]);
        }
      }
    }
  }

  // Sets scores outside each row's interval to -inf, whatever they are (K may hold NaN there).
  __device__ static void mask(Scores& scores, const PrefillMmaParams& p, const Work& work, int first_key) {
    const int column = first_key + lane_id() % 4 * 2;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const Interval keys = visible_keys(p, work, work.first_query + row_in_block(work, r));
      const int first = keys.first - column, last = keys.last - column;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[r / 2][n][r % 2 * 2 + e];
          const bool hidden = 8 * n + e >= last || (Options::kBoundedLeft && 8 * n + e < first);
          score = hidden ? -infinity() : score;
        }
      }
    }
  }

  // One step of the online softmax: weights = 2^(score * scale - maximum), and sums and output follow.
  //
  // The reference point (`maxima`, in base-2 exponents) follows the true maximum only when that has grown by more
  // than kRescaleSlack: most tiles then skip the pass over `output`. Exponentials stay below 2^kRescaleSlack, which
  // fp16 holds, and the final division makes the result the same.
  static constexpr float kRescaleSlack = 8.0f;
  __device__ static void softmax(
      const Scores& scores, Weights& weights, Output& output, float (&maxima)[kLaneRows], float (&sums)[kLaneRows],
      float scale) {
    float raised[kLaneRows];
    bool move = false;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        top = fmaxf(top, fmaxf(scores[r / 2][n][r % 2 * 2], scores[r / 2][n][r % 2 * 2 + 1]));
      }
      raised[r] = quad_max(top) * scale;
      move |= raised[r] > maxima[r] + kRescaleSlack;
    }
    if (__any_sync(kFullWarp, move)) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        const float next = fmaxf(maxima[r], raised[r]);
        // While nothing has been weighted the output is 0 (or what absorb_nonfinite put there): nothing to rescale,
        // and neither -inf - -inf nor inf * 0 may appear.
        const float factor = maxima[r] == -infinity() ? 1.0f : exp2_approx(maxima[r] - next);
        maxima[r] = next;
        sums[r] *= factor;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          output[r / 2][n][r % 2 * 2] *= factor;
          output[r / 2][n][r % 2 * 2 + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float reference = maxima[r] == -infinity() ? 0.0f : maxima[r];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const float even = exp2_approx(fmaf(scores[r / 2][n][r % 2 * 2], scale, -reference));
        const float odd = exp2_approx(fmaf(scores[r / 2][n][r % 2 * 2 + 1], scale, -reference));
        sums[r] += even + odd;
        weights[r / 2][n / 2][n % 2 * 2 + r % 2] = pack_pair<T>(even, odd);
      }
    }
  }

  // Whether a value that this thread copied into the tile is inf or NaN. Its own copies have landed; no barrier needed.
  __device__ static bool copied_nonfinite(uint32_t v_tile) {
    uint32_t found = 0;
    Copier<ValueTile>::each([&](int down, int right) {
      uint32_t w[4];
      load_chunk(w, v_tile + Copier<ValueTile>::offset(down, right));
#pragma unroll
      for (int i = 0; i < 4; ++i) found |= nonfinite_halves<T>(w[i]);
    });
    return found != 0;
  }

  // Adds the tile's inf and NaN values to the output of the rows that may attend to them (the result is inf or NaN
  // whatever their weight), then replaces them by 0. Rare: called by the whole block when a partly visible tile
  // holds such a value.
  __device__ static void absorb_nonfinite(
      Output& output, const PrefillMmaParams& p, const Work& work, int first_key, uint32_t v_tile) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll 1
      for (int key = 0; key < kBlockK; ++key) {
        const uint32_t word = load_word(v_tile + ValueTile::offset(key, n) + lane_id() % 4 * 4);
        const uint32_t bad = nonfinite_halves<T>(word);
        if (bad == 0) continue;
        const float2 value = unpack_pair<T>(word & ((bad >> 15) * 0xffffu));
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          const Interval keys = visible_keys(p, work, work.first_query + row_in_block(work, r));
          if (first_key + key < keys.first || first_key + key >= keys.last) continue;
          output[r / 2][n][r % 2 * 2] += value.x;
          output[r / 2][n][r % 2 * 2 + 1] += value.y;
        }
      }
    }
    __syncthreads();  // every warp has read the tile before anyone clears parts of it
    Copier<ValueTile>::rewrite(v_tile, [](uint32_t w) { return w & ~((nonfinite_halves<T>(w) >> 15) * 0xffffu); });
    __syncthreads();  // the cleared tile is complete before the product reads it
  }

  // Normalises, rounds and stores the warp's rows through shared memory, in 16-byte pieces; stores the LSE.
  __device__ static void store(
      const PrefillMmaParams& p, const Work& work, Output& output, const float (&maxima)[kLaneRows],
      float (&sums)[kLaneRows], uint32_t shared) {
    __syncthreads();  // the output tile lies over Q, K and V: every warp is done reading them
    const int pair = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float sum = quad_sum(sums[r]);
      const float inverse = sum == 0.0f ? 0.0f : reciprocal_approx(sum);  // 0: the row attended to nothing
      const int row = row_in_block(work, r);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        const uint32_t packed =
            pack_pair<T>(output[r / 2][n][r % 2 * 2] * inverse, output[r / 2][n][r % 2 * 2 + 1] * inverse);
        store_word(shared + OutTile::offset(row, n) + pair * 4, packed);
      }
      if constexpr (Options::kLse) {
        const int query = work.first_query + row;
        if (pair == 0 && query < work.seq_q && work.value_column == 0) {
          p.lse[work.request * p.lse_batch + int64_t{work.q_start + query} * p.lse_row + work.head * p.lse_head] =
              (maxima[r] + log2_approx(sum)) * kLn2;
        }
      }
    }
    __syncwarp();  // a warp reads back only the rows that it wrote
    constexpr int kOutChunks = kSplitColumns / 8;
    const int columns = min(kSplitColumns, kHeadDimV - work.value_column);
    T* out = static_cast<T*>(p.out) + work.request * p.out_batch + work.head * p.out_head + work.value_column;
#pragma unroll
    for (int piece = 0; piece < kWarpRows * kOutChunks; piece += kWarpSize) {
      const int row = work.warp * kWarpRows + (piece + lane_id()) / kOutChunks;
      const int chunk = (piece + lane_id()) % kOutChunks;
      const int query = work.first_query + row;
      if (query >= work.seq_q || chunk * 8 >= columns) continue;
      uint32_t w[4];
      load_chunk(w, shared + OutTile::offset(row, chunk));
      store_16_aligned<Options::kAlignment>(out + int64_t{work.q_start + query} * p.out_row + chunk * 8, w);
    }
  }

  __device__ static void run(const PrefillMmaParams& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t shared = shared_address(shared_memory);
    Work work;
    if (!find_work(p, work)) return;

    // Key tiles [tile, end) hold what the block's first and last query may see together. Intervals move right with the
    // query, so everything in between is covered.
    const int last_query = min(work.first_query + kBlockQ, work.seq_q) - 1;
    int tile = visible_keys(p, work, work.first_query).first / kBlockK;
    const int end = (visible_keys(p, work, last_query).last + kBlockK - 1) / kBlockK;

    const int kv_head = work.head / p.group_size;
    const T* q = static_cast<const T*>(p.q) + work.request * p.q_batch + work.head * p.q_head;
    const T* k = static_cast<const T*>(p.k) + work.request * p.k_batch + kv_head * p.k_head;
    const T* v = static_cast<const T*>(p.v) + work.request * p.v_batch + kv_head * p.v_head + work.value_column;
    const T* q_from = Copier<QueryTile>::start(q + int64_t{work.q_start + work.first_query} * p.q_row, p.q_row);
    const T* k_from = Copier<KeyTile>::start(k + int64_t{work.k_start + tile * kBlockK} * p.k_row, p.k_row);
    const T* v_from = Copier<ValueTile>::start(v + int64_t{work.k_start + tile * kBlockK} * p.v_row, p.v_row);
    const int value_columns = kHeadDimV % kSplitColumns == 0 ? kSplitColumns
                                                             : min(kSplitColumns, kHeadDimV - work.value_column);

    // Tiles are loaded in order, each once.
    auto load_keys = [&](int t) {
      if (t < end) {
        Copier<KeyTile>::load(shared + kKeyBase + t % kStages * KeyTile::kBytes, k_from, p.k_row,
                              work.seq_k - t * kBlockK, kHeadDim);
      }
      cp_async_commit();  // also when empty: the number of groups per tile is what cp_async_wait counts
    };
    auto load_values = [&](int t) {
      if (t < end) {
        Copier<ValueTile>::load(shared + kValueBase + t % kStages * ValueTile::kBytes, v_from, p.v_row,
                                work.seq_k - t * kBlockK, value_columns);
      }
      cp_async_commit();
    };

    Copier<QueryTile>::load(shared, q_from, p.q_row, work.seq_q - work.first_query, kHeadDim);
    cp_async_commit();
    if constexpr (kStages == 1) {
      load_keys(tile);
    } else {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        load_keys(tile + s);
        load_values(tile + s);
      }
    }

    // Lane parts of the ldmatrix addresses, see ldmatrix.cuh. K's differ from V's so that the two halves of a B
    // fragment land in neighbouring registers: otherwise each needs a move, which cost 10 % (H200, D = 128).
    const int lane = lane_id();
    const uint32_t q_lane =
        shared + work.warp * kWarpRows * QueryTile::kRowBytes + QueryTile::offset(lane % 16, lane / 16);
    const int k_lane = KeyTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const int v_lane = ValueTile::offset(lane % 16, lane / 16);

    uint32_t q_registers[kDepth / 16][kRowTiles][4];
    const bool edit_queries = p.q_flip != 0 || p.q_keep != 0xffffffffu;
    if (Options::kQueryInRegisters || edit_queries) {
      cp_async_wait<(kStages == 1 ? 1 : 2 * (kStages - 1))>();
      __syncthreads();  // Q is visible to the whole block
      if (edit_queries) {
        Copier<QueryTile>::rewrite(shared, [&](uint32_t w) { return (w & p.q_keep) ^ p.q_flip; });
        __syncthreads();  // the edited Q is
      }
      if constexpr (Options::kQueryInRegisters) {
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) load_queries(q_registers[step], q_lane, step);
      }
    }

    Output output;
    float maxima[kLaneRows], sums[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      maxima[r] = -infinity();
      sums[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) output[r / 2][n][r % 2 * 2] = output[r / 2][n][r % 2 * 2 + 1] = 0.0f;
    }

    // The union of the intervals of the warp's rows, and their intersection.
    const int warp_query = work.first_query + work.warp * kWarpRows;
    const Interval first_row = visible_keys(p, work, warp_query);
    const Interval last_row = visible_keys(p, work, min(warp_query + kWarpRows, work.seq_q) - 1);
    const bool has_rows = warp_query < work.seq_q;
    // The same for the block: a tile inside is seen by every row in full.
    const Interval whole{visible_keys(p, work, last_query).first, visible_keys(p, work, work.first_query).last};

    for (; tile < end; ++tile) {
      const int first_key = tile * kBlockK;
      const uint32_t k_tile = shared + kKeyBase + tile % kStages * KeyTile::kBytes;
      const uint32_t v_tile = shared + kValueBase + tile % kStages * ValueTile::kBytes;
      const bool partial = kWindowed && (first_key < whole.first || first_key + kBlockK > whole.last);
      bool nonfinite = false;
      // Makes a landed tile visible to the block; for partly visible values also tells whether any is not finite.
      auto publish_values = [&] {
        if (kWindowed && partial) {
          nonfinite = __syncthreads_or(copied_nonfinite(v_tile));
        } else {
          __syncthreads();
        }
      };

      if constexpr (kStages == 1) {
        cp_async_wait<0>();
        __syncthreads();  // K is visible; every warp is done with the previous V, whose slot is now refilled
        load_values(tile);
      } else {
        cp_async_wait<2 * (kStages - 2)>();
        publish_values();  // K and V are visible; every warp is done with the previous tile, whose slots are refilled
        if (kWindowed && nonfinite) absorb_nonfinite(output, p, work, first_key, v_tile);
        load_keys(tile + kStages - 1);
        load_values(tile + kStages - 1);
      }

      const bool warp_sees = has_rows && first_key < last_row.last && first_key + kBlockK > first_row.first;
      Weights weights;
      if (warp_sees) {
        Scores scores;
        multiply_keys(scores, q_registers, q_lane, k_tile + k_lane);
        if constexpr (Options::kSoftCap) {
#pragma unroll
          for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
            float& score = scores[i / (kKeyTiles * 4)][i / 4 % kKeyTiles][i % 4];
            score = tanh_exp(score * p.cap_scale);
          }
        }
        if (first_key < last_row.first || first_key + kBlockK > first_row.last) mask(scores, p, work, first_key);
        softmax(scores, weights, output, maxima, sums, p.logit_scale);
      }

      if constexpr (kStages == 1) {
        cp_async_wait<0>();
        publish_values();  // V is visible; every warp is done with K, whose slot is now refilled
        load_keys(tile + 1);
        if (kWindowed && nonfinite) absorb_nonfinite(output, p, work, first_key, v_tile);
      }
      if (warp_sees) multiply_values(output, weights, v_tile + v_lane);
    }
    cp_async_wait<0>();  // nothing in flight may land in the output tile
    store(p, work, output, maxima, sums, shared);
  }
};

}  // namespace kernelgen
