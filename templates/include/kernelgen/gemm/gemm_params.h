// Parameters of the CPU matrix products, and what part of a product a task is: dense, batched or grouped.
#pragma once

#include <cstdint>

namespace kernelgen {

// Strides are in elements. n counts outputs: half the columns of b with a gated activation.
struct GemmCpuParams {
  const void* a;
  const void* b;
  const void* bias;     // one value per column of b, null without
  const void* c;        // shape of out, null without
  void* out;
  const void* scale_a;  // float
  const void* scale_b;
  const void* zero_b;   // of packed int4, null for symmetric codes
  const void* ends;     // int32 per group: its end, or (masked) how many of its rows count
  void* codes;          // quantised output: `out` is then a float workspace; a user's epilogue: partials of its totals (row_totals.h)
  void* out_scale;      // float
  int64_t a_batch, a_row, a_column;
  int64_t b_batch, b_row, b_column;  // packed b: b_column is in bytes, b_row unused
  int64_t bias_batch;
  int64_t c_batch, c_row;
  int64_t out_batch, out_row;
  int64_t scale_a_batch, scale_a_row, scale_a_segment;     // a segment is what of k shares a scale
  int64_t scale_b_batch, scale_b_segment, scale_b_column;  // a column of scales
  int64_t zero_b_batch, zero_b_segment, zero_b_column;
  int64_t codes_batch, codes_row;
  int64_t out_scale_batch, out_scale_row, out_scale_block;
  int64_t batch;                      // entries, or groups
  int64_t m, n, k;                    // of one entry; of all groups together where that dimension is grouped
  int64_t block_m, block_n, block_k;  // of a task; block_k is a multiple of the product's depth
  int64_t tasks_m, tasks_n;           // tasks of one batch entry
  int64_t b_offset, scales_offset, sums_offset;  // bytes from the start of scratch: panel of b, scales, sums
  int64_t amax_offset;                           // elements from out: largest values, of an output with one scale
  int64_t quantize_rows, quantize_tasks;         // rows of a task that quantises, and how many there are
  double beta;
  double alpha, limit;  // of activations that have them
};

// What a task computes: `rows` rows and `columns` outputs over k .. k_end.
struct GemmTask {
  int64_t batch;  // entry or group: what all have of a kind has a batch stride of 0
  int64_t row, rows, column, columns, k, k_end;
  int64_t all_rows;  // of the product that the task is a part of: few of them are multiplied in another order
};

// What is grouped: nothing; rows of a; the first rows of every batch entry count; K.
enum class Grouping { kNone, kRows, kMasked, kK };

inline int64_t bounded(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The end of a group, whatever the values are: groups never overlap or leave the matrix.
inline int64_t group_end(const GemmCpuParams& p, int64_t group, int64_t start, int64_t limit) {
  return bounded(static_cast<const int32_t*>(p.ends)[group], start, limit);
}

// How many rows of a batch entry of the output are written.
template <Grouping kGrouping>
int64_t rows_in_use(const GemmCpuParams& p, int64_t batch) {
  if constexpr (kGrouping == Grouping::kMasked) return batch < p.batch ? group_end(p, batch, 0, p.m) : 0;
  if constexpr (kGrouping == Grouping::kRows) {
    int64_t end = 0;
    for (int64_t group = 0; group < p.batch; ++group) end = group_end(p, group, end, p.m);
    return end;
  }
  return batch < p.batch ? p.m : 0;
}

// The task of a number, false if there is none: tasks are counted for the worst split of rows into groups. Tasks that run at
// the same time are neighbours, which read the same columns of b.
template <Grouping kGrouping>
bool find_task(const GemmCpuParams& p, int64_t number, GemmTask& t) {
  const int64_t entry = number / (p.tasks_m * p.tasks_n), in_entry = number % (p.tasks_m * p.tasks_n);
  int64_t block = in_entry % p.tasks_m, start = 0, end = p.m, group = entry;
  t.k = 0;
  t.k_end = p.k;
  if constexpr (kGrouping == Grouping::kRows) {
    for (group = 0;; ++group, start = end) {
      if (group == p.batch) return false;
      end = group_end(p, group, start, p.m);
      const int64_t blocks = (end - start + p.block_m - 1) / p.block_m;
      if (block < blocks) break;
      block -= blocks;
    }
  } else if constexpr (kGrouping == Grouping::kMasked) {
    end = group_end(p, group, 0, p.m);
  } else if constexpr (kGrouping == Grouping::kK) {
    t.k = group ? group_end(p, group - 1, 0, p.k) : 0;
    t.k_end = group_end(p, group, t.k, p.k);
  }
  t.batch = group;
  t.all_rows = end - start;
  t.row = start + block * p.block_m;
  t.rows = bounded(end - t.row, 0, p.block_m);
  t.column = in_entry / p.tasks_m * p.block_n;
  t.columns = bounded(p.n - t.column, 0, p.block_n);
  return t.rows > 0 && t.columns > 0;
}

}  // namespace kernelgen
