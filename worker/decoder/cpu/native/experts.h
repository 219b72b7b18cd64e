  // (Part of `Decoder`.) Mixture of experts: each row's experts are chosen, rows are gathered by expert, all experts' first
  // products are one phase, and in the second a task adds all experts to its 64 columns in ascending order.

  bool experts_part(const HfLayer& l, Rows rows, Thread& t) {
    const HfExperts& e = *l.experts;
    if (!linear(t, e.router, rows, t.num_rows, [&](int g, int first, int count, const float* sums) {
          for (int r = 0; r < count; r++)
            for (int j = 0; j < GROUP; j += 16) {
              Lanes v = load(sums + r * GROUP + j);
              if (g * GROUP + j < router_logits.stride)
                store(router_logits.row(first + r) + g * GROUP + j, e.router.bias ? v + load(e.router.bias + g * GROUP + j) : v);
            }
        })) return false;
    if (!row_tasks(t.run, t.num_rows, [&](int r) { choose_experts(e, r); })) return false;
    if (!holdfast::tasks(t.run, 1, [&](int) { sort_by_expert(e); })) return false;
    int assigned = t.num_rows * e.top_k;
    if (!row_tasks(t.run, assigned, [&](int i) {
          memcpy((void*)expert_input.row(i), rows.data + order[i] / e.top_k * rows.stride, (expert_input.stride - 32) * sizeof(Input));
        })) return false;
    int runs = e.experts[0].up.groups;
    if (!holdfast::tasks(t.run, e.num_experts * runs, [&](int task) { expert_up(e.experts[task / runs], task / runs, task % runs, t.own); })) return false;
    float* place = place_of_sum(t, l.mlp_out_norm);
    return holdfast::tasks(t.run, e.experts[0].down.groups, [&](int g) { expert_columns(l, e, g, place, t.own); });
  }

  void choose_experts(const HfExperts& e, int row) {
    const float* logits = router_logits.row(row);
    int* chosen = &choices[row * e.top_k];
    float* weight = &weights[row * e.top_k];
    for (int k = 0; k < e.top_k; k++) {  // the largest that is left; of equal ones the first
      int best = -1;
      for (int i = 0; i < e.num_experts; i++)
        if (std::find(chosen, chosen + k, i) == chosen + k && (best < 0 || logits[i] > logits[best])) best = i;
      chosen[k] = best;
    }
    float largest = logits[chosen[0]], sum = 0, kept = 0;
    if (e.scoring == 0)
      for (int i = 0; i < e.num_experts; i++) sum += power_of_e(logits[i] - largest);
    for (int k = 0; k < e.top_k; k++) kept += weight[k] = e.scoring == 2 ? one_sigmoid(logits[chosen[k]]) : power_of_e(logits[chosen[k]] - largest);
    for (int k = 0; k < e.top_k; k++) weight[k] /= e.normalized || e.scoring == 1 ? kept : e.scoring == 0 ? sum : 1.0f;
  }
  static float power_of_e(float x) { alignas(64) float v[16] = {x}; store(v, exp_of(load(v))); return v[0]; }
  static float one_sigmoid(float x) { alignas(64) float v[16] = {x}; store(v, sigmoid_of(load(v))); return v[0]; }

  // `order` lists (row, choice) by expert, rows ascending; `first_of` says where each expert's begin.
  void sort_by_expert(const HfExperts& e) {
    int assigned = step.num_rows * e.top_k;
    std::fill(first_of.begin(), first_of.begin() + e.num_experts + 1, 0);
    for (int i = 0; i < assigned; i++) first_of[choices[i] + 1]++;
    for (int i = 0; i < e.num_experts; i++) first_of[i + 1] += first_of[i];
    std::vector<int> next(first_of.begin(), first_of.begin() + e.num_experts);
    for (int i = 0; i < assigned; i++) order[next[choices[i]]++] = i;
  }

  void expert_up(const HfMlp& expert, int index, int group, Local& own) {
    Packed<W> w = packed<W>(expert.up);
    for (int first = first_of[index]; first < first_of[index + 1]; first += MAX_ROWS) {
      int count = std::min((int)MAX_ROWS, first_of[index + 1] - first);
      InputRows<W> input = input_rows<W>(own.scratch, expert_input.row(first), expert_input.stride, count, w.row_length());
      product(own.scratch, w, group, input, own.scratch.sums);
      for (int r = 0; r < count; r++) activate(expert, group, own.scratch.sums + r * GROUP, inner_rows.row(first + r));
    }
  }

  // For each slice the experts of a row are added in ascending order; then the slices are, as a binary tree.
  void expert_columns(const HfLayer& l, const HfExperts& e, int g, float* place, Local& own) {
    int slices = e.experts[0].down.slices;
    float* sums = own.expert_sums(step.num_rows * slices * GROUP);
    for (int index = 0; index < e.num_experts; index++) {
      Packed<W> w = packed<W>(e.experts[index].down);
      const float* bias = e.experts[index].down.bias;
      for (int first = first_of[index]; first < first_of[index + 1]; first += MAX_ROWS) {
        int count = std::min((int)MAX_ROWS, first_of[index + 1] - first);
        InputRows<W> input = input_rows<W>(own.scratch, inner_rows.row(first), inner_rows.stride, count, w.row_length());
        for (int slice = 0; slice < slices; slice++) {
          slice_product(own.scratch, w, g, input, slice, own.scratch.sums);
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
    for (int row = 0; row < step.num_rows; row++) {
      float* slice = sums + (long)row * slices * GROUP;
      for (int apart = 1; apart < slices; apart *= 2)
        for (int s = 0; s + apart < slices; s += 2 * apart) add_to(slice + s * GROUP, slice + (s + apart) * GROUP, GROUP);
      for (int j = 0; j < GROUP && g * GROUP + j < y.stride; j += 16) put(place, l, e.experts[0].down, row, g * GROUP + j, load(slice + j), false);
    }
  }
