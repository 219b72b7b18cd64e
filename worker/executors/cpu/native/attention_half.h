// First half of a layer: norm, queries, keys and values, attention, its output. Methods of `Decoder`.
// How rows attend to tiles of keys is in `attention.h`, and how keys and values are kept in `pages.h`.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::attention_half(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  if (t.run.tid == 0 && step.progress) __atomic_fetch_add(step.progress, 1, __ATOMIC_RELAXED);
  if (index > t.first_layer && !finish(t, m.layers[index - 1], false)) return false;
  if (t.narrows && index == m.num_layers - 1) return narrowing_half(l, t);
  Rows rows;
  if (!norm_inputs(t, l, rows)) return false;
  if (!project(t, l.qkv, 0, l.qkv.groups, rows)) return false;
  if (!attend(l, kinds[kind_of[index]], t)) return false;
  return row_parallel(t, l.output, {attention_out.data, attention_out.stride}, l, false);
}

// The rows that attention takes in, and those of an MLP beside it (`h` or `h2`).
template <class W> bool Decoder<W>::norm_inputs(Thread& t, const NativeLayer& l, Rows& rows) {
  if (!l.parallel) return normed(t, l.attention_norm, rows);
  Rows of_mlp;
  if (!normed_together(t, l.attention_norm, h, rows)) return false;
  return !l.mlp_norm.weight || normed_together(t, l.mlp_norm, h2, of_mlp);
}

// Groups [begin, end) of queries, keys and values.
template <class W> bool Decoder<W>::project(Thread& t, const NativeLinear& qkv, int begin, int end, Rows rows) {
  return some_groups(t, qkv, begin, end, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < GROUP; j += 16) {
        Lanes v = load(sums + r * GROUP + j);
        store(projected.row(first + r) + g * GROUP + j, qkv.bias ? v + load(qkv.bias + g * GROUP + j) : v);
      }
  });
}

template <class W> bool Decoder<W>::attend(const NativeLayer& l, const Kind& kind, Thread& t) {
  const HeadShape& shape = kind.shape;
  Pages<W> pages = {(W*)l.pages, shape};
  bool inlined = decodes_alone && !kind.splits;  // then one task reads what it has written, and no other does
  if (!inlined && !holdfast::tasks(t.run, num_units * shape.num_kv_heads, [&](int i) {
        prepare(pages, l, t.own, units[i / shape.num_kv_heads], i % shape.num_kv_heads);
      }))
    return false;
  return attend_together(l, kind, t, inlined);
}

// All tasks of a kind. `inlined`: each prepares its own token first.
template <class W> bool Decoder<W>::attend_together(const NativeLayer& l, const Kind& kind, Thread& t, bool inlined) {
  Pages<W> pages = {(W*)l.pages, kind.shape};
  if (!holdfast::tasks(t.run, kind.num_tasks, [&](int i) {
        const AttentionTask& task = kind.tasks[i];
        if (inlined) prepare(pages, l, t.own, {task.sequence, 0, 1}, task.kv_head);
        const int later = i + threads;  // this thread's next task, if all are as fast
        attend_task(pages, t.own, task, l, later < kind.num_tasks ? keys_of(kind, kind.tasks[later]) : SomeKeys{});
      }))
    return false;
  return !kind.splits || holdfast::tasks(t.run, kind.num_tasks, [&](int i) {
    if (kind.tasks[i].part == 0 && kind.tasks[i].parts > 1) merge_task(pages, t.own, kind.tasks, i, l);
  });
}

