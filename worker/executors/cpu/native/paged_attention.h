// Attention of modules that are not a decoder's: a layer's rows leave their keys and values in pages, and attend.
#pragma once
#include "attention_tasks.h"

namespace holdfast {

// Of any dtype (`typed.h` says why).
struct AnyAttention {
  virtual ~AnyAttention() {}
  virtual int drain() = 0;
  virtual int begin(const NativeStep& step) = 0;
  virtual int run(int layer, const NativeAttentionRows& rows) = 0;
};

}  // namespace holdfast

namespace {

template <class W> class PagedAttention : public holdfast::AnyAttention {
  typedef typename InputOf<W>::Type Input;

 public:
  PagedAttention(const NativeAttention* of_layers, int num_layers, int block_size, holdfast::Pool* pool)
      : pool(pool), layers(of_layers, of_layers + num_layers), attention(native_pool_threads(pool)) {
    for (const NativeAttention& l : layers)
      kind_of.push_back(attention.kind_like(
          shape_of_heads(l.num_heads, l.num_kv_heads, l.key_dim, l.value_dim, block_size, l.window)));
    for (int i = 0; i < native_pool_threads(pool); i++) local.emplace_back(new Local);
  }
  int drain() override { return native_pool_drain(pool); }

  // Takes a step's sequences; the arrays behind them are read now. Its layers run in any order, each once.
  int begin(const NativeStep& step) override {
    return holdfast::prepared([&] { return attention.begin(step), (int)holdfast::kDone; });
  }
  int run(int layer, const NativeAttentionRows& rows) override {
    const AttentionKind& kind = attention.kinds[kind_of[layer]];
    const Job job = {this, layer, attention.num_units * kind.shape.num_kv_heads, attention.may_inline(kind), rows};
    return holdfast::run(pool, [](const void* argument, holdfast::Run& run) { go(*(const Job*)argument, run); }, &job);
  }

 private:
  // What a thread may look at between tasks.
  struct Job {
    PagedAttention* self;
    int layer, num_units;
    bool inlined;
    NativeAttentionRows rows;
  };
  struct Local {
    Tiles tiles;
    AttentionRoom<W> attention;
  };

  static void go(const Job& job, holdfast::Run& run) {
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // denormals are zeros, as in a decoder
    Local& own = *job.self->local[run.tid];
    job.self->attend(job, run, own);
    release_tiles(own.tiles);
    _mm_setcsr(control);
  }

  void attend(const Job& job, holdfast::Run& run, Local& own) {
    const NativeAttention& l = layers[job.layer];
    const AttentionKind& kind = attention.kinds[kind_of[job.layer]];
    HeadShape shape = kind.shape;
    scale_scores(shape, job.rows.scaling, l.softcap);
    if (l.kept_as == holdfast::KEPT_AS_INT8) attend(job, run, own, Pages<Code>{(Code*)l.pages, shape});
    else attend(job, run, own, Pages<W>{(W*)l.pages, shape});
  }

  template <class K> void attend(const Job& job, holdfast::Run& run, Local& own, const Pages<K>& pages) {
    const NativeAttention& l = layers[job.layer];
    const AttentionKind& kind = attention.kinds[kind_of[job.layer]];
    if (!job.inlined && !holdfast::tasks(run, job.num_units, [&](int i) {
          keep(pages, job.rows, attention.units[i / l.num_kv_heads], i % l.num_kv_heads);
        }))
      return;
    const NativeAttentionRows& r = job.rows;
    const LayerRows<W> rows = {(const Input*)r.queries,
                               r.query_token_stride,
                               r.query_head_stride,
                               l.key_dim,
                               (Input*)r.out,
                               (long)l.num_heads * l.value_dim,
                               0,
                               l.num_heads,
                               r.sinks};
    attention.attend(run, pages, kind, rows, own.tiles, own.attention, [&](const AttentionTask& task) {
      if (job.inlined) keep(pages, job.rows, {task.sequence, 0, 1}, task.kv_head);
    });
  }

  // Writes the keys and values of some tokens and one KV head to their pages.
  template <class K> void keep(const Pages<K>& pages, const NativeAttentionRows& rows, Unit unit, int kv_head) {
    const HeadShape& s = pages.shape;
    const SequenceView& seq = attention.sequences[unit.sequence];
    clear_begun(pages, seq, kv_head, seq.first_position + unit.first, seq.first_position + unit.end);
    W numbers[MAX_HEAD];
    float wide[MAX_HEAD];
    auto widened = [&](int count) {
      for (int j = 0; j < count; j += 16) store(wide + j, load(numbers + j));
      return wide;
    };
    for (int t = unit.first; t < unit.end; t++) {
      const long token = seq.first_row + t;
      const int position = seq.first_position + t;
      fill_up((const W*)rows.keys + token * rows.key_token_stride + kv_head * rows.key_head_stride, s.key_dim,
              s.padded(), numbers);
      if constexpr (Pages<K>::HAS_SCALES) write_key(pages, seq, kv_head, position, widened(s.padded()));
      else put_key(pages, seq, kv_head, position, numbers);
      fill_up((const W*)rows.values + token * rows.value_token_stride + kv_head * rows.value_head_stride, s.value_dim,
              s.value_dims(), numbers);
      if constexpr (Pages<K>::HAS_SCALES) write_value(pages, seq, kv_head, position, widened(s.value_dims()));
      else put_value(pages, seq, kv_head, position, numbers);
    }
  }
  static void fill_up(const W* from, int count, int padded, W* to) {
    memcpy((void*)to, from, count * sizeof(W));
    memset((void*)(to + count), 0, (padded - count) * sizeof(W));
  }

  holdfast::Pool* pool;
  std::vector<NativeAttention> layers;
  Attention<W> attention;
  std::vector<int> kind_of;
  std::vector<std::unique_ptr<Local>> local;
};

}  // namespace
