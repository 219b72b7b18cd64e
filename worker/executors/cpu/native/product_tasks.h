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

// Which run of groups a task takes, which of its thread's it is (0: the first), and the one that its thread likely
// takes next, or -1.
struct RunTaken {
  int run, number, next;
};

// With adapters each thread has neighbouring runs: of a run each adapter has little, so that what one thread reads
// would else alternate with what the other does; and what it has fetched for the next one is then in its own cache. A
// thread without any left takes another's.
inline RunTaken run_of(const AddedRows* added, int thread, int threads, int task, int runs, int num_tasks) {
  for (int i = 0; added && num_tasks == runs && i < threads; i++) {
    const int of = (thread + i) % threads, first = of * (runs / threads) + std::min(of, runs % threads);
    const int count = runs / threads + (of < runs % threads), number = added->turns->take(of, count, i == 0);
    if (number >= 0) return {first + number, i ? 0 : number, i == 0 && number + 1 < count ? first + number + 1 : -1};
  }
  const int later = task + threads;  // if all are as fast
  return {task % runs, task / threads, later < num_tasks ? later % runs : -1};
}

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
  return holdfast::tasks(run, num_tasks, [&](int task) {
    Scratch& own = scratch();
    int first_row = task / runs * chunk, count = std::min(chunk, num_rows - first_row);
    const RunTaken taken = run_of(added, run.tid, threads, task, runs, num_tasks);
    const int group = begin + taken.run * each, next = taken.next < 0 ? -1 : begin + taken.next * each;
    const InputRows<W> input = units ? rows_in_units<W>(units + (long)first_row * w.k_tiles(), count)
                                     : input_rows<W>(own, w, rows + first_row * stride, stride, count, call);
    for (int g = group, end = std::min(group + each, last); g < end; g++) {
      const int after = g + 1 < end ? g + 1 : next;
      if (added) put_aside<W>(own, *added, first_row, count, taken.number || g > group ? -1 : g, after);
      product(own, w, g, input, own.sums, after, [&](int slice, float* sums) {
        if (added) add_adapted<W>(*added, first_row, g, slice, count, sums);
      });
      own.aside = nullptr;
      out(g, first_row, count, own.sums);
    }
  });
}

}  // namespace
