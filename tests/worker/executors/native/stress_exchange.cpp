// Stress test of the exchange between ranks: one scenario by name, for some seconds. Each rank writes what it should, and
// after each meeting looks whether all others did; whatever goes wrong aborts and says where.
//   stress_exchange SCENARIO SECONDS RANKS SEED
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "exchange.h"

#define CHECK(what)                                                                        \
  do {                                                                                     \
    if (!(what)) {                                                                         \
      fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
      abort();                                                                             \
    }                                                                                      \
  } while (0)

using holdfast::Exchange;
using holdfast::Run;

namespace {

constexpr int kRows = 3, kStride = 96;
constexpr float kPatient = 600, kImpatient = 0.1f;

double seconds;
int ranks;
unsigned seed;

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

// Zeros that this process's children share with it, which know each other by `pids`.
struct Shared {
  char* memory;
  std::atomic<int>* pids;
  Shared() {
    long bytes = Exchange::bytes(ranks, kRows, kStride) + 4096;
    memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    pids = (std::atomic<int>*)(memory + bytes - 4096);
  }
  NativeExchange of(int rank, const int* processes, float timeout_s) const {
    return {memory, processes, timeout_s, rank, ranks};
  }
};

typedef std::function<void(Exchange&, int rank)> Life;

// A rank as a process of its own, which lives `life` once all others are there.
void live(const Shared& shared, int rank, float timeout_s, const Life& life) {
  std::vector<int> processes;
  for (int r = 0; r < ranks; r++) {
    while (!shared.pids[r].load()) usleep(100);
    processes.push_back((int)syscall(SYS_pidfd_open, shared.pids[r].load(), 0));
    CHECK(processes.back() >= 0);
  }
  Exchange exchange(shared.of(rank, processes.data(), timeout_s), kRows, kStride);
  life(exchange, rank);
}

// Runs all ranks; the last may end in another way than the others. Sums begin behind `first`.
void in_processes(float timeout_s, const Life& life, int how_the_last_ends = 0, Exchange::Sum first = 0) {
  Shared shared;
  for (int rank = 0; rank < ranks; rank++) *(Exchange::Sum*)(shared.memory + (rank + 1) * 128) = first;
  std::vector<int> started;
  for (int rank = 0; rank < ranks; rank++) {
    int pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) live(shared, rank, timeout_s, life), _exit(0);
    started.push_back(pid);
  }
  for (int rank = 0; rank < ranks; rank++) shared.pids[rank].store(started[rank]);
  int last = ranks - 1, status;
  for (int rank = 0; rank < last; rank++) CHECK(waitpid(started[rank], &status, 0) == started[rank] && status == 0);
  if (how_the_last_ends == SIGSTOP) kill(started[last], SIGCONT);
  CHECK(waitpid(started[last], &status, 0) == started[last]);
  CHECK(status == (how_the_last_ends == SIGKILL ? SIGKILL : 0));
}

float value(Exchange::Sum n, int rank, int i) { return (float)((n * 31 + (unsigned)rank * 7 + (unsigned)i) % 1000003); }

void write(Exchange& exchange, Exchange::Sum n, int rank, int first, int end) {
  float* own = exchange.own(n);
  for (int i = first; i < end; i++) own[i] = value(n, rank, i);
}
void verify(Exchange& exchange, Exchange::Sum n, int first, int end) {
  for (int rank = 0; rank < ranks; rank++)
    for (int i = first; i < end; i++) CHECK(exchange.buffer(rank, n)[i] == value(n, rank, i));
}

void dawdle(std::mt19937& random) {
  switch (random() % 32) {
    case 0: return (void)usleep(random() % 300);
    case 1: return (void)sched_yield();
    case 2:
      for (unsigned i = random() % 10000; i > 0; i--) __builtin_ia32_pause();
      return;
    default: return;
  }
}

// Sums of one row to all rows, with delays before, between and after; goes on until one rank's clock has run out, which it
// says in its row.
void sum_for_long(Exchange& exchange, int rank, int spin, Exchange::Sum first = 0) {
  std::mt19937 random(seed * 100 + (unsigned)rank);
  Exchange::Waiter waiter{spin, spin};
  double end = now() + seconds;
  long sums = 0;
  for (Exchange::Sum n = first + 1;; n++, sums++) {
    int count = (int)(n % kRows + 1) * kStride;
    dawdle(random);
    write(exchange, n, rank, 0, count);
    if (rank == 0) exchange.own(n)[count - 1] = now() < end ? 1.0f : 0.0f;
    dawdle(random);
    CHECK(exchange.meet(n, waiter));
    bool goes_on = exchange.buffer(0, n)[count - 1] == 1.0f;
    dawdle(random);
    verify(exchange, n, 0, count - 1);
    if (!goes_on) break;
  }
  CHECK(exchange.outcome() == 0);
  if (rank == 0) printf("%ld sums\n", sums);
}

void sums() {
  in_processes(kPatient, [](Exchange& exchange, int rank) { sum_for_long(exchange, rank, 2000); });
}
void never_spinning() {
  in_processes(kPatient, [](Exchange& exchange, int rank) { sum_for_long(exchange, rank, 0); });
}

