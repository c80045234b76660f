// The loop of every attention kernel with mma.sync tensor cores (sm_80 and later).
//
//   out[i] = sum_j softmax_j(scale * q[i].k[j]) v[j]       lse[i] = ln sum_j exp(scale * q[i].k[j])
//
// One block owns kBlockQ rows (queries of one head, or packed queries of the heads that share keys) and walks the keys they
// may attend to in tiles of kBlockK, keeping for each row a running maximum, a running sum and the unnormalised output in
// registers (online softmax). A warp owns kBlockQ / kWarps whole rows, so that the softmax never leaves a warp:
//
//   Q (kBlockQ x kDepth)                            global -> shared, once
//   K (kBlockK x kDepth), V (kBlockK x kSplitColumns)  global -> shared, each through a ring of kStages slots
//   S = Q K^T  (kWarpRows x kBlockK)                float32 accumulator fragments
//   S -> logits -> masks -> P = 2^(S - max)         packed to 16 bits: the accumulator layout is the A operand's
//   O += P V   (kWarpRows x kSplitColumns)          float32 accumulator fragments
//
// Values that a row may not attend to must not reach it even if they are NaN or inf, and 0 * NaN is NaN. Rows past the last
// key are zero-filled on the way to shared memory. In a tile that some rows see in part, each thread checks the values it
// copied; if any is not finite, Nonfinite::absorb adds those to the rows that may see them and replaces them by 0 before
// the product. Tiles that every row sees in full pay nothing. A given mask or a variant may hide any key: then every tile
// counts as seen in part.
//
// A variant may do without the softmax (kSoftmax false): P is the score itself, see mma_weights.cuh.
#pragma once

#include <kernelgen/attention/mma_products.cuh>
#include <kernelgen/attention/mma_rules.cuh>
#include <kernelgen/attention/mma_softmax.cuh>
#include <kernelgen/attention/mma_store.cuh>
#include <kernelgen/attention/mma_weights.cuh>

namespace kernelgen {

template <class Options, template <class> class LayoutOf>
struct AttentionMma : AttentionShape<Options> {
  using Shape = AttentionShape<Options>;
  using Layout = LayoutOf<Shape>;
  using Params = typename Layout::Params;
  using Work = typename Layout::Work;
  using T = typename Shape::T;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using Gemm = Products<Shape>;
  using Rule = Rules<Shape, Layout>;
  using Absorb = Nonfinite<Shape, Layout>;
  using Shape::kBlockK;
  using Shape::kKeyWarps;
  using Shape::kLaneRows;
  using Shape::kStages;
  using Shape::kStaged;
  using Shape::kTileSlots;
  using Shape::kWarpRows;
  static constexpr bool kAbsorbFirst = Shape::kMayHide && Shape::kSoftmax;  // before the weights are known

  // Turns every query by the sign of the scale, or clears it for a scale of 0: all later factors are positive.
  __device__ static void edit_queries(const Params& p, uint32_t shared) {
    Copier<Shape, QueryTile>::rewrite(shared, [&](uint32_t w) { return (w & p.q_keep) ^ p.q_flip; });
  }

