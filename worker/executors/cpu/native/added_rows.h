// Which rows of a product have which adapter, and the memory of what an adapter adds to a linear. Rows with the same adapter
// are taken together, up to four, only so that its numbers are read once for them. What is computed stands in `adapters.h`.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "decoder.h"
#include "rows.h"

namespace {

enum { ROWS_TOGETHER = 4 };

// Calls `fn(R)` for rows that are taken together: 1, 2 or 4.
template <class Fn> NATIVE_INLINE void with_count(int count, Fn&& fn) {
  if (count == 1) fn(std::integral_constant<int, 1>());
  else if (count == 2) fn(std::integral_constant<int, 2>());
  else fn(std::integral_constant<int, 4>());
}

// Rows with one adapter that are taken together.
struct AddedRun {
  NativeAdapted adapted;
  const int* rows;
  int count;
};

// The runs of some rows; memory of a thread.
struct AddedRuns {
  int first = -1;  // place in the order
  std::vector<AddedRun> list;
};

// How many of its own runs of groups each thread has taken in a product (`product_tasks.h`).
class Turns {
 public:
  explicit Turns(int threads) : taken(threads) {}
  void clear() {
    for (Turn& turn : taken) turn.count.store(0, std::memory_order_relaxed);
  }
  // The number of the next one of a thread's; `count` or more: it has none left.
  int take(int thread, int count) {
    std::atomic<int>& own = taken[thread].count;
    return own.load(std::memory_order_relaxed) < count ? own.fetch_add(1, std::memory_order_relaxed) : count;
  }

 private:
  struct alignas(64) Turn {
    std::atomic<int> count{0};
  };
  std::vector<Turn> taken;
};

// Of a product: which adapter each row has, and the inner numbers of all rows. Null pointers: no row has one.
struct AddedRows {
  const int* adapter_of = nullptr;         // [rows]; -1: none
  const int* order = nullptr;              // [rows] rows: those of each `BLOCK_ROWS` by their adapter
  const NativeAdapted* adapted = nullptr;  // [adapters], of this linear
  float* inner = nullptr;                  // [rows][stride]: [slices][ranks] each
  long stride = 0;
  AddedRuns* runs = nullptr;  // of this thread
  Turns* turns = nullptr;

  // The rows at places [first, end) of the order that have an adapter here; kept for the next call.
  const std::vector<AddedRun>& runs_of(int first, int end) const {
    if (runs->first != first) list_runs(first, end);
    return runs->list;
  }

 private:
  void list_runs(int first, int end) const {
    runs->first = first, runs->list.clear();
    for (int i = first; i < end;) {
      const int adapter = adapter_of[order[i]];
      int alike = 1;
      while (alike < ROWS_TOGETHER && i + alike < end && adapter_of[order[i + alike]] == adapter) alike++;
      if (alike == 3) alike = 2;
      if (adapter >= 0 && adapted[adapter].ranks) runs->list.push_back({adapted[adapter], order + i, alike});
      i += alike;
    }
  }
};

inline void order_by_adapter(const int* adapter_of, int num_rows, int* order) {
  for (int first = 0; first < num_rows; first += BLOCK_ROWS) {
    const int end = std::min(num_rows, first + BLOCK_ROWS);
    for (int r = first; r < end; r++) order[r] = r;
    std::stable_sort(order + first, order + end, [&](int a, int b) { return adapter_of[a] < adapter_of[b]; });
  }
}

}  // namespace
