// One step of a decoder, as phases of tasks for a pool of threads: embedding, layers, head.
//
// With several ranks there are sums over ranks between. Where they share memory (`exchange.h`) a step goes through them;
// else it stops there (`partial()` holds this rank's share, float32) and goes on once the sum is there. Which bits a row
// gets depends on its own sequence alone: rows meet in products and tiles, and those add in one order for any number of
// rows. The halves of a layer, the residual stream and the head are in files of their own; here is what they share.
#pragma once
#include <math.h>

#include <mutex>

#include "attention_tasks.h"
#include "exchange.h"
#include "product_tasks.h"
#include "recurrence_task.h"
#include "rows.h"
#include "step_sizes.h"

namespace {

enum { NORM_ROWS = 8, OWN_NORM_ROWS = 2, HEAD_ROWS = 128, SPIN_FOR_PEERS = 2000, COPIED = 1 << 14 };

template <class W> class Decoder {
  typedef typename InputOf<W>::Type Input;
  typedef holdfast::Run Run;
  typedef holdfast::Exchange Exchange;

 public:
  Decoder(const NativeModel& model, int num_threads)
      : m(model), threads(num_threads), attention(num_threads), turns(num_threads) {
    StepSizes sizes;
    int heads = 0;
    for (int i = 0; i < m.num_layers; i++) {
      const NativeLayer& l = m.layers[i];
      sizes.add(l);
      kind_of.push_back(-1);
      if (!attends(l)) continue;
      const int values = l.latent ? l.latent->latent_dim : l.head_dim;
      HeadShape s = shape_of_heads(l.num_heads, l.num_kv_heads, l.head_dim, values, l.block_size, l.window);
      s.values_in_keys = l.latent, s.sees_behind = l.sees_behind;
      s.has_own_table = l.has_own_table, s.block_bytes = l.block_bytes;
      scale_scores(s, l.scaling, l.softcap);
      kind_of.back() = attention.kind_like(s);
      heads = std::max(heads, l.num_heads * s.padded());
    }
    long rows = m.max_rows;
    part_stride = stride_of(m.hidden);
    const long columns = sum_columns(m.hidden, m.sum_parts);
    x = Buffer<float>(rows, columns), y = Buffer<float>(rows, columns), wanted_x = Buffer<float>(rows, columns);
    h = Buffer<Input>(rows, m.hidden), h2 = Buffer<Input>(rows, m.hidden);
    projected = Buffer<float>(rows, sizes.projected), queries = Buffer<Input>(rows, heads);
    attention_out = Buffer<Input>(rows, sizes.attended), inner_rows = Buffer<Input>(rows * sizes.chosen, sizes.inner);
    make_latent_rows(sizes.latents);
    if (sizes.units) units_of_row = sizes.units, row_units = Buffer<RowUnit>(1, rows * units_of_row);
    if (sizes.inner_units) inner_units = Buffer<RowUnit>(1, rows * sizes.chosen * sizes.inner_units);
    if (m.inputs) {
      const long filled = (m.inputs->dim + GROUP - 1) / GROUP * GROUP;
      own_inputs = Buffer<float>(rows, filled * m.num_layers), gated_inputs = Buffer<Input>(rows, filled);
    }
    wanted_kinds = attention.kinds;
    for (first_reader = m.num_layers; first_reader > 0 && m.layers[first_reader - 1].reads_others;) first_reader--;
    if (sizes.has_states) wanted_mixed = Buffer<Input>(rows, sizes.attended);
    if (sizes.experts) {
      const long chosen = rows * sizes.chosen, longest = std::max(m.hidden, sizes.latent);
      router_logits = Buffer<float>(rows, sizes.logits), expert_input = Buffer<Input>(chosen, longest);
      choices.resize(chosen), weights.resize(chosen), first_of.resize(sizes.experts + 1), order.resize(chosen);
    }
    if (sizes.has_scores) choice_scores = Buffer<float>(rows, sizes.experts);
    if (sizes.latent) latent_rows = Buffer<Input>(rows, sizes.latent);
    if (sizes.shared) shared_rows = Buffer<Input>(rows, sizes.shared), shared_weights.assign(rows, 1.0f);
    for (int i = 0; i < threads; i++) local.emplace_back(new Local(m.hidden, sizes.latents));
    num_tokens = std::max(0, std::min(m.vocab_rows, m.vocab_size - m.first_vocab_row));
    list_sites();
    if (m.exchange) exchange.reset(new Exchange(*m.exchange, rows, y.stride));
  }

  // Takes the step; the arrays behind it stay valid until its last segment has run.
  void begin(const NativeStep& next) {
    fill_rotaries(next);
    take(next);
  }

  // What all sequences of a step need of the tables of rotations. A step that is launched needs it while another begins.
  void fill_rotaries(const NativeStep& next) {
    int end = 0;
    for (int i = 0; i < next.num_sequences; i++)
      end = std::max(end, (int)(next.first_positions[i] + next.num_tokens[i]));
    std::lock_guard<std::mutex> guard(rotary_lock);
    for (int i = 0; i < m.num_rotaries; i++) fill_rotary(m.rotaries[i], end);
  }

  void take(const NativeStep& next) {
    step = next;
    attention.begin(step);
    narrows = can_narrow() && step.num_wanted < step.num_rows && !step.hidden;
    if (narrows && ends_with_attention()) list_wanted();
    if (weighed.data) list_positions(step.num_sequences);
    if (m.positions) list_places();
    make_room(step.num_wanted);
    begin_adapters();
    next_segment = 0;
  }

  float* partial() { return next_segment == 1 ? x.data : y.data; }
  long partial_stride() const { return y.stride; }
  float* residual() { return x.data; }

  // Runs segments [first, end) of the step: 0 embeds, 3 l + 1 and 3 l + 3 are a layer's halves, 3 l + 2 is the rest of the
  // first half where ranks share a norm in it, the last is the head.
  // `finished_layer`: also adds what this layer's MLP left to the residual; -1: the segment after it does so.
  int run(holdfast::Pool* pool, int first, int end, int finished_layer) {
    next_segment = end;
    const Part part = part_of(first, end, finished_layer);
    int outcome = holdfast::run(
        pool, [](const void* argument, Run& run) { ((const Part*)argument)->decoder->go(*(const Part*)argument, run); },
        &part);
    return outcome == holdfast::kDone && exchange ? exchange->outcome() : outcome;
  }

  // Runs a whole step in a task of `outer`, on its thread alone. Its rotations are there.
  void run_alone(const NativeStep& next, Run& outer) {
    take(next);
    Run run = {0, 1, nullptr, outer.slot, nullptr, 0};
    go(part_of(0, 3 * m.num_layers + 2, -1), run);
  }

 private:
  // What a thread may look at between tasks: a late one finds the numbers of its own job here, never a later one's.
  struct Part {
    Decoder* decoder;
    int first, end, finished_layer, first_layer, num_rows, num_wanted, num_pooled;
    Exchange::Sum last_sum;
    bool gathers, keeps_hidden, narrows;
  };
  struct Local;
  struct Thread {
    Local& own;
    Run& run;
    int first_layer, num_rows, num_wanted, num_pooled;
    Exchange::Sum sum;
    bool gathers, keeps_hidden, narrows;
    float* residual;
  };  // sum: the latest, counted by each thread; num_rows: of the residual stream, fewer once it is narrowed

  Part part_of(int first, int end, int finished_layer) {
    return {this,
            first,
            end,
            finished_layer,
            step.first_layer,
            step.num_rows,
            step.num_wanted,
            step.num_pooled,
            last_sum,
            step.all_logits != nullptr,
            step.hidden != nullptr,
            narrows && first == 0 && end == 3 * m.num_layers + 2};
  }
  void go(const Part& part, Run& run) {
    unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);  // flush denormals, as the tile unit does
    Thread thread = {*local[run.tid], run,          part.first_layer,  part.num_rows, part.num_wanted, part.num_pooled,
                     part.last_sum,   part.gathers, part.keeps_hidden, part.narrows,  x.data};
    bool goes_on = true;
    for (int s = part.first; s < part.end && goes_on; s++) {
      if (s == 0) goes_on = embed(thread);
      else if (s > 3 * m.num_layers) goes_on = head_part(thread);
      else if (s % 3 == 1) goes_on = attention_half((s - 1) / 3, thread);
      else goes_on = s % 3 == 2 ? shared_norm_part((s - 1) / 3, thread) : mlp_half((s - 1) / 3, thread);
    }
    if (goes_on && part.finished_layer >= 0) end_layer(thread, part.finished_layer);
    if (run.tid == 0) last_sum = thread.sum;  // the caller is in time for all phases
    release_tiles(thread.own.scratch.tiles);
    _mm_setcsr(control);
  }

