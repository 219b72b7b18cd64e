// Which rows of a product have which adapter, and the memory of what an adapter adds to a linear. Rows with the same
// adapter are taken together, up to four, only so that its numbers are read once for them. What is computed stands in
// `adapters.h`.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
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

// Which runs of groups of a product are taken (`product_tasks.h`): each thread takes its own from the first one on, and
// then the last ones of others, whose next one stays theirs.
class Turns {
 public:
  explicit Turns(int threads) : taken(threads) {}
  void clear() {
    for (Taken& of : taken) of.both.store(0, std::memory_order_relaxed);
  }
  // The number of one of the `count` runs of a thread, or -1: none is left.
  int take(int of, int count, bool is_own) {
    std::atomic<uint64_t>& both = taken[of].both;
    for (uint64_t found = both.load(std::memory_order_relaxed);;) {
      const int first = (int)(uint32_t)found, last = (int)(found >> 32);
      if (first + last >= count) return -1;
      const uint64_t after = found + (is_own ? 1 : uint64_t(1) << 32);
      if (both.compare_exchange_weak(found, after, std::memory_order_relaxed)) return is_own ? first : count - 1 - last;
    }
  }

 private:
  struct alignas(64) Taken {
    std::atomic<uint64_t> both{0};  // how many from the first one on, and from the last one on in the upper half
  };
  std::vector<Taken> taken;
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
