// The last layers of a step that wants fewer rows than it has. Methods of `Decoder`.
//
// A prompt's next token comes from its last row alone. The other rows leave keys and values in every layer, and nothing
// after the last layer's: there the residual stream is narrowed to the rows that are wanted, before queries are made; or
// before the first of the layers at the end that all read keys and values of others. Rows do not depend on each other's
// company, so the wanted ones get the bits they would have had.
#pragma once
#include "step.h"

namespace {

// The wanted rows as sequences of their own, behind those of the step: runs of tokens that follow one another.
template <class W> void Decoder<W>::list_wanted() {
  std::vector<SequenceView>& sequences = attention.sequences;
  std::vector<Unit>& units = attention.units;
  int begin = (int)sequences.size();
  for (int i = 0, s = 0; i < step.num_wanted; i++) {
    int row = (int)step.wanted[i];
    auto holds = [&] {
      return row >= sequences[s].first_row && row < sequences[s].first_row + sequences[s].num_tokens;
    };
    bool follows = i > 0 && row == step.wanted[i - 1] + 1 && holds();
    while (!holds()) s = (s + 1) % begin;
    if (follows) sequences.back().num_tokens++, units.back().end++;
    else {
      SequenceView of = sequences[s];
      units.push_back({(int)sequences.size(), 0, 1});
      sequences.push_back({i, of.first_position + row - of.first_row, 1, of.blocks, of.window_blocks, of.end});
    }
  }
  num_wanted_units = (int)units.size() - attention.num_units;
  for (int index = std::min(first_reader, m.num_layers - 1); index < m.num_layers; index++)
    attention.list_tasks(wanted_kinds[kind_of[index]], begin, (int)sequences.size(), step.num_wanted);
}

template <class W> bool Decoder<W>::narrowing_half(const NativeLayer& l, Thread& t) {
  const int kv_heads = l.num_kv_heads;
  const HeadShape& shape = attention.kinds[kind_of.back()].shape;
  Rows rows;
  if (!normed(t, l.attention_norm, rows)) return false;
  if (!project(t, l.qkv, queries_end(l) / GROUP, l.qkv.groups, rows)) return false;
  if (!with_pages(l, shape, [&](auto pages) {
        return holdfast::tasks(t.run, attention.num_units * kv_heads, [&](int i) {
          prepare_keys(pages, l, t.own, attention.units[i / kv_heads], i % kv_heads);
        });
      }))
    return false;
  if (!narrow(t)) return false;
  return !t.num_rows || wanted_half(m.num_layers - 1, t, l.attention_norm.stays);
}

// The half of a layer that the wanted rows alone go through, with keys and values that are written. `is_normed`: the
// residual stream is already what attention takes in.
template <class W> bool Decoder<W>::wanted_half(int index, Thread& t, bool is_normed) {
  const NativeLayer& l = m.layers[index];
  const int kv_heads = l.num_kv_heads;
  const HeadShape& shape = attention.kinds[kind_of[index]].shape;
  Rows rows;
  if (!(is_normed ? normed(t, NativeNorm{}, rows) : norm_inputs(t, l, rows))) return false;
  if (!project(t, l.qkv, 0, (queries_end(l) + GROUP - 1) / GROUP, rows)) return false;
  if (!holdfast::tasks(t.run, num_wanted_units * kv_heads, [&](int i) {
        prepare_queries(shape, l, t.own, attention.units[attention.num_units + i / kv_heads], i % kv_heads);
      }))
    return false;
  if (!with_pages(l, shape, [&](auto pages) {
        return attention.attend(t.run, pages, wanted_kinds[kind_of[index]], rows_of(l, shape), t.own.scratch.tiles,
                                t.own.attention, [](const AttentionTask&) {});
      }))
    return false;
  return row_parallel(t, l.output, {attention_out.data, attention_out.stride}, l,
                      place_of_sum(t, l.attention_out_norm));
}

// From here on the residual stream has the wanted rows alone.
template <class W> bool Decoder<W>::narrow(Thread& t) {
  if (!row_tasks(t.run, t.num_wanted,
                 [&](int r) { memcpy(wanted_x.row(r), x.row(step.wanted[r]), x.stride * sizeof(float)); }))
    return false;
  t.residual = wanted_x.data, t.num_rows = t.num_wanted;
  return true;
}

}  // namespace