  struct Local {
    Scratch scratch;
    AttentionRoom<W> attention;
    RecurrenceRoom recurrence;
    Buffer<Input> normed, query_rows, head_rows;  // the last two of latent attention
    Buffer<float> head;
    long calls = 0;
    Exchange::Waiter peers{SPIN_FOR_PEERS, SPIN_FOR_PEERS};
    std::vector<float> of_experts;
    AddedRuns added_runs, expert_runs;
    std::vector<NativeAdapted> of_head;  // [adapters], of one head of latent attention
    Buffer<float> head_inner;
    float* expert_sums(long count) { return of_experts.assign(count, 0.0f), of_experts.data(); }
    Local(int hidden, const LatentSizes& latents) : normed(OWN_NORM_ROWS, hidden), head(2, MAX_HEAD) {
      if (!latents.weighed && !latents.query_rows) return;
      query_rows = Buffer<Input>(OWN_NORM_ROWS, latents.query_rows),
      head_rows = Buffer<Input>(HEAD_ROWS, latents.plain);
    }
  };
  void make_room(int num_wanted) {
    if (num_wanted <= room) return;
    room = num_wanted;
    group_best = Buffer<float>(room, m.head.groups), group_at = Buffer<int>(room, m.head.groups);
  }

  bool ends_with_attention() const {
    const NativeLayer& last = m.layers[m.num_layers - 1];
    return attends(last) && !keeps_state(last);
  }

