// First half of a layer: norm, queries, keys and values, attention, its output. Methods of `Decoder`.
// How rows attend to keys is in `attention_tasks.h`.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::attention_half(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  if (t.run.tid == 0 && step.progress) __atomic_fetch_add(step.progress, 1, __ATOMIC_RELAXED);
  if (index > t.first_layer && !end_layer(t, index - 1)) return false;
  if (index == t.first_layer && m.inputs && !make_inputs(t)) return false;
  if (t.narrows && index == first_reader && !narrow(t)) return false;
  if (!t.num_rows) return true;
  if (!mixes(l)) return !t.narrows || index < m.num_layers - 1 || narrow(t);
  if (keeps_state(l)) return state_half(index, t);
  if (l.latent) return latent_half(index, t);
  if (t.narrows && index >= first_reader) return wanted_half(index, t, false);
  if (t.narrows && index == m.num_layers - 1) return narrowing_half(l, t);
  Rows rows;
  if (!norm_inputs(t, l, rows)) return false;
  if (!project(t, l.qkv, 0, l.qkv.groups, rows)) return false;
  if (!attend(l, attention.kinds[kind_of[index]], t)) return false;
  return row_parallel(t, l.output, {attention_out.data, attention_out.stride}, l,
                      place_of_sum(t, l.attention_out_norm));
}

// The rows that attention takes in, and those of an MLP beside it (`h` or `h2`).
template <class W> bool Decoder<W>::norm_inputs(Thread& t, const NativeLayer& l, Rows& rows) {
  if (!l.parallel) return normed(t, l.attention_norm, rows);
  Rows of_mlp;
  if (!normed_together(t, l.attention_norm, h, rows)) return false;
  return !l.mlp_norm.weight || normed_together(t, l.mlp_norm, h2, of_mlp);
}

// Groups [begin, end) of queries, keys and values.
template <class W>
bool Decoder<W>::project(Thread& t, const NativeLinear& qkv, int begin, int end, Rows rows, long at) {
  return some_groups(t, qkv, begin, end, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
    for (int r = 0; r < count; r++)
      for (int j = 0; j < GROUP; j += 16) {
        Lanes v = load(sums + r * GROUP + j);
        store(projected.row(first + r) + at + g * GROUP + j, qkv.bias ? v + load(qkv.bias + g * GROUP + j) : v);
      }
  });
}

// Calls `fn` with the pages of a layer, of what its keys and values are kept as.
template <class W>
template <class Fn>
bool Decoder<W>::with_pages(const NativeLayer& l, const HeadShape& shape, Fn&& fn) {
  if (m.kept_as == holdfast::KEPT_AS_INT8) return fn(Pages<Code>{(Code*)l.pages, shape});
  return fn(Pages<W>{(W*)l.pages, shape});
}

template <class W> bool Decoder<W>::attend(const NativeLayer& l, const AttentionKind& kind, Thread& t) {
  const HeadShape& shape = kind.shape;
  const bool inlined = attention.may_inline(kind);
  return with_pages(l, shape, [&](auto pages) {
    if (!inlined && !holdfast::tasks(t.run, attention.num_units * shape.num_kv_heads, [&](int i) {
          prepare(pages, l, t.own, attention.units[i / shape.num_kv_heads], i % shape.num_kv_heads);
        }))
      return false;
    return attention.attend(t.run, pages, kind, rows_of(l, shape), t.own.scratch.tiles, t.own.attention,
                            [&](const AttentionTask& task) {
                              if (inlined) prepare(pages, l, t.own, {task.sequence, 0, 1}, task.kv_head);
                            });
  });
}

template <class W> LayerRows<W> Decoder<W>::rows_of(const NativeLayer& l, const HeadShape& s) const {
  const long slice_length = (long)l.output.slice_tiles * K_TILE;
  const float* gates = l.has_gate ? projected.data + l.num_heads * l.head_dim : nullptr;
  return {queries.data, queries.stride,    s.padded(), s.padded(), attention_out.data, attention_out.stride,
          slice_length, l.heads_per_slice, l.sinks,    gates,      projected.stride};
}

