// Dense and ragged attention on Hopper: TMA, WGMMA, one warpgroup that copies and up to three that multiply.
//
//   out[i] = sum_j softmax_j(scale * q[i].k[j]) v[j]       lse[i] = ln sum_j exp(scale * q[i].k[j])
//
// A block stays on its SM and takes row tiles until there are none (sm90_tiles.cuh). Each consumer has 64 rows of a tile, whole, so that
// its softmax stays within a warp. Keys are walked from right to left in tiles of kBlockK:
//
//   copying warp        keys, then the values of the tile before, into two rings; the next row tile's queries
//   checking warps      values of tiles that some row sees in part, for inf and NaN (sm90_values.cuh)
//   consumer            S_j = Q K_j^T, and O += P_(j+1) V_(j+1) right behind it; the softmax of S_j runs under the latter, and,
//                       as consumers take turns (kPingpong), under the products of the others
//
// P never leaves the registers: the layout of S is that of an A operand.
#pragma once

#include <kernelgen/attention/mma_store.cuh>
#include <kernelgen/attention/sm90_dense.cuh>
#include <kernelgen/attention/sm90_softmax.cuh>
#include <kernelgen/attention/sm90_split.cuh>
#include <kernelgen/attention/sm90_values.cuh>
#include <kernelgen/sm90/control.cuh>
#include <kernelgen/sm90/stmatrix.cuh>

namespace kernelgen {

// `Layout` says where rows, keys and values are: DenseSm90, or PagedSm90 of paged_sm90.cuh.
template <class Options, template <class> class Layout = DenseSm90>
struct PrefillSm90 : Sm90Shape<Options> {
  using Shape = Sm90Shape<Options>;
  using Rows = Layout<Shape>;
  using Params = typename Rows::Params;
  using Work = typename Rows::Work;
  using Rule = Rules<Shape, Rows>;
  using Tiles = TileValues<Shape, Rows>;
  using typename Shape::KeyBox;
  using typename Shape::KeyRing;
  using typename Shape::QueryBox;
  using typename Shape::T;
  using typename Shape::ValueRing;
  using typename Shape::Values;
  using Shape::kBlockK;
  using Shape::kBoxColumns;
  using Shape::kChecks;
  using Shape::kCheckers;
  using Shape::kConsumers;
  using Shape::kPingpong;
  using ValueProduct = Wgmma<T, Shape::kSplitColumns>;
  using Scores = float[Shape::kScoreCount];
  template <int Keys>
  using PartScores = float[Keys / 2];
  using Output = float[Shape::kOutputCount];
  using Weights = uint32_t[Shape::kKeySteps][4];
  // Logits that are made one by one have registers for nothing else.
  static constexpr bool kByReference = !Shape::kNatural && !Shape::kAnyHidden;

  // Key tiles [begin, end) that any row of the tile sees, and the keys that all of its rows see.
  struct Span {
    int begin, end;
    Interval whole;

    __device__ bool partial(int tile) const {
      return Shape::kAnyHidden || tile * kBlockK < whole.first || (tile + 1) * kBlockK > whole.last;
    }
  };

  // Intervals move right with the query, so everything between the first row's and the last row's is covered.
  __device__ static Span span_of(const Params& p, const Work& work) {
    const Interval first = Rows::visible_keys(p, work, work.first_query);
    const Interval last = Rows::visible_keys(p, work, Rows::last_query(p, work, Shape::kBlockQ));
    const Span span{first.first / kBlockK, ceil_div(last.last, kBlockK), {last.first, first.last}};
    if constexpr (Shape::kSplit) {
      const Interval part = part_of_tiles(p, work, {span.begin, span.end});
      return {part.first, part.last, span.whole};
    } else {
      return span;
    }
  }

