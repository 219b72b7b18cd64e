// The search: choices of the next thread, depth first, and the fibers that they run.
#include "checker.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <unordered_set>
#include <utility>
#include <vector>

namespace checker {

namespace {

class Explorer;
Explorer* explorer;  // the one of this program

Hash mix(Hash a, Hash b) {
  Hash mixed = (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9;
  return mixed ^ (mixed >> 29);
}

constexpr int kStack = 4 << 10;

struct Fiber {
  ucontext_t entry;
  jmp_buf place;
  bool entered, finished;
  const void* asleep;  // the word that it sleeps on
  const char* low;     // end of what lives on its stack, which grows down
  alignas(16) char stack[kStack];
};

struct Region {
  const char* place;
  std::size_t bytes;  // a multiple of 8
};

struct Choice {
  std::vector<int> open;  // threads that have not been tried yet; the last one is on trial
  int goes_on;            // the thread that ran before, if it can run; to leave it is a preemption
  int preemptions;        // before this choice
};

class Explorer {
 public:
  Explorer(int threads, void (*make)(), void (*body)(int)) : threads(threads), make(make), body(body) {}

  Found explore(int preemptions) {
    most_preemptions = preemptions;
    do { one_run(); } while (next_order());
    return {seen.size(), run_count};
  }

  void watch(const void* place, std::size_t bytes) { watched.push_back({static_cast<const char*>(place), bytes}); }

  // What the atomics call, on a fiber.
  __attribute__((noinline)) void next_thread() {
    asm volatile("mov %%rsp, %0" : "=r"(fibers[running].low));
    if (!_setjmp(fibers[running].place)) _longjmp(scheduler, 1);
  }
  void changed(int variable, Hash before, Hash after) { memory ^= mix(variable, before) ^ mix(variable, after); }
  int new_variable(Hash value) {
    memory ^= mix(variables, value);
    return variables++;
  }
  void sleep_on(const void* word) {
    fibers[running].asleep = word;
    next_thread();
  }
  void wake(const void* word) {
    for (int i = 0; i < threads; i++)
      if (fibers[i].asleep == word) fibers[i].asleep = nullptr;
  }

  [[noreturn]] void fail(const char* what) {
    printf("FAILED: %s\norder of threads:", what);
    for (int thread : order) printf(" %d", thread);
    printf("\n%zu states, %ld runs\n", seen.size(), run_count);
    fflush(stdout);
    _Exit(1);
  }

 private:
  void one_run() {
    run_count++;
    memory = 0, variables = 0;
    watched.clear();
    order.clear();
    make();
    for (int i = 0; i < threads; i++) start_fiber(i);
    running = -1;
    int preemptions = 0;
    for (std::size_t depth = 0; !all_finished(); depth++) {
      if (depth == choices.size() && !new_choice(preemptions)) return;
      const Choice& choice = choices[depth];
      order.push_back(choice.open.back());
      preemptions = choice.preemptions + (choice.goes_on >= 0 && choice.goes_on != order.back());
      resume(order.back());
    }
  }

  bool all_finished() const {
    for (int i = 0; i < threads; i++)
      if (!fibers[i].finished) return false;
    return true;
  }

  bool new_choice(int preemptions) {  // false: this state is known
    Choice choice{{}, can_run(running) ? running : -1, preemptions};
    if (!seen.insert(mix(state(), Hash(choice.goes_on * 100 + preemptions))).second) return false;
    bool may_switch = choice.goes_on < 0 || preemptions < most_preemptions;
    for (int i = 0; i < threads; i++)
      if (can_run(i) && i != running && may_switch) choice.open.push_back(i);
    if (choice.goes_on >= 0) choice.open.push_back(running);
    if (choice.open.empty()) fail("all threads sleep");
    choices.push_back(std::move(choice));
    return true;
  }

  bool can_run(int i) const { return i >= 0 && !fibers[i].finished && !fibers[i].asleep; }

  bool next_order() {
    while (!choices.empty()) {
      choices.back().open.pop_back();
      if (!choices.back().open.empty()) return true;
      choices.pop_back();
    }
    return false;
  }

  Hash state() const {
    Hash all = memory;
    for (const Region& region : watched) all = hashed(all, region.place, region.place + region.bytes);
    for (const Fiber& fiber : fibers) {
      if (&fiber == fibers + threads) break;
      all = mix(all, Hash(fiber.finished * 2 + (fiber.asleep != nullptr)));
      if (fiber.finished) continue;
      const char* registers = reinterpret_cast<const char*>(fiber.place[0].__jmpbuf);
      all = hashed(all, registers, registers + sizeof fiber.place[0].__jmpbuf);
      all = hashed(all, fiber.low, fiber.stack + kStack);
    }
    return all;
  }

  static Hash hashed(Hash all, const char* from, const char* to) {
    for (Hash piece; from < to; from += sizeof piece) {
      memcpy(&piece, from, sizeof piece);
      all = mix(all, piece);
    }
    return all;
  }

  void start_fiber(int i) {
    Fiber& fiber = fibers[i];
    fiber.entered = fiber.finished = false;
    fiber.asleep = nullptr;
    memset(fiber.stack, 0, kStack);
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack;
    fiber.entry.uc_stack.ss_size = kStack;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, reinterpret_cast<void (*)()>(fiber_main), 1, i);
    resume(i);  // up to its first operation
  }

  static void fiber_main(int i) {
    explorer->body(i);
    explorer->fibers[i].finished = true;
    explorer->next_thread();
  }

  void resume(int i) {  // setjmp, since swapcontext makes a system call each time
    Fiber& fiber = fibers[running = i];
    if (_setjmp(scheduler)) return;
    if (fiber.entered) _longjmp(fiber.place, 1);
    fiber.entered = true;
    setcontext(&fiber.entry);
  }

  const int threads;
  void (*make)();
  void (*body)(int);
  Fiber fibers[kMostThreads];
  jmp_buf scheduler;
  int running = 0, variables = 0, most_preemptions = 0;
  Hash memory = 0;
  long run_count = 0;
  std::vector<Region> watched;
  std::vector<Choice> choices;
  std::vector<int> order;
  std::unordered_set<Hash> seen;
};

}  // namespace

Found explore(int threads, void (*make)(), void (*body)(int), int preemptions) {
  explorer = new Explorer(threads, make, body);
  return explorer->explore(preemptions);
}
void watch(const void* place, std::size_t bytes) { explorer->watch(place, bytes); }
void fail(const char* what) { explorer->fail(what); }
void next_thread() { explorer->next_thread(); }
int new_variable(Hash value) { return explorer->new_variable(value); }
void changed(int variable, Hash before, Hash after) { explorer->changed(variable, before, after); }
void sleep_on(const void* word) { explorer->sleep_on(word); }
void wake(const void* word) { explorer->wake(word); }

}  // namespace checker
