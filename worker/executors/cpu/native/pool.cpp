// The thread pool's threads and system calls: makes them, lets them sleep and wakes them, joins them.
// How they share out work is pool_protocol.h's affair.
#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>
#include <memory>
#include <new>

namespace holdfast {

namespace {

constexpr int kDefaultSpin = 2000;

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  static_assert(sizeof(word) == 4 && std::atomic<std::uint32_t>::is_always_lock_free, "the kernel reads it");
  syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

struct Worker {
  Pool* pool;
  int tid;
  pthread_t thread;
  Protocol::Waiter idle, busy;
};

void nothing(const void*, Run&) {}

}  // namespace

void SystemAtomics::sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  futex(word, FUTEX_WAIT, value);  // may return for no reason; who waits looks again
}

void SystemAtomics::wake_all(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, 0x7fffffff); }

void SystemAtomics::fail(const char* what) {
  fprintf(stderr, "holdfast thread pool: %s\n", what);
  abort();
}

struct Pool {
  Pool(int threads, int spin, bool placed)
      : threads(threads),
        owner(getpid()),
        placed(placed),
        slots(new Protocol::Slot[threads + 1]),
        workers(new Worker[threads]),
        protocol(threads, slots.get()) {
    for (int tid = 0; tid < threads; tid++) {
      workers[tid].pool = this;
      workers[tid].tid = tid;
      workers[tid].idle.most = workers[tid].idle.limit = spin;
      workers[tid].busy.most = workers[tid].busy.limit = spin;
    }
  }

  const int threads;
  const pid_t owner;
  const bool placed;      // every thread was given a core
  int started = 1;        // threads, the caller among them
  int callers_core = -1;  // which the others keep off, since the last job
  std::unique_ptr<Protocol::Slot[]> slots;
  std::unique_ptr<Worker[]> workers;  // entry 0 is the caller's
  Protocol protocol;
  alignas(64) std::atomic<bool> busy{false};
};

namespace {

void* work(void* worker_pointer) {
  Worker& worker = *static_cast<Worker*>(worker_pointer);
  worker.pool->protocol.work(worker.tid, worker.idle, worker.busy);
  return nullptr;
}

// It takes no signals but those of its own faults: the others are for the program's threads.
sigset_t signals_to_block() {
  sigset_t set;
  sigfillset(&set);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&set, own);
  return set;
}

// The thread is on its core from its first instruction on.
int start_worker(Worker& worker, const int* cores) {
  pthread_attr_t attributes;
  if (int error = pthread_attr_init(&attributes)) return error;
  if (cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores[worker.tid], &set);
    pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
  }
  sigset_t blocked = signals_to_block(), before;
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  int error = pthread_create(&worker.thread, &attributes, work, &worker);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return error;
}

bool possible(int threads, const int* cores) {
  if (threads < 1 || threads > Protocol::kMostThreads) return false;
  for (int tid = 0; cores && tid < threads; tid++)
    if (cores[tid] < 0 || cores[tid] >= CPU_SETSIZE) return false;
  return true;
}

void join_workers(Pool& pool) {
  pool.protocol.stop();
  for (int tid = 1; tid < pool.started; tid++) pthread_join(pool.workers[tid].thread, nullptr);
}

int start_workers(Pool& pool, const int* cores) {
  for (; pool.started < pool.threads; pool.started++)
    if (int error = start_worker(pool.workers[pool.started], cores)) return error;
  return 0;
}

Pool* make(int threads, int spin, bool placed) {
  try {
    return new Pool(threads, spin, placed);
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return nullptr;
  }
}

// The pool is one caller's at a time.
class Turn {
 public:
  explicit Turn(Pool& pool) : pool(pool), mine(!pool.busy.exchange(true)) {}
  ~Turn() {
    if (mine) pool.busy.store(false);
  }
  Pool& pool;
  const bool mine;
};

// After fork() the child has the caller's thread alone. A pool of one thread misses nothing.
bool lost_its_threads(const Pool& pool) { return pool.threads > 1 && getpid() != pool.owner; }

// Linux may wake a thread on its waker's core though another is idle, and leave both there for tens of milliseconds: a
// step then takes twice its time. So the workers keep off the core that the caller was last seen on. The caller itself
// may go wherever its own mask allows, which is theirs as well but for that core.
void keep_off_callers_core(Pool& pool) {
  if (pool.threads == 1 || pool.placed) return;
  int core = sched_getcpu();
  if (core == pool.callers_core) return;
  pool.callers_core = core;
  cpu_set_t set;
  if (core < 0 || sched_getaffinity(0, sizeof set, &set) || CPU_COUNT(&set) < pool.threads) return;
  CPU_CLR(core, &set);
  for (int tid = 1; tid < pool.started; tid++)
    pthread_setaffinity_np(pool.workers[tid].thread, sizeof set, &set);  // refused: they stay where they may be
}

int run_now(Pool& pool, Job job, const void* argument, std::size_t bytes) {
  keep_off_callers_core(pool);
  Run run = pool.protocol.begin(job, argument, bytes, pool.workers[0].busy);
  job(run.slot->argument, run);
  if (!pool.protocol.end(run)) SystemAtomics::fail("the caller left a job in which a task still runs");
  return run.slot->failed.load();
}

}  // namespace

int run(Pool* pool, Job job, const void* argument, std::size_t bytes) {
  if (lost_its_threads(*pool)) return kForked;
  if (bytes > Protocol::kMostArgument) return kTooLong;
  Turn turn(*pool);
  if (!turn.mine) return kBusy;
  return run_now(*pool, job, argument, bytes);
}

int drain(Pool* pool) {
  if (lost_its_threads(*pool)) return kForked;
  Turn turn(*pool);
  if (!turn.mine) return kBusy;
  run_now(*pool, nothing, "", 0);  // so that no thread comes back to an older job
  pool->protocol.drain(pool->workers[0].busy);
  return kDone;
}

}  // namespace holdfast

using holdfast::Pool;

Pool* native_pool_create(int threads, int spin, const int* cores) {
  if (!holdfast::possible(threads, cores)) {
    errno = EINVAL;
    return nullptr;
  }
  Pool* pool = holdfast::make(threads, spin < 0 ? holdfast::kDefaultSpin : spin, cores != nullptr);
  if (!pool) return nullptr;
  int error = holdfast::start_workers(*pool, cores);
  if (!error) return pool;
  native_pool_destroy(pool);
  errno = error;
  return nullptr;
}

void native_pool_destroy(Pool* pool) {
  if (getpid() == pool->owner) holdfast::join_workers(*pool);
  delete pool;
}

int native_pool_threads(const Pool* pool) { return pool->threads; }

int native_pool_drain(Pool* pool) { return holdfast::drain(pool); }
