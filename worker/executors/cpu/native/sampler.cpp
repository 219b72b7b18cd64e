// Sampler: rows of logits to tokens and log-probabilities, the same bits on every machine.
//
// A draw is an exponential race (tests/reference/sampler.py says how, in PyTorch): the token with the largest
//     score = scaled logit - log(-log(1 - u)),  u = (noise + 1/2) / 2^32, noise a hash of (key, token)
// wins. Three things make it fast. A block of 64 tokens whose best logit is more than 22.9 below the best score so far
// cannot win: -log(-log(1 - u)) is at most 33 log 2. A token is scored exactly only if the bound -log(u), read off the
// noise's exponent, lets it win. And top-p needs no sorting: the race is run among all tokens first, and its winner
// is of the nucleus if the mass of better ones is below p; if it is not, then neither is anything that is no better, and
// the rest race again. That gives the same winner as a race in the nucleus, since tokens' times do not depend on each other.
// Where the nucleus is small, a level below it is guessed first, and the race is run above that.
//
// What may not live here: edits (`edits.h`), sums over a row (`masses.h`), and what is searched for in it (`logits_row.h`).
#include "sampler.h"

#include <math.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "edits.h"
#include "masses.h"
#include "pool.h"
#include "words.h"

namespace {

const float MOST_GUMBEL = 22.9f;   // above 33 log 2
const double SMALL_NUCLEUS = 0.4;  // a share of the mass
const uint32_t POSITION_PRIME = 0x9E3779B1u, TOKEN_PRIME = 0xC2B2AE3Du;

NATIVE_INLINE uint32_t mixed(uint32_t bits) {
  bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return bits ^ bits >> 16;
}
NATIVE_INLINE Words mixed(Words bits) {
  bits = (bits ^ right<16>(bits)) * all_words(0x85EBCA6Bu);
  bits = (bits ^ right<13>(bits)) * all_words(0xC2B2AE35u);
  return bits ^ right<16>(bits);
}
uint32_t noise_key(long seed, int position) {
  uint32_t key = mixed((uint32_t)seed ^ (uint32_t)position * POSITION_PRIME);
  return mixed(key ^ (uint32_t)((uint64_t)seed >> 32));
}

struct Scored {
  double score;
  int token;
};

// What is left of a row: scaled logits of at least `least` and above `bar`.
struct Bounds {
  float least, bar;
};
NATIVE_INLINE unsigned mask_left(Lanes scaled, Bounds left) {
  return mask_at_least(scaled, all(left.least)) & mask_above(scaled, all(left.bar));
}

// The race of one row's tokens.
struct Race {
  const Row& row;
  float scale;
  uint32_t key;

  double score(int token, float scaled) const {
    double u = (mixed(key + (uint32_t)token * TOKEN_PRIME) + 0.5) * 0x1p-32;
    return (double)scaled - log_of(-log_of(1.0 - u));  // 1 - u is exact
  }
  // The winner among the tokens that are left. The best one is among them.
  int winner(Bounds left) const {
    int token = row.first_best();
    Scored best = {score(token, row.largest * scale), token};
    float needed = lowered(best.score);
    for (int b = 0; b < row.blocks; b++) {
      float block_best = row.best[b] * scale;
      if (block_best < left.least || block_best <= left.bar || block_best + MOST_GUMBEL < needed) continue;
      run_block(b, left, best, needed);
    }
    return best.token;
  }
  // A little less than a score: bounds are compared with it in floats.
  static float lowered(double score) { return (float)(score - 1e-4 - fabs(score) * 1e-6); }

