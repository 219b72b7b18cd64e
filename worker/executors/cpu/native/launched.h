// Steps that a thread of their own runs while their caller does something else. It is thread 0 of the pool then. A step
// that nothing else is in flight with is left to who awaits it, which is faster than waking a thread.
//
// Steps in pieces (`apart.h`) run into each other: who finds no piece of the oldest one takes one of the next. Others run
// when those before them are over. What a step computes does not live here.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "apart.h"
#include "pool.h"

namespace {

// `Decoder` cuts a step, runs one as a whole, and runs a piece.
template <class Decoder> class LaunchedSteps {
 public:
  LaunchedSteps(Decoder& decoder, holdfast::Pool* pool) : decoder(decoder), pool(pool), owner(getpid()) {}
  ~LaunchedSteps() {
    if (!thread.joinable()) return;
    if (getpid() != owner) {  // a child of the process has no such thread
      thread.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> guard(lock);
      is_over = true;
    }
    changed.notify_all();
    thread.join();
  }

  // Takes a step, whose arrays stay valid until it was awaited.
  int launch(const NativeStep& step) {
    if (getpid() != owner) return holdfast::kForked;
    try {
      std::unique_ptr<Launched> next(new Launched{step, {}, 0, 0, holdfast::kDone});
      decoder.cut(step, next->cut);
      std::lock_guard<std::mutex> guard(lock);
      const bool is_first = steps.empty() && outcomes.empty() && !runs;
      if (!is_first && !thread.joinable()) start();
      steps.push_back(std::move(next));
      is_left = is_first;
    } catch (const std::exception&) { return holdfast::kNoMemory; }
    changed.notify_all();
    return holdfast::kDone;
  }

  // Whether it has nothing to do.
  bool is_idle() {
    std::lock_guard<std::mutex> guard(lock);
    return steps.empty() && !runs;
  }

  // The outcome of the oldest step that was not awaited. Behind the last one the pool is free.
  int await() {
    if (getpid() != owner) return holdfast::kForked;
    std::unique_lock<std::mutex> guard(lock);
    if (is_left) is_left = false, run_first(guard);
    changed.wait(guard, [&] { return !outcomes.empty() && (!steps.empty() || !runs || outcomes.size() > 1); });
    const int outcome = outcomes.front();
    outcomes.pop_front();
    return outcome;
  }

 private:
  struct Launched {
    NativeStep step;
    CutStep cut;  // no pieces: it is run as a whole
    size_t taken, done;
    int outcome;
  };

  // It takes no signals: they are for the program's threads.
  void start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread = std::thread([this] { work(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work() {
    std::unique_lock<std::mutex> guard(lock);
    for (;;) {
      changed.wait(guard, [&] { return is_over || (!steps.empty() && !is_left && !runs); });
      if (is_over) return;
      run_first(guard);
    }
  }

  // The oldest step, and those whose pieces follow it.
  void run_first(std::unique_lock<std::mutex>& guard) {
    Launched& first = *steps.front();
    const bool in_pieces = !first.cut.pieces.empty();
    runs = true;
    guard.unlock();
    const int outcome = in_pieces ? run_pieces() : decoder.run_whole(first.step);
    guard.lock();
    runs = false;
    if (!in_pieces || outcome != holdfast::kDone) end_first(outcome);  // pieces end by themselves
    changed.notify_all();
  }

  // With the lock.
  void end_first(int outcome) {
    if (steps.empty()) return;
    outcomes.push_back(outcome);
    steps.pop_front();
  }

  int run_pieces() {
    LaunchedSteps* self = this;
    return holdfast::run(
        pool,
        [](const void* argument, holdfast::Run& run) {
          LaunchedSteps* steps = *(LaunchedSteps* const*)argument;
          holdfast::tasks(run, run.num_threads, [&](int) { steps->take_pieces(run); });
        },
        &self);
  }

  // In a task: piece after piece, until there is none.
  void take_pieces(holdfast::Run& run) {
    std::unique_lock<std::mutex> guard(lock);
    while (Launched* of = with_piece()) {
      const NativeStep& piece = of->cut.pieces[of->taken++];
      guard.unlock();
      int outcome = holdfast::prepared([&] { return decoder.run_piece(piece, run), run.slot->failed.load(); });
      guard.lock();
      if (outcome != holdfast::kDone) of->outcome = outcome;
      of->done++;
      while (!steps.empty() && is_done(*steps.front())) {
        end_first(steps.front()->outcome);
        changed.notify_all();
      }
    }
  }
  static bool is_done(const Launched& step) { return !step.cut.pieces.empty() && step.done == step.cut.pieces.size(); }

  // The oldest step with a piece that nobody has, unless one before it is run as a whole.
  Launched* with_piece() const {
    for (const auto& step : steps) {
      if (step->cut.pieces.empty()) return nullptr;
      if (step->taken < step->cut.pieces.size()) return step.get();
    }
    return nullptr;
  }

  Decoder& decoder;
  holdfast::Pool* const pool;
  const pid_t owner;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::unique_ptr<Launched>> steps;  // that are not over, the oldest first
  std::deque<int> outcomes;
  bool runs = false, is_left = false, is_over = false;
  std::thread thread;
};

}  // namespace
