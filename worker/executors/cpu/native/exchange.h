// Exchange of partial sums between the ranks of one host, through memory that all of them have mapped.
// What may live here: who has come to which sum, waiting for the others, and their loss. What may not: arithmetic, and how
// ranks come to share memory (`exchange.py`).
//
// A rank has one line and two buffers [rows][stride], for even and odd sums. It writes its partials of sum n into its
// buffer n % 2, then it arrives at n (its line says so) and waits until all others have: from then on it may read all
// buffers n % 2. Sums are numbered from 1, alike on all ranks.
//
// Why two buffers are enough: a rank writes sum n + 2 where n was only after it has met the others at n + 1. Each of them
// arrives there only when it has written its partials of n + 1, which it computes from what it read of sum n. So nobody
// reads sum n any more. And nobody reads n + 2 too early, since its writer has not arrived there.
//
// Who waits sleeps on the other's line after some spinning. It says so first and looks again then; who arrives says so
// first and looks for sleepers then: with sequentially consistent operations one of both sees the other. Every few
// milliseconds a sleeper wakes by itself and looks whether the others live: a process that has ended arrives nowhere.
// Then the exchange is broken for good: every meeting fails at once, and the others are told.
#pragma once
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "decoder.h"
#include "pool.h"

namespace holdfast {

class Exchange {
 public:
  using Sum = std::uint32_t;  // wraps around
  using Waiter = Protocol::Waiter;
  enum { kMostRanks = 16 };
  enum Outcome { kFine = 0, kEnded = -100, kSilent = -200, kLeft = -300 };  // minus the rank that was lost

  static long bytes(int ranks, long rows, long stride) { return kPage + 2 * ranks * buffer_bytes(rows, stride); }

  Exchange(const NativeExchange& shared, long rows, long stride)
      : memory((char*)shared.memory),
        rank(shared.rank),
        ranks(shared.ranks),
        timeout_ms((long)(shared.timeout_s * 1000)),
        each(buffer_bytes(rows, stride)),
        owner(getpid()),
        processes(shared.processes, shared.processes + shared.ranks) {}
  Exchange(const Exchange&) = delete;
  ~Exchange() { leave(); }

  // This rank's place for its partials of a sum, or, once it has met the others there, another rank's.
  float* buffer(int of_rank, Sum n) const { return (float*)(memory + kPage + (2 * of_rank + n % 2) * each); }
  float* own(Sum n) const { return buffer(rank, n); }

  // Says that this rank's partials of sum n are written, and waits for the others. May be called by several threads.
  // False: a rank is lost, and `outcome` says which.
  bool meet(Sum n, Waiter& waiter) {
    if (outcome()) return false;
    arrive(n);
    return waiter.spin([&] { return missing(n) == kNone; }) || sleep_until(n);
  }
  int outcome() const { return broken.load(std::memory_order_relaxed); }

 private:
  enum { kPage = 4096, kLineBytes = 128, kNone = -1, kLookMs = 20 };
  struct Line {
    std::atomic<std::uint32_t> arrived, sleepers, left;
  };
  static_assert((kMostRanks + 1) * kLineBytes <= kPage, "lines fit behind the first, which is Python's");

  static long buffer_bytes(long rows, long stride) {
    return (rows * stride * (long)sizeof(float) + kPage - 1) / kPage * kPage;
  }
  Line& line(int of_rank) const { return *(Line*)(memory + (of_rank + 1) * kLineBytes); }

  int missing(Sum n) const {
    for (int r = 0; r < ranks; r++)
      if ((std::int32_t)(line(r).arrived.load() - n) < 0) return r;
    return kNone;
  }

  void arrive(Sum n) {
    Line& own = line(rank);
    if (own.arrived.load() != n) own.arrived.store(n);
    if (own.sleepers.load()) wake(own);
  }

  bool sleep_until(Sum n) {
    long waited = 0, since_look = 0, last = now_ms();
    for (int late; (late = missing(n)) != kNone;) {
      if (outcome()) return false;
      sleep_on(line(late), n);
      long now = now_ms(),
           passed = std::min(now - last, 2L * kLookMs);  // when we were stopped ourselves, nobody was silent
      last = now, waited += passed, since_look += passed;
      int why = line(late).left.load() ? kLeft - late : kFine;
      if (!why && since_look >= kLookMs) why = waited >= timeout_ms ? kSilent - late : ended(), since_look = 0;
      if (why && missing(n) != kNone) return fail(why);  // who arrived and left after it is not missed
    }
    return true;
  }
  void sleep_on(Line& other, Sum n) {
    other.sleepers.fetch_add(1);
    std::uint32_t seen = other.arrived.load();
    timespec limit = {0, kLookMs * 1000000L};
    if ((std::int32_t)(seen - n) < 0 && !other.left.load())
      syscall(SYS_futex, &other.arrived, FUTEX_WAIT, seen, &limit, nullptr,
              0);  // not private: the word is in other processes too
    other.sleepers.fetch_sub(1);
  }
  static void wake(Line& own) { syscall(SYS_futex, &own.arrived, FUTEX_WAKE, 0x7fffffff, nullptr, nullptr, 0); }

  // Which other rank's process has ended, as an outcome.
  int ended() const {
    pollfd polled[kMostRanks] = {};
    for (int r = 0; r < ranks; r++) polled[r] = {r == rank ? -1 : processes[r], POLLIN, 0};
    if (poll(polled, ranks, 0) <= 0) return kFine;
    for (int r = 0; r < ranks; r++)
      if (polled[r].revents & POLLIN) return kEnded - r;
    return kFine;
  }

  bool fail(int why) {
    int none = kFine;
    broken.compare_exchange_strong(none, why);
    leave();
    return false;
  }
  void leave() {
    if (getpid() != owner) return;  // a forked child's copy says nothing in its parent's name
    line(rank).left.store(1);
    wake(line(rank));
  }
  static long now_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
  }

  char* const memory;
  const int rank, ranks;
  const long timeout_ms, each;
  const pid_t owner;
  const std::vector<int> processes;
  std::atomic<int> broken{kFine};
};

}  // namespace holdfast
