// The protocol of the thread pool: how threads enter a job, share out the tasks of its phases, wait and leave.
// A template over its atomic operations: pool.cpp runs it on std::atomic and futexes, a model checker
// (tests/worker/executors/native/) on atomics that try every interleaving. No threads, clocks or system calls in here.
//
// The rules, and why they are right:
//
// 1. A phase ends when its tasks are done, not when all threads have come. One word of a job holds the phase, how many
//    of its tasks were claimed and how many are done. The next phase begins when the first thread that has seen the end
//    of the last one claims a task. A thread that was put aside finds a later phase in the word and goes on to it, so
//    nobody ever waits for a thread that is not in the middle of a task.
// 2. A job has a slot: its word and a COPY of its argument. A worker enters by adding itself to the slot's readers, and
//    looks again whether the job is still the current one; the caller takes for a new job only a slot that is not the
//    current one and has no readers. Both sides write first and then read what the other wrote, so one of them sees the
//    other: a slot is never changed under a reader. A thread stays in one slot at most; so of (threads + 1) slots
//    one is always free, and a new job waits for nobody, however long a late thread stays in an old one.
// 3. The caller closes the word before it leaves the job. A late thread then gets no task of it, whatever it believes
//    the number of tasks to be; so only tasks, and never the code between them, may touch what the caller owns.
// 4. Who sleeps says so first and looks again then; who changes something changes it first and looks for sleepers then
//    (Bell). Again one of both sees the other, and no wake-up is lost.
//
// All operations are sequentially consistent: on x86-64 that costs nothing here (every write is a locked instruction
// anyway), and it makes the interleavings that the checker tries all that there are.
#pragma once
#include <cstddef>
#include <cstdint>

