// Second half of a layer: norm and MLP, or a mixture of experts. Methods of `Decoder`.
//
// Of a mixture each row's experts are chosen, rows are gathered by expert, all experts' first products are one phase, and
// in the second a task adds all experts to its 64 columns, in ascending order.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::mlp_half(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  if (!t.num_rows) return true;  // the last layer, where no row is wanted
  if (!finish(t, l, true)) return false;
  if (!feeds(l)) return true;
  Rows rows = l.mlp_norm.weight ? Rows{h2.data, h2.stride} : Rows{h.data, h.stride};
  if (!l.parallel && !normed(t, l.mlp_norm, rows)) return false;
  if (l.experts && l.experts->latent) return latent_part(l, rows, t);
  if (l.experts && !l.beside) return experts_part(l, rows, rows, place_of_sum(t, l.mlp_out_norm), t);
  RowUnit* units = room_for_inner(l.mlp);
  if (!up_part(t, l.mlp, rows, inner_rows, units)) return false;
  float* place = place_of_sum(t, l.mlp_out_norm);
  if (!row_parallel(t, l.mlp.down, {inner_rows.data, inner_rows.stride, units}, l, place)) return false;
  return !l.beside || beside_part(l, place + part_stride, t);
}

// A mixture of experts beside an MLP: what it leaves lies beside what the MLP has left.
template <class W> bool Decoder<W>::beside_part(const NativeLayer& l, float* place, Thread& t) {
  Rows routed, rows;
  if (!normed_together(t, l.beside->router_norm, h, routed)) return false;
  if (!normed_together(t, l.beside->norm, h2, rows)) return false;
  return experts_part(l, routed, rows, place, t);
}

// The inner rows of an MLP: in units, where there is room for them, or else as they are.
template <class W>
bool Decoder<W>::up_part(Thread& t, const NativeMlp& mlp, Rows rows, Buffer<Input>& out, RowUnit* units) {
  return linear(t, mlp.up, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
    put_inner(mlp, g, first, count, sums, out, units);
  });
}
template <class W>
void Decoder<W>::put_inner(const NativeMlp& mlp, int g, int first, int count, const float* sums, Buffer<Input>& out,
                           RowUnit* units) {
  const long each = inner_of_group(mlp), of_row = units_in(mlp.down);
  for (int r = first; r < first + count; r++, sums += GROUP)
    if (units) activate(mlp, g, sums, units + r * of_row + g * each / UNIT);
    else activate(mlp, g, sums, out.row(r) + g * each);
}
// For inner rows in units, where nothing but a product in units takes them; else null.
template <class W> RowUnit* Decoder<W>::room_for_inner(const NativeMlp& mlp) const {
  const bool is_whole = mlp.up.groups * inner_of_group(mlp) >= inner_length(mlp);
  return mlp.down.units.bits && is_whole && !adapted_sites[mlp.down.site] ? inner_units.data : nullptr;
}
template <class W> void Decoder<W>::activate(const NativeMlp& mlp, int g, const float* sums, RowUnit* to) {
  alignas(64) Input numbers[GROUP];
  activate(mlp, g, sums, numbers);
  const int length = std::min(inner_of_group(mlp), inner_length(mlp) - g * inner_of_group(mlp));
  quantize_row(numbers, length / UNIT, to);
}
template <class W> void Decoder<W>::activate(const NativeMlp& mlp, int g, const float* sums, Input* to) {
  const float* bias = mlp.up.bias ? mlp.up.bias + g * GROUP : nullptr;
  Lanes v[4];
  for (int j = 0; j < 4; j++) v[j] = load(sums + 16 * j);
  if (bias)
    for (int j = 0; j < 4; j++) v[j] = v[j] + load(bias + 16 * j);
  if (mlp.has_gate)
    for (int j = 0; j < 2; j++)
      store(to + 16 * j, gated(mlp.activation, v[j] * all(mlp.gate_scale), v[j + 2]) * all(mlp.inner_scale));
  else
    for (int j = 0; j < 4; j++)
      if (g * GROUP + 16 * j < inner_length(mlp)) store(to + 16 * j, activated(mlp.activation, v[j]));
}

template <class W>
bool Decoder<W>::experts_part(const NativeLayer& l, Rows routed, Rows rows, float* place, Thread& t) {
  const NativeExperts& e = *l.experts;
  if (!choose_part(e, routed, t) || !up_of_experts(e, rows, t)) return false;
  if (e.shared && !shared_part(t, e, rows)) return false;
  AddedRows added;  // to the expert that all rows go through
  const Rows inner = {shared_rows.data, shared_rows.stride};
  if (e.shared && adapted_sites[e.shared->down.site] && !prepare_added(t, e.shared->down, inner, t.num_rows, added))
    return false;
  if (!prepare_experts(t, e, e.experts[0].down, inner_rows)) return false;
  return holdfast::tasks(t.run, e.experts[0].down.groups, [&](int g) { expert_columns(l, e, g, place, t, added); });
}

