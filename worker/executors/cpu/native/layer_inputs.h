// Inputs of layers' own, beside the residual stream (Gemma 4). Methods of `Decoder`.
//
//   p = (norm(context_scale context(e)) + table_scale table[token]) scale, for all layers, e what enters the first one;
//   at a layer's end: x += norm(projection(activation(gate(x)) p)), p of the layer
//
// All ranks compute all of it: a layer has no sum over ranks more.
#pragma once
#include "step.h"

namespace {

template <class W> bool Decoder<W>::make_inputs(Thread& t) {
  const NativeTokenInputs& inputs = *m.inputs;
  const long filled = (inputs.dim + GROUP - 1) / GROUP * GROUP;
  Rows rows;
  if (!normed_together(t, NativeNorm{}, h, rows)) return false;
  if (!linear(t, inputs.context, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++)
          for (int j = 0; j < GROUP; j += 16)
            store(own_inputs.row(first + r) + g * GROUP + j, load(sums + r * GROUP + j) * all(inputs.context_scale));
      }))
    return false;
  const Packed<W> coded = packed<W>(inputs.coded);
  return row_tasks(t.run, t.num_rows, [&](int r) {
    std::vector<W> numbers(inputs.table ? 0 : coded.row_length());
    const W* looked_up = inputs.table ? (const W*)inputs.table + step.token_ids[r] * (long)inputs.dim * m.num_layers
                                      : row_of_units(coded, (int)step.token_ids[r], numbers.data());
    for (int index = 0; index < m.num_layers; index++, looked_up += inputs.dim) {
      float* p = own_inputs.row(r) + index * filled;
      norm_row(p, inputs.norm, inputs.dim, p);
      for (int j = 0; j < inputs.dim; j += 16) {
        const int count = std::min(16, inputs.dim - j);
        alignas(64) W some[16] = {};
        memcpy((void*)some, looked_up + j, count * sizeof(W));
        store(p + j,
              keep_range(fma(load(some), all(inputs.table_scale), load(p + j)) * all(inputs.scale), 0, count, zero()));
      }
    }
  });
}

// Adds what a layer makes of its own input. Nothing is left for other ranks to add.
template <class W> bool Decoder<W>::add_input(int index, Thread& t) {
  const NativeLayer& l = m.layers[index];
  const NativeLayerInput& input = *l.input;
  const long filled = (m.inputs->dim + GROUP - 1) / GROUP * GROUP;
  const bool is_narrowed = t.residual != x.data;
  Rows rows;
  if (!normed(t, NativeNorm{}, rows)) return false;
  if (!linear(t, input.gate, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
        for (int r = 0; r < count; r++) {
          const long row = is_narrowed ? step.wanted[first + r] : first + r;
          const float* p = own_inputs.row(row) + index * filled + g * GROUP;
          for (int j = 0; j < GROUP && g * GROUP + j < gated_inputs.stride; j += 16)
            store(gated_inputs.row(first + r) + g * GROUP + j,
                  activated(input.activation, load(sums + r * GROUP + j)) * load(p + j));
        }
      }))
    return false;
  if (!linear(t, input.projection, {gated_inputs.data, gated_inputs.stride}, t.num_rows,
              [&](int g, int first, int count, const float* sums) {
                for (int r = 0; r < count; r++)
                  for (int j = 0; j < GROUP && g * GROUP + j < part_stride; j += 16)
                    store(y.row(first + r) + g * GROUP + j, load(sums + r * GROUP + j));
              }))
    return false;
  return row_tasks(t.run, t.num_rows, [&](int r) {
    float *from = y.row(r), *to = row_of(t, r);
    norm_row(from, input.norm, m.hidden, from);
    for (int j = 0; j < m.hidden; j += 16) store(to + j, load(to + j) + tail_of(from + j, m.hidden - j));
    if (l.output_scale != 1.0f) scale_residual(t, l, r);
  });
}

}  // namespace
