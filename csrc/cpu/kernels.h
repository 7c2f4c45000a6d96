// SPDX-License-Identifier: Apache-2.0
// What the CPU library exports: the C functions that vllm_segreuse/kernels/cpu.py calls, with its structures. One
// library is built per instruction set (vectors.h), and the best one the machine has is loaded.
#pragma once

#include <cstdint>

#include "../segreuse/address.h"
#include "../segreuse/rotate.h"

namespace segreuse::cpu {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2 };

// How pages lie elsewhere: as they are, or as scales and codes of one byte (vllm_segreuse/kernels/codecs.py).
enum class CodecId : int32_t { kRaw, kInt8, kFp8 };

// One half of a page.
struct Part {
  TiledStrides strides;
  Rotation rotation;
};

// Lines of 64 bytes of bfloat16, as vLLM packs pages for the matrix unit: 16 tokens by 2 channels.
inline bool has_key_lines(const TiledStrides& strides) {
  return strides.token_tile == 16 && strides.token_lo == 2 && strides.channel_tile == 2 &&
         strides.channel_lo == 1;
}

// The same of values: 2 tokens by 16 channels.
inline bool has_value_lines(const TiledStrides& strides) {
  return strides.token_tile == 2 && strides.token_lo == 1 && strides.channel_tile == 16 &&
         strides.channel_lo == 2;
}

struct AlignArgs {
  void* const* pages;  // of each layer
  int64_t layers, page_stride;  // in elements
  const void* const* read;  // where sources lie: `pages`, or pages of as many layers elsewhere
  int64_t read_stride;      // in elements; of encoded pages in bytes
  const Part* parts;
  int64_t num_parts;
  const int64_t* sources;  // slots, of each token
  const int64_t* targets;
  const int64_t* angles;  // rows of the tables
  int64_t tokens, block_size;
  const float* cos;  // [angles, pairs]
  const float* sin;
  int64_t pairs;
  void* scratch;  // null (as it is if `read` is not `pages`), or room for the tokens of one layer: all parts, all channels
  int64_t value_scales, codes;  // where they lie in an encoded page, in bytes
  DType dtype;
  CodecId codec;  // of what is read
};

// Whole pages to rows of memory elsewhere.
struct StoreArgs {
  const void* const* pages;  // of each layer
  int64_t layers, page_stride;  // in bytes, as all of these
  void* const* cells;  // of each layer: where its page of row 0 is stored
  int64_t cell_stride;
  int64_t page_bytes;
  const int64_t* blocks;  // that are copied
  const int64_t* rows;    // where to
  int64_t count;
};

// Whole pages to scales and codes in rows of memory elsewhere.
struct EncodeArgs {
  const void* const* pages;  // of each layer
  int64_t layers, page_stride;  // in elements
  const Part* parts;  // keys, values
  void* const* cells;  // of each layer: where its page of row 0 is stored
  int64_t cell_stride, value_scales, codes;  // in bytes
  const int64_t* blocks;
  const int64_t* rows;
  int64_t count;
  uint8_t* encoded;  // of each block, 1; set to 0 where a number has no code
  DType dtype;
  CodecId codec;
};

// `segreuse_align` of encoded pages.
void align_encoded(const AlignArgs& args);

// How products of queries and keys become weights.
struct Weights {
  const float* sinks;  // null, or a logit of each head that takes part in its softmax; no key's
  float scale, soft_cap;  // soft_cap > 0: logits are soft_cap * tanh(logit / soft_cap)
};

// Queries of one or more requests against the pages of one layer.
struct AttentionArgs {
  void* out;          // [queries, heads, head_size]
  const void* query;  // the same
  const void* pages;
  int64_t page_stride;  // in elements
  TiledStrides keys, values;
  const int32_t* block_tables;
  int64_t table_stride;
  const int64_t* request;
  const int64_t* positions;
  int64_t queries, heads;
  Weights weights;
  int64_t window;     // most keys that a query sees, its own and those before it; 0: all before it
  float value_scale;  // of stored values
  DType dtype;        // of queries and output
  DType pages_dtype;  // the same, or fp8
};

struct ScoreArgs {
  float* scores;       // [tokens]
  float* late_scores;  // [tokens], sums over the queries from `late_from` on; null: not wanted
  const void* query;
  const void* pages;
  int64_t page_stride;
  TiledStrides keys;
  const int32_t* block_ids;
  const int64_t* positions;
  int64_t queries, heads, tokens;
  int64_t late_from;
  Weights weights;
  DType dtype;        // of queries
  DType pages_dtype;  // the same, or fp8
  int32_t highest;    // nonzero: the highest weight of a key, not the sum
};

// Shares of what has changed of tokens of one layer, to tokens that follow them.
struct CarryArgs {
  void* pages;
  int64_t page_stride;  // in elements
  const Part* parts;
  int64_t num_parts;
  const void* const* before;  // of each part, what the changed tokens were: [rows, heads, channels]
  const int64_t* changed;     // their slots
  int64_t num_rows;
  const int64_t* slots;  // of each token
  const int64_t* rows;   // of the changed token; -1: it takes part in no change
  const int64_t* distances;     // from the changed token
  const float* shares;          // [parts, tokens]
  int64_t tokens, block_size;
  const float* cos;  // [distances, pairs]
  const float* sin;
  const float* cos_by_pair;  // [pairs, distances]
  const float* sin_by_pair;
  int64_t num_distances;
  DType dtype;
};

}  // namespace segreuse::cpu

#define SEGREUSE_EXPORT extern "C" __attribute__((visibility("default")))

// Of the structures, in bytes and in the order of the functions: whether the library is as old as who calls it.
SEGREUSE_EXPORT void segreuse_sizes(int64_t* sizes);
SEGREUSE_EXPORT void segreuse_align(const segreuse::cpu::AlignArgs* args);
SEGREUSE_EXPORT void segreuse_attention(const segreuse::cpu::AttentionArgs* args);
SEGREUSE_EXPORT void segreuse_scores(const segreuse::cpu::ScoreArgs* args);
SEGREUSE_EXPORT void segreuse_store(const segreuse::cpu::StoreArgs* args);
SEGREUSE_EXPORT void segreuse_encode(const segreuse::cpu::EncodeArgs* args);
SEGREUSE_EXPORT void segreuse_carry(const segreuse::cpu::CarryArgs* args);