// The experts of each row, and the rows of each expert.
template <class W> bool Decoder<W>::choose_part(const NativeExperts& e, Rows routed, Thread& t) {
  if (!linear(t, e.router, routed, t.num_rows, [&](int g, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++)
          for (int j = 0; j < GROUP; j += 16) {
            Lanes v = load(sums + r * GROUP + j);
            if (g * GROUP + j < router_logits.stride)
              store(router_logits.row(first + r) + g * GROUP + j,
                    e.router.bias ? v + load(e.router.bias + g * GROUP + j) : v);
          }
      }))
    return false;
  if (!row_tasks(t.run, t.num_rows, [&](int r) { choose_experts(e, r); })) return false;
  return holdfast::tasks(t.run, 1, [&](int) { sort_by_expert(e, t.num_rows), sort_by_adapter(e, t); });
}

// The first products of all experts.
template <class W> bool Decoder<W>::up_of_experts(const NativeExperts& e, Rows rows, Thread& t) {
  const long length = std::min(rows.stride, expert_input.stride) - 32;
  if (!row_tasks(t.run, t.num_rows * e.top_k, [&](int i) {
        memcpy((void*)expert_input.row(i), rows.data + order[i] / e.top_k * rows.stride, length * sizeof(Input));
      }))
    return false;
  if (!prepare_experts(t, e, e.experts[0].up, expert_input)) return false;
  const int runs = e.experts[0].up.groups;
  const long call = ++t.own.calls;
  return holdfast::tasks(t.run, e.num_experts * runs,
                         [&](int task) { expert_up(e.experts[task / runs], task / runs, task % runs, t.own, call); });
}

// Of experts with rows of another size: their sum, and what all rows go through, are inputs of one product.
template <class W> bool Decoder<W>::latent_part(const NativeLayer& l, Rows rows, Thread& t) {
  const NativeExperts& e = *l.experts;
  float* place = place_of_sum(t, l.mlp_out_norm);
  if (!choose_part(e, rows, t)) return false;
  if (!linear(t, *e.latent, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++)
          for (int j = 0; j < GROUP && g * GROUP + j < latent_rows.stride; j += 16) {
            Lanes v = load(sums + r * GROUP + j);
            store(latent_rows.row(first + r) + g * GROUP + j,
                  e.latent->bias ? v + load(e.latent->bias + g * GROUP + j) : v);
          }
      }))
    return false;
  if (!up_of_experts(e, {latent_rows.data, latent_rows.stride}, t) || !up_part(t, l.mlp, rows, shared_rows) ||
      !prepare_experts(t, e, e.experts[0].down, inner_rows))
    return false;
  const NativeLinear &from = e.experts[0].down, &to = l.mlp.down;
  if (!holdfast::tasks(t.run, from.groups, [&](int g) {
        const float* sums = sums_of_experts(e, g, t);
        for (int row = 0; row < t.num_rows; row++, sums += GROUP)
          for (int j = 0, c = g * GROUP; j < GROUP && c < from.outputs; j += 16, c += 16)
            put_in_slices(shared_rows.row(row), from.outputs / to.slices, to.slice_tiles * K_TILE, c,
                          std::min(16, from.outputs - c), load(sums + j));
      }))
    return false;
  return row_parallel(t, l.mlp.down, {shared_rows.data, shared_rows.stride}, l, place);
}

// `order` lists (row, choice) by expert, rows ascending; `first_of` says where each expert's begin.
template <class W> void Decoder<W>::sort_by_expert(const NativeExperts& e, int num_rows) {
  int assigned = num_rows * e.top_k;
  std::fill(first_of.begin(), first_of.begin() + e.num_experts + 1, 0);
  for (int i = 0; i < assigned; i++) first_of[choices[i] + 1]++;
  for (int i = 0; i < e.num_experts; i++) first_of[i + 1] += first_of[i];
  std::vector<int> next(first_of.begin(), first_of.begin() + e.num_experts);
  for (int i = 0; i < assigned; i++) order[next[choices[i]]++] = i;
}

