// The thread pool of the native executor: threads that go through the phases of a job together.
// pool_protocol.h says how and why it is right; here stand the promises. Kernels belong elsewhere, and so does scratch
// memory: a job keeps it by run.tid.
//
// A job is a function that every thread runs. It calls tasks(run, n, fn) once for each phase, all threads alike: the
// same phases in the same order, the same n for a phase that is not over. A task runs once, on any thread, and a phase
// begins when all tasks of the last one are done. When tasks() returns false the job is over: leave it at once.
//
// A thread that the system puts aside between tasks holds nobody up: the others go on, run() returns, and further jobs
// begin while it is away. Therefore, outside tasks, a job may use
// - *argument, a copy that stays this job's until the last thread has left it (the caller's may live on its stack), and
// - memory that lives until drain(); a late thread may find there what later phases or jobs have written, also as its
//   n, which is harmless: it gets no task. It must not follow a pointer that it finds in such changing memory.
// Inside a task, everything that the caller owns during run() may be used. Tasks may throw std::bad_alloc and nothing else,
// and must not end their thread.
//
// A thread that is stopped in the middle of a task holds its phase up until it goes on; one that is cancelled there
// would for ever, and cannot be survived inside a process. After fork() the child has the pool without its threads:
// run() answers kForked there and does nothing, destroy frees memory alone; the parent's pool is not touched. A pool of
// one thread goes on in the child.
// Threads have the floating-point modes (MXCSR) of the thread that made the pool; a job sets what its bits depend on.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "pool_protocol.h"

namespace holdfast {

struct SystemAtomics {
  template <class T> using Atomic = std::atomic<T>;
  static void pause() { __builtin_ia32_pause(); }
  static void copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  static void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value);
  static void wake_all(std::atomic<std::uint32_t>& word);
  [[noreturn]] static void fail(const char* what);  // a mistake of the program: says it and aborts
};

using Protocol = PoolProtocol<SystemAtomics>;
using Run = Protocol::Run;
using Job = Protocol::Job;
struct Pool;

enum Outcome : int {
  kDone = 0,
  kForked = -1,   // this process is a child of the pool's
  kBusy = -2,     // the pool runs a job already: another thread's, or the one that this call was made in
  kTooLong = -3,  // the argument has more than kMostArgument bytes
  kNoMemory = -4  // a task, or the preparation of a job, could not have the memory that it needs
};

// Runs a job on all threads; the caller is thread 0. Copies `bytes` bytes of the argument.
int run(Pool* pool, Job job, const void* argument, std::size_t bytes);

template <class Argument> int run(Pool* pool, Job job, const Argument* argument) {
  static_assert(std::is_trivially_copyable_v<Argument>, "late threads read a copy of the argument");
  static_assert(sizeof(Argument) <= Protocol::kMostArgument && alignof(Argument) <= 64, "it has to fit into its slot");
  return run(pool, job, argument, sizeof(Argument));
}

// One phase of `n` tasks, fn(0) to fn(n - 1). False: this job is over, leave it. A task that gets no memory ends its job
// with the phase, and run() answers kNoMemory: nobody goes on with what it has not computed.
template <class Fn> bool tasks(Run& run, int n, Fn&& fn) {
  auto guarded = [&](int i) {
    try {
      fn(i);
    } catch (const std::bad_alloc&) { run.slot->failed.store(kNoMemory); }
  };
  return Protocol::tasks(run, n, guarded) && !run.slot->failed.load();
}

// What `prepare` returns, or kNoMemory: no exception may pass the library's entry points.
template <class Fn> int prepared(Fn&& prepare) {
  try {
    return prepare();
  } catch (const std::bad_alloc&) { return kNoMemory; }
}

// Waits until all threads have left all jobs: memory that jobs read between tasks may be freed after it.
int drain(Pool* pool);

}  // namespace holdfast

extern "C" {
// A pool of `threads` threads in all (1 to 1024). `spin`: pauses before a waiting thread sleeps; negative: a default.
// `cores`: null, or one core for each thread; entry 0 is where the caller should be, which the pool leaves alone. With
// null the threads may go wherever the caller of a job may, but for the core that it is on, if there are enough.
// Null and errno: EINVAL for an argument out of range or a core that is not ours, EAGAIN or ENOMEM from the system.
holdfast::Pool* native_pool_create(int threads, int spin, const int* cores);
// Joins the threads, which may sleep, spin or be late in a job that is over. Not during run().
void native_pool_destroy(holdfast::Pool* pool);
int native_pool_threads(const holdfast::Pool* pool);
int native_pool_drain(holdfast::Pool* pool);
}
