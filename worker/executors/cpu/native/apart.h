// A step of whole prompts in pieces: runs of prompts, each of which one thread takes through all layers by itself. Nobody
// waits between phases, and the rows of a piece stay in its thread's cache.
//
// A row's bits depend on its own prompt alone, so they are those of the step as a whole. For encoders on one rank: their
// prompts are whole in a step, and no sequence reads what another writes. What a thread computes is in `step.h`.
#pragma once
#include "step.h"

namespace {

// With fewer rows products take longer, and with more the rows leave the cache. The last pieces are small ones, so that
// threads end together.
enum { LEAST_PIECE = 48, MOST_PIECE = 128 };

// A step that was cut. `wanted`: rows of all pieces, each counted from the first row of its own.
struct CutStep {
  std::vector<NativeStep> pieces;
  std::vector<long> wanted;
};

template <class W> class Apart {
 public:
  Apart(const NativeModel& model, int threads)
      : m(model), is_possible(threads > 1 && m.tensor_parallel_size == 1), rooms(threads, 0), decoders(threads) {
    for (int i = 0; i < m.num_layers; i++) is_possible = is_possible && m.layers[i].sees_behind;
  }

  // False: all threads are to run the step together.
  bool cut(const NativeStep& step, CutStep& out) const {
    out.pieces.clear();
    const bool is_whole = !step.first_layer && !step.hidden && !step.adapter_of;
    if (!is_possible || !is_whole || !step.num_sequences || step.num_wanted != step.num_pooled) return false;
    out.wanted.assign(step.wanted, step.wanted + step.num_wanted);
    if (!std::is_sorted(out.wanted.begin(), out.wanted.end())) return false;
    for (NativeStep rest = step; rest.num_sequences;)
      out.pieces.push_back(take(rest, step.num_rows - rest.num_rows, out.wanted));
    if (!are_even(out.pieces, step.num_rows)) out.pieces.clear();
    return !out.pieces.empty();
  }

  // Runs a piece in a task of `run`, on its thread.
  void run(const NativeStep& piece, holdfast::Run& run) {
    const int rows = std::max(piece.num_rows, piece.num_wanted);
    if (rows > rooms[run.tid]) {
      NativeModel own = m;
      own.max_rows = 2 * rows;
      decoders[run.tid].reset(), rooms[run.tid] = 0;  // the next may not be made
      decoders[run.tid].reset(new Decoder<W>(own, 1)), rooms[run.tid] = own.max_rows;
    }
    decoders[run.tid]->run_alone(piece, run);
  }

 private:
  // The sequences that are next in `rest`, which they leave. `before`: rows of the step before it.
  NativeStep take(NativeStep& rest, int before, std::vector<long>& wanted) const {
    const int share = rest.num_rows / (2 * (int)rooms.size());
    const int rows = std::min((int)MOST_PIECE, std::max((int)LEAST_PIECE, share));
    NativeStep piece = rest;
    piece.num_sequences = piece.num_rows = piece.num_wanted = 0;
    do {
      piece.num_sequences++, piece.num_rows += (int)*rest.num_tokens, rest.blocks += *rest.num_blocks;
      rest.num_sequences--, rest.num_tokens++, rest.num_blocks++, rest.first_positions++;
      if (rest.num_window_blocks) rest.window_blocks += *rest.num_window_blocks++;
      if (rest.second_starts) rest.second_starts++;
    } while (rest.num_sequences && piece.num_rows + *rest.num_tokens / 2 < rows);
    rest.token_ids += piece.num_rows, rest.num_rows -= piece.num_rows;
    long* row = wanted.data() + wanted.size() - rest.num_wanted;
    for (piece.wanted = row; rest.num_wanted && *row < before + piece.num_rows; rest.num_wanted--, row++)
      *row -= before, piece.num_wanted++;
    piece.num_pooled = piece.num_wanted, rest.pooled += piece.num_wanted * ((m.hidden + 15L) / 16 * 16);
    return piece;
  }

  // Whether threads that take piece after piece end together, or nearly so.
  bool are_even(const std::vector<NativeStep>& pieces, long num_rows) const {
    std::vector<long> rows(rooms.size(), 0);
    for (const NativeStep& piece : pieces) *std::min_element(rows.begin(), rows.end()) += piece.num_rows;
    return 5L * (long)rows.size() * *std::max_element(rows.begin(), rows.end()) <= 6 * num_rows;
  }

  NativeModel m;
  bool is_possible;
  std::vector<int> rooms;  // rows that the decoder of each thread has room for
  std::vector<std::unique_ptr<Decoder<W>>> decoders;
};

}  // namespace
