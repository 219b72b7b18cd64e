// Adapters of a step's rows (`adapters.h`): which linears they add to, and the phase before such a product. Methods of
// `Decoder`.
#pragma once
#include "step.h"

namespace {

template <class W> void Decoder<W>::list_sites() {
  adapted_sites.assign(m.num_sites + 1, 0), slices_of_site.assign(m.num_sites + 1, 1),
      wanted_adapters.resize(m.max_rows);
  row_order.resize(m.max_rows), wanted_order.resize(m.max_rows);
  auto note = [&](const NativeLinear& linear) { slices_of_site[linear.site] = linear.slices; };
  for (int i = 0; i < m.num_layers; i++) {
    const NativeExperts* experts = m.layers[i].experts;
    note(m.layers[i].output), note(m.layers[i].mlp.down);
    if (experts) note(experts->experts[0].down);
    if (experts && experts->shared) note(experts->shared->down);
  }
}

// Which linears adapters of this step add to, and room for the inner numbers of its rows.
template <class W> void Decoder<W>::begin_adapters() {
  if (!step.adapter_of && !has_adapted) return;
  has_adapted = step.adapter_of;
  std::fill(adapted_sites.begin(), adapted_sites.end(), 0);
  long most = 0, most_of_experts = 0;
  if (has_adapted) adapted.resize((size_t)m.num_sites * step.num_adapters);
  for (int i = 0; has_adapted && i < step.num_adapters; i++)
    for (int site = 1; site <= m.num_sites; site++) {
      const NativeAdapted& here = step.adapters[i].linears[site - 1];
      adapted[(site - 1) * step.num_adapters + i] = here;
      if (here.ranks) adapted_sites[site] = 1;
      long& of = here.experts ? most_of_experts : most;
      of = std::max(of, (long)here.ranks * slices_of_site[site]);
    }
  begin_adapted_experts(most_of_experts), begin_adapted_heads(most_of_experts);
  if (!most && !most_of_experts) return;
  if (most > inner_of_rows.stride) inner_of_rows = Buffer<float>(m.max_rows, most);
  for (int i = 0; i < step.num_wanted; i++) wanted_adapters[i] = step.adapter_of[step.wanted[i]];
  order_by_adapter(step.adapter_of, step.num_rows, row_order.data());
  order_by_adapter(wanted_adapters.data(), step.num_wanted, wanted_order.data());
}

// The inner numbers of all rows with adapters.
template <class W>
bool Decoder<W>::prepare_added(Thread& t, const NativeLinear& linear, Rows in, int num_rows, AddedRows& added) {
  const bool is_narrow = t.residual == wanted_x.data || linear.site == m.head.site;
  t.own.added_runs.first = -1;
  added = {is_narrow ? wanted_adapters.data() : step.adapter_of,
           is_narrow ? wanted_order.data() : row_order.data(),
           adapted.data() + (long)(linear.site - 1) * step.num_adapters,
           inner_of_rows.data,
           inner_of_rows.stride,
           &t.own.added_runs,
           &turns};
  const CutRows<W> rows = {in.data, in.stride, linear.slices, (long)linear.slice_tiles * K_TILE};
  const int share = num_rows / (4 * threads), each = share < 4 ? std::max(1, share) : share / 8 * 4 + 4;
  const bool done = holdfast::tasks(t.run, (num_rows + each - 1) / each, [&](int task) {
    if (task == 0) turns.clear();
    for (int row = task * each, end = std::min(num_rows, row + each); row < end; row += ROWS_TOGETHER)
      inner_of<W>(added, rows, row, std::min(end, row + ROWS_TOGETHER));
  });
  t.own.added_runs.first = -1;
  return done;
}

// Adds to the embedding of row r, whose token has a place on this rank: the column of A at the place is scale A x of an x
// that is one there, and zero elsewhere.
template <class W> void Decoder<W>::add_to_embedding(int r, int place, float* out) const {
  if (!adapted_sites[m.embedding_site] || step.adapter_of[r] < 0) return;
  const NativeAdapted& adapted = step.adapters[step.adapter_of[r]].linears[m.embedding_site - 1];
  if (!adapted.ranks) return;
  const long inputs = (m.vocab_rows + K_TILE - 1) / K_TILE * K_TILE;
  alignas(64) float inner[MOST_RANKS], sums[16];
  for (int j = 0; j < adapted.ranks; j += 16)
    store(inner + j, load((const W*)adapted.a + (j * inputs + place * 16L)) * load(adapted.scales + j));
  for (int first = 0; first < m.hidden; first += 16) {
    const NativeSpan& span = adapted.spans[first / 16];
    Lanes sum = zero();
    for (int j = span.first; j < span.end; j++)
      sum = fma(load((const W*)adapted.b + span.place + (j - span.first) * 16), all(inner[j]), sum);
    store(sums, sum);
    for (int i = 0; i < 16 && first + i < m.hidden; i++) out[first + i] += sums[i] * m.embedding_scale;
  }
}

}  // namespace