  // Of these tiles the ones that a consumer's own rows see, at least one: `whole` is of its rows, and `last` is the last row's last key.
  struct OwnSpan : Span {
    int last;
  };
  __device__ static OwnSpan own_span(const Params& p, const Work& work, const Span& span, int group) {
    if constexpr (!Shape::kOwnTiles) return {span, 0};
    const int row = work.first_query + group * Shape::kQueries;
    const Interval first = Rows::visible_keys(p, work, row), last = Rows::visible_keys(p, work, min(row + Shape::kQueries, work.seq_q) - 1);
    const int begin = max(min(first.first / kBlockK, span.end - 1), span.begin);
    return {{begin, max(min(ceil_div(last.last, kBlockK), span.end), begin + 1), {last.first, first.last}}, last.last};
  }

  __device__ static uint32_t queries_full(uint32_t shared, int group) { return shared + Shape::kQueriesAt + group * 16; }
  __device__ static uint32_t queries_empty(uint32_t shared, int group) { return queries_full(shared, group) + 8; }
  __device__ static uint32_t query_tile(uint32_t shared, int group) { return shared + group * Shape::kQueryBytes; }
  __device__ static uint32_t checked(uint32_t shared, int stage) { return shared + Shape::kCheckedAt + stage * 8; }
  __device__ static uint32_t flags(uint32_t shared, int stage) { return shared + Shape::kFlagsAt + stage * 16; }
  __device__ static uint32_t key_tile(uint32_t shared, int stage) { return shared + Shape::kKeysAt + stage * Shape::kKeyBytes; }
  __device__ static uint32_t value_tile(uint32_t shared, int stage) { return shared + Shape::kValuesAt + stage * Shape::kValueBytes; }

  __device__ static int rank() { return Shape::kBlocks > 1 ? static_cast<int>(cluster_rank()) : 0; }

  // ---- The copying warp ---------------------------------------------------------------------------------------------

  // Rows [row, row + rows of a box) of a head, box by box, by one lane.
  template <int Boxes, int BoxBytes>
  __device__ static void load_tile(uint32_t target, const TensorMap& map, uint32_t barrier, int row, int head, int request) {
#pragma unroll
    for (int box = 0; box < Boxes; ++box) tma_load(target + box * BoxBytes, map, barrier, box * kBoxColumns, row, head, request);
  }

  // The same of a tile of keys or values: with another block each loads half of the rows, for both.
  template <int Boxes, int BoxBytes>
  __device__ static void load_keys_tile(uint32_t target, const TensorMap& map, uint32_t barrier, int row, int head, int request) {
    if constexpr (Shape::kBlocks == 1) {
      load_tile<Boxes, BoxBytes>(target, map, barrier, row, head, request);
    } else {
      constexpr int kHalfRows = kBlockK / 2;
#pragma unroll
      for (int box = 0; box < Boxes; ++box) {
        tma_load_multicast(target + box * BoxBytes + rank() * kHalfRows * kSwizzleRowBytes, map, barrier, box * kBoxColumns,
                           row + rank() * kHalfRows, head, request, 3);
      }
    }
  }

