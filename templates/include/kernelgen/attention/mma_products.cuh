// The two matrix products of attention, from shared tiles to accumulator fragments.
#pragma once

#include <kernelgen/attention/mma_shape.cuh>

namespace kernelgen {

template <class Shape>
struct Products {
  using T = typename Shape::T;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kDepthSteps = Shape::kDepth / 16;
  using QueryFragments = uint32_t[kDepthSteps][kRowTiles][4];

  // A fragments of the warp's query rows for k16 step `step`.
  __device__ static void load_queries(uint32_t (&fragments)[kRowTiles][4], uint32_t q_lane, int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ldmatrix_x4(fragments[m], QueryTile::chunk_step(q_lane, 2 * step) + m * 16 * QueryTile::kRowBytes);
    }
  }

  // scores = Q K^T for the warp's rows, without a plain rope part.
  __device__ static void multiply_keys(
      typename Shape::Scores& scores, const QueryFragments& q_registers, uint32_t q_lane, uint32_t k_lane) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
      }
    }
    add_products<KeyTile, 0, Shape::kKeyDepth / 16>(scores, q_registers, q_lane, k_lane);
  }

  // scores += Q K^T over a plain rope part.
  __device__ static void add_rope(
      typename Shape::Scores& scores, const QueryFragments& q_registers, uint32_t q_lane, uint32_t rope_lane) {
    add_products<typename Shape::RopeTile, Shape::kKeyDepth / 16, kDepthSteps>(scores, q_registers, q_lane, rope_lane);
  }

  // scores += Q K^T over k16 steps [First, End) of the queries; `k_lane` lies in a tile of keys that begins at the first.
  template <class Tile, int First, int End>
  __device__ static void add_products(
      typename Shape::Scores& scores, const QueryFragments& q_registers, uint32_t q_lane, uint32_t k_lane) {
#pragma unroll
    for (int step = First; step < End; ++step) {
      uint32_t a[kRowTiles][4];
      if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) a[i / 4][i % 4] = q_registers[step][i / 4][i % 4];
      } else {
        load_queries(a, q_lane, step);
      }
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, Tile::chunk_step(k_lane, 2 * (step - First)) + n * 8 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(scores[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<T>(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // output += P V
  __device__ static void multiply_values(
      typename Shape::Output& output, const typename Shape::Weights& weights, uint32_t v_lane) {
#pragma unroll
    for (int step = 0; step < Shape::kBlockK / 16; ++step) {
#pragma unroll
      for (int n = 0; n < Shape::kValueTiles; n += 2) {
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
};

}  // namespace kernelgen
