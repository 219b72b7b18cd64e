// First half of a layer with multi-head latent attention, in its absorbed form. Methods of `Decoder`.
//
//   c | r = x W, c normed, r turned: the one key of all heads, and c the value;  q | p of each head, p turned;
//   score = (q A) c + p r, for A of the head;  out = (what the scores weigh of c) V, for V of the head
//
// (q A) c is q times the key that the head would make of c, and the same for values: so pages keep c | r alone, and every
// row of a step takes this form, whatever piece of a prompt it comes in. Sums of rows never meet. Rounded to the model's
// dtype are q, q A, p, c, r, and what was weighed of c.
#pragma once
#include "step.h"

namespace {

// `count` numbers, rounded; `from` is readable up to a multiple of 16.
template <class Input> NATIVE_INLINE void put_rounded(Input* to, const float* from, int count) {
  int i = 0;
  for (; i + 16 <= count; i += 16) store(to + i, load(from + i));
  if (i == count) return;
  alignas(64) Input rest[16];
  store(rest, load(from + i));
  memcpy((void*)(to + i), rest, (count - i) * sizeof(Input));
}

template <class W> bool Decoder<W>::latent_half(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  const bool narrowing = t.narrows && index == m.num_layers - 1;
  const AttentionKind& kind = narrowing ? wanted_kinds[kind_of[index]] : attention.kinds[kind_of[index]];
  const int queries_end = l.latent->query_outputs;
  Rows rows;
  if (!normed(t, l.attention_norm, rows)) return false;
  if (!project(t, l.qkv, narrowing ? queries_end / GROUP : 0, l.qkv.groups, rows)) return false;
  if (narrowing) {
    if (!holdfast::tasks(t.run, attention.num_units, [&](int i) { keep_latents(l, t.own, attention.units[i]); }))
      return false;
    if (!narrow(t)) return false;
    if (!t.num_rows) return true;
    if (!normed(t, l.attention_norm, rows)) return false;
    if (!project(t, l.qkv, 0, (queries_end + GROUP - 1) / GROUP, rows)) return false;
  }
  if (l.latent->queries.groups && !project_queries(t, *l.latent)) return false;
  if (!absorb_queries(t, l, narrowing ? 0 : attention.num_units)) return false;
  const HeadShape& s = kind.shape;
  const long filled = (long)l.latent->expand.slice_tiles * K_TILE;
  const LayerRows<W> of_layer = {queries.data, queries.stride, s.padded(), s.padded(),
                                 weighed.data, weighed.stride, filled,     1};
  if (!attention.attend(t.run, Pages<W>{(W*)l.pages, s}, kind, of_layer, t.own.scratch.tiles, t.own.attention,
                        [](const AttentionTask&) {}))
    return false;
  if (!expand_values(t, l)) return false;
  return row_parallel(t, l.output, {attention_out.data, attention_out.stride}, l,
                      place_of_sum(t, l.attention_out_norm));
}

// The queries of all heads from the normed first outputs of `qkv`.
template <class W> bool Decoder<W>::project_queries(Thread& t, const NativeLatent& latent) {
  auto norm_into = [&](Buffer<Input>& out, int r) {
    norm_row(projected.row(r), latent.query_norm, latent.query_outputs, out.row(r));
  };
  const bool for_itself = t.num_rows <= OWN_NORM_ROWS;  // as in `normed`
  Buffer<Input>& of_rows = for_itself ? t.own.query_rows : query_rows;
  if (for_itself)
    for (int r = 0; r < t.num_rows; r++) norm_into(of_rows, r);
  else if (!row_tasks(t.run, t.num_rows, [&](int r) { norm_into(of_rows, r); })) return false;
  return linear(t, latent.queries, {of_rows.data, of_rows.stride}, t.num_rows,
                [&](int g, int first, int count, const float* sums) {
                  for (int r = 0; r < count; r++)
                    memcpy(head_queries.row(first + r) + g * GROUP, sums + r * GROUP, GROUP * sizeof(float));
                });
}

// Calls `fn(head, first row, rows, first group, end)` so that all groups of all heads and rows come up once, in a phase
// with `others` more tasks.
template <class W>
template <class Fn, class Other>
bool Decoder<W>::head_tasks(Thread& t, int heads, int groups, int others, Fn&& fn, Other&& other) {
  const int chunks = (t.num_rows + HEAD_ROWS - 1) / HEAD_ROWS;
  const int parts = std::max(1, std::min(groups, 2 * threads / std::max(1, heads * chunks)));
  const int each = (groups + parts - 1) / parts, num_tasks = heads * chunks * parts;
  return holdfast::tasks(t.run, num_tasks + others, [&](int task) {
    if (task >= num_tasks) return other(task - num_tasks);
    const int part = task % parts, chunk = task / parts % chunks, first = chunk * HEAD_ROWS;
    fn(task / parts / chunks, first, std::min((int)HEAD_ROWS, t.num_rows - first), part * each,
       std::min(groups, (part + 1) * each));
  });
}

// Queries as attention takes them; and, where there are units, their latents into pages.
template <class W> bool Decoder<W>::absorb_queries(Thread& t, const NativeLayer& l, int num_units) {
  const NativeLatent& latent = *l.latent;
  const int groups = latent.absorb.groups / l.num_heads;
  return head_tasks(
      t, l.num_heads, groups, num_units,
      [&](int head, int first, int count, int from, int end) { absorb_head(t, l, head, first, count, from, end); },
      [&](int unit) { keep_latents(l, t.own, attention.units[unit]); });
}

// Rows [first, first + count) of a head, groups [begin, end) of its latent dimensions.
template <class W>
void Decoder<W>::absorb_head(Thread& t, const NativeLayer& l, int head, int first, int count, int begin, int end) {
  const NativeLatent& latent = *l.latent;
  const Buffer<float>& from = latent.queries.groups ? head_queries : projected;
  const int padded = (l.head_dim + 31) / 32 * 32, groups = latent.absorb.groups / l.num_heads;
  const Packed<W> w = packed<W>(latent.absorb);
  Local& own = t.own;
  for (int r = 0; r < count; r++) {
    const float* query = from.row(first + r) + (long)head * (latent.plain_dim + latent.rope_dim);
    Input* plain = own.head_rows.row(r);
    put_rounded(plain, query, latent.plain_dim);
    memset((void*)(plain + latent.plain_dim), 0, (w.row_length() - latent.plain_dim) * sizeof(Input));
    if (begin) continue;
    float* turned = own.head.row(1);
    memcpy(turned, query + latent.plain_dim, latent.rope_dim * sizeof(float));
    if (l.rotary >= 0) rotate(m.rotaries[l.rotary], positions[t.residual == x.data ? 0 : 1][first + r], turned);
    Input* to = queries.row(first + r) + (long)head * padded + latent.latent_dim;
    put_rounded(to, turned, latent.rope_dim);
    memset((void*)(to + latent.rope_dim), 0, (padded - l.head_dim) * sizeof(Input));
  }
  const InputRows<W> input = input_rows<W>(own.scratch, w, own.head_rows.data, own.head_rows.stride, count);
  const AddedRows added = added_to_head(latent.absorb, head, own.head_rows.data, own.head_rows.stride, first, count, t);
  for (int g = begin; g < end; g++) {
    product(own.scratch, w, head * groups + g, input, own.scratch.sums, g + 1 < end ? head * groups + g + 1 : -1,
            [&](int slice, float* sums) {
              if (added.runs) add_adapted<W>(added, 0, g, slice, count, sums);
            });
    for (int r = 0; r < count; r++)
      put_rounded(queries.row(first + r) + (long)head * padded + g * GROUP, own.scratch.sums + r * GROUP,
                  std::min((int)GROUP, latent.latent_dim - g * GROUP));
  }
}

// Norms and turns what a run of tokens leaves, and writes it to their pages.
template <class W> void Decoder<W>::keep_latents(const NativeLayer& l, Local& own, Unit unit) {
  const NativeLatent& latent = *l.latent;
  const SequenceView& seq = attention.sequences[unit.sequence];
  const Pages<W> pages = {(W*)l.pages, attention.kinds[kind_of[&l - m.layers]].shape};
  float *key = own.head.row(0), *turned = own.head.row(1);
  clear_begun(pages, seq, 0, seq.first_position + unit.first, seq.first_position + unit.end);
  for (int t = unit.first; t < unit.end; t++) {
    const int position = seq.first_position + t;
    const float* from = projected.row(seq.first_row + t) + latent.query_outputs;
    norm_row(from, latent.latent_norm, latent.latent_dim, key);
    memcpy(turned, from + latent.latent_dim, latent.rope_dim * sizeof(float));
    if (l.rotary >= 0) rotate(m.rotaries[l.rotary], position, turned);
    memcpy(key + latent.latent_dim, turned, latent.rope_dim * sizeof(float));
    memset(key + l.head_dim, 0, (pages.shape.padded() - l.head_dim) * sizeof(float));
    write_key(pages, seq, 0, position, key);
  }
}

// What heads have weighed of latents becomes the inputs of the layer's output.
template <class W> bool Decoder<W>::expand_values(Thread& t, const NativeLayer& l) {
  const NativeLatent& latent = *l.latent;
  const Packed<W> w = packed<W>(latent.expand);
  const int groups = latent.expand.groups / l.num_heads;
  const long slice_length = (long)l.output.slice_tiles * K_TILE;
  return head_tasks(
      t, l.num_heads, groups, 0,
      [&](int head, int first, int count, int begin, int end) {
        const Input* rows = weighed.row(first) + head * w.row_length();
        const InputRows<W> input = input_rows<W>(t.own.scratch, w, rows, weighed.stride, count);
        const long place = head / l.heads_per_slice * slice_length + head % l.heads_per_slice * latent.value_dim;
        const AddedRows added = added_to_head(latent.expand, head, rows, weighed.stride, first, count, t);
        for (int g = begin; g < end; g++) {
          float* sums = t.own.scratch.sums;
          product(t.own.scratch, w, head * groups + g, input, sums, g + 1 < end ? head * groups + g + 1 : -1,
                  [&](int slice, float* of_slice) {
                    if (added.runs) add_adapted<W>(added, 0, g, slice, count, of_slice);
                  });
          for (int r = 0; r < count; r++)
            put_rounded(attention_out.row(first + r) + place + g * GROUP, sums + r * GROUP,
                        std::min((int)GROUP, latent.value_dim - g * GROUP));
        }
      },
      [](int) {});
}

// The positions of a step's rows, and of those that are wanted.
template <class W> void Decoder<W>::list_positions(int num_sequences) {
  for (std::vector<int>& some : positions) some.clear();
  for (int i = 0; i < (int)attention.sequences.size(); i++)
    for (int t = 0; t < attention.sequences[i].num_tokens; t++)
      positions[i < num_sequences ? 0 : 1].push_back(attention.sequences[i].first_position + t);
}

}  // namespace