namespace holdfast {

template <class Atomics> class PoolProtocol {
  template <class T> using Atomic = typename Atomics::template Atomic<T>;
  using Word = std::uint64_t;

 public:
  struct Slot;
  struct Waiter;
  struct Run {  // one thread's way through one job
    int tid;
    int num_threads;
    PoolProtocol* pool;
    Slot* slot;
    Waiter* waiter;
    Word phase;
  };
  using Job = void (*)(const void* argument, Run& run);

  static constexpr int kCountBits = 22;
  static constexpr int kMostTasks = (1 << kCountBits) - 1;
  static constexpr int kMostPhases = (1 << (64 - 2 * kCountBits)) - 2;
  static constexpr int kMostThreads = 1024;
  static constexpr int kMostArgument = 1024;  // bytes

  struct alignas(64) Slot {
    Atomic<Word> progress{kClosed};  // phase 20 | done 22 | claimed 22
    alignas(64) Atomic<std::int32_t> readers{0};
    Job job = nullptr;
    Atomic<std::int32_t> failed{0};  // a task of the job has: what with is its caller's affair
    alignas(64) unsigned char argument[kMostArgument];
  };

  // Spins for a while before it sleeps. The limit halves when spinning was in vain, because the awaited thread has
  // most likely no core and ours may be the one; now and then it spins the most, to find out that the machine is quiet.
  struct alignas(64) Waiter {
    int most = 0;  // pauses
    int limit = 0;
    unsigned waits = 0;

    template <class Over> bool spin(Over over) {
      int pauses = ++waits % 16 == 0 ? most : limit;
      for (int i = 0; i < pauses; i++) {
        if (over()) return succeeded(pauses);
        Atomics::pause();
      }
      if (over()) return succeeded(pauses);
      limit /= 2;
      return false;
    }

   private:
    bool succeeded(int pauses) {
      limit = pauses < most / 2 ? 2 * pauses + 1 : most;
      return true;
    }
  };

  // Where threads sleep until something they look at has changed.
  class alignas(64) Bell {
    Atomic<std::uint32_t> rung{0};
    Atomic<std::uint32_t> sleepers{0};

   public:
    void ring() {  // after the change
      if (sleepers.load() == 0) return;
      rung.fetch_add(1);
      Atomics::wake_all(rung);
    }
    template <class Over> void wait(Waiter& waiter, Over over) {
      if (waiter.spin(over)) return;
      while (!over()) {
        sleepers.fetch_add(1);
        std::uint32_t heard = rung.load();
        if (!over()) Atomics::sleep_while(rung, heard);
        sleepers.fetch_sub(1);
      }
    }
  };

  // `slots` has threads + 1 entries; all that is passed in outlives the pool.
  PoolProtocol(int threads, Slot* slots) : num_threads(threads), slots(slots) {}

  // The caller's part: begin, the job itself, end.
  Run begin(Job job, const void* argument, std::size_t bytes, Waiter& waiter) {
    int index = free_slot();
    Slot& slot = slots[index];
    slot.job = job;
    slot.failed.store(0);
    Atomics::copy(slot.argument, argument, bytes);
    slot.progress.store(0);
    publish(index);
    return {0, num_threads, this, &slot, &waiter, 0};
  }
  // False: a task is still running, so not all threads called tasks() alike.
  bool end(Run& run) {
    Word last = run.slot->progress.exchange(kClosed);
    return done_of(last) == claimed_of(last);
  }

  // A worker's part: takes part in every job that it is in time for, until stop().
  void work(int tid, Waiter& idle, Waiter& busy) {
    for (Word seen = 0;;) {
      started.wait(idle, [&] { return current.load() != seen; });
      seen = current.load();
      if (index_of(seen) == kStop) return;
      visit(slots[index_of(seen)], seen, tid, busy);
    }
  }
  void stop() { publish(kStop); }

  // Waits until no worker is in a job, between tasks included: what jobs read there may be freed then.
  // The caller has begun and ended an empty job before, so that none can come back to an older one.
  void drain(Waiter& waiter) {
    for (int i = 0; i <= num_threads; i++)
      left.wait(waiter, [&] { return i == index_of(current.load()) || slots[i].readers.load() == 0; });
  }

  template <class Task> static bool tasks(Run& run, int n, Task&& task) {
    if (n < 0 || n > kMostTasks || run.phase == kMostPhases) Atomics::fail("tasks: too many tasks or phases");
    run.phase++;
    if (run.num_threads == 1) {
      for (int i = 0; i < n; i++) task(i);
      return true;
    }
    return share(run, n, task);
  }

 private:
  static constexpr Word kOneClaimed = 1, kOneDone = Word(1) << kCountBits, kOnePhase = kOneDone << kCountBits;
  static constexpr Word kClosed = ~Word(0);  // a later phase than any
  static constexpr int kStop = 0xffff;
  static constexpr int kNone = -1;

  static Word phase_of(Word word) { return word / kOnePhase; }
  static int done_of(Word word) { return int(word / kOneDone) & kMostTasks; }
  static int claimed_of(Word word) { return int(word) & kMostTasks; }
  static int index_of(Word job) { return int(job & 0xffff); }

  template <class Task> static bool share(Run& run, int n, Task&& task) {
    for (int i = next_task(run, n, false); i != kNone; i = next_task(run, n, true)) task(i);
    Atomic<Word>& progress = run.slot->progress;
    auto over = [&] {
      Word word = progress.load();
      return phase_of(word) != run.phase || done_of(word) == n;
    };
    if (n > 0) run.pool->advanced.wait(*run.waiter, over);
    return progress.load() != kClosed;
  }

  // Says that a task is done, if one was, and claims the next: both in one step, as each step moves the word's line
  // from core to core.
  static int next_task(Run& run, int n, bool finished) {
    Word word = run.slot->progress.load();
    for (;;) {
      if (phase_of(word) > run.phase) return kNone;  // we are late; not when finished: our task held the phase open
      bool first = phase_of(word) < run.phase;       // we have seen all phases before ours end, and nobody began ours
      int claimed = first ? 0 : claimed_of(word);
      bool more = claimed < n;
      if (!more && !finished) return kNone;
      Word after = (first ? run.phase * kOnePhase : word) + (finished ? kOneDone : 0) + (more ? kOneClaimed : 0);
      if (!run.slot->progress.compare_exchange_weak(word, after)) continue;
      if (finished && done_of(after) == n) run.pool->advanced.ring();
      return more ? claimed : kNone;
    }
  }

  void visit(Slot& slot, Word seen, int tid, Waiter& busy) {
    slot.readers.fetch_add(1);
    if (current.load() == seen) {
      Run run{tid, num_threads, this, &slot, &busy, 0};
      slot.job(slot.argument, run);
    }
    slot.readers.fetch_sub(1);
    left.ring();
  }

  int free_slot() {
    int taken = index_of(current.load());
    for (int i = 0; i <= num_threads; i++)
      if (i != taken && slots[i].readers.load() == 0) return i;
    Atomics::fail("free_slot: more readers than threads");
    return kNone;
  }

  void publish(int index) {
    current.store((++serial << 16) + Word(index));
    started.ring();
  }

  const int num_threads;
  Slot* const slots;
  Word serial = 0;                      // the caller's
  alignas(64) Atomic<Word> current{0};  // serial 48 | slot 16; 0 before the first job
  Bell started;                         // a job or the stop was published
  Bell advanced;                        // a phase has ended
  Bell left;                            // a worker has left a job
};

}  // namespace holdfast