  // --- rows and norms ---

  template <class Fn> bool row_tasks(Run& run, int rows, Fn&& fn) {
    return holdfast::tasks(run, (rows + NORM_ROWS - 1) / NORM_ROWS, [&](int t) {
      for (int r = t * NORM_ROWS; r < rows && r < (t + 1) * NORM_ROWS; r++) fn(r);
    });
  }

  void norm_or_copy(const float* from, const NativeNorm& norm, Input* out) {
    if (norm.weight) return norm_row(from, norm, m.hidden, out);
    for (int i = 0; i < m.hidden; i += 16) store(out + i, tail_of(from + i, m.hidden - i));
  }

  // The rows of a linear's input. Few rows: each thread makes them for itself, which is faster than waiting.
  struct Rows {
    const Input* data;
    long stride;
    const RowUnit* units = nullptr;  // the same in units, beside each other, if they are there
  };
  bool normed(Thread& t, const NativeNorm& norm, Rows& rows) {
    if (t.num_rows > OWN_NORM_ROWS || norm.stays) return normed_together(t, norm, h, rows);
    rows = {t.own.normed.data, t.own.normed.stride};
    for (int r = 0; r < t.num_rows; r++) norm_or_copy(row_of(t, r), norm, t.own.normed.row(r));
    return true;
  }
  bool normed_together(Thread& t, const NativeNorm& norm, Buffer<Input>& out, Rows& rows) {
    rows = {out.data, out.stride};
    if (norm.stays)
      return row_tasks(t.run, t.num_rows, [&](int r) {
        norm_row(row_of(t, r), norm, m.hidden, row_of(t, r));
        norm_or_copy(row_of(t, r), {}, out.row(r));
      });
    return row_tasks(t.run, t.num_rows, [&](int r) { norm_or_copy(row_of(t, r), norm, out.row(r)); });
  }

  // --- linears ---

