// Where the numbers of a tile lie: 32 inputs of 16 outputs, as the products of a library's class read them.
// Packed weights and pages of the KV cache are made of such tiles. Plain C++.
#pragma once

namespace {

enum { TILE = 512, K_TILE = 32 };

// [pair of inputs][output][2]: as tiles of AMX are.
inline int in_pairs(int k, int n) { return k / 2 * 32 + n * 2 + k % 2; }
// [pair of inputs][2][output], of float32.
inline int in_lines(int k, int n) { return k / 2 * 32 + k % 2 * 16 + n; }
// [four inputs][even or odd][output][2], of the two the first one in the upper half: as VDPBF16PS adds them one after the other.
inline int in_fours(int k, int n) { return k / 4 * 64 + k % 2 * 32 + n * 2 + 1 - k % 4 / 2; }

}  // namespace