  void run_block(int b, Bounds left, Scored& best, float& needed) const {
    const float* p = row.block(b);
    for (int j = 0; j < BLOCK; j += 16) {
      uint32_t first = (uint32_t)(b * BLOCK + j);
      Words noise = mixed(words_from(key + first * TOKEN_PRIME, TOKEN_PRIME));
      // The upper 24 bits as a number 2^e (1 + m), of which the bits give e + m <= log2: at most 0.09 too little.
      Lanes log2_u = fma(numbers(bits_of(numbers(right<8>(noise)))), all(0x1p-23f), all(-127.0f - 24.0f));
      Lanes scaled = load(p + j) * all(scale);
      Lanes bound = minus_fma(log2_u, all(0.69314718f), scaled);
      unsigned can_win = mask_at_least(bound, all(needed)) & mask_left(scaled, left);
      for (; can_win; can_win &= can_win - 1) {
        int lane = __builtin_ctz(can_win), token = (int)first + lane;
        double one = score(token, p[j + lane] * scale);
        if (one > best.score || (one == best.score && token < best.token)) best = {one, token}, needed = lowered(one);
      }
    }
  }
};

// The smallest float that is no smaller.
float raised(double x) {
  float f = (float)x;
  return (double)f < x ? nextafterf(f, INFINITY) : f;
}

struct Scratch {
  Row given, edited;
  Editor editor;
  Selection selection;
  Guess guess;
  std::vector<float> values;
  std::vector<int> tokens;
};

// The least scaled logit that min-p and top-k leave.
float least_kept(const Row& row, const NativeDraw& draw, Scratch& s) {
  float scale = draw.inverse_temperature, least = -INFINITY;
  if (draw.min_p > 0) least = raised((double)(row.largest * scale) + log_of(draw.min_p));
  if (draw.top_k > 0 && draw.top_k < row.vocab)
    least = std::max(least, kth_best(row, draw.top_k, s.selection, s.values) * scale);
  return least;
}

// A race among all would mostly be won by a token that is not of a small nucleus. So a bar is guessed below which
// nothing is of it: right if the mass above the bar is not below p.
double raise_bar(const Row& row, const NativeDraw& draw, Scratch& s, Bounds& left) {
  float scale = draw.inverse_temperature;
  float bar = s.guess.bar(row, scale, left.least, draw.top_p * 1.2 + 0.01);
  Mass mass = mass_of(row, scale, left.least, bar);
  double wanted = draw.top_p * mass.all;
  if (mass.above >= wanted) left.bar = bar;
  return wanted;
}

int drawn_token(const Row& row, const NativeDraw& draw, Scratch& s) {
  float scale = draw.inverse_temperature;
  if (scale == 0) return row.first_best();
  Race race = {row, scale, noise_key(draw.seed, draw.position)};
  float top = row.largest * scale;
  Bounds left = {least_kept(row, draw, s), -INFINITY};
  double wanted = draw.top_p < SMALL_NUCLEUS ? raise_bar(row, draw, s, left) : -1;
  for (;;) {
    int token = race.winner(left);
    float scaled = row.logits[token] * scale;
    if (draw.top_p >= 1 || scaled == top) return token;
    double above;
    if (wanted < 0) {
      Mass mass = mass_of(row, scale, left.least, scaled);
      wanted = draw.top_p * mass.all, above = mass.above;
    } else above = mass_above(row, scale, scaled);
    if (above < wanted) return token;
    left.bar = scaled;
  }
}

struct Report {
  NativeDrawn* drawn;
  int* top_tokens;
  float* top_logprobs;
};

void report(const Row& row, const NativeDraw& draw, Scratch& scratch, const Report& to) {
  double log_sum = log_mass_of(row), top = row.largest;
  auto logprob = [&](int token) { return (float)((double)row.logits[token] - top - log_sum); };
  to.drawn->rank = rank_of(row, to.drawn->token), to.drawn->logprob = logprob(to.drawn->token);
  int count = std::min(draw.num_logprobs, row.vocab);
  to.drawn->num_top = count;
  if (!count) return;
  std::vector<int>& tokens = scratch.tokens;
  best_tokens(row, count, scratch.selection, tokens);
  for (int i = 0; i < count; i++) to.top_tokens[i] = tokens[i], to.top_logprobs[i] = logprob(tokens[i]);
}

// Changes single logits where they lie, and puts them back; many in a copy.
int drawn_from_edited(float* logits, const NativeDraw& draw, const NativeEdits& edits, Scratch& s) {
  if (!Editor::is_sparse(edits)) {
    const float* copy = s.editor.edited_copy(s.given, edits);
    s.edited.read_again(copy, s.given, s.editor.bests, s.editor.changed);
    s.editor.forget();
    return drawn_token(s.edited, draw, s);
  }
  s.editor.edit_in_place(logits, s.given.vocab, edits);
  s.edited.read_again(logits, s.given, s.given.best, s.editor.changed);
  int token = drawn_token(s.edited, draw, s);
  s.editor.undo();
  return token;
}

void sample_row(float* logits, int vocab, const float* block_best, const float* mass, const NativeDraw& draw,
                const NativeEdits* edits, Scratch& s, const Report& to) {
  s.given.read(logits, vocab, block_best, mass);
  *to.drawn = {-1, 1, 0.0f, 0};
  if (s.given.is_broken) return;
  to.drawn->token = draw.token;
  if (draw.token < 0) {
    to.drawn->token = edits ? drawn_from_edited(logits, draw, *edits, s) : drawn_token(s.given, draw, s);
  }
  if (draw.num_logprobs >= 0) report(s.given, draw, s, to);
}

struct FlushedDenormals {
  unsigned control = _mm_getcsr();
  FlushedDenormals() { _mm_setcsr(control | 0x8040); }
  ~FlushedDenormals() { _mm_setcsr(control); }
};

struct Sampler {
  holdfast::Pool* pool;
  std::vector<std::unique_ptr<Scratch>> scratch;  // by thread
};

struct Job {
  Sampler* sampler;
  float* logits;
  const float *block_best, *block_mass;
  int vocab, count, top_stride;
  const NativeDraw* draws;
  const NativeEdits* edits;
  NativeDrawn* out;
  int* top_tokens;
  float* top_logprobs;
};

void sample_all(const void* argument, holdfast::Run& run) {
  const Job job = *(const Job*)argument;
  holdfast::tasks(run, job.count, [&](int r) {
    FlushedDenormals flushed;
    const NativeDraw& draw = job.draws[r];
    long at = (long)r * job.top_stride, blocks = (job.vocab + BLOCK - 1) / BLOCK;
    sample_row(job.logits + (long)r * job.vocab, job.vocab, job.block_best ? job.block_best + r * blocks : nullptr,
               job.block_mass ? job.block_mass + r * blocks : nullptr, draw,
               draw.edits < 0 ? nullptr : job.edits + draw.edits, *job.sampler->scratch[run.tid],
               {job.out + r, job.top_tokens + at, job.top_logprobs + at});
  });
}

}  // namespace