  __device__ static void run(const Params& p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const uint32_t block_shared = shared_address(shared_memory);
    Work work;
    if (!Layout::find_work(p, work)) return;
    uint32_t shared = block_shared;
    if constexpr (kKeyWarps > 1) shared += threadIdx.x / kWarpSize * Shape::kGroupBytes;

    // Key tiles [tile, end) hold what the block's first and last row may see together. Intervals move right with the
    // query, so everything in between is covered.
    const int first_query = Layout::query(p, work, 0);
    const int last_query = Layout::last_query(p, work, Shape::kBlockQ);
    int tile = Layout::visible_keys(p, work, first_query).first / kBlockK;
    const int end = (Layout::visible_keys(p, work, last_query).last + kBlockK - 1) / kBlockK;
    if constexpr (kKeyWarps > 1) tile += threadIdx.x / kWarpSize;

    typename Layout::Loader loader(p, work, tile, tile < end);
    // Slot of a ring; the tiles of a group are kKeyWarps apart.
    auto slot_of = [](int t, int slots) { return t / kKeyWarps % slots; };
    auto k_slot = [&](int t) { return shared + Shape::kKeyBase + slot_of(t, kTileSlots) * KeyTile::kBytes; };
    auto v_slot = [&](int t) { return shared + Shape::kValueBase + slot_of(t, kTileSlots) * ValueTile::kBytes; };
    auto scale_slot = [&](int t) {
      if constexpr (!Shape::kPageScales) return 0u;
      return shared + Shape::kScaleBase + slot_of(t, max_of(Shape::kScaleSlots, 1)) * Shape::kScaleSlotBytes;
    };
    auto rope_slot = [&](int t) {
      if constexpr (!Shape::kPlainRope) return 0u;
      return shared + Shape::kRopeBase + slot_of(t, max_of(Shape::kRopeSlots, 1)) * Shape::RopeTile::kBytes;
    };
    // Tiles are loaded in order, each once.
    auto load_keys = [&](int t) {
      if constexpr (!kStaged) {
        if (t < end) loader.load_keys(k_slot(t), t * kBlockK);
      }
      cp_async_commit();  // also when empty: the number of groups per tile is what cp_async_wait counts
    };
    auto load_values = [&](int t) {
      if constexpr (!kStaged) {
        if (t < end) loader.load_values(v_slot(t), t * kBlockK);
      }
      cp_async_commit();
    };
    auto byte_slot = [&](int t) { return shared + Shape::kBytesBase + slot_of(t, kStages) * Shape::kStageBytes; };
    auto load_bytes = [&](int t) {
      if constexpr (kStaged) {
        if (t < end) loader.load_bytes(byte_slot(t), scale_slot(t), rope_slot(t), t * kBlockK);
      }
      cp_async_commit();
    };

    Layout::load_queries(p, work, shared);
    cp_async_commit();
    if constexpr (kStaged) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) load_bytes(tile + s * kKeyWarps);
    } else if constexpr (kStages == 1) {
      load_keys(tile);
    } else {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        load_keys(tile + s * kKeyWarps);
        load_values(tile + s * kKeyWarps);
      }
    }

    // Lane parts of the ldmatrix addresses, see ldmatrix.cuh. K's differ from V's so that the two halves of a B
    // fragment land in neighbouring registers: otherwise each needs a move, which cost 10 % (H200, D = 128).
    const int lane = lane_id();
    const uint32_t q_lane =
        shared + work.warp * kWarpRows * QueryTile::kRowBytes + QueryTile::offset(lane % 16, lane / 16);
    const int k_lane = KeyTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const int v_lane = ValueTile::offset(lane % 16, lane / 16);

    typename Gemm::QueryFragments q_registers;
    const bool edited = p.q_flip != 0 || p.q_keep != 0xffffffffu;
    if (Shape::kQueryInRegisters || edited) {
      cp_async_wait<(kStaged ? kStages : kStages == 1 ? 1 : 2 * (kStages - 1))>();
      Shape::group_sync();  // Q is visible to the whole group
      if (edited) {
        edit_queries(p, shared);
        Shape::group_sync();  // the edited Q is
      }
      if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
        for (int step = 0; step < Gemm::kDepthSteps; ++step) Gemm::load_queries(q_registers[step], q_lane, step);
      }
    }

    typename Shape::Output output;
    float maxima[kLaneRows], sums[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      maxima[r] = -infinity();
      sums[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < Shape::kValueTiles; ++n) output[r / 2][n][r % 2 * 2] = output[r / 2][n][r % 2 * 2 + 1] = 0.0f;
    }

    // The union of the intervals of the warp's rows, and their intersection.
    const int warp_row = work.warp * kWarpRows;
    const bool has_rows = Layout::row_exists(work, warp_row);
    const Interval first_row = Layout::visible_keys(p, work, Layout::query(p, work, warp_row));
    const Interval last_row = Layout::visible_keys(p, work, Layout::last_query(p, work, warp_row + kWarpRows));
    // The same for the block: a tile inside is seen by every row in full.
    const Interval whole{Layout::visible_keys(p, work, last_query).first, Layout::visible_keys(p, work, first_query).last};

    for (; tile < end; tile += kKeyWarps) {
      const int first_key = tile * kBlockK;
      const uint32_t k_tile = k_slot(tile), v_tile = v_slot(tile), scales = scale_slot(tile);
      const bool partial = Shape::kAnyHidden || (Shape::kWindowed && (first_key < whole.first || first_key + kBlockK > whole.last));
      bool nonfinite = false;
      // Makes a landed tile visible to the group; for partly visible values also tells whether any is not finite.
      auto publish_values = [&] {
        if (Shape::kMayHide && partial) {
          nonfinite = Shape::group_sync_or(Absorb::copied(v_tile));
        } else {
          Shape::group_sync();
        }
      };

      if constexpr (kStaged) {
        cp_async_wait<kStages - 1>();
        Shape::group_sync();  // every warp is done with the previous tile, which is now overwritten
        const uint32_t bytes = byte_slot(tile);
        Layout::Loader::KeyBytes::widen(k_tile, bytes);
        const bool found = Layout::Loader::ValueBytes::widen(v_tile, bytes + Shape::kKeyStageBytes);
        load_bytes(tile + kStages * kKeyWarps);  // into the slot just widened, by the same threads
        // K, V and their scales (which landed before the wait above) are visible.
        if (Shape::kMayHide && partial) {
          nonfinite = Shape::group_sync_or(found);
        } else {
          Shape::group_sync();
        }
        if (kAbsorbFirst && nonfinite) Absorb::absorb(output, p, work, first_key, v_tile);
      } else if constexpr (kStages == 1) {
        cp_async_wait<0>();
        Shape::group_sync();  // K is visible; every warp is done with the previous V, whose slot is now refilled
        load_values(tile);
      } else {
        cp_async_wait<2 * (kStages - 2)>();
        publish_values();  // K and V are visible; every warp is done with the previous tile, whose slots are refilled
        if (kAbsorbFirst && nonfinite) Absorb::absorb(output, p, work, first_key, v_tile);
        load_keys(tile + (kStages - 1) * kKeyWarps);
        load_values(tile + (kStages - 1) * kKeyWarps);
      }

      const bool warp_sees = has_rows && first_key < last_row.last && first_key + kBlockK > first_row.first;
      typename Shape::Weights weights;
      if (warp_sees) {
        typename Shape::Scores scores;
        Gemm::multiply_keys(scores, q_registers, q_lane, k_tile + k_lane);
        if constexpr (Shape::kPlainRope) {
          Rule::scale_latent(scores, p, work, scales);
          Gemm::add_rope(scores, q_registers, q_lane, rope_slot(tile) + Shape::RopeTile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2));
        }
        Rule::apply(scores, p, work, first_key, first_key < last_row.first || first_key + kBlockK > first_row.last, scales);
        if constexpr (Shape::kSoftmax) {
          Softmax<Shape>::step(scores, weights, output, maxima, sums, Rule::softmax_scale(p), scales + kBlockK * 4,
                               1.0f / Layout::value_reference(work));
        } else {
          PlainWeights<Shape>::step(scores, weights, output, maxima, scales + kBlockK * 4, 1.0f / Layout::value_reference(work));
        }
      }

      if constexpr (!kStaged && kStages == 1) {
        cp_async_wait<0>();
        publish_values();  // V is visible; every warp is done with K, whose slot is now refilled
        load_keys(tile + kKeyWarps);
        if (kAbsorbFirst && nonfinite) Absorb::absorb(output, p, work, first_key, v_tile);
      }
      if constexpr (!Shape::kSoftmax) {
        if (nonfinite) Absorb::absorb_weighted(output, weights, warp_sees, p, work, first_key, v_tile);
      }
      if (warp_sees) Gemm::multiply_values(output, weights, v_tile + v_lane);
    }
    cp_async_wait<0>();  // nothing in flight may land in what reuses the tiles
    if constexpr (kKeyWarps > 1) {
      if (!Store<Shape, Layout>::combine_groups(output, maxima, sums, block_shared)) return;
    }
    if constexpr (Layout::kPartials) {
      if (Layout::is_partial(work)) {
        Store<Shape, Layout>::partial(p, work, output, maxima, sums);
        return;
      }
    }
    Store<Shape, Layout>::rows(p, work, output, maxima, sums, block_shared);
  }
};

}  // namespace kernelgen
