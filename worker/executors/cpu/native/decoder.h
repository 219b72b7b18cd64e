// The decoder's plain data, as Python fills it in (`structures.py` mirrors this file), and its entry points.
// Pointers stay valid for as long as the decoder does. What is computed with them is in `step.h`.
#pragma once

namespace holdfast {
enum Dtype { BFLOAT16, FLOAT16, FLOAT32 };
enum KeptAs { KEPT_AS_MODEL, KEPT_AS_INT8 };  // keys and values: in the model's dtype, or as codes (`codes.h`)
}  // namespace holdfast

extern "C" {

// What the units of a quantized weight have beside codes and scales, and the type of the scales (`units.h`).
enum NativeOffset { NATIVE_MIDDLE, NATIVE_ZERO_POINTS, NATIVE_MINIMA, NATIVE_BYTE_MINIMA, NATIVE_BYTE_HALVES };
enum NativeScales { NATIVE_HALF_SCALES, NATIVE_BFLOAT_SCALES, NATIVE_FLOAT_SCALES };
struct NativeUnits {
  int bits, offset, scales;  // bits of a code, 4, 5, 6 or 8; 0: there are no units
  int before;                // see `UnitForm`
};

// Where a panel of units lies, and how.
struct NativePanel {
  const void* first;
  NativeUnits units;
};

struct NativeLinear {
  const void* tiles;  // packed (`linear.h`), or compact panels, or panels of units
  const float* bias;  // [groups * 64], or null
  int slices, slice_tiles, groups, outputs;
  long panel_bytes;  // of a compact panel (`compact_order.h`) or one of units; 0: tiles
  NativeUnits units;
  const NativePanel* panels;  // [groups * 2], of a weight whose panels have units of several forms; or null
  int code_run;               // k tiles that share scales, of panels of codes (`coded_order.h`); 0: it has none
  int site;                   // its number, from 1, among the linears that adapters may add to; 0: it is none of them
};

enum { MOST_RANKS = 256 };  // of one module, filled up to sixteens
// What an adapter adds to a linear (`adapters.h`). Of 16 outputs, the ranks that they have numbers of.
struct NativeSpan {
  int first, end;
  long place;  // in `b`, of [end - first][16]
};
struct NativeAdapted {
  const void* a;                 // [ranks / 16][inputs, slices filled up to whole tiles][16], of the model's dtype
  const void* b;                 // likewise
  const float* scales;           // [ranks]
  const NativeSpan* spans;       // [groups * 4]
  int ranks;                     // filled up to sixteens; 0: it adds nothing here
  const NativeAdapted* experts;  // [experts or heads] each with its own; `ranks` is the most of them then. Or null
};
struct NativeAdapter {
  const NativeAdapted* linears;  // [sites]
};
// The matrices of one module as an adapter's file has them: A [rank][inputs], of which this rank's inputs are the first, or
// `columns` of a linear says which, and B [outputs][rank]. A stride: numbers to the next row; a step: to the next column.
struct NativeLowRank {
  const void *a, *b;
  long a_stride, a_step, b_stride, b_step;
  float scale;
  int rank, a_dtype, b_dtype;  // rank 0: the module has none
};
// What an adapter is packed from for one linear, and fixed inputs by which it is proved.
struct NativeAdaptedSite {
  const NativeLowRank* parts;
  long slice_length, filled_length;  // inputs of a slice, and with those that fill it up
  const int *part_of, *rows;         // [blocks * 16]: which output of which part a packed one is; -1: none
  const long* columns;               // [inputs] of A; null: as they are
  const float* probe;                // [inputs]
  const void* filled_probe;          // the same, filled up, as rows of the linear are stored
  const long *output_parts, *output_rows, *output_places;  // [outputs]: its part, output of that, and packed output
  long outputs;
  int num_parts, slices, blocks, number;  // number: of the linear among all that adapters may add to
};

struct NativeNorm {
  const float* weight;  // null: no norm
  const float* bias;    // or null
  float eps;
  int is_layer_norm;
  int stays;  // before a half of a layer: the normed row takes the place of the residual stream's
};

struct NativeMlp {
  NativeLinear up;                // with a gate: groups of 32 gates and 32 ups
  NativeLinear down;              // sums over slices
  float gate_scale, inner_scale;  // with a gate: multiply it before the activation, and what goes into `down`
  int activation, has_gate;
};

enum NativeScoring { NATIVE_SOFTMAX, NATIVE_SOFTMAX_OF_TOP, NATIVE_SIGMOID };
struct NativeExperts {
  NativeLinear router;  // outputs: one an expert, or several times that many, which are summed: see `routing.h`
  const NativeMlp* experts;
  const NativeMlp* shared;          // an expert of all rows, with as many slices as the others; or null
  const NativeLinear* shared_gate;  // one output: the shared expert is weighted by its sigmoid; or null
  const NativeLinear* latent;       // makes the rows of experts that have another size than the hidden ones; or null.
                                    // Then each slice of the inputs of the layer's `mlp.down` has their sum first
  const float* selection_bias;      // [experts]: what experts are chosen by is their score and this; or null
  const float* scales;              // [experts]: multiply the weights of chosen experts; or null
  float least_sum;
  int num_experts, top_k, scoring, normalized, num_groups, top_groups,
      group_best;  // best scores of a group that count, 1 or 2
};

// A mixture beside an MLP: mlp_out_norm(MLP) + out_norm(experts of norm(x)), with a router that is given router_norm(x).
struct NativeBeside {
  NativeNorm norm, router_norm, out_norm, mlp_out_norm;
};

struct NativeRotary {
  const float* inverse_frequencies;
  float* table;  // [positions][sines, cosines][pairs], filled as positions come up
  float scaling;
  int pairs, interleaved, filled;
};

// What a norm of queries and keys goes over: each head with one weight, all heads together, each head with its own weight.
enum NativeHeadNorms { NATIVE_NORM_EACH_HEAD, NATIVE_NORM_ALL_HEADS, NATIVE_NORM_OWN_WEIGHTS };

// A short convolution in place of attention (`short_conv.h`). Its output is the layer's.
struct NativeShortConv {
  NativeLinear inputs;  // outputs: B of all channels, then C, then x
  const float* kernel;  // [width][channels, filled up]: the last row weighs a token itself
  const float* bias;    // [channels, filled up], or null
  int channels, width;
  int columns;  // inputs of the convolution that a slot keeps, each at its position modulo this
};

// A recurrence in place of attention or beside it (`recurrence.h`): Gated DeltaNet, or Mamba2, whose C, B and x are queries,
// keys and values. Its output is the layer's.
struct NativeRecurrence {
  NativeLinear
      inputs;  // outputs: queries and keys of all key heads, values, then z, and b and a, or dt, of all value heads
  NativeLinear rates;  // the last outputs of `inputs`, from b on, where these lie in another form; or none
  NativeLinear
      gates;  // of a decay for each key (Kimi): from the last outputs of `inputs`, a of each key, then z; or none
  const float *kernel,
      *conv_bias;  // of the convolution: [width][channels of queries, keys and values]; [channels] or null
  const float *a_log, *dt_bias;  // [value heads], but for dt_bias [value heads][keys] of a decay for each key
  const float* skip;             // [value heads], of Mamba2; null: Gated DeltaNet
  NativeNorm norm;               // over the values of a head; of Mamba2 weights of all heads
  float dt_scale, z_scale;       // multiply dt, or a, and z
  float least_dt, most_dt;       // of Mamba2: bounds of a time step
  int key_heads, value_heads, key_dim, value_dim, width;
  int columns;                      // rows of inputs that a slot keeps, each at its position modulo this
  int unit_heads, heads_per_slice;  // value heads of a unit, see `recurrence_task.h`; of a slice of the output's inputs
  int norm_heads;  // of Mamba2: heads that are normed together, more than this rank's where ranks share them; 0: no norm
  int norm_groups, first_group;  // groups of the whole model, and this rank's first
  int gate_inputs;               // outputs of `inputs` that `gates` takes, behind b
};

// What multi-head latent attention has beside `qkv` and `output` (`latent_attention.h`): one key of all heads, [latent][rope],
// whose latent is the value.
struct NativeLatent {
  NativeLinear queries;  // of the normed first outputs of `qkv`: [head][plain][rope]; no groups: `qkv` has them itself
  NativeLinear absorb, expand;  // each head by itself: from plain dimensions to the latent's, and from them to values
  NativeNorm query_norm, latent_norm;
  int query_outputs;  // of `qkv`, before the latent and the rope part of the key
  int plain_dim, rope_dim, latent_dim, value_dim;
};

// What a layer has of its own input (`layer_inputs.h`), and what all layers' inputs are made of.
struct NativeLayerInput {
  NativeLinear gate, projection;  // not shared by ranks
  NativeNorm norm;
  int activation;
};
struct NativeTokenInputs {
  const void* table;     // [vocabulary][layers][dim], not packed: of the whole model, on every rank; or null
  NativeLinear coded;    // then: the same in units
  NativeLinear context;  // outputs: [layers][dim, filled up to whole groups]
  NativeNorm norm;
  float table_scale, context_scale, scale;
  int dim;
};

// Either half may be missing.
struct NativeLayer {
  NativeNorm attention_norm, attention_out_norm, mlp_norm, mlp_out_norm, query_norm, key_norm, value_norm;
  NativeLinear qkv, output;
  NativeMlp mlp;
  const NativeExperts* experts;  // instead of `mlp`, or beside it, or, of latent rows, before its `down`; or null
  const NativeBeside* beside;    // the norms of a mixture beside `mlp`, which has an `mlp_out_norm`; or null
  const float* sinks;
  const float* query_scales;  // [positions]: multiply queries; or null
  void* pages;
  const NativeShortConv* conv;         // in place of attention, or null
  const NativeRecurrence* recurrence;  // likewise; or beside attention: then each slice of the output's inputs has
                                       // values of attention first
  const NativeLatent* latent;          // of latent attention: one KV head of `head_dim` = latent and rope; or null
  const NativeLayerInput* input;       // or null
  float* states;                       // [slots][state_length]: what such a layer keeps of sequences
  long state_length;
  long block_bytes;  // of its pages: from a block to the next; 0: blocks follow one another
  float scaling, softcap, value_scale, residual_scale, output_scale;  // output_scale: of a layer with an `mlp_out_norm`
  int num_heads, num_kv_heads, head_dim, heads_per_slice, window, rotary, head_norms, norms_after_rotation, has_gate,
      parallel;                   // head_norms: see `HeadNorms`; has_gate: a gate for each output of attention
  int block_size, has_own_table;  // has_own_table: its blocks are those of layers with a window
  int reads_others;               // `pages` are another layer's, which writes them: `qkv` has queries alone
  int sees_behind;                // a query sees the keys behind it too; its prompt is in one step
};

// Attention of one layer of modules that are not a decoder's.
struct NativeAttention {
  void* pages;
  float softcap;  // 0: none
  int num_heads, num_kv_heads, key_dim, value_dim, window, kept_as;
};

// The rows of a step for such a layer: [token][head][dimension], the last without gaps.
struct NativeAttentionRows {
  // queries: as a linear's inputs (bfloat16, else float32); keys, values: of the model's dtype
  const void *queries, *keys, *values;
  long query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
      value_head_stride;  // in numbers
  const float* sinks;     // [heads], or null
  void* out;              // [tokens][heads][value_dim], as queries
  float scaling;
};

// Memory that all ranks of a replica have mapped, zeros at first, and what each of them knows of the others.
struct NativeExchange {
  void* memory;          // `native_exchange_bytes` of it
  const int* processes;  // [ranks] a pidfd of each, which becomes readable when it has ended
  float timeout_s;       // after which a silent rank is lost
  int rank, ranks;
};

struct NativeModel {
  const NativeLayer* layers;
  NativeRotary* rotaries;
  const void* embedding;  // [rows of this rank][hidden], not packed; null: the head's weights, as they are packed
  NativeNorm norm;
  NativeLinear head;
  const NativeTokenInputs* inputs;  // or null
  const NativeExchange* exchange;   // null: a step stops where a sum over ranks is due
  const float* positions;           // [positions][hidden, filled up to sixteens]: added to the embedding; or null
  const float* segments;            // likewise, two rows: for tokens of a prompt's first text, and of its second
  float embedding_scale, logit_scale, logit_softcap;
  int num_layers, num_rotaries, hidden, first_vocab_row, vocab_rows,
      vocab_size;                               // rows: of this rank; the last ranks' may lie beyond the vocabulary
  int max_rows, tensor_parallel_size, kept_as;  // kept_as: see `KeptAs`
  int sum_parts;       // sums that a half of a layer leaves beside each other: 2 with a mixture beside an MLP, else 1
  int num_sites;       // linears that adapters may add to, and the embedding
  int embedding_site;  // number of the embedding among them; 0: none
};

struct NativeStep {
  const long *token_ids, *first_positions, *num_tokens, *num_blocks, *blocks, *wanted;
  const long *num_window_blocks, *window_blocks;  // of layers with a window that have a table of their own; or null
  const long *state_slots, *num_drafts;  // of each sequence, where the model has states: its slot; how many of its last
                                         // tokens are drafts, which its next step may follow only in part
  float* logits;                         // [wanted that are not pooled][vocab rows], or null
  float* block_best;  // [wanted][groups of the head], or null: the largest of each 64 logits; NaN: not all are finite
  float* block_mass;  // [wanted][groups of the head], or null: the sum of exp(logit - the largest) of each 64 logits
  float* all_logits;  // [wanted][vocab size], or null: with an exchange, those of all ranks; null or not on all alike
  float*
      hidden;  // [rows][hidden], or null: the residual stream of all rows behind the last layer; then none is left out
  int* best;   // [wanted]: the token of the row's largest logit; -1: not all are finite. With an exchange, of all
               // ranks, unless there are logits; without, a column of this rank
  long* progress;                 // counts layers
  const int* adapter_of;          // [rows]: its number among `adapters`, or -1; null: no row has one
  const NativeAdapter* adapters;  // [num_adapters]
  float* pooled;                  // [num_pooled][hidden, up to a multiple of 16]: behind the final norm; or null
  const long* second_starts;      // [num_sequences]: where the second of two texts begins, or 0; null: none has two
  int num_rows, num_sequences, num_wanted;
  int first_layer;  // where the step begins: 0, but for a proof of one layer
  int num_adapters;
  int num_pooled;  // of the last rows among `wanted`: they have no logits, and their states are kept
};
}
