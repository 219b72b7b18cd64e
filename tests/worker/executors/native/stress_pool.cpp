// Stress test of the thread pool: one scenario by name, for some seconds. Tasks leave their results in plain memory, so
// that ThreadSanitizer sees a phase that began too early; whatever goes wrong aborts and says where.
//   stress_pool SCENARIO SECONDS THREADS SEED
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pool.h"

#define CHECK(what)                                                      \
  do {                                                                   \
    if (!(what)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
      abort();                                                           \
    }                                                                    \
  } while (0)

using holdfast::Pool;
using holdfast::Run;

namespace {

double seconds;
int threads;
unsigned seed;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

Pool* make(int count, int spin) {
  Pool* pool = native_pool_create(count, spin, nullptr);
  CHECK(pool && native_pool_threads(pool) == count);
  return pool;
}

// A job of random phases. Task i of a phase adds up what its neighbours left in the phase before; so each phase's
// values tell whether all of the last one was there, and `ran` whether each task ran once.
struct Phases {
  std::vector<int> sizes;
  std::vector<std::vector<int>> ran;
  std::vector<std::vector<unsigned>> values;
  void (*between)(Run&) = nullptr;

  Phases(std::mt19937& random, int most_phases, int most_tasks) {
    sizes.resize(random() % unsigned(most_phases) + 1);
    for (int& size : sizes) size = random() % 8 == 0 ? 0 : int(random() % unsigned(most_tasks)) + 1;
    for (int size : sizes) ran.emplace_back(size, 0), values.emplace_back(size, 0u);
  }
  unsigned value(int phase, int i) const {
    unsigned sum = unsigned(phase * 31 + i);
    if (phase > 0 && sizes[phase - 1] > 0)
      for (int far : {0, 1, 7}) sum = sum * 3 + values[phase - 1][(i + far) % sizes[phase - 1]];
    return sum;
  }
  void task(int phase, int i) {
    ran[phase][i]++;
    values[phase][i] = value(phase, i);
  }
  void verify() const {
    for (int phase = 0; phase < int(sizes.size()); phase++)
      for (int i = 0; i < sizes[phase]; i++) CHECK(ran[phase][i] == 1 && values[phase][i] == value(phase, i));
  }
};

// Outside tasks only the copy of this is read: a late thread may find the caller's Phases gone.
constexpr int kMostPhases = 100;
struct Sheet {
  Phases* phases;
  void (*between)(Run&);
  int count;
  int sizes[kMostPhases];
};

void go_through(const void* argument, Run& run) {
  const Sheet& sheet = *static_cast<const Sheet*>(argument);
  for (int phase = 0; phase < sheet.count; phase++) {
    if (sheet.between) sheet.between(run);
    Phases* phases = sheet.phases;
    if (!holdfast::tasks(run, sheet.sizes[phase], [=](int i) { phases->task(phase, i); })) return;
  }
}

void run_phases(Pool* pool, std::mt19937& random, int most_phases, int most_tasks, void (*between)(Run&) = nullptr) {
  Phases phases(random, most_phases, most_tasks);
  Sheet sheet{&phases, between, int(phases.sizes.size()), {}};
  std::copy(phases.sizes.begin(), phases.sizes.end(), sheet.sizes);
  CHECK(holdfast::run(pool, go_through, &sheet) == 0);
  memset(static_cast<void*>(&sheet), 0xee, sizeof sheet);  // a late thread must not see this
  phases.verify();
}

long run_random_jobs(Pool* pool, unsigned own_seed, void (*between)(Run&) = nullptr) {
  std::mt19937 random(own_seed);
  long jobs = 0;
  for (double end = now() + seconds; now() < end; jobs++)
    run_phases(pool, random, jobs % 10 ? 12 : kMostPhases, jobs % 50 ? 40 : 3000, between);
  return jobs;
}

void random_phases() {
  Pool* pool = make(threads, -1);
  printf("%ld jobs\n", run_random_jobs(pool, seed));
  native_pool_destroy(pool);
}

void never_spinning() {
  Pool* pool = make(threads, 0);
  printf("%ld jobs\n", run_random_jobs(pool, seed));
  native_pool_destroy(pool);
}

void limits() {
  Pool* pool = make(threads, -1);
  static std::atomic<long> sum;
  struct Size {
    int phases, tasks;
  };
  for (Size size : {Size{3, 1000000}, Size{5000, 2}, Size{1, 4194303}}) {
    sum = 0;
    auto job = [](const void* argument, Run& run) {
      Size size = *static_cast<const Size*>(argument);
      for (int phase = 0; phase < size.phases; phase++)
        if (!holdfast::tasks(run, size.tasks, [](int) { sum.fetch_add(1, std::memory_order_relaxed); })) return;
    };
    CHECK(holdfast::run(pool, job, &size) == 0);
    CHECK(sum == long(size.phases) * size.tasks);
  }
  native_pool_destroy(pool);
}

// Signals put workers aside wherever they are, tasks included, as the system would.
void put_aside(int) {
  timespec pause{0, 300000};
  nanosleep(&pause, nullptr);
}

std::atomic<pid_t> victims[64];

void take_signals(Run& run) {
  if (run.tid == 0 || victims[run.tid]) return;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  victims[run.tid] = pid_t(syscall(SYS_gettid));
}

void stopped_threads() {
  struct sigaction action{};
  action.sa_handler = put_aside;
  sigaction(SIGUSR1, &action, nullptr);
  Pool* pool = make(threads, -1);
  std::atomic<bool> over{false};
  std::thread tormentor([&] {
    for (std::mt19937 random(seed + 1); !over;) {
      pid_t victim = victims[random() % unsigned(threads)];
      if (victim) syscall(SYS_tgkill, getpid(), victim, SIGUSR1);
      timespec pause{0, long(random() % 200000)};
      nanosleep(&pause, nullptr);
    }
  });
  printf("%ld jobs\n", run_random_jobs(pool, seed, take_signals));
  over = true;
  tormentor.join();
  native_pool_destroy(pool);
}

// Thread 1 stays between two tasks of a job while the caller goes on with others.
std::atomic<int> inside, released, back;

struct Late {
  int number;
  int* caller_owns;
};

void late_job(const void* argument, Run& run) {
  const Late& late = *static_cast<const Late*>(argument);
  if (run.tid == 1 && late.number == 0) {
    inside = 1;
    while (!released) sched_yield();
    CHECK(late.number == 0);  // the copy is still this job's
    CHECK(!holdfast::tasks(run, 1000, [](int) { CHECK(!"a task of a job that is over"); }));
    back = 1;
    return;
  }
  int* owned = late.caller_owns;
  bool wait = late.number == 0;
  holdfast::tasks(run, 1, [=](int) {
    while (wait && !inside) sched_yield();
    ++*owned;
  });
}

void late_thread() {
  for (double end = now() + seconds; now() < end;) {
    Pool* pool = make(threads, -1);
    inside = released = back = 0;
    for (int number = 0; number < 20; number++) {
      int owned = 0;
      Late late{number, &owned};
      CHECK(holdfast::run(pool, late_job, &late) == 0);
      late.number = -1;
      CHECK(owned == 1 && !back);
    }
    std::thread release([] { released = 1; });
    CHECK(native_pool_drain(pool) == 0);
    CHECK(back == 1);
    release.join();
    native_pool_destroy(pool);
  }
}

void two_pools() {
  std::thread other([] {
    Pool* pool = make(threads, -1);
    run_random_jobs(pool, seed + 1);
    native_pool_destroy(pool);
  });
  random_phases();
  other.join();
}

// A task of one pool runs jobs on another; on its own it is refused.
struct Nested {
  Pool *outer, *inner;
};

void nested_pools() {
  Nested pools{make(threads, -1), make(threads, -1)};
  long jobs = 0;
  for (double end = now() + seconds; now() < end; jobs++) {
    auto job = [](const void* argument, Run& run) {
      Nested pools = *static_cast<const Nested*>(argument);
      holdfast::tasks(run, 3, [=](int i) {
        std::mt19937 random(seed);
        if (i == 0) run_phases(pools.inner, random, 10, 20);
        CHECK(native_pool_drain(pools.outer) == holdfast::kBusy);
      });
    };
    CHECK(holdfast::run(pools.outer, job, &pools) == 0);
  }
  native_pool_destroy(pools.outer);
  native_pool_destroy(pools.inner);
}

void fork_keeps_out() {
  Pool* pool = make(threads, -1);
  std::mt19937 random(seed);
  for (double end = now() + seconds; now() < end;) {
    run_phases(pool, random, 10, 20);
    pid_t child = fork();
    if (child == 0) {
      auto job = [](const void*, Run&) { CHECK(!"a job in a child"); };
      int nothing = 0;
      CHECK(holdfast::run(pool, job, &nothing) == holdfast::kForked);
      CHECK(native_pool_drain(pool) == holdfast::kForked);
      native_pool_destroy(pool);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // whose own locks a child may find taken
      Pool* own = make(threads, -1);
      run_phases(own, random, 10, 20);
      native_pool_destroy(own);
#endif
      _exit(0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  native_pool_destroy(pool);
}

void destroyed_at_any_time() {
  std::mt19937 random(seed);
  for (double end = now() + seconds; now() < end;) {
    Pool* pool = make(threads, int(random() % 3) * 1000);
    for (unsigned jobs = random() % 3; jobs > 0; jobs--) run_phases(pool, random, 3, 5);
    if (random() % 2) sched_yield();
    native_pool_destroy(pool);
  }
}

std::atomic<pid_t> ids[64];

char state_of(pid_t id) {
  char path[64], text[256] = {};
  snprintf(path, sizeof path, "/proc/self/task/%d/stat", id);
  FILE* file = fopen(path, "r");
  CHECK(file && fgets(text, sizeof text, file));
  fclose(file);
  return strrchr(text, ')')[2];
}

void idle_sleeps() {
  Pool* pool = make(threads, -1);
  int nothing = 0;
  auto job = [](const void*, Run& run) {
    ids[run.tid] = pid_t(syscall(SYS_gettid));
    holdfast::tasks(run, run.num_threads, [&run](int) {
      for (int tid = 0; tid < run.num_threads; tid++)
        while (!ids[tid]) sched_yield();
    });
  };
  CHECK(holdfast::run(pool, job, &nothing) == 0);
  for (int tid = 1; tid < threads; tid++)
    while (state_of(ids[tid]) != 'S') sched_yield();  // in the end all sleep; a test that does not end has failed
  CHECK(holdfast::run(pool, job, &nothing) == 0);
  native_pool_destroy(pool);
}

// Null where a core is not ours; else each worker is on its core alone, and the caller stays where it was.
void on_cores() {
  cpu_set_t ours;
  CHECK(sched_getaffinity(0, sizeof ours, &ours) == 0);
  int first = 0;
  while (!CPU_ISSET(first, &ours)) first++;
  std::vector<int> cores(threads, first);
  static int core;
  core = first;
  Pool* pool = native_pool_create(threads, -1, cores.data());
  CHECK(pool);
  auto job = [](const void*, Run& run) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    CHECK(run.tid == 0 || (CPU_COUNT(&set) == 1 && CPU_ISSET(core, &set)));
    ids[run.tid] = 1;
    holdfast::tasks(run, 1, [&run](int) {
      for (int tid = 0; tid < run.num_threads; tid++)
        while (!ids[tid]) sched_yield();
    });
  };
  int nothing = 0;
  CHECK(holdfast::run(pool, job, &nothing) == 0);
  cpu_set_t after;
  CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&ours, &after));
  native_pool_destroy(pool);
  cores.back() = CPU_SETSIZE - 1;  // a core that no machine of ours has
  CHECK(!native_pool_create(threads, -1, cores.data()));
}

// What the workers may use, once a job has run. The caller stays on one core of two or more that it may use.
void masks_of_workers(Pool* pool, cpu_set_t* masks) {
  struct Masks {
    cpu_set_t* of;
  } argument{masks};
  for (int tid = 0; tid < threads; tid++) ids[tid] = 0;
  auto job = [](const void* argument, Run& run) {
    sched_getaffinity(0, sizeof(cpu_set_t), static_cast<const Masks*>(argument)->of + run.tid);
    ids[run.tid] = 1;
    holdfast::tasks(run, 1, [&run](int) {
      for (int tid = 0; tid < run.num_threads; tid++)
        while (!ids[tid]) sched_yield();
    });
  };
  CHECK(holdfast::run(pool, job, &argument) == 0);
}

// Workers may use the caller's cores but the one that it is on; where that leaves too few, they stay as they were.
void keeps_off_callers_core() {
  cpu_set_t ours;
  CHECK(sched_getaffinity(0, sizeof ours, &ours) == 0);
  bool enough = CPU_COUNT(&ours) >= threads;
  Pool* pool = make(threads, -1);
  std::vector<cpu_set_t> masks(threads);
  for (int seen = 0, tries = 0; !seen;) {
    CHECK(++tries < 100000);
    int before = sched_getcpu();
    masks_of_workers(pool, masks.data());
    if (sched_getcpu() != before) continue;  // the system moves who runs at any time
    cpu_set_t rest = ours;
    if (enough) CPU_CLR(before, &rest);
    seen = CPU_EQUAL(&masks[0], &ours) && CPU_EQUAL(&masks[threads - 1], &rest);
  }
  cpu_set_t kept = masks[threads - 1], one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
  masks_of_workers(pool, masks.data());
  if (threads > 1)
    CHECK(CPU_COUNT(&masks[threads - 1]) == CPU_COUNT(&kept));  // one core is too few: nothing is changed
  CHECK(sched_setaffinity(0, sizeof ours, &ours) == 0);
  native_pool_destroy(pool);
}

struct Scenario {
  const char* name;
  void (*run)();
};

const Scenario kScenarios[] = {
    {"random_phases", random_phases},
    {"never_spinning", never_spinning},
    {"limits", limits},
    {"stopped_threads", stopped_threads},
    {"late_thread", late_thread},
    {"two_pools", two_pools},
    {"nested_pools", nested_pools},
    {"fork_keeps_out", fork_keeps_out},
    {"destroyed_at_any_time", destroyed_at_any_time},
    {"idle_sleeps", idle_sleeps},
    {"on_cores", on_cores},
    {"keeps_off_callers_core", keeps_off_callers_core},
};

}  // namespace

int main(int count, char** words) {
  CHECK(count == 5);
  seconds = atof(words[2]);
  threads = atoi(words[3]);
  seed = unsigned(atoi(words[4]));
  for (const Scenario& scenario : kScenarios)
    if (words[1] == std::string(scenario.name)) return scenario.run(), 0;
  fprintf(stderr, "no scenario %s\n", words[1]);
  return 2;
}