extern "C" {

void* native_sampler_create(holdfast::Pool* pool) {
  try {
    std::unique_ptr<Sampler> sampler(new Sampler{pool, {}});
    for (int i = 0; i < native_pool_threads(pool); i++) sampler->scratch.emplace_back(new Scratch);
    return sampler.release();
  } catch (const std::bad_alloc&) { return nullptr; }
}
// kBusy: a job runs, perhaps with its memory, and the sampler stays as it is.
int native_sampler_destroy(void* sampler) {
  if (!sampler) return holdfast::kDone;
  if (native_pool_drain(((Sampler*)sampler)->pool) == holdfast::kBusy) return holdfast::kBusy;
  delete (Sampler*)sampler;
  return holdfast::kDone;
}
// Draws a token from each of `count` rows of logits. `block_best`: the largest of each 64 of them, NaN where one is not
// finite; or null. `block_mass`: as the function of that name, of each; or null. `top` is for up to `top_stride` tokens of each row.
int native_sample(void* sampler, float* logits, int vocab, const float* block_best, const float* block_mass,
                  const NativeDraw* draws, int count, const NativeEdits* edits, NativeDrawn* out, int* top_tokens,
                  float* top_logprobs, int top_stride) {
  Job job = {(Sampler*)sampler, logits, block_best, block_mass, vocab,      count,
             top_stride,        draws,  edits,      out,        top_tokens, top_logprobs};
  return holdfast::run(job.sampler->pool, sample_all, &job);
}
}
