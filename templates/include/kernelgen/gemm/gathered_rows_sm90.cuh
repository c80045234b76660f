// Rows of a that lie anywhere, into the stages of gemm/grouped_sm90: p.rows names the row of a for each row of the product.
//
// The copy engine has no gather on Hopper, and takes 9 ns for a box of one row. Two warps beside the one that starts its copies bring the
// rows by cp.async, 16 bytes a lane and four rows an instruction, to where the engine would have put them; each thread's arrival at the
// stage's full barrier comes when its copies are done. They are writes of the generic proxy, so that the consumers fence before the tensor
// core reads them. (A fence by the warps that copy, two stages behind, made 256 x 128 rows of 7168 in fp8 blocks 10 % slower.)
#pragma once

#include <kernelgen/cuda/cp_async.cuh>
#include <kernelgen/cuda/warp.cuh>
#include <kernelgen/gemm/tiles_sm90.cuh>
#include <kernelgen/sm90/smem_tile.cuh>

namespace kernelgen {

template <int BlockM>
struct GatheredRows {
  static constexpr int kWarps = 2, kFillers = kWarps * kWarpSize;
  static constexpr int kOwn = BlockM / kWarps, kRowsOfCopy = kWarpSize * 16 / kSwizzleRowBytes, kCopies = kOwn / kRowsOfCopy;
  static_assert(kOwn % 8 == 0, "a warp's rows begin with a group of eight");

  uint32_t from[kCopies];  // where this lane's bytes of a row begin, in units of 16 bytes
  int copies;              // with rows of the tile

  __device__ void find(const DenseSm90Params& p, const OutputTile& tile, int warp) {
    const int first = tile.m + warp * kOwn, left = tile.row_end - first - lane_id() / 8;
    const int32_t* rows = p.rows + first + lane_id() / 8;  // one address: this warp has 40 registers
    copies = max(0, min(kCopies, ceil_div(tile.row_end - first, kRowsOfCopy)));
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsOfCopy < left ? rows[i * kRowsOfCopy] : 0;  // behind the group any row will do
      from[i] = static_cast<uint32_t>(row) * static_cast<uint32_t>(p.a_row) + lane_id() % 8;
    }
  }

  // 128 bytes of each row from `column` on, into the stage; zeros behind the `width` bytes that a row has.
  __device__ void copy(uint32_t stage, const DenseSm90Params& p, int column, int width, int warp) const {
    const int lane_row = lane_id() / 8, chunk = lane_id() % 8;
    const int bytes = max(0, min(16, width - column - chunk * 16));
    const uint32_t target = stage + (warp * kOwn + lane_row) * kSwizzleRowBytes;
    const uint32_t even = target + ((chunk ^ lane_row) << 4), odd = target + ((chunk ^ lane_row ^ 4) << 4);
    const uint4* a = static_cast<const uint4*>(p.a) + (bytes > 0 ? column / 16 : 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i < copies) copy_bytes_aligned<16>((i % 2 ? odd : even) + i * kRowsOfCopy * kSwizzleRowBytes, a + from[i], bytes);
    }
  }
};

}  // namespace kernelgen