  __device__ static void produce(const Params& p, uint32_t shared) {
    RowTileDealer<Shape, Rows> dealer{{{shared + Shape::kSlotsAt}}, static_cast<int>(blockIdx.x) / Shape::kBlocks};
    RowTileReader<Shape, Rows> reader{{{shared + Shape::kSlotsAt}}, rank()};
    const bool deals = rank() == 0;
    const KeyRing keys{shared + Shape::kBarriersAt};
    const ValueRing values{shared + Shape::kValueRingAt};
    typename KeyRing::Position k_at;
    typename ValueRing::Position v_at;
    RingPosition<1> q_at;  // of every consumer's queries
    const bool issues = lane_id() == 0;
    Work work;
    for (;; dealer.advance()) {
      if (!(deals ? dealer.next(p, work) : reader.next(work))) break;
      if (deals) dealer.ask(p);
      const Span span = span_of(p, work);
      if (span.begin >= span.end) continue;
      const int request = Shape::kRagged ? 0 : work.request, kv_head = Rows::kv_head(p, work);
      typename Rows::Places places;  // of the tile whose keys come next
      auto load_keys = [&](int tile) {
        places.find(p, work, tile);
        keys.wait_empty(k_at);
        if constexpr (Rows::kPaged) {
          places.load_keys(p, work, key_tile(shared, k_at.stage), keys.full(k_at.stage));
        } else if (issues) {
          keys.expect(k_at, Shape::kKeyBytes);
          load_keys_tile<Shape::kKeyBoxes, KeyBox::kBytes>(
              key_tile(shared, k_at.stage), p.map_k, keys.full(k_at.stage), work.k_start + tile * kBlockK, kv_head, request);
        }
        k_at.advance();
      };
      auto load_values = [&](int tile, typename Rows::Places at) {
        if constexpr (Shape::kGathers) at.find(p, work, tile);  // again: there are no registers to keep them in
        values.wait_empty(v_at);
        if constexpr (Rows::kPaged) {
          at.load_values(p, work, value_tile(shared, v_at.stage), values.full(v_at.stage));
        } else if (issues) {
          values.expect(v_at, Shape::kValueBytes);
          load_keys_tile<Shape::kValueBoxes, Values::kBoxBytes>(
              value_tile(shared, v_at.stage), p.map_v, values.full(v_at.stage), work.k_start + tile * kBlockK, kv_head, request);
        }
        v_at.advance();
      };
      load_keys(span.end - 1);
#pragma unroll
      for (int group = 0; group < kConsumers; ++group) {
        const uint32_t full = queries_full(shared, group);
        barrier_wait(queries_empty(shared, group), q_at.parity ^ 1);
        if (issues) {
          barrier_arrive_expect(full, Shape::kKeyBoxes * Shape::kQueryRows * kSwizzleRowBytes);
          const int row = work.q_start + work.first_query + group * Shape::kQueries;
          load_tile<Shape::kKeyBoxes, QueryBox::kBytes>(query_tile(shared, group), p.map_q, full,
                                                        Shape::kPackedHeads > 1 ? work.head_ : row, Shape::kPackedHeads > 1 ? row : work.head_,
                                                        request);
        }
      }
      q_at.advance();
      for (int tile = span.end - 2; tile >= span.begin; --tile) {
        const typename Rows::Places of_values = places;
        load_keys(tile);
        load_values(tile + 1, of_values);
      }
      load_values(span.begin, places);
    }
    if (deals) dealer.finish(p);
  }

  // ---- The checking warps -------------------------------------------------------------------------------------------

  __device__ static void check(const Params& p, uint32_t shared, int checker) {
    RowTileReader<Shape, Rows> tiles{{{shared + Shape::kSlotsAt}}, rank()};
    const ValueRing values{shared + Shape::kValueRingAt};
    typename ValueRing::Position at;
    Work work;
    while (tiles.next(work)) {
      const Span span = span_of(p, work);
      for (int tile = span.end - 1; tile >= span.begin; --tile) {
        values.wait_full(at);
        if (span.partial(tile)) {
          const bool found = Tiles::search(value_tile(shared, at.stage), checker * kWarpSize + lane_id(), kCheckers * kWarpSize);
          const uint32_t any = __any_sync(kFullWarp, found);
          if (lane_id() == 0) store_word(flags(shared, at.stage) + checker * 4, any);
        }
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(checked(shared, at.stage));
        values.release(at.stage);
        at.advance();
      }
    }
  }

  // ---- A consumer ---------------------------------------------------------------------------------------------------

  // What threads wrote, the tensor core has to see.
  template <class Ring>
  __device__ static void wait_tile(const Ring& ring, const typename Ring::Position& at) {
    ring.wait_full(at);
    if constexpr (Shape::kGathers) tma_store_fence();
  }