  // Calls `out(group, first row, rows, sums [rows][64])` for all groups and rows of a product.
  template <class Out> bool linear(Thread& thread, const NativeLinear& linear, Rows in, int num_rows, Out&& out) {
    return some_groups(thread, linear, 0, linear.groups, in, num_rows, out);
  }
  template <class Out>
  bool some_groups(Thread& thread, const NativeLinear& linear, int begin, int last, Rows in, int num_rows, Out&& out) {
    Local& own = thread.own;
    AddedRows added;
    const bool adds = linear.site && adapted_sites[linear.site];
    if (adds && !prepare_added(thread, linear, in, num_rows, added)) return false;
    if (!in.units && are_quantized_together(linear, num_rows)) {
      if (!quantize_together(thread.run, in.data, in.stride, num_rows, units_in(linear), row_units.data)) return false;
      in.units = row_units.data;
    }
    return product_tasks(
        thread.run, threads, packed<W>(linear), begin, last, in.data, in.stride, num_rows, ++own.calls,
        [&]() -> Scratch& { return own.scratch; }, out, in.units, adds ? &added : nullptr);
  }
  // Of many rows, once for all threads; few are quantized by each of them, which is faster than waiting.
  bool are_quantized_together(const NativeLinear& linear, int num_rows) const {
    return linear.units.bits && num_rows > BLOCK_ROWS && units_in(linear) <= units_of_row;
  }

  // --- sums over ranks and the residual ---

  // Whether outputs of a half go straight to the residual: nothing is done to their sum first.
  bool is_direct(const NativeNorm& out_norm) const { return m.tensor_parallel_size == 1 && !out_norm.weight; }

  // Where a half of a layer leaves its outputs, [rows][y.stride]; null: at the residual. A sum over ranks begins.
  float* place_of_sum(Thread& t, const NativeNorm& out_norm) {
    t.sum++;
    return is_direct(out_norm) ? nullptr : exchange ? exchange->own(t.sum) : y.data;
  }

  float* row_of(const Thread& t, int row) const { return t.residual + row * x.stride; }
  void put_residual(const Thread& t, const NativeLayer& l, int row, int column, Lanes v) {
    float* to = row_of(t, row) + column;
    store(to, load(to) + v * all(l.residual_scale));
  }
  void put(const Thread& t, float* place, const NativeLayer& l, const NativeLinear& w, int row, int column, Lanes v,
           bool with_bias = true) {
    if (place) return store(place + row * y.stride + column, v);
    put_residual(t, l, row, column, w.bias && with_bias ? v + load(w.bias + column) : v);
  }

  // --- residual.h ---

  bool embed(Thread& t);
  void embed_row(int r, float* out);
  void list_places();
  void add_place(int r, float* out) const;
  void add_to_embedding(int r, int place, float* out) const;
  bool row_parallel(Thread& t, const NativeLinear& w, Rows in, const NativeLayer& l, float* place);
  template <class Fn> bool summed_tasks(Thread& t, int rows, Fn&& fn);
  void sum_over_ranks(Exchange::Sum sum, int row, float* out, long first = 0, int columns = 0) const;
  bool finish(Thread& t, const NativeLayer& l, bool is_attention);
  bool end_layer(Thread& t, int index);
  void add_beside(Thread& t, const NativeBeside& beside, int row, float* sums);
  void scale_residual(const Thread& t, const NativeLayer& l, int row);

  // --- adapted_rows.h ---

  void list_sites();
  void begin_adapters();
  bool prepare_added(Thread& t, const NativeLinear& linear, Rows in, int num_rows, AddedRows& added);

  // --- adapted_experts.h ---

  void begin_adapted_experts(long most);
  void sort_by_adapter(const NativeExperts& e, const Thread& t);
  AddedRows added_to_expert(const NativeLinear& linear, int index, Local& own);
  bool prepare_experts(Thread& t, const NativeExperts& e, const NativeLinear& linear, const Buffer<Input>& rows);

  // --- adapted_heads.h ---

  void begin_adapted_heads(long most);
  AddedRows added_to_head(const NativeLinear& linear, int head, const Input* rows, long stride, int first, int count,
                          Thread& t);

  // --- layer_inputs.h ---

  bool make_inputs(Thread& t);
  bool add_input(int index, Thread& t);

  // --- attention_half.h ---