template <class W> void Decoder<W>::expert_up(const NativeMlp& expert, int index, int group, Local& own, long call) {
  Packed<W> w = packed<W>(expert.up);
  const AddedRows added = added_to_expert(expert.up, index, own);
  for (int first = first_of[index]; first < first_of[index + 1]; first += MAX_ROWS) {
    int count = std::min((int)MAX_ROWS, first_of[index + 1] - first);
    InputRows<W> input = input_rows<W>(own.scratch, w, expert_input.row(first), expert_input.stride, count, call);
    product(own.scratch, w, group, input, own.scratch.sums, -1, [&](int slice, float* sums) {
      if (added.runs) add_adapted<W>(added, first, group, slice, count, sums);
    });
    put_inner(expert, group, first, count, own.scratch.sums, inner_rows, room_for_inner(expert));
  }
}

// The first products of the expert that all rows go through, and its weights.
template <class W> bool Decoder<W>::shared_part(Thread& t, const NativeExperts& e, Rows rows) {
  if (e.shared_gate && !linear(t, *e.shared_gate, rows, t.num_rows, [&](int, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++) shared_weights[first + r] = one_sigmoid(sums[r * GROUP]);
      }))
    return false;
  return up_part(t, *e.shared, rows, shared_rows);
}

template <class W>
void Decoder<W>::add_shared(const NativeExperts& e, int g, float* sums, Local& own, int num_rows,
                            const AddedRows& added) {
  Packed<W> w = packed<W>(e.shared->down);
  for (int first = 0; first < num_rows; first += MAX_ROWS) {
    int count = std::min((int)MAX_ROWS, num_rows - first);
    InputRows<W> input = input_rows<W>(own.scratch, w, shared_rows.row(first), shared_rows.stride, count);
    for (int slice = 0; slice < w.slices; slice++) {
      slice_product(own.scratch, w, g, input, slice, own.scratch.sums);
      if (added.runs) add_adapted<W>(added, first, g, slice, count, own.scratch.sums);
      for (int r = 0; r < count; r++) {
        float* to = sums + ((long)(first + r) * w.slices + slice) * GROUP;
        for (int j = 0; j < GROUP; j += 16)
          store(to + j, fma(load(own.scratch.sums + r * GROUP + j), all(shared_weights[first + r]), load(to + j)));
      }
    }
  }
}

// Of a group of columns, the sums of each row's experts, in ascending order, for each slice of their inner numbers.
template <class W> float* Decoder<W>::sums_of_experts(const NativeExperts& e, int g, Thread& t) {
  Local& own = t.own;
  int slices = e.experts[0].down.slices;
  float* sums = own.expert_sums(t.num_rows * slices * GROUP);
  for (int index = 0; index < e.num_experts; index++) {
    Packed<W> w = packed<W>(e.experts[index].down);
    const float* bias = e.experts[index].down.bias;
    const RowUnit* units = room_for_inner(e.experts[index]);
    const AddedRows added = added_to_expert(e.experts[index].down, index, own);
    for (int first = first_of[index]; first < first_of[index + 1]; first += MAX_ROWS) {
      int count = std::min((int)MAX_ROWS, first_of[index + 1] - first);
      const InputRows<W> input = units ? rows_in_units<W>(units + (long)first * w.k_tiles(), count)
                                       : input_rows<W>(own.scratch, w, inner_rows.row(first), inner_rows.stride, count);
      for (int slice = 0; slice < slices; slice++) {
        slice_product(own.scratch, w, g, input, slice, own.scratch.sums);
        if (added.runs) add_adapted<W>(added, first, g, slice, count, own.scratch.sums);
        for (int r = 0; r < count; r++) {
          int choice = order[first + r];
          float* to = sums + ((long)(choice / e.top_k) * slices + slice) * GROUP;
          for (int j = 0; j < GROUP; j += 16) {
            Lanes v = load(own.scratch.sums + r * GROUP + j);
            if (bias && slice == 0) v = v + load(bias + g * GROUP + j);
            store(to + j, fma(v, all(weights[choice]), load(to + j)));
          }
        }
      }
    }
  }
  return sums;
}

// The shared expert is added last; then the slices are, as a binary tree.
template <class W>
void Decoder<W>::expert_columns(const NativeLayer& l, const NativeExperts& e, int g, float* place, Thread& t,
                                const AddedRows& added) {
  const int slices = e.experts[0].down.slices;
  float* sums = sums_of_experts(e, g, t);
  if (e.shared) add_shared(e, g, sums, t.own, t.num_rows, added);
  for (int row = 0; row < t.num_rows; row++) {
    float* slice = sums + (long)row * slices * GROUP;
    for (int apart = 1; apart < slices; apart *= 2)
      for (int s = 0; s + apart < slices; s += 2 * apart) add_to(slice + s * GROUP, slice + (s + apart) * GROUP, GROUP);
    for (int j = 0; j < GROUP && g * GROUP + j < part_stride; j += 16)
      put(t, place, l, e.experts[0].down, row, g * GROUP + j, load(slice + j), false);
  }
}

}  // namespace