  // By the first `Keys` keys of a tile.
  template <int Keys>
  __device__ static void multiply_keys(PartScores<Keys>& scores, uint32_t queries, uint32_t keys) {
#pragma unroll
    for (int step = 0; step < Shape::kDepthSteps; ++step) {
      Wgmma<T, Keys>::template shared<0, 0>(scores, QueryBox::descriptor(queries + step / 4 * QueryBox::kBytes, 0, step % 4),
                                        KeyBox::descriptor(keys + step / 4 * KeyBox::kBytes, 0, step % 4), step > 0);
    }
  }

  // The warp's scores once more, by itself: rows of 16 queries at `queries`. Keys are still in their stage, or have been given back and come
  // from memory (kEarlyKeys): then those behind the request's last, which nobody sees, are 0.
  __device__ static void remake_scores(Scores& scores, uint32_t queries, uint32_t keys, const Params& p, const Work& work, int first_key) {
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < Shape::kScoreCount; ++i) scores[i] = 0.0f;
    // A few keys at a time: the products under way leave few registers.
    constexpr int kKeys = Options::kEarlyKeys ? 8 : 16;
#pragma unroll
    for (int n = 0; n < kBlockK / kKeys; ++n) {
      const int key = first_key + 8 * n + lane / 4;
      const T* chunk = nullptr;
      if constexpr (Options::kEarlyKeys) {
        if (key < work.seq_k) chunk = Rows::key_row(p, work, key) + lane % 4 * 2;
      }
#pragma unroll 1
      for (int step = 0; step < Shape::kDepthSteps; ++step, chunk += 16) {
        const int box = step / 4, column = step % 4 * 2;
        uint32_t a[4], b[4] = {0, 0};
        ldmatrix_x4(a, queries + box * QueryBox::kBytes + swizzled_chunk(lane % 16, column + lane / 16));
        if constexpr (Options::kEarlyKeys) {
          if (key < work.seq_k) {
            b[0] = *reinterpret_cast<const uint32_t*>(chunk);
            if (Options::kHeadDim % 16 == 0 || 16 * step + 8 < Options::kHeadDim) b[1] = *reinterpret_cast<const uint32_t*>(chunk + 8);
          }
        } else {
          ldmatrix_x4(b, keys + box * KeyBox::kBytes + swizzled_chunk(16 * n + lane % 8 + lane / 16 * 8, column + lane / 8 % 2));
        }
#pragma unroll
        for (int half = 0; half < kKeys / 8; ++half) {
          mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(scores[kKeys / 2 * n + 4 * half]), a, b[2 * half], b[2 * half + 1]);
        }
      }
    }
  }

  __device__ static void multiply_values(Output& output, const Weights& weights, uint32_t values) {
#pragma unroll
    for (int step = 0; step < Shape::kKeySteps; ++step) {
      ValueProduct::template registers<1>(output, weights[step], Values::descriptor(values, 0, step), 1);
    }
  }

  // Turns every query of the warp by the sign of the scale, or clears it for a scale of 0: all later factors are positive.
  __device__ static void edit_queries(const Params& p, uint32_t queries, int group) {
    for (int i = threadIdx.x % kWarpgroupThreads; i < Shape::kKeyBoxes * QueryBox::kBytes / 16; i += kWarpgroupThreads) {
      uint32_t w[4];
      load_chunk(w, queries + i * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = (w[j] & p.q_keep) ^ p.q_flip;
      store_chunk(queries + i * 16, w);
    }
    tma_store_fence();
    named_barrier_sync(kOfConsumer + group, kWarpgroupThreads);
  }

  // Rows that no query comes to would be what memory held, whose logits may outgrow everything.
  __device__ static void clear_unused_rows(uint32_t shared, int group) {
    if constexpr (Shape::kQueryRows < kMmaRows) {
      constexpr int kUnused = (kMmaRows - Shape::kQueryRows) * 8;
      const uint32_t zeros[4] = {0, 0, 0, 0};
      for (int i = threadIdx.x % kWarpgroupThreads; i < Shape::kKeyBoxes * kUnused; i += kWarpgroupThreads) {
        const int box = i / kUnused, at = i % kUnused;
        store_chunk(query_tile(shared, group) + box * QueryBox::kBytes + swizzled_chunk(Shape::kQueryRows + at / 8, at % 8), zeros);
      }
      tma_store_fence();
      named_barrier_sync(kOfConsumer + group, kWarpgroupThreads);
    }
  }

  __device__ static void take_turn(int group) {
    if constexpr (kPingpong) named_barrier_sync(kTurn + group, 2 * kWarpgroupThreads);
  }
  __device__ static void give_turn(int group) {
    if constexpr (kPingpong) named_barrier_arrive(kTurn + (group + 1) % kConsumers, 2 * kWarpgroupThreads);
  }

  __device__ static void release_queries(uint32_t shared, int group) {
    if (lane_id() == 0) barrier_arrive(queries_empty(shared, group));
  }

  // The next row tile with any key; results of those in front of it that have none are written here.
  template <class Reader>
  __device__ static bool next_tile(const Params& p, Reader& tiles, Work& work, Span& span) {
    while (tiles.next(work)) {
      span = span_of(p, work);
      if (span.begin < span.end) return true;
      DeferredSoftmax<Shape> nothing;
      store_empty(p, work, nothing);
    }
    return false;
  }

  __device__ static void consume(const Params& p, uint32_t shared, int group) {
    RowTileReader<Shape, Rows> tiles{{{shared + Shape::kSlotsAt}}, rank()};
    const KeyRing keys{shared + Shape::kBarriersAt};
    const ValueRing values{shared + Shape::kValueRingAt};
    typename KeyRing::Position k_at;
    typename ValueRing::Position v_at;
    uint32_t query_parity = 0;
    const bool edited = p.q_flip != 0 || p.q_keep != 0xffffffffu;
    clear_unused_rows(shared, group);
    if (kPingpong && group == kConsumers - 1) named_barrier_arrive(kTurn, 2 * kWarpgroupThreads);  // the first turn is the first consumer's
    Scores scores;
    Output output;
    Weights weights;
    Work work;
    work.warp = warp_id();
    Span span;

    const auto wait_queries = [&] {
      wait_tile(keys, k_at);
      barrier_wait(queries_full(shared, group), query_parity);
      if (edited) edit_queries(p, query_tile(shared, group), group);
    };
    const auto start_scores = [&] {
      multiply_keys<kBlockK>(scores, query_tile(shared, group), key_tile(shared, k_at.stage));
      wgmma_commit();
    };
    const auto start_output = [&] {
      multiply_values(output, weights, value_tile(shared, v_at.stage));
      wgmma_commit();
    };
    const auto end_output = [&] {
      hold(output);
      values.release(v_at.stage);
      v_at.advance();
    };
    // Waits for the values of a tile, which are finite where some row must not see them. The flags are read by the lane that gives the tile
    // back: racecheck does not see that __syncwarp, or a product, orders the others' reads.
    const auto wait_values = [&](int tile) {
      wait_tile(values, v_at);
      if constexpr (kChecks) {
        if (!span.partial(tile)) return;
        barrier_wait(checked(shared, v_at.stage), v_at.parity);
        uint32_t found[4] = {};
        if (lane_id() == 0) load_chunk(found, flags(shared, v_at.stage));
        if (__shfl_sync(kFullWarp, found[0] | found[1] | found[2], 0) != 0) {
          Tiles::absorb(output, p, work, tile * kBlockK, value_tile(shared, v_at.stage));
        }
      }
    };

    const auto give_keys_back = [&] {
      keys.release(k_at.stage);
      k_at.advance();
    };
    // Tiles that only other consumers' rows see are given back, and turns and checks keep their order. No product brings the lanes together
    // here: without a barrier one could still wait, or read, when another gives the tile back.
    const auto pass_over_keys = [&] {
      keys.wait_full(k_at);
      __syncwarp();
      give_keys_back();
    };
    const auto pass_over_values = [&](int tile) {
      wait_values(tile);
      __syncwarp();
      end_output();
    };
    const auto pass_turn = [&] {
      take_turn(group);
      give_turn(group);
    };

    while (next_tile(p, tiles, work, span)) {
      const OwnSpan own = own_span(p, work, span, group);
      DeferredSoftmax<Shape> softmax;
      const auto to_logits = [&](int tile) {
        Rule::apply(reinterpret_cast<typename Shape::Scores&>(scores), p, work, tile * kBlockK, own.partial(tile), 0u);
      };
      // Ends what reads the tile's keys, and after the last tile the queries.
      const auto to_weights = [&](int tile) {
        const float scale = Rule::softmax_scale(p);
        const int k_stage = k_at.stage;
        hold(scores);
        if constexpr (Options::kEarlyKeys) give_keys_back();
        to_logits(tile);
        bool done = false;
        if (kByReference && softmax.settled) {
          done = softmax.step_by_reference(scores, scale);
          if (!done) {
            remake_scores(scores, query_tile(shared, group) + work.warp % 4 * 16 * kSwizzleRowBytes, key_tile(shared, k_stage), p,
                          work, tile * kBlockK);
            to_logits(tile);
          }
        }
        if (!done) softmax.step_by_maximum(scores, scale);
        if constexpr (!Options::kEarlyKeys) give_keys_back();
        if (!Options::kOutOverQuery && tile == own.begin) release_queries(shared, group);
      };
#pragma unroll
      for (int i = 0; i < Shape::kOutputCount; ++i) output[i] = 0.0f;
      int tile = span.end - 1;
      if constexpr (Shape::kOwnTiles) {
        for (; tile >= own.end; --tile) {
          pass_over_keys();
          pass_over_values(tile);
          pass_turn();
        }
      }
      wait_queries();
      if (Shape::kHalves && own.last - tile * kBlockK <= Shape::kHalfK) {
        PartScores<Shape::kHalfK> half_scores;
        wgmma_fence();
        multiply_keys<Shape::kHalfK>(half_scores, query_tile(shared, group), key_tile(shared, k_at.stage));
        wgmma_commit();
        wgmma_wait<0>();
        hold(half_scores);
        give_keys_back();
        using Half = PartShape<Shape, Shape::kHalfK>;
        Rules<Half, Rows>::apply(reinterpret_cast<typename Half::Scores&>(half_scores), p, work, tile * kBlockK, true, 0u);
        softmax.step_by_maximum(half_scores, Rule::softmax_scale(p));
        if (!Options::kOutOverQuery && tile == own.begin) release_queries(shared, group);
        softmax.pack(weights, half_scores);
      } else {
        wgmma_fence();
        start_scores();
        wgmma_wait<0>();
        to_weights(tile);
        softmax.pack(weights, scores);
      }
      query_parity ^= 1;

      for (--tile; tile >= own.begin; --tile) {
        wait_tile(keys, k_at);
        wait_values(tile + 1);
        take_turn(group);
        hold(output);
        wgmma_fence();
        start_scores();
        start_output();
        give_turn(group);
        wgmma_wait<1>();
        to_weights(tile);
        wgmma_wait<0>();
        hold(scores);
        end_output();
        softmax.pack(weights, scores);
        softmax.rescale(output);
      }

      wait_values(own.begin);
      hold(output);
      wgmma_fence();
      start_output();
      wgmma_wait<0>();
      end_output();
      if constexpr (Shape::kOwnTiles) {
        for (tile = own.begin - 1; tile >= span.begin; --tile) {
          pass_over_keys();
          pass_turn();
          pass_over_values(tile);
        }
      }
      store(p, work, output, softmax, shared, group);
    }
  }

  // ---- Results ------------------------------------------------------------------------------------------------------

  // Finishes a row: its LSE is stored; what its output is to be multiplied with. Sinks of split keys are the merge's.
  __device__ static float finish_row(const Params& p, const Work& work, DeferredSoftmax<Shape>& softmax, int r, bool exists) {
    using Rest = Store<Shape, Rows>;
    const int row = Shape::row_in_block(work.warp, r);
    float sum = quad_sum(softmax.sums[r]), scale = 1.0f;
    if constexpr (Shape::kSinks && !Shape::kSplit) scale = Rest::add_sink(p.sinks[Rows::head(p, work, row)], softmax.maxima[r], sum);
    if constexpr (Shape::kLse || Shape::kSplit) {
      if (lane_id() % 4 == 0 && exists) *lse_of(p, work, row) = (softmax.maxima[r] + log2_approx(sum)) * kLn2;
    }
    return Rest::normaliser(softmax.maxima[r], sum) * scale;
  }

  __device__ static float* lse_of(const Params& p, const Work& work, int row) {
    if constexpr (Shape::kSplit) {
      return p.lse + PartialSm90<Shape, Rows>::place(p, work, row);
    } else {
      return Rows::lse(p, work, row);
    }
  }

  // Rows that see no key, or none of this part.
  __device__ static void store_empty(const Params& p, const Work& work, DeferredSoftmax<Shape>& softmax) {
    const auto out = Rows::output(p, work);
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = Shape::row_in_block(work.warp, r);
      const bool exists = Rows::row_exists(work, row);
      finish_row(p, work, softmax, r, exists);
      if (Shape::kSplit || !exists) continue;  // the merge passes over an LSE of -inf
      for (int chunk = lane_id() % 4; chunk * 8 < Shape::kHeadDimV; chunk += 4) store_16_aligned<16>(out(row) + chunk * 8, zeros);
    }
  }

  // Normalises and rounds the warp's rows, and stores them through shared memory: by the copy engine, or, where what follows a request's
  // last row is another's first, in pieces of 16 bytes.
  __device__ static void store(const Params& p, const Work& work, Output& output, DeferredSoftmax<Shape>& softmax, uint32_t shared, int group) {
    const uint32_t staging = Options::kOutOverQuery ? query_tile(shared, group) : shared + Shape::kOutAt + group * Shape::kOutBytes;
    const int lane = lane_id(), first_row = work.warp % 4 * 16;
    const bool leads = threadIdx.x % kWarpgroupThreads == 0;
    const auto place = [&](int row, int chunk) {
      return staging + chunk / 8 * (kMmaRows * kSwizzleRowBytes) + swizzled_chunk(first_row + row, chunk % 8);
    };
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = finish_row(p, work, softmax, r, Rows::row_exists(work, Shape::row_in_block(work.warp, r)));
    if constexpr (Shape::kSplit) {
      PartialSm90<Shape, Rows>::store(p, work, output, factor);
      return;
    }
#pragma unroll
    for (int part = 0; part < Options::kOutParts; ++part) {
      constexpr int kChunks = Shape::kOutputCount / 4, kOfPart = Options::kOutParts > 1 ? Shape::kOutBoxes * 8 : kChunks;  // of 8 columns
      // No warp multiplies these queries any more, and what was stored before has been read.
      if constexpr (!Shape::kRagged) {
        if (!Options::kOutOverQuery && leads) tma_store_wait_read<0>();
      }
      if constexpr (!Shape::kRagged || Options::kOutOverQuery) named_barrier_sync(kOfConsumer + group, kWarpgroupThreads);
#pragma unroll
      for (int n = part * kOfPart; n < min_of((part + 1) * kOfPart, kChunks); n += 2) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = pack_pair<typename Shape::OutElement>(output[4 * n + 2 * i] * factor[i % 2], output[4 * n + 2 * i + 1] * factor[i % 2]);
        }
        stmatrix_x4(place(lane % 16, n - part * kOfPart + lane / 16), w[0], w[1], w[2], w[3]);
      }
      if constexpr (!Shape::kRagged) {
        tma_store_fence();
        named_barrier_sync(kOfConsumer + group, kWarpgroupThreads);
        if (leads) {
#pragma unroll
          for (int box = 0; box < Shape::kOutBoxes; ++box) {
            const int row = work.first_query + group * Shape::kQueries;
            tma_store(p.map_out, staging + box * (kMmaRows * kSwizzleRowBytes), (part * Shape::kOutBoxes + box) * kBoxColumns,
                      Shape::kPackedHeads > 1 ? work.head_ : row, Shape::kPackedHeads > 1 ? row : work.head_, work.request);
          }
          tma_store_commit();
          if constexpr (Options::kOutOverQuery) {
            tma_store_wait_read<0>();
            barrier_arrive(queries_empty(shared, group), 4);
          }
        }
      } else {
        __syncwarp();  // a warp reads back only the rows that it wrote
        constexpr int kRowChunks = Shape::kHeadDimV / 8;
        const int of_part = min(kOfPart, kRowChunks - part * kOfPart);
        const auto out = Rows::output(p, work);
#pragma unroll 8
        for (int piece = lane; piece < 16 * of_part; piece += kWarpSize) {
          const int row = piece / of_part, chunk = piece % of_part;
          if (!Rows::row_exists(work, work.warp * 16 + row)) break;
          uint32_t w[4];
          load_chunk(w, place(row, chunk));
          store_16_aligned<16>(out(work.warp * 16 + row) + (part * kOfPart + chunk) * 8, w);
        }
        if constexpr (Options::kOutOverQuery) {
          tma_store_fence();  // the next queries come behind these accesses
          __syncwarp();
          release_queries(shared, group);
        } else {
          __syncwarp();  // all lanes have read before the next results are written
        }
      }
    }
  }

  __device__ static void run(const Params& p) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const uint32_t shared = shared_address(dynamic_shared);
    const int warp = warp_id(), group = warp / 4;
    if (threadIdx.x == 0) {
      KeyRing{shared + Shape::kBarriersAt}.init();
      ValueRing{shared + Shape::kValueRingAt}.init();
      typename Shape::Slots{{shared + Shape::kSlotsAt}}.init();
      for (int stage = 0; stage < Options::kValueStages; ++stage) barrier_init(checked(shared, stage), max_of(kCheckers, 1));
      for (int i = 0; i < kConsumers; ++i) {
        barrier_init(queries_full(shared, i), 1);
        barrier_init(queries_empty(shared, i), 4);
      }
      barrier_init_fence();
    }
    if (threadIdx.x == 32) {
      tma_prefetch_map(p.map_q);
      tma_prefetch_map(p.map_k);
      tma_prefetch_map(p.map_v);
      if constexpr (Shape::kBoxesOut) tma_prefetch_map(p.map_out);
    }
    if constexpr (Shape::kBlocks > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    wait_for_previous_kernel();
    start_next_kernel();
    if (group == kConsumers) {
      give_registers<Shape::kProducerRegisters>();
      if (warp == 4 * kConsumers) {
        produce(p, shared);
      } else if constexpr (kChecks) {
        check(p, shared, warp - 4 * kConsumers - 1);
      }
    } else {
      take_registers<Shape::kConsumerRegisters>();
      consume(p, shared, group);
      if (Shape::kBoxesOut && threadIdx.x % kWarpgroupThreads == 0) tma_store_wait_read<0>();  // the block's memory stays until then
    }
    if constexpr (Shape::kBlocks > 1) {
      __syncwarp();
      cluster_sync();  // the other block's copies and arrivals have come
    }
  }
};

}  // namespace kernelgen
