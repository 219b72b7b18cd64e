// Model check of the pool's protocol: the real pool_protocol.h on the checker's atomics, jobs of a few small phases.
// In every order of operations: each task runs once, after all tasks of the phase before and while its caller waits
// for it; an argument stays as it was for whoever is in the job; nobody reads what drain() allowed to free; all end.
//   check_pool PREEMPTIONS THREADS JOBS PHASE_SIZES...      such as: check_pool 3 2 2 2 1
#include "checker.h"
#include "pool_protocol.h"

#include <stdio.h>
#include <stdlib.h>

#include <new>

namespace {

using Protocol = holdfast::PoolProtocol<checker::Atomics>;
using Run = Protocol::Run;

constexpr int kMost = 4;
int threads, jobs, phases;
int sizes[kMost];

struct Argument {
  long job, again;
};

struct World {  // one run's
  Protocol::Slot slots[checker::kMostThreads + 1];
  Protocol protocol{threads, slots};
  Protocol::Waiter idle[checker::kMostThreads], busy[checker::kMostThreads];
  struct Plain {
    int callers_job = -1;  // what the caller owns is there while it runs this job
    int freed = 0;         // what lives until drain()
    int ran[kMost][kMost][kMost] = {}, done[kMost][kMost] = {};
  } plain;

  World() {
    checker::watch(&plain, sizeof plain);
    for (Protocol::Slot& slot : slots) checker::watch(slot.argument, sizeof(Argument));
  }
};

alignas(World) char room[sizeof(World)];
World& world = *reinterpret_cast<World*>(room);
World::Plain& plain = world.plain;

void require(bool fine, const char* what) {
  if (!fine) checker::fail(what);
}

int size_of(int job, int phase) { return sizes[(phase + job) % phases]; }

void task(int job, int phase, int i) {
  require(plain.callers_job == job, "a task of a job that is over");
  require(i < size_of(job, phase) && plain.ran[job][phase][i] == 0, "a task that is none, or ran before");
  bool in_turn = phase == 0 || plain.done[job][phase - 1] == size_of(job, phase - 1);
  require(in_turn, "a phase began before the last one ended");
  plain.ran[job][phase][i] = 1;
  checker::next_thread();  // a task takes time
  require(plain.callers_job == job, "a job ended during its task");
  plain.done[job][phase]++;
}

// The number of tasks is read from memory of the caller's kind that later jobs change: a late thread finds nonsense.
int size_as_read(int job, int phase) { return plain.callers_job == job ? size_of(job, phase) : kMost - 1; }

void job(const void* pointer, Run& run) {
  const Argument& argument = *static_cast<const Argument*>(pointer);
  const int number = int(argument.job);
  for (int phase = 0; phase < phases; phase++) {
    checker::next_thread();  // the code between tasks takes time
    require(argument.job == number && argument.again == number, "an argument changed under a reader");
    require(!plain.freed, "freed memory was read after a drain");
    if (!Protocol::tasks(run, size_as_read(number, phase), [=](int i) { task(number, phase, i); })) return;
  }
}

void nothing(const void*, Run&) {}

void run_job(int number) {
  Argument argument{number, number};
  plain.callers_job = number;
  Run run = world.protocol.begin(job, &argument, sizeof argument, world.busy[0]);
  job(run.slot->argument, run);
  require(world.protocol.end(run), "a job ended with a task running");
  for (int phase = 0; phase < phases; phase++)
    require(plain.done[number][phase] == size_of(number, phase), "a task never ran");
  plain.callers_job = -1;
}

void caller() {
  for (int number = 0; number < jobs; number++) run_job(number);
  Run empty = world.protocol.begin(nothing, "", 0, world.busy[0]);
  world.protocol.end(empty);
  world.protocol.drain(world.busy[0]);
  plain.freed = 1;
  world.protocol.stop();
}

void body(int tid) {
  if (tid == 0) caller();
  else world.protocol.work(tid, world.idle[tid], world.busy[tid]);
}

void make() { new (room) World; }

}  // namespace

int main(int count, char** words) {
  if (count < 5 || count > 4 + kMost) return 2;
  threads = atoi(words[2]), jobs = atoi(words[3]), phases = count - 4;
  for (int i = 0; i < phases; i++) sizes[i] = atoi(words[4 + i]);
  checker::Found found = checker::explore(threads, make, body, atoi(words[1]));
  printf("no fault in %zu states, %ld runs\n", found.states, found.runs);
}
