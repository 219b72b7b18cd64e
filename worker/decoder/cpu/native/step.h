// One step of a decoder, as phases of tasks for a pool of threads: embedding, layers, head.
//
// With several ranks there are sums over ranks between. Where they share memory (`exchange.h`) a step goes through them;
// else it stops there (`partial()` holds this rank's share, float32) and goes on once the sum is there. Which bits a row gets depends on its own sequence alone: rows meet in products and tiles, and
// those add in one order for any number of rows. Products and attention are in `linear.h` and `attention.h`.
#pragma once
#include <math.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "exchange.h"
#include "pool.h"

namespace {

enum { NORM_ROWS = 8, OWN_NORM_ROWS = 2, SPIN_FOR_PEERS = 2000, COPIED = 1 << 14 };

inline long stride_of(long columns) { return (columns + 31) / 32 * 32 + 32; }

// A [rows][columns] buffer, zeroed, with rows aligned and set apart from powers of two.
template <class T> struct Buffer {
  T* data = nullptr;
  long stride = 0, bytes = 0;
  Buffer() = default;
  Buffer(long rows, long columns) : stride(stride_of(columns)) {
    bytes = (rows * stride * sizeof(T) + 4095) / 4096 * 4096;
    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeros, by the system
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    data = (T*)fresh;
  }
  Buffer(Buffer&& other) { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) {
    std::swap(data, other.data), std::swap(stride, other.stride), std::swap(bytes, other.bytes);
    return *this;
  }
  ~Buffer() {
    if (data) munmap(data, bytes);
  }
  T* row(long r) const { return data + r * stride; }
};

HF_INLINE Lanes tail_of(const float* p, int left) { return left >= 16 ? load(p) : keep_range(load(p), 0, left, zero()); }

// The norm of x [n]; x and the weights are readable up to a multiple of 16. Four sums, added pairwise.
template <class Out> HF_INLINE void norm_row(const float* x, const HfNorm& norm, int n, Out* out) {
  Lanes mean = zero(), sum[4];
  if (norm.is_layer_norm) {
    for (auto& s : sum) s = zero();
    for (int i = 0, k = 0; i < n; i += 16, k++) sum[k % 4] = sum[k % 4] + tail_of(x + i, n - i);
    mean = all(sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n);
  }
  for (auto& s : sum) s = zero();
  for (int i = 0, k = 0; i < n; i += 16, k++) {
    Lanes v = tail_of(x + i, n - i);
    if (norm.is_layer_norm) v = keep_range(v - mean, 0, n - i, zero());
    sum[k % 4] = fma(v, v, sum[k % 4]);
  }
  float square = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n;
  Lanes inverse = all(1.0f / square_root(square + norm.eps));
  for (int i = 0; i < n; i += 16) {
    Lanes v = tail_of(x + i, n - i);
    if (norm.is_layer_norm) v = keep_range(v - mean, 0, n - i, zero());
    v = v * inverse * tail_of(norm.weight + i, n - i);
    if (norm.bias) v = v + tail_of(norm.bias + i, n - i);
    store(out + i, v);
  }
}

HF_INLINE Lanes activated(int activation, Lanes gate) {
  switch (activation) {
    case 0: return silu_of(gate);
    case 1: return gelu_of(gate);
    case 2: return gelu_tanh_of(gate);
    case 3: return larger(gate, zero());
    default: return larger(gate, zero()) * larger(gate, zero());
  }
}
enum { CLAMPED_SWIGLU = 5 };
HF_INLINE Lanes gated(int activation, Lanes gate, Lanes up) {
  if (activation != CLAMPED_SWIGLU) return activated(activation, gate) * up;
  gate = smaller(gate, all(7.0f)), up = larger(smaller(up, all(7.0f)), all(-7.0f));
  return (up + all(1.0f)) * (gate * sigmoid_of(gate * all(1.702f)));
}

template <class W> HF_INLINE Packed<W> packed(const HfLinear& linear) {
  return {(const W*)linear.tiles, linear.slices, linear.slice_tiles, linear.groups};
}

template <class W> class Decoder {
  typedef typename InputOf<W>::Type Input;
  typedef holdfast::Run Run;
  typedef holdfast::Exchange Exchange;

 public:
  Decoder(const HfModel& model, int num_threads) : m(model), threads(num_threads) {
    int qkv = 0, heads = 0, attended = 0, inner = 0, moe_rows = 1, experts = 0;
    for (int i = 0; i < m.num_layers; i++) {
      const HfLayer& l = m.layers[i];
      HeadShape s = head_shape(l);
      kind_of.push_back(kind_like(s));
      qkv = std::max(qkv, l.qkv.groups * GROUP), heads = std::max(heads, l.num_heads * s.padded());
      attended = std::max(attended, l.output.slices * l.output.slice_tiles * K_TILE);
      auto widest = [&](const HfMlp& mlp) { inner = std::max(inner, mlp.down.slices * mlp.down.slice_tiles * K_TILE); };
      if (!l.experts) widest(l.mlp);
      else {
        for (int e = 0; e < l.experts->num_experts; e++) widest(l.experts->experts[e]);
        moe_rows = std::max(moe_rows, l.experts->top_k), experts = std::max(experts, l.experts->num_experts);
      }
    }
    long rows = m.max_rows;
    x = Buffer<float>(rows, m.hidden), y = Buffer<float>(rows, m.hidden);
    h = Buffer<Input>(rows, m.hidden), h2 = Buffer<Input>(rows, m.hidden);
    projected = Buffer<float>(rows, qkv), queries = Buffer<Input>(rows, heads);
    attention_out = Buffer<Input>(rows, attended), inner_rows = Buffer<Input>(rows * moe_rows, inner);
    if (experts) {
      router_logits = Buffer<float>(rows, experts), expert_input = Buffer<Input>(rows * moe_rows, m.hidden);
      choices.resize(rows * moe_rows), weights.resize(rows * moe_rows), first_of.resize(experts + 1), order.resize(rows * moe_rows);
    }
    for (int i = 0; i < threads; i++) local.emplace_back(new Local(m.hidden));
    num_tokens = std::max(0, std::min(m.vocab_rows, m.vocab_size - m.first_vocab_row));
    if (m.exchange) exchange.reset(new Exchange(*m.exchange, rows, y.stride));
  }

  // Takes the step; the arrays behind it stay valid until its last segment has run.
  void begin(const HfStep& next) {
    step = next;
    sequences.clear(), units.clear();
    int row = 0, last = 0;
    long num_blocks = 0;
    for (int i = 0; i < step.num_sequences; i++) num_blocks += step.num_blocks[i];
    block_ids.assign(step.blocks, step.blocks + num_blocks);
    const int* blocks = block_ids.data();
    decodes_alone = true;
    for (int i = 0; i < step.num_sequences; i++) {
      SequenceView seq = {row, (int)step.first_positions[i], (int)step.num_tokens[i], blocks};
      sequences.push_back(seq);
      blocks += step.num_blocks[i];
      for (int t = 0; t < seq.num_tokens;) {  // runs of tokens that share 32 positions
        int end = std::min(seq.num_tokens, t + 32 - (seq.first_position + t) % 32);
        units.push_back({i, t, end});
        t = end;
      }
      row += seq.num_tokens, last = std::max(last, seq.first_position + seq.num_tokens);
      if (seq.num_tokens != 1) decodes_alone = false;
    }
    for (int i = 0; i < m.num_rotaries; i++) fill_rotary(m.rotaries[i], last);
    for (Kind& kind : kinds) list_tasks(kind);
    num_units = (int)units.size();
    make_room(step.num_wanted);
    next_segment = 0;
  }

  int num_segments() const { return 2 * m.num_layers + 2; }
  float* partial() { return next_segment == 1 ? x.data : y.data; }
  long partial_stride() const { return y.stride; }
  float* residual() { return x.data; }

  // Runs segments [first, end) of the step: 0 embeds, 2 l + 1 and 2 l + 2 are a layer's halves, the last is the head.
  // `finished_layer`: also adds what this layer's MLP left to the residual; -1: the segment after it does so.
  int run(holdfast::Pool* pool, int first, int end, int finished_layer) {
    next_segment = end;
    Part part = {this, first, end, finished_layer, step.first_layer, step.num_rows, step.num_wanted, last_sum, step.all_logits != nullptr};
    int outcome = holdfast::run(pool, [](const void* argument, Run& run) { ((const Part*)argument)->decoder->go(*(const Part*)argument, run); }, &part);
    return outcome == holdfast::kDone && exchange ? exchange->outcome() : outcome;
  }

 private:
  // What a thread may look at between tasks: a late one finds the numbers of its own job here, never a later one's.
  struct Part { Decoder* decoder; int first, end, finished_layer, first_layer, num_rows, num_wanted; Exchange::Sum last_sum; bool gathers; };
  struct Local;
  struct Thread { Local& own; Run& run; int first_layer, num_rows, num_wanted; Exchange::Sum sum; bool gathers; };  // sum: the latest, counted by each thread

  void go(const Part& part, Run& run) {
    unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // flush denormals, as the tile unit does
    Thread thread = {*local[run.tid], run, part.first_layer, part.num_rows, part.num_wanted, part.last_sum, part.gathers};
    bool goes_on = true;
    for (int s = part.first; s < part.end && goes_on; s++) {
      if (s == 0) goes_on = embed(thread);
      else if (s > 2 * m.num_layers) goes_on = head_part(thread);
      else goes_on = s % 2 ? attention_half((s - 1) / 2, thread) : mlp_half((s - 1) / 2, thread);
    }
    if (goes_on && part.finished_layer >= 0) finish(thread, m.layers[part.finished_layer], false);
    if (run.tid == 0) last_sum = thread.sum;  // the caller is in time for all phases
    release_tiles(thread.own.scratch.tiles);
    _mm_setcsr(control);
  }

  struct Local {
    Scratch scratch;
    AttentionScratch<W> attention;
    QueryRows<W> rows;
    Buffer<Input> normed;
    Buffer<float> head;
    Exchange::Waiter peers{SPIN_FOR_PEERS, SPIN_FOR_PEERS};
    std::vector<float> of_experts;
    float* expert_sums(long count) {
      of_experts.assign(count, 0.0f);
      return of_experts.data();
    }
    explicit Local(int hidden) : normed(OWN_NORM_ROWS, hidden), head(2, MAX_HEAD) {}
  };
  struct Unit { int sequence, first, end; };
  struct AttentionTask { int sequence, kv_head, first, count, part, parts, slot; };
  // Layers whose attention has the same tasks.
  struct Kind { HeadShape shape; std::vector<AttentionTask> tasks; int num_tasks; bool splits; };

  HeadShape head_shape(const HfLayer& l) const {
    HeadShape s;
    s.num_heads = l.num_heads, s.num_kv_heads = l.num_kv_heads, s.head_dim = l.head_dim;
    s.key_tiles = (l.head_dim + 31) / 32, s.value_tiles = (l.head_dim + 15) / 16;
    s.block_size = m.block_size, s.span = m.block_size % 32 ? 16 : 32;
    s.window = l.window,
    s.scale = l.scaling * LOG2_E;
    s.softcap = l.softcap > 0 ? l.softcap * LOG2_E : 0, s.cap_scale = l.softcap > 0 ? l.scaling / l.softcap : 0;
    return s;
  }

  int kind_like(const HeadShape& s) {
    for (int k = 0; k < (int)kinds.size(); k++) {
      const HeadShape& o = kinds[k].shape;
      if (o.num_heads == s.num_heads && o.num_kv_heads == s.num_kv_heads && o.head_dim == s.head_dim && o.window == s.window &&
          o.scale == s.scale && o.softcap == s.softcap) return k;
    }
    kinds.push_back({s, {}, 0, false});
    return (int)kinds.size() - 1;
  }

  void make_room(int num_wanted) {
    if (num_wanted <= room) return;
    room = num_wanted;
    group_best = Buffer<float>(room, m.head.groups), group_at = Buffer<int>(room, m.head.groups);
  }

  static void fill_rotary(HfRotary& rotary, int positions) {
    for (int p = rotary.filled; p < positions; p++) {
      float* row = rotary.table + (long)p * 2 * rotary.pairs;
      for (int i = 0; i < rotary.pairs; i++) {
        float sine, cosine;
        sine_cosine((float)p * rotary.inverse_frequencies[i], &sine, &cosine);
        row[i] = sine * rotary.scaling, row[rotary.pairs + i] = cosine * rotary.scaling;
      }
    }
    rotary.filled = std::max(rotary.filled, positions);
  }

  // --- embedding and norms ---

  bool embed(Thread& t) {
    t.sum++;
    if (!row_tasks(t.run, t.num_rows, [&](int r) { embed_row(r, exchange ? exchange->own(t.sum) + r * y.stride : x.row(r)); })) return false;
    return !exchange || summed_tasks(t, t.num_rows, [&](int r) { sum_over_ranks(t.sum, r, x.row(r)); });
  }
  void embed_row(int r, float* out) {
    int row = (int)step.token_ids[r] - m.first_vocab_row;
    bool mine = row >= 0 && row < m.vocab_rows;
    const W* vector = (const W*)m.embedding + (mine ? (long)row * m.hidden : 0);
    int i = 0;
    for (; i + 16 <= m.hidden; i += 16) store(out + i, mine ? load(vector + i) * all(m.embedding_scale) + zero() : zero());
    for (; i < m.hidden; i++) out[i] = mine ? element(vector[i]) * m.embedding_scale + 0.0f : 0.0f;
  }
  static float element(Bf16 v) { uint32_t bits = (uint32_t)v.bits << 16; float f; memcpy(&f, &bits, 4); return f; }
  static float element(Half v) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16((short)v.bits))); }
  static float element(float v) { return v; }

  template <class Fn> bool row_tasks(Run& run, int rows, Fn&& fn) {
    return holdfast::tasks(run, (rows + NORM_ROWS - 1) / NORM_ROWS, [&](int t) {
      for (int r = t * NORM_ROWS; r < rows && r < (t + 1) * NORM_ROWS; r++) fn(r);
    });
  }

  void norm_or_copy(const float* from, const HfNorm& norm, Input* out) {
    if (norm.weight) return norm_row(from, norm, m.hidden, out);
    for (int i = 0; i < m.hidden; i += 16) store(out + i, tail_of(from + i, m.hidden - i));
  }

  // The rows of a linear's input. Few rows: each thread makes them for itself, which is faster than waiting.
  struct Rows { const Input* data; long stride; };
  bool normed(Thread& t, const HfNorm& norm, Rows& rows) {
    if (t.num_rows > OWN_NORM_ROWS) return normed_together(t, norm, h, rows);
    rows = {t.own.normed.data, t.own.normed.stride};
    for (int r = 0; r < t.num_rows; r++) norm_or_copy(x.row(r), norm, t.own.normed.row(r));
    return true;
  }
  bool normed_together(Thread& t, const HfNorm& norm, Buffer<Input>& out, Rows& rows) {
    rows = {out.data, out.stride};
    return row_tasks(t.run, t.num_rows, [&](int r) { norm_or_copy(x.row(r), norm, out.row(r)); });
  }

  // --- linears ---

  // Calls `out(group, first row, rows, sums [rows][64])` for all groups and rows of a product.
  template <class Out> bool linear(Thread& thread, const HfLinear& linear, Rows in, int num_rows, Out&& out) {
    Local& own = thread.own;
    Packed<W> w = packed<W>(linear);
    int chunk = num_rows > BLOCK_ROWS ? MAX_ROWS : BLOCK_ROWS, chunks = (num_rows + chunk - 1) / chunk;
    int each = groups_per_task(w, num_rows), runs = (w.groups + each - 1) / each;
    return holdfast::tasks(thread.run, chunks * runs, [&](int task) {
      int first_row = task / runs * chunk, rows = std::min(chunk, num_rows - first_row), group = task % runs * each;
      InputRows<W> input = input_rows<W>(own.scratch, in.data + first_row * in.stride, in.stride, rows, w.row_length());
      for (int g = group; g < std::min(group + each, w.groups); g++) {
        product(own.scratch, w, g, input, own.scratch.sums);
        out(g, first_row, rows, own.scratch.sums);
      }
    });
  }
  int groups_per_task(const Packed<W>& w, int num_rows) const {
    long work = (long)std::min(num_rows, 16) * w.row_length() * GROUP;  // so that a task takes some microseconds
    int each = (int)std::max(1L, std::min((1L << 18) / work, (long)w.groups / (8 * threads)));
    return std::max(each, w.groups > 512 ? 8 : 1);
  }

  // --- attention ---

  bool attention_half(int index, Thread& t) {
    const HfLayer& l = m.layers[index];
    if (t.run.tid == 0 && step.progress) __atomic_fetch_add(step.progress, 1, __ATOMIC_RELAXED);
    if (index > t.first_layer && !finish(t, m.layers[index - 1], false)) return false;
    Rows rows, rows2;
    if (!(l.parallel ? normed_together(t, l.attention_norm, h, rows) : normed(t, l.attention_norm, rows))) return false;
    if (l.parallel && l.mlp_norm.weight && !normed_together(t, l.mlp_norm, h2, rows2)) return false;
    if (!linear(t, l.qkv, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
          for (int r = 0; r < count; r++)
            for (int j = 0; j < GROUP; j += 16) {
              Lanes v = load(sums + r * GROUP + j);
              store(projected.row(first + r) + g * GROUP + j, l.qkv.bias ? v + load(l.qkv.bias + g * GROUP + j) : v);
            }
        })) return false;
    if (!attend(l, kinds[kind_of[index]], t)) return false;
    return row_parallel(t, l.output, {attention_out.data, attention_out.stride}, l, false);
  }

  bool attend(const HfLayer& l, const Kind& kind, Thread& t) {
    const HeadShape& shape = kind.shape;
    Pages<W> pages = {(const W*)l.pages, shape};
    bool inlined = decodes_alone && !kind.splits;  // then one task reads what it has written, and no other does
    if (!inlined && !holdfast::tasks(t.run, num_units * shape.num_kv_heads, [&](int i) {
          prepare(l, shape, t.own, units[i / shape.num_kv_heads], i % shape.num_kv_heads);
        })) return false;
    if (!holdfast::tasks(t.run, kind.num_tasks, [&](int i) {
          const AttentionTask& task = kind.tasks[i];
          if (inlined) prepare(l, shape, t.own, {task.sequence, 0, 1}, task.kv_head);
          attend_task(pages, t.own, task, l);
        })) return false;
    return !kind.splits || holdfast::tasks(t.run, kind.num_tasks, [&](int i) {
      if (kind.tasks[i].part == 0 && kind.tasks[i].parts > 1) merge_task(pages, t.own, kind.tasks, i, l);
    });
  }

  // Whole tokens of one sequence for one KV head. Long contexts are parted where few tasks are there to share.
  void list_tasks(Kind& kind) {
    const HeadShape& shape = kind.shape;
    int tokens = std::max(1, QUERY_ROWS / shape.group()), slot = 0;
    bool may_split = threads > 1 && step.num_rows <= 4 * threads;
    kind.tasks.clear(), kind.splits = false;
    for (int i = 0; i < (int)sequences.size(); i++) {
      const SequenceView& seq = sequences[i];
      for (int t = 0; t < seq.num_tokens; t += tokens) {
        int count = std::min(tokens, seq.num_tokens - t);
        int from = first_key(shape, seq.first_position + t) / SPLIT, to = (seq.first_position + t + count - 1) / SPLIT;
        int num_parts = may_split ? to - from + 1 : 1;
        for (int k = 0; k < shape.num_kv_heads; k++) {
          for (int part = 0; part < num_parts; part++)
            kind.tasks.push_back({i, k, t * shape.group(), count * shape.group(), part, num_parts, slot + part});
          if (num_parts > 1) slot += num_parts, kind.splits = true;
        }
      }
    }
    kind.num_tasks = (int)kind.tasks.size();
    while ((int)parts.size() < slot) parts.emplace_back(new Softmax);
  }

  // Norms and rotates the queries and keys of a run of tokens for one KV head, and writes its keys and values.
  void prepare(const HfLayer& l, const HeadShape& s, Local& own, Unit unit, int kv_head) {
    const SequenceView& seq = sequences[unit.sequence];
    clear_begun(l, s, seq, unit, kv_head);
    for (int t = unit.first; t < unit.end; t++) {
      int row = seq.first_row + t, position = seq.first_position + t;
      const float* from = projected.row(row);
      for (int i = 0; i < s.group(); i++) {
        int head = kv_head * s.group() + i;
        float* q = rotated(l, s, own, from, head, l.query_norm, head, position, s.num_heads);
        Input* out = queries.row(row) + head * s.padded();
        for (int j = 0; j < s.padded(); j += 16) store(out + j, load(q + j));
      }
      float* k = rotated(l, s, own, from + s.num_heads * s.head_dim, kv_head, l.key_norm, kv_head, position, s.num_kv_heads);
      write_key(l, s, seq, position, kv_head, k);
      write_value(l, s, seq, position, kv_head, from + (s.num_heads + s.num_kv_heads + kv_head) * s.head_dim);
    }
  }

  // One head [padded] after norm and rotation, zeros behind its dimensions.
  float* rotated(const HfLayer& l, const HeadShape& s, Local& own, const float* from, int head, const HfNorm& norm, int norm_head,
                 int position, int num_heads) {
    float* v = own.head.row(0);
    const float* raw = from + (long)head * s.head_dim;
    memset(v, 0, (s.padded() + 16) * 4);
    if (norm.weight && l.head_norms == HF_NORM_ALL_HEADS) whole_norm(norm, from, num_heads * s.head_dim, head * s.head_dim, s.head_dim, v);
    else if (norm.weight) {
      HfNorm one = norm;
      bool own_weights = l.head_norms == HF_NORM_OWN_WEIGHTS;
      if (own_weights) one.weight += norm_head * s.head_dim;
      if (own_weights && one.bias) one.bias += norm_head * s.head_dim;
      norm_row(raw, one, s.head_dim, v);
    } else memcpy(v, raw, s.head_dim * 4);
    if (l.rotary >= 0) rotate(m.rotaries[l.rotary], position, v);
    return v;
  }

  // A norm over all heads together, of which [first, first + count) is wanted.
  void whole_norm(const HfNorm& norm, const float* from, int n, int first, int count, float* out) {
    Lanes sum[4];
    for (auto& s : sum) s = zero();
    for (int i = 0, k = 0; i < n; i += 16, k++) {
      Lanes v = tail_of(from + i, n - i);
      sum[k % 4] = fma(v, v, sum[k % 4]);
    }
    float inverse = 1.0f / square_root(sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)n + norm.eps);
    for (int i = 0; i < count; i++) out[i] = from[first + i] * inverse * norm.weight[first + i];
  }

  static void rotate(const HfRotary& rotary, int position, float* v) {
    const float *sines = rotary.table + (long)position * 2 * rotary.pairs, *cosines = sines + rotary.pairs;
    if (!rotary.interleaved && rotary.pairs % 16 == 0) {
      for (int i = 0; i < rotary.pairs; i += 16) {
        Lanes a = load(v + i), b = load(v + rotary.pairs + i), s = load(sines + i), c = load(cosines + i);
        store(v + i, minus_fma(b, s, a * c)), store(v + rotary.pairs + i, fma(a, s, b * c));
      }
      return;
    }
    for (int i = 0; i < rotary.pairs; i++) {
      float* first = rotary.interleaved ? v + 2 * i : v + i;
      float* second = rotary.interleaved ? first + 1 : first + rotary.pairs;
      float a = *first, b = *second;
      *first = scalar_fma(-b, sines[i], a * cosines[i]), *second = scalar_fma(a, sines[i], b * cosines[i]);
    }
  }

  W* page_of(const HfLayer& l, const HeadShape& s, const SequenceView& seq, int position, int kv_head) {
    return (W*)l.pages + ((long)seq.blocks[position / s.block_size] * s.num_kv_heads + kv_head) * s.page_elements();
  }
  // Zeros for what lies behind the tokens of spans that this step begins: masked keys never bring in another's NaN.
  void clear_begun(const HfLayer& l, const HeadShape& s, const SequenceView& seq, Unit unit, int kv_head) {
    int first = seq.first_position + unit.first, end = seq.first_position + unit.end;
    for (int p = (first + SUB_PAGE - 1) / SUB_PAGE * SUB_PAGE; p < end; p += SUB_PAGE) {
      if (p + SUB_PAGE <= end) continue;
      memset((void*)(page_of(l, s, seq, p, kv_head) + p % s.block_size / SUB_PAGE * s.key_tiles * TILE), 0, s.key_tiles * TILE * sizeof(W));
    }
    for (int p = (first + s.span - 1) / s.span * s.span; p < end; p += s.span) {
      if (p + s.span <= end) continue;
      W* values = page_of(l, s, seq, p, kv_head) + s.key_elements();
      memset((void*)(values + (long)(p % s.block_size) * s.value_dims()), 0, (long)s.span * s.value_dims() * sizeof(W));
    }
  }
  void write_key(const HfLayer& l, const HeadShape& s, const SequenceView& seq, int position, int kv_head, const float* k) {
    W rounded[MAX_HEAD];
    for (int j = 0; j < s.padded(); j += 16) store(rounded + j, load(k + j));
    W* tiles = page_of(l, s, seq, position, kv_head) + position % s.block_size / SUB_PAGE * s.key_tiles * TILE;
    int key = position % SUB_PAGE;
    for (int d = 0; d < s.padded(); d++) tiles[d / 32 * TILE + place(d % 32, key)] = rounded[d];
  }
  void write_value(const HfLayer& l, const HeadShape& s, const SequenceView& seq, int position, int kv_head, const float* from) {
    W rounded[MAX_HEAD];
    for (int j = 0; j < s.value_dims(); j += 16) store(rounded + j, tail_of(from + j, s.head_dim - j));
    W* span = page_of(l, s, seq, position, kv_head) + s.key_elements() + (long)(position % s.block_size / s.span) * s.span * s.value_dims();
    int key = position % s.span;
    for (int d = 0; d < s.value_dims(); d++) span[(long)(d / 16) * s.span * 16 + place(key, d % 16)] = rounded[d];
  }
  // Where (k, n) lies in a tile.
  static int place(int k, int n) { return sizeof(W) == 2 ? k / 2 * 32 + n * 2 + k % 2 : k / 2 * 32 + k % 2 * 16 + n; }

  void attend_task(const Pages<W>& pages, Local& own, const AttentionTask& task, const HfLayer& l) {
    const HeadShape& s = pages.shape;
    const SequenceView& seq = sequences[task.sequence];
    AttentionScratch<W>& a = own.attention;
    gather_queries<W>(a, s, seq, task.kv_head, task.first, task.count, queries.data, queries.stride, own.rows);
    const int* at = own.rows.positions;
    int last = at[task.count - 1] + 1, first_part = first_key(s, at[0]) / SPLIT;
    if (task.parts > 1) {
      int from = (first_part + task.part) * SPLIT, to = std::min(last, from + SPLIT);
      attend_keys(own.scratch.tiles, a, pages, seq, task.kv_head, at, task.count, begin_of(s, at[0], from), to, a.total);
      keep_part(s, task, a.total);
      return;
    }
    for (int from = first_part * SPLIT; from < last; from += SPLIT) {
      Softmax& sum = from == first_part * SPLIT ? a.total : a.part;
      attend_keys(own.scratch.tiles, a, pages, seq, task.kv_head, at, task.count, begin_of(s, at[0], from), std::min(last, from + SPLIT), sum);
      if (&sum == &a.part) merge_all(s, a.total, a.part, task.count);
    }
    write_out(s, own, task, a.total, l);
  }
  // The first tile of [from, ..) that any row sees.
  static int begin_of(const HeadShape& s, int position, int from) { return std::max(from, first_key(s, position) / KEYS * KEYS); }

  static void merge_all(const HeadShape& s, Softmax& total, const Softmax& part, int count) {
    int dims = s.value_dims();
    for (int r = 0; r < count; r++)
      merge_row(total.largest + r, total.sums + r * 16, total.values + r * dims, part.largest[r], part.sums + r * 16, part.values + r * dims, dims);
  }
  void keep_part(const HeadShape& s, const AttentionTask& task, const Softmax& sum) {
    Softmax& kept = *parts_of(task.slot);
    memcpy(kept.largest, sum.largest, task.count * 4), memcpy(kept.sums, sum.sums, task.count * 64);
    memcpy(kept.values, sum.values, (long)task.count * s.value_dims() * 4);
  }
  void merge_task(const Pages<W>& pages, Local& own, const std::vector<AttentionTask>& list, int first, const HfLayer& l) {
    const AttentionTask& task = list[first];
    Softmax& total = *parts_of(task.slot);
    for (int part = 1; part < task.parts; part++) merge_all(pages.shape, total, *parts_of(task.slot + part), task.count);
    gather_queries<W>(own.attention, pages.shape, sequences[task.sequence], task.kv_head, task.first, task.count, queries.data, queries.stride, own.rows);
    write_out(pages.shape, own, task, total, l);
  }
  Softmax* parts_of(int slot) { return parts[slot].get(); }

  void write_out(const HeadShape& s, Local& own, const AttentionTask& task, Softmax& sum, const HfLayer& l) {
    int dims = s.value_dims(), slice_length = l.output.slice_tiles * K_TILE;
    for (int r = 0; r < task.count; r++) {
      int head = own.rows.heads[r];
      float *largest = sum.largest + r, *sums = sum.sums + r * 16, *values = sum.values + (long)r * dims;
      if (l.sinks) add_sink(largest, sums, values, l.sinks[head], dims);
      Lanes inverse = all(1.0f / sum_of(load(sums)));
      Input rounded[MAX_HEAD];
      for (int j = 0; j < dims; j += 16) store(rounded + j, load(values + j) * inverse);
      Input* out = attention_out.row(own.rows.tokens[r]) + (long)(head / l.heads_per_slice) * slice_length + head % l.heads_per_slice * s.head_dim;
      memcpy((void*)out, rounded, s.head_dim * sizeof(Input));
    }
  }

  // --- sums over ranks and the residual ---

  // Whether outputs of a half go straight to the residual: nothing is done to their sum first.
  bool is_direct(const HfNorm& out_norm) const { return m.tensor_parallel_size == 1 && !out_norm.weight; }

  // Where a half of a layer leaves its outputs, [rows][y.stride]; null: at the residual. A sum over ranks begins.
  float* place_of_sum(Thread& t, const HfNorm& out_norm) {
    t.sum++;
    return is_direct(out_norm) ? nullptr : exchange ? exchange->own(t.sum) : y.data;
  }

  bool row_parallel(Thread& t, const HfLinear& w, Rows in, const HfLayer& l, bool is_mlp) {
    float* place = place_of_sum(t, is_mlp ? l.mlp_out_norm : l.attention_out_norm);
    return linear(t, w, in, t.num_rows, [&](int g, int first, int count, const float* sums) {
      for (int r = 0; r < count; r++)
        for (int j = 0; j < GROUP && g * GROUP + j < y.stride; j += 16)
          put(place, l, w, first + r, g * GROUP + j, load(sums + r * GROUP + j));
    });
  }
  void put_residual(const HfLayer& l, int row, int column, Lanes v) {
    float* to = x.row(row) + column;
    store(to, load(to) + v * all(l.residual_scale));
  }
  void put(float* place, const HfLayer& l, const HfLinear& w, int row, int column, Lanes v, bool with_bias = true) {
    if (place) return store(place + row * y.stride + column, v);
    put_residual(l, row, column, w.bias && with_bias ? v + load(w.bias + column) : v);
  }

  // As `row_tasks`, once all ranks have written their rows of the latest sum. False also where a rank is lost: a late thread
  // that hears of it too early gets no more tasks anyway.
  template <class Fn> bool summed_tasks(Thread& t, int rows, Fn&& fn) {
    if (!exchange) return row_tasks(t.run, rows, fn);
    return row_tasks(t.run, rows, [&](int r) { if (exchange->meet(t.sum, t.own.peers)) fn(r); }) && !exchange->outcome();
  }
  // Ranks hold neighbouring subtrees of the tree over slices: theirs are added as its upper part.
  void sum_over_ranks(Exchange::Sum sum, int row, float* out) const {
    int ranks = m.tensor_parallel_size;
    const float* parts[Exchange::kMostRanks];
    for (int i = 0; i < ranks; i++) parts[i] = exchange->buffer(i, sum) + row * y.stride;
    for (int j = 0; j < m.hidden; j += 16) {
      Lanes v[Exchange::kMostRanks];
      for (int i = 0; i < ranks; i++) v[i] = tail_of(parts[i] + j, m.hidden - j);
      for (int apart = 1; apart < ranks; apart *= 2)
        for (int i = 0; i + apart < ranks; i += 2 * apart) v[i] = v[i] + v[i + apart];
      store(out + j, v[0]);
    }
  }

  // What a half of a layer left goes to the residual: in `y`, summed over ranks by now, or with all ranks.
  bool finish(Thread& t, const HfLayer& l, bool is_attention) {
    const HfNorm& norm = is_attention ? l.attention_out_norm : l.mlp_out_norm;
    if (is_direct(norm)) return true;
    const float* bias = is_attention ? l.output.bias : l.experts ? nullptr : l.mlp.down.bias;
    return summed_tasks(t, t.num_rows, [&](int r) {
      float* sums = y.row(r);
      if (exchange) sum_over_ranks(t.sum, r, sums);
      if (bias)
        for (int j = 0; j < m.hidden; j += 16) store(sums + j, load(sums + j) + load(bias + j));
      if (norm.weight) norm_row(sums, norm, m.hidden, sums);
      for (int j = 0; j < m.hidden; j += 16) put_residual(l, r, j, tail_of(sums + j, m.hidden - j));
    });
  }

  // --- MLP ---

  bool mlp_half(int index, Thread& t) {
    const HfLayer& l = m.layers[index];
    if (!finish(t, l, true)) return false;
    Rows rows = l.mlp_norm.weight ? Rows{h2.data, h2.stride} : Rows{h.data, h.stride};
    if (!l.parallel && !normed(t, l.mlp_norm, rows)) return false;
    if (l.experts) return experts_part(l, rows, t);
    if (!up_part(t, l.mlp, rows)) return false;
    return row_parallel(t, l.mlp.down, {inner_rows.data, inner_rows.stride}, l, true);
  }

  bool up_part(Thread& t, const HfMlp& mlp, Rows rows) {
    return linear(t, mlp.up, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
      for (int r = 0; r < count; r++) activate(mlp, g, sums + r * GROUP, inner_rows.row(first + r));
    });
  }
  static void activate(const HfMlp& mlp, int g, const float* sums, Input* out) {
    const float* bias = mlp.up.bias ? mlp.up.bias + g * GROUP : nullptr;
    Lanes v[4];
    for (int j = 0; j < 4; j++) v[j] = load(sums + 16 * j);
    if (bias)
      for (int j = 0; j < 4; j++) v[j] = v[j] + load(bias + 16 * j);
    if (mlp.has_gate)
      for (int j = 0; j < 2; j++) store(out + g * 32 + 16 * j, gated(mlp.activation, v[j], v[j + 2]));
    else
      for (int j = 0; j < 4; j++)
        if (g * GROUP + 16 * j < mlp.down.slices * mlp.down.slice_tiles * K_TILE) store(out + g * GROUP + 16 * j, activated(mlp.activation, v[j]));
  }