  bool attention_half(int index, Thread& t);
  bool norm_inputs(Thread& t, const NativeLayer& l, Rows& rows);
  bool project(Thread& t, const NativeLinear& qkv, int begin, int end, Rows rows,
               long at = 0);  // `at`: of a row of projections, where the outputs go
  bool attend(const NativeLayer& l, const AttentionKind& kind, Thread& t);
  static int queries_end(const NativeLayer& l);
  LayerRows<W> rows_of(const NativeLayer& l, const HeadShape& s) const;
  template <class Fn> bool with_pages(const NativeLayer& l, const HeadShape& shape, Fn&& fn);
  template <class K> void prepare(const Pages<K>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head);
  void prepare_queries(const HeadShape& s, const NativeLayer& l, Local& own, Unit unit, int kv_head);
  template <class K> void prepare_keys(const Pages<K>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head);
  const float* rotated(const NativeLayer& l, Local& own, const float* from, int head, const NativeNorm& norm,
                       int norm_head, int position, int num_heads);

  // --- latent_attention.h ---

  bool latent_half(int index, Thread& t);
  bool project_queries(Thread& t, const NativeLatent& latent);
  template <class Fn, class Other>
  bool head_tasks(Thread& t, int heads, int groups, int others, Fn&& fn, Other&& other);
  bool absorb_queries(Thread& t, const NativeLayer& l, int num_units);
  void absorb_head(Thread& t, const NativeLayer& l, int head, int first, int count, int begin, int end);
  void keep_latents(const NativeLayer& l, Local& own, Unit unit);
  bool expand_values(Thread& t, const NativeLayer& l);
  void list_positions(int num_sequences);
  void make_latent_rows(const LatentSizes& sizes) {
    if (sizes.query_rows) query_rows = Buffer<Input>(m.max_rows, sizes.query_rows);
    if (!sizes.weighed) return;
    weighed = Buffer<Input>(m.max_rows, sizes.weighed);
    head_queries = Buffer<float>(m.max_rows, sizes.head_queries);
  }

  // --- short_conv.h ---

  bool state_half(int index, Thread& t);
  bool shared_norm_part(int index, Thread& t);
  bool mixed_out(int index, Thread& t);
  bool convolve_all(const NativeLayer& l, Thread& t);
  void convolve(const NativeLayer& l, int sequence, int first, int end);
  void put_mixed(const NativeLayer& l, int row, int c, int count, Lanes v);
  bool narrow_mixed(Thread& t, Rows& mixed);

  // --- recurrence.h ---

  enum { MAX_NORM_PARTS = 1024 };
  bool recur(const NativeLayer& l, Thread& t);
  bool project_gates(Thread& t, const NativeRecurrence& net);
  void recurrence_unit(const NativeLayer& l, RecurrenceRoom& room, int sequence, int unit);
  void recurrence_run(const NativeLayer& l, RecurrenceRoom& room, const RecurrenceTask& task, int from, int count,
                      bool is_draft);
  void put_head(const NativeLayer& l, const RecurrenceTask& task, int h, int position, const float* from);
  Input* mixed_head(const NativeLayer& l, int row, int h);
  static int sums_of_groups(const NativeRecurrence& net, const float* gated, float* sums);
  const float* gated_row(const NativeRecurrence& net, int row) const;
  bool send_squares(const NativeLayer& l, Thread& t);
  bool norm_groups(const NativeLayer& l, Thread& t);

  // --- wanted_rows.h ---

  bool can_narrow() const { return m.tensor_parallel_size == 1 || exchange; }
  void list_wanted();
  bool narrowing_half(const NativeLayer& l, Thread& t);
  bool wanted_half(int index, Thread& t, bool is_normed);
  bool narrow(Thread& t);

  // --- mlp_half.h ---

