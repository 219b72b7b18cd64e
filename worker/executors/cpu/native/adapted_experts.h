// Adapters of the experts of a mixture (`adapters.h`). Rows lie by expert, those of an expert by their adapter: so a
// product of one expert has runs of rows with one adapter, as other products have. Methods of `Decoder`.
#pragma once
#include "step.h"

namespace {

// Room for the inner numbers of all rows that experts take, each as often as it is chosen.
template <class W> void Decoder<W>::begin_adapted_experts(long most) {
  adapts_experts = most;
  if (!most) return;
  if (most > inner_of_experts.stride) inner_of_experts = Buffer<float>((long)order.size(), most);
  of_experts.resize((first_of.size() - 1) * step.num_adapters);
  gathered.resize(order.size()), gathered_adapters.resize(order.size());
}

// Sorts the rows of each expert by their adapters.
template <class W> void Decoder<W>::sort_by_adapter(const NativeExperts& e, const Thread& t) {
  if (!adapts_experts) return;
  const int* adapter_of = t.residual == wanted_x.data ? wanted_adapters.data() : step.adapter_of;
  auto of = [&](int choice) { return adapter_of[choice / e.top_k]; };
  for (int i = 0; i < e.num_experts; i++)
    std::stable_sort(order.begin() + first_of[i], order.begin() + first_of[i + 1],
                     [&](int a, int b) { return of(a) < of(b); });
  for (int i = 0; i < first_of[e.num_experts]; i++) gathered[i] = i, gathered_adapters[i] = of(order[i]);
}

// Rows of one expert's linear; null pointers where no adapter of this step adds to it.
template <class W> AddedRows Decoder<W>::added_to_expert(const NativeLinear& linear, int index, Local& own) {
  if (!adapted_sites[linear.site]) return {};
  return {gathered_adapters.data(), gathered.data(),         of_experts.data() + (long)index * step.num_adapters,
          inner_of_experts.data,    inner_of_experts.stride, &own.expert_runs};
}

// The inner numbers of all experts' rows, of their first linears or of their last.
template <class W>
bool Decoder<W>::prepare_experts(Thread& t, const NativeExperts& e, const NativeLinear& linear,
                                 const Buffer<Input>& rows) {
  if (!adapted_sites[linear.site]) return true;
  t.own.expert_runs.first = -1;
  const CutRows<W> in = {rows.data, rows.stride, linear.slices, (long)linear.slice_tiles * K_TILE};
  const bool done = holdfast::tasks(t.run, e.num_experts, [&](int index) {
    if (first_of[index] == first_of[index + 1]) return;
    for (int i = 0; i < step.num_adapters; i++) {
      const NativeAdapted& here = step.adapters[i].linears[linear.site - 1];
      of_experts[(long)index * step.num_adapters + i] = here.ranks ? here.experts[index] : here;
    }
    const AddedRows added = added_to_expert(linear, index, t.own);
    for (int row = first_of[index]; row < first_of[index + 1]; row += ROWS_TOGETHER)
      inner_of<W>(added, in, row, std::min(first_of[index + 1], row + ROWS_TOGETHER));
  });
  t.own.expert_runs.first = -1;
  return done;
}

}  // namespace