// Whole tokens of one sequence for one KV head, of the sequences [begin, end), which have `num_rows` tokens. Long contexts
// are parted where few tasks are there to share.
template <class W> void Decoder<W>::list_tasks(Kind& kind, int begin, int end, int num_rows) {
  const HeadShape& shape = kind.shape;
  int tokens = std::max(1, QUERY_ROWS / shape.group()), slot = 0;
  bool may_split = threads > 1 && num_rows <= 4 * threads;
  kind.tasks.clear(), kind.splits = false;
  for (int i = begin; i < end; i++) {
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
template <class W>
void Decoder<W>::prepare(const Pages<W>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  prepare_queries(pages.shape, l, own, unit, kv_head);
  prepare_keys(pages, l, own, unit, kv_head);
}
template <class W>
void Decoder<W>::prepare_queries(const HeadShape& s, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  const SequenceView& seq = sequences[unit.sequence];
  for (int t = unit.first; t < unit.end; t++) {
    int row = seq.first_row + t, position = seq.first_position + t;
    const float* from = projected.row(row);
    for (int i = 0; i < s.group(); i++) {
      int head = kv_head * s.group() + i;
      float* q = rotated(l, s, own, from, head, l.query_norm, head, position, s.num_heads);
      Input* out = queries.row(row) + head * s.padded();
      for (int j = 0; j < s.padded(); j += 16) store(out + j, load(q + j));
    }
  }
}
template <class W>
void Decoder<W>::prepare_keys(const Pages<W>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  const HeadShape& s = pages.shape;
  const SequenceView& seq = sequences[unit.sequence];
  clear_begun(pages, seq, kv_head, seq.first_position + unit.first, seq.first_position + unit.end);
  for (int t = unit.first; t < unit.end; t++) {
    int position = seq.first_position + t;
    const float* from = projected.row(seq.first_row + t);
    float* k =
        rotated(l, s, own, from + s.num_heads * s.head_dim, kv_head, l.key_norm, kv_head, position, s.num_kv_heads);
    write_key(pages, seq, kv_head, position, k);
    write_value(pages, seq, kv_head, position, from + (s.num_heads + s.num_kv_heads + kv_head) * s.head_dim);
  }
}

// One head [padded] after norm and rotation, zeros behind its dimensions.
template <class W>
float* Decoder<W>::rotated(const NativeLayer& l, const HeadShape& s, Local& own, const float* from, int head,
                           const NativeNorm& norm, int norm_head, int position, int num_heads) {
  float* v = own.head.row(0);
  const float* raw = from + (long)head * s.head_dim;
  memset(v, 0, (s.padded() + 16) * 4);
  if (norm.weight && l.head_norms == HF_NORM_ALL_HEADS)
    whole_norm_row(from, norm, num_heads * s.head_dim, head * s.head_dim, s.head_dim, v);
  else if (norm.weight) {
    NativeNorm one = norm;
    bool own_weights = l.head_norms == HF_NORM_OWN_WEIGHTS;
    if (own_weights) one.weight += norm_head * s.head_dim;
    if (own_weights && one.bias) one.bias += norm_head * s.head_dim;
    norm_row(raw, one, s.head_dim, v);
  } else memcpy(v, raw, s.head_dim * 4);
  if (l.rotary >= 0) rotate(m.rotaries[l.rotary], position, v);
  return v;
}

// What a task of a decode begins with: the keys of its part, but for its own token's, which are not written yet.
template <class W> SomeKeys Decoder<W>::keys_of(const Kind& kind, const AttentionTask& task) const {
  const SequenceView& seq = sequences[task.sequence];
  const int first = (first_key(kind.shape, seq.first_position) / SPLIT + task.part) * SPLIT;
  return {&seq, task.kv_head, begin_of(kind.shape, seq.first_position, first), seq.first_position};
}

template <class W>
void Decoder<W>::attend_task(const Pages<W>& pages, Local& own, const AttentionTask& task, const NativeLayer& l,
                             SomeKeys after) {
  const HeadShape& s = pages.shape;
  const SequenceView& seq = sequences[task.sequence];
  AttentionScratch<W>& a = own.attention;
  gather_queries<W>(a, s, seq, task.kv_head, task.first, task.count, queries.data, queries.stride, own.rows);
  const int* at = own.rows.positions;
  int last = at[task.count - 1] + 1, first_part = first_key(s, at[0]) / SPLIT;
  if (task.parts > 1) {
    int from = (first_part + task.part) * SPLIT, to = std::min(last, from + SPLIT);
    attend_keys(own.scratch.tiles, a, pages, seq, task.kv_head, at, task.count, begin_of(s, at[0], from), to, a.total,
                after);
    keep_part(s, task, a.total);
    return;
  }
  for (int from = first_part * SPLIT; from < last; from += SPLIT) {
    Softmax& sum = from == first_part * SPLIT ? a.total : a.part;
    attend_keys(own.scratch.tiles, a, pages, seq, task.kv_head, at, task.count, begin_of(s, at[0], from),
                std::min(last, from + SPLIT), sum,
                from + SPLIT < last ? SomeKeys{&seq, task.kv_head, from + SPLIT, last} : after);
    if (&sum == &a.part) merge_all(s, a.total, a.part, task.count);
  }
  write_out(s, own, task, a.total, l);
}
// The first tile of [from, ..) that any row sees.
template <class W> int Decoder<W>::begin_of(const HeadShape& s, int position, int from) {
  return std::max(from, first_key(s, position) / KEYS * KEYS);
}

template <class W> void Decoder<W>::merge_all(const HeadShape& s, Softmax& total, const Softmax& part, int count) {
  int dims = s.value_dims();
  for (int r = 0; r < count; r++)
    merge_row(total.largest + r, total.sums + r * 16, total.values + r * dims, part.largest[r], part.sums + r * 16,
              part.values + r * dims, dims);
}
template <class W> void Decoder<W>::keep_part(const HeadShape& s, const AttentionTask& task, const Softmax& sum) {
  Softmax& kept = *parts_of(task.slot);
  memcpy(kept.largest, sum.largest, task.count * 4), memcpy(kept.sums, sum.sums, task.count * 64);
  memcpy(kept.values, sum.values, (long)task.count * s.value_dims() * 4);
}
template <class W>
void Decoder<W>::merge_task(const Pages<W>& pages, Local& own, const std::vector<AttentionTask>& list, int first,
                            const NativeLayer& l) {
  const AttentionTask& task = list[first];
  Softmax& total = *parts_of(task.slot);
  for (int part = 1; part < task.parts; part++) merge_all(pages.shape, total, *parts_of(task.slot + part), task.count);
  gather_queries<W>(own.attention, pages.shape, sequences[task.sequence], task.kv_head, task.first, task.count,
                    queries.data, queries.stride, own.rows);
  write_out(pages.shape, own, task, total, l);
}
template <class W> Softmax* Decoder<W>::parts_of(int slot) { return parts[slot].get(); }

template <class W>
void Decoder<W>::write_out(const HeadShape& s, Local& own, const AttentionTask& task, Softmax& sum, const NativeLayer& l) {
  int dims = s.value_dims(), slice_length = l.output.slice_tiles * K_TILE;
  for (int r = 0; r < task.count; r++) {
    int head = own.rows.heads[r];
    float *largest = sum.largest + r, *sums = sum.sums + r * 16, *values = sum.values + (long)r * dims;
    if (l.sinks) add_sink(largest, sums, values, l.sinks[head], dims);
    Lanes inverse = all(1.0f / sum_of(load(sums)));
    Input rounded[MAX_HEAD];
    for (int j = 0; j < dims; j += 16) store(rounded + j, load(values + j) * inverse);
    Input* out = attention_out.row(own.rows.tokens[r]) + (long)(head / l.heads_per_slice) * slice_length +
                 head % l.heads_per_slice * s.head_dim;
    memcpy((void*)out, rounded, s.head_dim * sizeof(Input));
  }
}

}  // namespace