// Where queries, and the gates behind them, end among the outputs of a layer's first product.
template <class W> int Decoder<W>::queries_end(const NativeLayer& l) {
  return (1 + l.has_gate) * l.num_heads * l.head_dim;
}

// Norms and rotates the queries and keys of a run of tokens for one KV head, and writes its keys and values.
template <class W>
template <class K>
void Decoder<W>::prepare(const Pages<K>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  prepare_queries(pages.shape, l, own, unit, kv_head);
  if (!l.reads_others) prepare_keys(pages, l, own, unit, kv_head);
}
template <class W>
void Decoder<W>::prepare_queries(const HeadShape& s, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  const SequenceView& seq = attention.sequences[unit.sequence];
  for (int t = unit.first; t < unit.end; t++) {
    int row = seq.first_row + t, position = seq.first_position + t;
    const float* from = projected.row(row);
    for (int i = 0; i < s.group(); i++) {
      int head = kv_head * s.group() + i;
      const float* q = rotated(l, own, from, head, l.query_norm, head, position, s.num_heads);
      Input* out = queries.row(row) + head * s.padded();
      for (int j = 0; j < s.padded(); j += 16)
        store(out + j, l.query_scales ? load(q + j) * all(l.query_scales[position]) : load(q + j));
    }
  }
}
template <class W>
template <class K>
void Decoder<W>::prepare_keys(const Pages<K>& pages, const NativeLayer& l, Local& own, Unit unit, int kv_head) {
  const SequenceView& seq = attention.sequences[unit.sequence];
  const float* of_keys = projected.data + queries_end(l);
  clear_begun(pages, seq, kv_head, seq.first_position + unit.first, seq.first_position + unit.end);
  for (int t = unit.first; t < unit.end; t++) {
    int position = seq.first_position + t;
    const float* keys = of_keys + (seq.first_row + t) * projected.stride;
    write_key(pages, seq, kv_head, position,
              rotated(l, own, keys, kv_head, l.key_norm, kv_head, position, l.num_kv_heads));
    const float* value = keys + (l.num_kv_heads + kv_head) * l.head_dim;
    if (l.value_norm.weight) norm_row(value, l.value_norm, l.head_dim, own.head.row(0)), value = own.head.row(0);
    if (l.value_scale != 1.0f) {
      for (int j = 0; j < l.head_dim; j += 16) store(own.head.row(0) + j, load(value + j) * all(l.value_scale));
      value = own.head.row(0);
    }
    write_value(pages, seq, kv_head, position, value);
  }
}

// One head [padded] after norm and rotation, zeros behind its dimensions. Without either it is where it lies.
template <class W>
const float* Decoder<W>::rotated(const NativeLayer& l, Local& own, const float* from, int head, const NativeNorm& norm,
                                 int norm_head, int position, int num_heads) {
  const int dim = l.head_dim;
  float* v = own.head.row(0);
  const float* raw = from + (long)head * dim;
  if (!norm.weight && l.rotary < 0 && dim % K_TILE == 0) return raw;
  memset(v, 0, ((dim + 31) / 32 * 32 + 16) * 4);
  if (norm.weight && l.norms_after_rotation) memcpy(v, raw, dim * 4);
  else if (norm.weight && l.head_norms == NATIVE_NORM_ALL_HEADS)
    whole_norm_row(from, norm, num_heads * dim, head * dim, dim, v);
  else if (norm.weight) {
    NativeNorm one = norm;
    bool own_weights = l.head_norms == NATIVE_NORM_OWN_WEIGHTS;
    if (own_weights) one.weight += norm_head * dim;
    if (own_weights && one.bias) one.bias += norm_head * dim;
    norm_row(raw, one, dim, v);
  } else memcpy(v, raw, dim * 4);
  if (l.rotary >= 0) rotate(m.rotaries[l.rotary], position, v);
  if (norm.weight && l.norms_after_rotation) norm_row(v, norm, dim, v);
  return v;
}

}  // namespace
