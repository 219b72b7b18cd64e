// Nanoseconds that a word takes from one core to another: two threads, each on a core, hand it to and fro. Prints the
// median of the rounds.
//   core_ping CORE OTHER_CORE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {

constexpr int kRounds = 301, kPasses = 1000;  // a round that is interrupted is far from the median

void stay_on(int core) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(core, &mask);
  if (sched_setaffinity(0, sizeof mask, &mask)) abort();
}

double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}

// Waits for some numbers, of which each is two more than the last, and hands on the next.
void pass(std::atomic<int>& word, int first) {
  for (int i = first; i < first + 2 * kPasses; i += 2) {
    while (word.load(std::memory_order_acquire) != i) __builtin_ia32_pause();
    word.store(i + 1, std::memory_order_release);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  alignas(64) static std::atomic<int> word{0};
  std::thread other([&] {
    stay_on(atoi(words[2]));
    for (int round = 0; round < kRounds; round++) pass(word, 2 * round * kPasses + 1);
  });
  stay_on(atoi(words[1]));
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; round++) {
    const double began = now_ns();
    pass(word, 2 * round * kPasses);
    rounds.push_back((now_ns() - began) / (2 * kPasses));
  }
  other.join();
  std::sort(rounds.begin(), rounds.end());
  printf("%.1f\n", rounds[kRounds / 2]);
}