#include "experts.h"

  // --- head ---

  bool head_part(Thread& t) {
    if (!finish(t, m.layers[m.num_layers - 1], false)) return false;
    if (!t.num_wanted) return true;
    if (!row_tasks(t.run, t.num_wanted, [&](int r) { norm_or_copy(x.row(step.wanted[r]), m.norm, h.row(r)); })) return false;
    if (!linear(t, m.head, {h.data, h.stride}, t.num_wanted, [&](int g, int first, int count, const float* sums) {
          for (int r = 0; r < count; r++) logits_of(g, first + r, sums + r * GROUP);
        })) return false;
    if (exchange && t.gathers) return gather_logits(t);
    t.sum++;
    if (!row_tasks(t.run, t.num_wanted, [&](int r) { choose_best(r, exchange ? choices_of(m.exchange->rank, t.sum) : nullptr); })) return false;
    return !exchange || summed_tasks(t, t.num_wanted, [&](int r) { choose_among_ranks(t.sum, r); });
  }

  void logits_of(int g, int row, const float* sums) {
    alignas(64) float out[GROUP];
    int columns = std::min((int)GROUP, m.vocab_rows - g * GROUP), tokens = std::min(columns, num_tokens - g * GROUP);
    Lanes best = all(-INFINITY), broken = zero();
    for (int j = 0; j < columns; j += 16) {
      Lanes v = load(sums + j);
      if (m.head.bias) v = v + load(m.head.bias + g * GROUP + j);
      v = v * all(m.logit_scale);
      if (m.logit_softcap > 0) v = tanh_of(v * all(1.0f / m.logit_softcap)) * all(m.logit_softcap);
      store(out + j, v);
      Lanes real = keep_range(v, 0, tokens - j, all(-INFINITY));
      best = larger(best, real);
      broken = broken + keep_range(v - v, 0, tokens - j, zero());  // NaN where not finite
    }
    if (step.logits) memcpy(step.logits + (long)row * m.vocab_rows + g * GROUP, out, columns * 4);
    float value = largest_of(best), doubt = sum_of(broken);
    int at = 0;
    if (doubt == 0.0f && tokens > 0)
      while (out[at] != value) at++;
    group_best.row(row)[g] = value, group_at.row(row)[g] = doubt == 0.0f ? g * GROUP + at : -1;
  }

  // A row's largest logit among those of one rank.
  struct Choice { float value; int token; };
  Choice* choices_of(int rank, Exchange::Sum sum) const { return (Choice*)exchange->buffer(rank, sum); }

  // Of equal logits the first, over all ranks; none where those of any rank are not all finite.
  void choose_among_ranks(Exchange::Sum sum, int row) {
    Choice best = choices_of(0, sum)[row];
    for (int i = 1; i < m.tensor_parallel_size; i++) {
      Choice other = choices_of(i, sum)[row];
      if (other.token < 0 || (best.token >= 0 && other.value > best.value)) best = other;
    }
    step.best[row] = best.token;
  }

  // All ranks' logits, in pieces of what a buffer of the exchange holds.
  bool gather_logits(Thread& t) {
    long most = m.max_rows * y.stride, all = (long)t.num_wanted * m.vocab_rows;
    for (long first = 0; first < all; first += most) {
      long count = std::min(most, all - first);
      int pieces = (int)((count + COPIED - 1) / COPIED);
      t.sum++;
      if (!holdfast::tasks(t.run, pieces, [&](int i) {
            long from = (long)i * COPIED;
            memcpy(exchange->own(t.sum) + from, step.logits + first + from, std::min((long)COPIED, count - from) * sizeof(float));
          })) return false;
      if (!holdfast::tasks(t.run, pieces, [&](int i) {
            if (!exchange->meet(t.sum, t.own.peers)) return;
            long from = (long)i * COPIED;
            for (int rank = 0; rank < m.tensor_parallel_size; rank++)
              place_logits(rank, exchange->buffer(rank, t.sum) + from, first + from, std::min((long)COPIED, count - from));
          }) || exchange->outcome()) return false;
    }
    return true;
  }
  // `count` of a rank's logits [wanted][vocab rows], from `first` on, to their places among those of all.
  void place_logits(int rank, const float* from, long first, long count) {
    long before = (long)rank * m.vocab_rows, columns = std::min((long)m.vocab_rows, m.vocab_size - before);
    for (long end = first + count; first < end;) {
      long row = first / m.vocab_rows, column = first % m.vocab_rows, run = std::min(end - first, m.vocab_rows - column);
      if (column < columns) memcpy(step.all_logits + row * m.vocab_size + before + column, from, std::min(run, columns - column) * sizeof(float));
      from += run, first += run;
    }
  }

  // Of equal logits the first.
  void choose_best(int row, Choice* choices) {
    float value = -INFINITY;
    int at = num_tokens > 0 ? -1 : 0;
    for (int g = 0; g < m.head.groups && g * GROUP < num_tokens; g++) {
      if (group_at.row(row)[g] < 0) { at = -1; break; }
      if (group_best.row(row)[g] > value) value = group_best.row(row)[g], at = group_at.row(row)[g];
    }
    if (choices) choices[row] = {value, at < 0 ? at : at + m.first_vocab_row};
    else if (step.best) step.best[row] = at;
    if (step.best_value) step.best_value[row] = value;
  }

  HfModel m;
  int threads;
  HfStep step = {};
  int next_segment = 0, num_tokens = 0;  // tokens of the vocabulary whose logits are this rank's
  Exchange::Sum last_sum = 0;
  std::unique_ptr<Exchange> exchange;  // or none
  bool decodes_alone = false;
  std::vector<int> block_ids;
  std::vector<SequenceView> sequences;
  std::vector<Unit> units;
  std::vector<std::unique_ptr<Local>> local;
  Buffer<float> x, y, projected, group_best, router_logits;
  Buffer<Input> h, h2, queries, attention_out, inner_rows, expert_input;
  Buffer<int> group_at;
  std::vector<int> choices, first_of, order;
  std::vector<float> weights;
  std::vector<std::unique_ptr<Softmax>> parts;
  std::vector<Kind> kinds;  // their number is fixed once the decoder is made
  std::vector<int> kind_of;
  int num_units = 0, room = 0;
};

}  // namespace
