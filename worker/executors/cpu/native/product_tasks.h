// A product as tasks of a pool: each is some groups of outputs for some rows.
#pragma once
#include "adapters.h"
#include "decoder.h"
#include "linear.h"
#include "pool.h"

namespace {

const int LONG_ROW = 2560, MOST_GROUPS = 4;  // of a product of many rows: inputs, groups of a task
const int QUANTIZED_ROWS = 8;                // by a task

template <class W> NATIVE_INLINE Packed<W> packed(const NativeLinear& linear) {
  return {(const W*)linear.tiles, linear.slices,         linear.slice_tiles, linear.groups,
          linear.panel_bytes,     form_of(linear.units), linear.panels,      linear.code_run};
}

// So many that the rows of a task stay in the second cache.
template <class W> int rows_per_task(const Packed<W>& w, int num_rows) {
  const bool are_many = w.row_length() > LONG_ROW;
  return num_rows <= BLOCK_ROWS ? BLOCK_ROWS : are_many ? MAX_ROWS / 2 : MAX_ROWS;
}
template <class W> int groups_per_task(const Packed<W>& w, int groups, int num_rows, int chunks, int threads) {
  if (num_rows > BLOCK_ROWS) return std::max(1, std::min(MOST_GROUPS, groups * chunks / (16 * threads)));
  long work = (long)std::min(num_rows, 16) * w.row_length() * GROUP;  // so that a task takes some microseconds
  int each = (int)std::max(1L, std::min((1L << 18) / work, (long)groups / (8 * threads)));
  return std::max(each, groups > 512 ? 8 : 1);
}

// What a product of a group fetches for the next one; and, of the first of a thread, for itself.
template <class W>
void put_aside(Scratch& own, const AddedRows& added, int first_row, int count, int group, int after) {
  own.aside = &own.adapters;
  own.aside->clear();
  for (int g : {group, after})
    if (g >= 0) fetch_adapted<W>(added, first_row, g, count, *own.aside);
}

// Which run of groups a task is. With adapters each thread has neighbouring runs, if all are as fast: of a run each
// adapter has little, so that what one thread reads would else alternate with what the other does.
struct RunOrder {
  int runs, threads;
  bool is_apart;
  int run_of(int task) const {
    if (!is_apart) return task % runs;
    const int thread = task % threads;
    return thread * (runs / threads) + std::min(thread, runs % threads) + task / threads;
  }
};

// Many rows as units of a weight's inputs, by all threads, once for all tasks of a product.
template <class T>
bool quantize_together(holdfast::Run& run, const T* rows, long stride, int num_rows, long units, RowUnit* out) {
  return holdfast::tasks(run, (num_rows + QUANTIZED_ROWS - 1) / QUANTIZED_ROWS, [&](int task) {
    for (int r = task * QUANTIZED_ROWS, end = std::min(num_rows, r + QUANTIZED_ROWS); r < end; r++)
      quantize_row(rows + r * stride, units, out + r * units);
  });
}

// Calls `out(group, first row, rows, sums [rows][64])` for groups [begin, last) and all rows of a product. `call` numbers
// it (`input_rows`); `scratch()` is the memory of the thread that calls it, in a task.
// `units`: the rows in units; or null, where the weight is not or each thread makes them. `added`: adapters of rows; or null.
template <class W, class ScratchOf, class Out>
bool product_tasks(holdfast::Run& run, int threads, const Packed<W>& w, int begin, int last,
                   const typename InputOf<W>::Type* rows, long stride, int num_rows, long call, ScratchOf&& scratch,
                   Out&& out, const RowUnit* units = nullptr, const AddedRows* added = nullptr) {
  const int chunk = rows_per_task(w, num_rows), chunks = (num_rows + chunk - 1) / chunk;
  const int each = groups_per_task(w, last - begin, num_rows, chunks, threads), runs = (last - begin + each - 1) / each;
  const int num_tasks = chunks * runs;
  const RunOrder order = {runs, threads, added && chunks == 1};
  return holdfast::tasks(run, num_tasks, [&](int task) {
    Scratch& own = scratch();
    int first_row = task / runs * chunk, count = std::min(chunk, num_rows - first_row);
    int group = begin + order.run_of(task) * each, later = task + threads;
    int next =
        later < num_tasks ? begin + order.run_of(later) * each : -1;  // of this thread's next task, if all are as fast
    const InputRows<W> input = units ? rows_in_units<W>(units + (long)first_row * w.k_tiles(), count)
                                     : input_rows<W>(own, w, rows + first_row * stride, stride, count, call);
    for (int g = group, end = std::min(group + each, last); g < end; g++) {
      const int after = g + 1 < end ? g + 1 : next;
      if (added) put_aside<W>(own, *added, first_row, count, task < threads && g == group ? g : -1, after);
      product(own, w, g, input, own.sums, after, [&](int slice, float* sums) {
        if (added) add_adapted<W>(*added, first_row, g, slice, count, sums);
      });
      own.aside = nullptr;
      out(g, first_row, count, own.sums);
    }
  });
}

}  // namespace