// Ranks that share a process, as in tests: the sanitizer for threads sees them.
void threads_as_ranks() {
  Shared shared;
  int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
  std::vector<int> processes(ranks, self);
  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; r++)
    exchanges.emplace_back(new Exchange(shared.of(r, processes.data(), kPatient), kRows, kStride));
  for (int r = 0; r < ranks; r++) threads.emplace_back([&, r] { sum_for_long(*exchanges[r], r, 100); });
  for (std::thread& thread : threads) thread.join();
}

// As steps go: a phase of tasks writes, the tasks of the next meet the other ranks and read.
void with_pools() {
  in_processes(kPatient, [](Exchange& exchange, int rank) {
    struct Sheet {
      Exchange* exchange;
      int rank;
      Exchange::Sum first;
      bool* goes_on;
      double end;
    };
    holdfast::Pool* pool = native_pool_create(3, -1, nullptr);
    CHECK(pool);
    bool goes_on = true;
    double end = now() + seconds;
    for (Exchange::Sum first = 0; goes_on; first += 10) {
      Sheet sheet = {&exchange, rank, first, &goes_on, end};
      CHECK(holdfast::run(
                pool,
                [](const void* argument, Run& run) {
                  Sheet sheet = *(const Sheet*)argument;
                  Exchange& exchange = *sheet.exchange;
                  for (Exchange::Sum n = sheet.first + 1; n <= sheet.first + 10; n++) {
                    if (!holdfast::tasks(run, kRows, [&](int i) {
                          write(exchange, n, sheet.rank, i * kStride, (i + 1) * kStride);
                          if (i == 0) exchange.own(n)[0] = now() < sheet.end ? 1.0f : 0.0f;
                        }))
                      return;
                    if (!holdfast::tasks(run, kRows, [&](int i) {
                          Exchange::Waiter waiter{100, 100};
                          CHECK(exchange.meet(n, waiter));
                          verify(exchange, n, i * kStride + 1, (i + 1) * kStride);
                          if (i == 0 && n == sheet.first + 10) *sheet.goes_on = exchange.buffer(0, n)[0] == 1.0f;
                        }))
                      return;
                  }
                },
                &sheet) == 0);
    }
    native_pool_destroy(pool);
  });
}

// The number of a sum goes around.
void wraps() {
  const Exchange::Sum first = 0xffffff80u;
  in_processes(kPatient, [=](Exchange& exchange, int rank) { sum_for_long(exchange, rank, 100, first); }, 0, first);
}

// What the others hear when the last rank is gone after some sums: of it, or of one that has heard before them.
void lose_last(float timeout_s, int signal, int expected) {
  in_processes(
      timeout_s,
      [=](Exchange& exchange, int rank) {
        Exchange::Waiter waiter{100, 100};
        Exchange::Sum n = 1;
        int last = ranks - 1;
        for (; n < 50; n++) CHECK(exchange.meet(n, waiter));
        if (rank == last && signal) kill(getpid(), signal);
        if (rank == last && !signal) return;
        if (rank == last) exchange.meet(n++, waiter);  // it comes back late, to a sum that the others have arrived at
        CHECK(!exchange.meet(n, waiter));
        int heard = exchange.outcome(), kind = heard / 100 * 100, lost = kind - heard;
        bool second_hand = (kind == Exchange::kLeft || kind == Exchange::kEnded) && lost != rank && lost < last;
        CHECK(second_hand || (rank != last && heard == expected - last));
        for (int again = 0; again < 3; again++) CHECK(!exchange.meet(++n, waiter) && exchange.outcome() == heard);
      },
      signal);
}
void killed() { lose_last(kPatient, SIGKILL, Exchange::kEnded); }
void stopped() { lose_last(kImpatient, SIGSTOP, Exchange::kSilent); }
void left() { lose_last(kPatient, 0, Exchange::kLeft); }

// A child that ends does not take its parent's rank with it.
void forked_child() {
  in_processes(kPatient, [](Exchange& exchange, int rank) {
    Exchange::Waiter waiter{100, 100};
    CHECK(exchange.meet(1, waiter));
    int child = fork();
    if (child == 0) exchange.~Exchange(), _exit(0);
    CHECK(waitpid(child, nullptr, 0) == child);
    if (rank == 0) usleep(50000);
    CHECK(exchange.meet(2, waiter));
  });
}

struct Scenario {
  const char* name;
  void (*run)();
};

const Scenario kScenarios[] = {
    {"sums", sums},
    {"never_spinning", never_spinning},
    {"threads_as_ranks", threads_as_ranks},
    {"with_pools", with_pools},
    {"wraps", wraps},
    {"killed", killed},
    {"stopped", stopped},
    {"left", left},
    {"forked_child", forked_child},
};

}  // namespace

int main(int count, char** words) {
  CHECK(count == 5);
  seconds = atof(words[2]);
  ranks = atoi(words[3]);
  seed = unsigned(atoi(words[4]));
  for (const Scenario& scenario : kScenarios)
    if (words[1] == std::string(scenario.name)) return scenario.run(), 0;
  fprintf(stderr, "no scenario %s\n", words[1]);
  return 2;
}