  bool mlp_half(int index, Thread& t);
  bool up_part(Thread& t, const NativeMlp& mlp, Rows rows, Buffer<Input>& out, RowUnit* units = nullptr);
  RowUnit* room_for_inner(const NativeMlp& mlp) const;
  static void put_inner(const NativeMlp& mlp, int g, int first, int count, const float* sums, Buffer<Input>& out,
                        RowUnit* units);
  bool shared_part(Thread& t, const NativeExperts& e, Rows rows);
  void add_shared(const NativeExperts& e, int g, float* sums, Local& own, int num_rows, const AddedRows& added);
  static void activate(const NativeMlp& mlp, int g, const float* sums, Input* to);
  static void activate(const NativeMlp& mlp, int g, const float* sums, RowUnit* to);
  bool experts_part(const NativeLayer& l, Rows routed, Rows rows, float* place, Thread& t);
  bool choose_part(const NativeExperts& e, Rows routed, Thread& t);
  bool up_of_experts(const NativeExperts& e, Rows rows, Thread& t);
  bool latent_part(const NativeLayer& l, Rows rows, Thread& t);
  bool beside_part(const NativeLayer& l, float* place, Thread& t);
  void sort_by_expert(const NativeExperts& e, int num_rows);
  void expert_up(const NativeMlp& expert, int index, int group, Local& own, long call);
  float* sums_of_experts(const NativeExperts& e, int g, Thread& t);
  void expert_columns(const NativeLayer& l, const NativeExperts& e, int g, float* place, Thread& t,
                      const AddedRows& added);

  // --- routing.h ---

  void choose_experts(const NativeExperts& e, int row);
  const float* summed_logits(const NativeExperts& e, int row);
  static const float* scores_for_choice(const NativeExperts& e, const float* logits, float* scores);
  static void keep_best_groups(const NativeExperts& e, float* scores);
  static void choose_best_of(const float* values, int count, int most, int* chosen);
  static float power_of_e(float x);
  static float one_sigmoid(float x);

  // --- head.h ---

  const W* head_row(int row, std::vector<W>& out);
  bool head_part(Thread& t);
  void keep_pooled(const Thread& t, int wanted, int r) const;
  void logits_of(int g, int row, const float* sums);
  struct Choice {
    float value;
    int token;
  };
  Choice* choices_of(int rank, Exchange::Sum sum) const;
  void choose_among_ranks(Exchange::Sum sum, int row);
  bool gather_logits(Thread& t, int num_rows);
  void place_logits(int rank, const float* from, long first, long count);
  void choose_best(int row, Choice* choices);

  NativeModel m;
  int threads;
  std::mutex rotary_lock;
  NativeStep step = {};
  long part_stride = 0;                  // of a sum that a half of a layer leaves
  int next_segment = 0, num_tokens = 0;  // tokens of the vocabulary whose logits are this rank's
  Exchange::Sum last_sum = 0;
  std::unique_ptr<Exchange> exchange;                                 // or none
  bool narrows = false, has_adapted = false, adapts_experts = false;  // the latter two: of the last step
  Attention<W> attention;
  std::vector<std::unique_ptr<Local>> local;
  Buffer<float> x, y, wanted_x, inner_of_rows, inner_of_experts, own_inputs, projected, head_queries, group_best,
      router_logits, choice_scores;
  Buffer<Input> h, h2, queries, attention_out, wanted_mixed, inner_rows, expert_input, shared_rows, latent_rows,
      gated_inputs, query_rows, weighed;   // the last two of latent attention, as `head_queries`
  Buffer<RowUnit> row_units, inner_units;  // of one product's rows, beside each other; the latter of inner rows of MLPs
  int units_of_row = 0;
  Buffer<int> group_at;
  std::vector<int> choices, first_of, order, slices_of_site, wanted_adapters, row_order, wanted_order;
  std::vector<int> row_numbers;                  // those of the rows of a task
  std::vector<int> gathered, gathered_adapters;  // of the rows that experts take: their numbers, their adapters
  std::vector<char> adapted_sites;               // of this step
  std::vector<NativeAdapted> adapted;            // [sites][adapters], of this step
  std::vector<NativeAdapted> of_experts;         // [experts][adapters], of one linear of a mixture
  Turns turns;
  std::vector<float> weights, shared_weights;
  std::vector<int> kind_of, positions[2];   // positions: of rows, and of wanted rows
  std::vector<RowPlace> places;             // of rows, of a model that adds such to the embedding
  std::vector<AttentionKind> wanted_kinds;  // as those of `attention`, of layers that see the wanted rows alone
  int num_wanted_units = 0, room = 0;
  int first_reader = 0;  // from this layer on all read keys and values of others; the number of layers: none does
};

}  // namespace
