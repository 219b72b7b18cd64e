// The attention of a step as tasks of a pool: which rows attend to which keys of their sequences.
// How rows attend to tiles of keys is in `attention.h`, and how keys and values are kept in `pages.h`.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "pool.h"

namespace {

// Tokens [first, end) of a sequence, which share 32 positions: one task writes their keys and values.
struct Unit {
  int sequence, first, end;
};

// Rows [first, first + count) of a sequence and a KV head, for the keys of one of `parts`; `slot` numbers what parts keep.
struct AttentionTask {
  int sequence, kv_head, first, count, part, parts, slot;
};

// Layers whose attention has the same tasks.
struct AttentionKind {
  HeadShape shape;
  std::vector<AttentionTask> tasks;
  int num_tasks = 0;
  bool splits = false;
};

// What a thread attends with.
template <class W> struct AttentionRoom {
  AttentionScratch<W> scratch;
  QueryRows rows;
};

template <class W> class Attention {
 public:
  explicit Attention(int threads) : threads(threads) {}

  // The kind of such layers. All kinds are made before the first step: threads look at them between tasks.
  int kind_like(const HeadShape& shape) {
    for (int k = 0; k < (int)kinds.size(); k++)
      if (kinds[k].shape == shape) return k;
    kinds.push_back({shape, {}, 0, false});
    return (int)kinds.size() - 1;
  }

  // Takes the sequences of a step, and lists the tasks of all kinds. Returns the position after the last one.
  int begin(const NativeStep& step) {
    sequences.clear(), units.clear();
    int row = 0, last = 0;
    const int* blocks = keep(block_ids, step.blocks, step.num_blocks, step.num_sequences);
    const int* window_blocks = keep(window_block_ids, step.window_blocks, step.num_window_blocks, step.num_sequences);
    decodes_alone = true;
    for (int i = 0; i < step.num_sequences; i++) {
      SequenceView seq = {row, (int)step.first_positions[i], (int)step.num_tokens[i], blocks, window_blocks};
      seq.end = seq.first_position + seq.num_tokens;
      sequences.push_back(seq);
      blocks += step.num_blocks[i];
      if (step.num_window_blocks) window_blocks += step.num_window_blocks[i];
      for (int t = 0; t < seq.num_tokens;) {
        int end = std::min(seq.num_tokens, t + 32 - (seq.first_position + t) % 32);
        units.push_back({i, t, end});
        t = end;
      }
      row += seq.num_tokens, last = std::max(last, seq.end);
      if (seq.num_tokens != 1) decodes_alone = false;
    }
    num_units = (int)units.size();
    for (AttentionKind& kind : kinds) list_tasks(kind, 0, step.num_sequences, row);
    return last;
  }

  // Whole tokens of one sequence for one KV head, or some of its heads where they are many, of the sequences [begin, end),
  // which have `num_rows` tokens. Long contexts are parted where few tasks are there to share.
  void list_tasks(AttentionKind& kind, int begin, int end, int num_rows) {
    const HeadShape& shape = kind.shape;
    const int group = shape.group(), most = group > QUERY_ROWS ? (int)QUERY_ROWS : QUERY_ROWS / group * group;
    int slot = 0;
    bool may_split = threads > 1 && num_rows <= 4 * threads;
    kind.tasks.clear(), kind.splits = false;
    for (int i = begin; i < end; i++) {
      const SequenceView& seq = sequences[i];
      for (int row = 0; row < seq.num_tokens * group; row += most) {
        int count = std::min(most, seq.num_tokens * group - row);
        int from = first_key(shape, seq.first_position + row / group) / SPLIT;
        int to = (end_of_keys(shape, seq, seq.first_position + (row + count - 1) / group) - 1) / SPLIT;
        int num_parts = may_split ? to - from + 1 : 1;
        for (int k = 0; k < shape.num_kv_heads; k++) {
          for (int part = 0; part < num_parts; part++)
            kind.tasks.push_back({i, k, row, count, part, num_parts, slot + part});
          if (num_parts > 1) slot += num_parts, kind.splits = true;
        }
      }
    }
    kind.num_tasks = (int)kind.tasks.size();
    while ((int)parts.size() < slot) parts.emplace_back(new Softmax);
  }

  // Whether each task may write the keys and values of its own token: then no other reads them.
  bool may_inline(const AttentionKind& kind) const {
    return decodes_alone && !kind.splits && kind.shape.group() <= QUERY_ROWS;
  }

  // All tasks of a kind. `prepare(task)`: what each does first.
  template <class K, class Prepare>
  bool attend(holdfast::Run& run, const Pages<K>& pages, const AttentionKind& kind, const LayerRows<W>& layer,
              Tiles& tiles, AttentionRoom<W>& own, Prepare&& prepare) {
    if (!holdfast::tasks(run, kind.num_tasks, [&](int i) {
          const AttentionTask& task = kind.tasks[i];
          prepare(task);
          const int later = i + threads;  // this thread's next task, if all are as fast
          attend_task(pages, layer, tiles, own, task,
                      later < kind.num_tasks ? keys_of(kind, kind.tasks[later]) : SomeKeys{});
        }))
      return false;
    return !kind.splits || holdfast::tasks(run, kind.num_tasks, [&](int i) {
      if (kind.tasks[i].part == 0 && kind.tasks[i].parts > 1) merge_task(pages.shape, layer, own, kind.tasks[i]);
    });
  }

  std::vector<SequenceView> sequences;
  std::vector<Unit> units;
  std::vector<AttentionKind> kinds;
  int num_units = 0;

 private:
  // The tables of all sequences, as they are looked up. None: `counts` is null.
  static const int* keep(std::vector<int>& kept, const long* ids, const long* counts, int num_sequences) {
    long total = 0;
    for (int i = 0; counts && i < num_sequences; i++) total += counts[i];
    kept.assign(ids, ids + total);
    return kept.data();
  }

  // What a task of a decode begins with: the keys of its part, but for its own token's, which are not written yet.
  SomeKeys keys_of(const AttentionKind& kind, const AttentionTask& task) const {
    const SequenceView& seq = sequences[task.sequence];
    const int first = (first_key(kind.shape, seq.first_position) / SPLIT + task.part) * SPLIT;
    return {&seq, task.kv_head, begin_of(first_key(kind.shape, seq.first_position), first), seq.first_position};
  }

  // The first tile of [from, ..) that has a key of [first, ..).
  static int begin_of(int first, int from) { return std::max(from, first / KEYS * KEYS); }

  template <class K>
  void attend_task(const Pages<K>& pages, const LayerRows<W>& layer, Tiles& tiles, AttentionRoom<W>& own,
                   const AttentionTask& task, SomeKeys after) {
    const HeadShape& s = pages.shape;
    const SequenceView& seq = sequences[task.sequence];
    AttentionScratch<W>& a = own.scratch;
    gather_queries<W>(a, s, seq, task.kv_head, task.first, task.count, layer, own.rows);
    const int begin = own.rows.firsts[0], last = own.rows.ends[task.count - 1], first_part = begin / SPLIT;
    if (task.parts > 1) {
      int from = (first_part + task.part) * SPLIT, to = std::min(last, from + SPLIT);
      attend_keys(tiles, a, pages, seq, task.kv_head, own.rows, begin_of(begin, from), to, a.total, after);
      keep_part(s, task, a.total);
      return;
    }
    for (int from = first_part * SPLIT; from < last; from += SPLIT) {
      Softmax& sum = from == first_part * SPLIT ? a.total : a.part;
      attend_keys(tiles, a, pages, seq, task.kv_head, own.rows, begin_of(begin, from), std::min(last, from + SPLIT),
                  sum, from + SPLIT < last ? SomeKeys{&seq, task.kv_head, from + SPLIT, last} : after);
      if (&sum == &a.part) merge_all(s, a.total, a.part, task.count);
    }
    write_results(s, own.rows, a.total, layer);
  }

  void keep_part(const HeadShape& s, const AttentionTask& task, const Softmax& sum) {
    Softmax& kept = *parts[task.slot];
    memcpy(kept.largest, sum.largest, task.count * 4), memcpy(kept.sums, sum.sums, task.count * 64);
    memcpy(kept.values, sum.values, (long)task.count * s.value_dims() * 4);
  }

  void merge_task(const HeadShape& s, const LayerRows<W>& layer, AttentionRoom<W>& own, const AttentionTask& task) {
    Softmax& total = *parts[task.slot];
    for (int part = 1; part < task.parts; part++) merge_all(s, total, *parts[task.slot + part], task.count);
    gather_queries<W>(own.scratch, s, sequences[task.sequence], task.kv_head, task.first, task.count, layer, own.rows);
    write_results(s, own.rows, total, layer);
  }

  int threads;
  bool decodes_alone = false;
  std::vector<int> block_ids, window_block_ids;
  std::vector<std::unique_ptr<Softmax>> parts;
};

}  // namespace
