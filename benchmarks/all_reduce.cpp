// Times of single sums between two ranks of one host: the exchange of the native executor, by itself.
// Both ranks work for a random while, say when they are there, meet, and add a row of each: a sum costs what passes from
// the later arrival to the end of the addition on both. Prints nanoseconds, one sum a line; then each rank's CPU time.
//   all_reduce ELEMENTS SUMS MOST_WORK_US [0: each rank on a core of its own; 1: both on one core]
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "exchange.h"

using holdfast::Exchange;

namespace {

constexpr int kRanks = 2, kSpin = 2000;  // as `native_pool_create` has it

long now_of(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1000000000L + time.tv_nsec;
}
long now() { return now_of(CLOCK_MONOTONIC); }

struct Times {
  std::atomic<int> pid;
  long cpu;
  long* arrived;
  long* ended;
};

void* shared_memory(long bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) abort();
  return memory;
}

void add(const float* a, const float* b, long elements, float* out) {
  for (long j = 0; j < elements; j++) out[j] = a[j] + b[j];
}

void stay_on(int core) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(core, &mask);
  sched_setaffinity(0, sizeof mask, &mask);  // where it may not, the system chooses
}

void work_for(long ns) {
  for (long end = now() + ns; now() < end;) {}
}

void rank_life(int rank, void* memory, Times* all, long elements, int sums, long most_work_ns, bool one_core) {
  stay_on(one_core ? 0 : rank);
  Times& own = all[rank];
  own.pid = getpid();
  int processes[kRanks];
  for (int r = 0; r < kRanks; r++) {
    while (!all[r].pid.load()) usleep(100);
    processes[r] = (int)syscall(SYS_pidfd_open, all[r].pid.load(), 0);
  }
  Exchange exchange({memory, processes, 60, rank, kRanks}, 1, elements);
  holdfast::Protocol::Waiter waiter;
  waiter.most = waiter.limit = kSpin;
  std::vector<float> out(elements);
  unsigned state = 7 + rank;
  long before = now_of(CLOCK_PROCESS_CPUTIME_ID);
  for (int i = 0; i < sums; i++) {
    state = state * 1664525u + 1013904223u;
    work_for(most_work_ns * (state >> 16) / 65536);
    for (long j = 0; j < elements; j++) exchange.own(i + 1)[j] = float(i + j);
    own.arrived[i] = now();
    if (!exchange.meet(i + 1, waiter)) abort();
    add(exchange.buffer(0, i + 1), exchange.buffer(1, i + 1), elements, out.data());
    own.ended[i] = now();
    if (out[0] != 2 * float(i)) abort();
  }
  own.cpu = now_of(CLOCK_PROCESS_CPUTIME_ID) - before;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  long elements = atol(argv[1]), most_work_ns = 1000 * atol(argv[3]);
  int sums = atoi(argv[2]);
  void* memory = shared_memory(Exchange::bytes(kRanks, 1, elements));
  Times* all = (Times*)shared_memory(sizeof(Times) * kRanks);
  for (int r = 0; r < kRanks; r++)
    all[r].arrived = (long*)shared_memory(sums * sizeof(long)),
    all[r].ended = (long*)shared_memory(sums * sizeof(long));
  for (int r = 0; r < kRanks; r++)
    if (fork() == 0) return rank_life(r, memory, all, elements, sums, most_work_ns, argc > 4 && atoi(argv[4])), 0;
  for (int r = 0, status; r < kRanks; r++)
    if (wait(&status) < 0 || status) return 1;
  for (int i = 0; i < sums; i++)
    printf("%ld\n", std::max(all[0].ended[i], all[1].ended[i]) - std::max(all[0].arrived[i], all[1].arrived[i]));
  fprintf(stderr, "%ld %ld\n", all[0].cpu, all[1].cpu);
}
