// Adapters of the weight that latent attention has by head, in the forms that its products take (`latent_attention.h`). Each
// head has records of its own, as an expert has. Methods of `Decoder`.
#pragma once
#include "step.h"

namespace {

// Room for the inner numbers of the rows of a task.
template <class W> void Decoder<W>::begin_adapted_heads(long most) {
  for (auto& own : local)
    if (weighed.data && most > own->head_inner.stride) own->head_inner = Buffer<float>(HEAD_ROWS, most);
  for (int i = (int)row_numbers.size(); weighed.data && i < HEAD_ROWS; i++) row_numbers.push_back(i);
}

// What adapters add to rows [first, first + count) of a head's product, whose inputs are `rows` [count][stride]; null
// pointers where no adapter of this step adds to it.
template <class W>
AddedRows Decoder<W>::added_to_head(const NativeLinear& linear, int head, const Input* rows, long stride, int first,
                                    int count, Thread& t) {
  if (!adapted_sites[linear.site]) return {};
  Local& own = t.own;
  own.of_head.resize(step.num_adapters);
  for (int i = 0; i < step.num_adapters; i++) {
    const NativeAdapted& here = step.adapters[i].linears[linear.site - 1];
    own.of_head[i] = here.ranks ? here.experts[head] : here;
  }
  const int* adapter_of = (t.residual == wanted_x.data ? wanted_adapters.data() : step.adapter_of) + first;
  const AddedRows added = {adapter_of,          row_numbers.data(),    own.of_head.data(),
                           own.head_inner.data, own.head_inner.stride, &own.expert_runs};
  const CutRows<W> in = {rows, stride, 1, (long)linear.slice_tiles * K_TILE};
  own.expert_runs.first = -1;
  for (int row = 0; row < count; row += ROWS_TOGETHER)
    inner_of<W>(added, in, row, std::min(count, row + (int)ROWS_TOGETHER));
  own.expert_runs.first = -1;
  return added;
}

}  // namespace
