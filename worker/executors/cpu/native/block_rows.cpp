// Copies of blocks out of a cache and into it, and of rows with their digests. A row of bytes holds a block's layers one
// after the other.
#include "digest.h"

namespace {

enum { AT_ONCE = 8 * LINE };

struct LayerBlocks {
  uint8_t* blocks;  // of one layer, one after the other
  int64_t bytes;    // of a block
};

struct Copy {
  const uint8_t* from;
  uint8_t* to;
  int64_t bytes;
};

// Copies, and meanwhile fetches what is copied next: it lies elsewhere, so no core foresees it.
void copy_and_fetch(const Copy& copy, const Copy& next) {
  for (int64_t at = 0; at < copy.bytes; at += AT_ONCE) {
    const int64_t end = std::min<int64_t>(at + AT_ONCE, next.bytes);
    for (int64_t line = at; line < end; line += LINE) __builtin_prefetch(next.from + line);
    memcpy(copy.to + at, copy.from + at, std::min<int64_t>(AT_ONCE, copy.bytes - at));
  }
}

// Copies a block to its row, with its digest behind it. Meanwhile fetches the one that is copied next.
template <bool PAST>
void copy_sealed(int num_layers, const LayerBlocks* layers, int64_t id, int64_t next_id, uint8_t* row, int64_t bytes,
                 uint64_t seed) {
  Digest<PAST> digest(row, bytes, seed);
  for (int k = 0; k < num_layers; k++) {
    const LayerBlocks &layer = layers[k], &next = layers[(k + 1) % num_layers];
    const int64_t ahead = k + 1 < num_layers ? id : next_id;
    digest.copy(layer.blocks + id * layer.bytes, layer.bytes, next.blocks + ahead * next.bytes);
  }
  digest.write(row + bytes);
}

}  // namespace

// Rows and blocks lie at these addresses and have these numbers; `to_rows`: else from them.
extern "C" void native_copy_blocks(int to_rows, int num_layers, const LayerBlocks* layers, long count,
                                   const int64_t* block_ids, uint8_t* const* rows) {
  Copy last = {nullptr, nullptr, 0};
  for (long i = 0; i < count; i++) {
    uint8_t* row = rows[i];
    for (int k = 0; k < num_layers; k++) {
      uint8_t* block = layers[k].blocks + block_ids[i] * layers[k].bytes;
      const Copy copy = {to_rows ? block : row, to_rows ? row : block, layers[k].bytes};
      copy_and_fetch(last, copy);
      last = copy;
      row += layers[k].bytes;
    }
  }
  copy_and_fetch(last, {nullptr, nullptr, 0});
}

// Copies of blocks of these numbers, as rows of more than 240 bytes that begin at these places of a memory, each with
// its digest behind it, by its seed. `past`: past this core's caches; rows begin at cache lines.
extern "C" void native_copy_sealed(int past, int num_layers, const LayerBlocks* layers, long count,
                                   const int64_t* block_ids, uint8_t* memory, const int64_t* firsts,
                                   const uint64_t* seeds) {
  int64_t bytes = 0;
  for (int k = 0; k < num_layers; k++) bytes += layers[k].bytes;
  for (long i = 0; i < count; i++) {
    const int64_t next = block_ids[std::min(i + 1, count - 1)];
    const auto copy = past ? copy_sealed<true> : copy_sealed<false>;
    copy(num_layers, layers, block_ids[i], next, memory + firsts[i], bytes, seeds[i]);
  }
  if (past) _mm_sfence();
}

// Copies rows of more than 240 bytes from one memory to the same places of another, and compares the digest of what
// was copied with the one behind each row. Returns 1 if all are equal.
extern "C" int native_copy_checked(long count, const uint8_t* from, uint8_t* to, const int64_t* firsts,
                                   const int64_t* lengths, const uint64_t* seeds) {
  for (long i = 0; i < count; i++) {
    Digest<false> digest(to + firsts[i], lengths[i], seeds[i]);
    digest.copy(from + firsts[i], lengths[i], nullptr);
    uint8_t found[DIGEST_BYTES];
    digest.write(found);
    if (memcmp(found, from + firsts[i] + lengths[i], DIGEST_BYTES)) return 0;
  }
  return 1;
}
