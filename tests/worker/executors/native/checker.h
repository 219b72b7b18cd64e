// A model checker: runs a few threads as fibers on one, and tries every order of their atomic operations.
// A state is what is in the atomics, in the watched memory, and on each fiber's stack; a state met again is not
// continued, so the search ends. Each order is a run from the start: a program under test may keep no state but what
// its `make` makes anew, and no heap memory on a fiber. Knows nothing of the pool. x86-64, no sanitizers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace checker {

using Hash = std::uint64_t;
constexpr int kMostThreads = 4;

struct Found {
  std::size_t states;
  long runs;
};

// Every order with at most so many preemptions (switches away from a thread that could go on) of `threads` threads that
// run `body`, after `make`. Prints the first fault with its order and exits with 1.
Found explore(int threads, void (*make)(), void (*body)(int thread), int preemptions);

void watch(const void* place, std::size_t bytes);  // plain memory that is a part of the state; from make()
[[noreturn]] void fail(const char* what);

// For the atomics, on a fiber.
void next_thread();  // here another thread may go on
int new_variable(Hash value);
void changed(int variable, Hash before, Hash after);
void sleep_on(const void* word);
void wake(const void* word);

// std::atomic, with a choice of the next thread before each operation.
template <class T> class Atomic {
 public:
  Atomic(T value = T()) : value(value), variable(new_variable(Hash(value))) {}
  T load() { return now(); }
  void store(T next) { now(), set(next); }
  T exchange(T next) { return now(), set(next); }
  T fetch_add(T more) { return now(), set(T(value + more)); }
  T fetch_sub(T less) { return now(), set(T(value - less)); }
  bool compare_exchange_weak(T& expected, T next) {
    bool same = now() == expected;
    expected = value;
    if (same) set(next);
    return same;
  }
  // A futex's sleep: looking at the word and falling asleep are one step.
  void sleep_while(T same) {
    if (now() == same) sleep_on(this);
  }
  void wake_all() { now(), wake(this); }

 private:
  T now() {
    next_thread();
    return value;
  }
  T set(T next) {
    T old = value;
    changed(variable, Hash(old), Hash(next));
    value = next;
    return old;
  }

  T value;
  int variable;
};

struct Atomics {
  template <class T> using Atomic = checker::Atomic<T>;
  static void pause() {}
  static void copy(void* to, const void* from, std::size_t bytes) {  // in two steps, as plain memory is written
    std::size_t half = bytes / 2;
    memcpy(to, from, half);
    next_thread();
    memcpy(static_cast<char*>(to) + half, static_cast<const char*>(from) + half, bytes - half);
  }
  static void sleep_while(Atomic<std::uint32_t>& word, std::uint32_t value) { word.sleep_while(value); }
  static void wake_all(Atomic<std::uint32_t>& word) { word.wake_all(); }
  [[noreturn]] static void fail(const char* what) { checker::fail(what); }
};

}  // namespace checker
