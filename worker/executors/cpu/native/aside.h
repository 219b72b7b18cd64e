// What a product fetches beside its own weights: memory that is read soon, some lines of it with each k tile.
//
// Of many lines that are asked for at once, much has not come when it is needed. What is fetched, and for whom,
// does not live here.
#pragma once
#include <immintrin.h>

#include <vector>

namespace {

class Aside {
 public:
  void clear() { stretches.clear(), next = 0, lines = 0; }
  void add(const void* from, long bytes) {
    if (bytes > 0) stretches.push_back({(const char*)from, (const char*)from + bytes}), lines += (bytes + 63) / 64;
  }
  // Lines of each of `steps` steps.
  int share(long steps) const { return (int)((lines + steps - 1) / steps); }
  void some(int count) {
    for (; count > 0 && next < stretches.size(); next++) {
      Stretch& from = stretches[next];
      for (; count > 0 && from.at < from.end; count--, from.at += 64) _mm_prefetch(from.at, _MM_HINT_T1);
      if (from.at < from.end) return;
    }
  }

 private:
  struct Stretch {
    const char *at, *end;
  };
  std::vector<Stretch> stretches;
  size_t next = 0;
  long lines = 0;
};

}  // namespace
