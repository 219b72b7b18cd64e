// One token of each of 32 sequences through the states of a recurrence (`worker/executors/cpu/native/delta_rule.h`), and a
// pass in place over the same states, in turns. Run by `recurrences.py`.
//
//     recurrences KEYS VALUES HEADS LAYERS RULE ROUNDS    RULE: 0 delta rule, 1 with a decay for each key, 2 Mamba2
//
// Prints nanoseconds of CPU time of both, a line for each round.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include <vector>

#include "delta_rule.h"

namespace {

const long SEQUENCES = 32;

long cpu_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1000000000L + now.tv_nsec;
}
float* states_of(long numbers) {
  const long bytes = numbers * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) exit(1);
  madvise(memory, bytes, MADV_HUGEPAGE);
  float* states = (float*)memory;
  for (long i = 0; i < numbers; i++) states[i] = (float)(i % 97) * 1e-3f;
  return states;
}

}  // namespace

int main(int, char** words) {
  const int keys = atoi(words[1]), values = atoi(words[2]), rule = atoi(words[5]), rounds = atoi(words[6]);
  const long heads = atol(words[3]) * atol(words[4]) * SEQUENCES, of_head = (long)keys * values;
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zeros, as in a step
  float* states = states_of(heads * of_head);
  std::vector<float> q(keys), k(keys), decays(keys), faded(keys), v(values), out(values);
  for (int i = 0; i < keys; i++) q[i] = 0.01f * (i % 7), k[i] = 0.02f * (i % 5), decays[i] = 0.999f;
  for (int i = 0; i < keys; i++) faded[i] = decays[i] * k[i];
  for (int i = 0; i < values; i++) v[i] = 0.3f;
  const float decay = 0.999f, rate = 0.5f, skip = 1.0f;
  const HeadTokens token = {q.data(),
                            k.data(),
                            rule == 1 ? faded.data() : nullptr,
                            v.data(),
                            rule == 1 ? decays.data() : &decay,
                            &rate,
                            out.data(),
                            values,
                            keys,
                            1,
                            rule == 2 ? &skip : nullptr};
  for (int round = 0; round < rounds; round++) {
    const long began = cpu_ns();
    for (long head = 0; head < heads; head++)
      for (int column = 0; column < values; column += STATE_COLUMNS)
        pass_tile(states + head * of_head + (long)column * keys, token, column);
    const long between = cpu_ns();
    for (long i = 0; i < heads * of_head; i += 16) store(states + i, load(states + i) * all(0.999f));
    printf("%ld %ld\n", between - began, cpu_ns() - between);
  }
}
