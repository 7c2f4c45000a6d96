// SPDX-License-Identifier: Apache-2.0
// Tokens that are moved together: the same for every layer of a call.
#pragma once

#include <vector>

#include "kernels.h"

namespace segreuse::cpu {

template <class Format>
using Code = typename Format::Code;

// The two channels of a pair.
struct Pair {
  int first, second;

  Pair(const Rotation& rotation, int pair)
      : first(rotation.first + (rotation.neox ? pair : 2 * pair)),
        second(first + (rotation.neox ? rotation.dim / 2 : 1)) {}
};

constexpr int kTile = 32;        // tokens that vLLM's CPU backend keeps side by side
constexpr int kPairedTile = 16;  // the same for the matrix unit, of two channels

// Tokens that follow each other inside a tile of a page at either end, and turn by one angle.
struct Run {
  int64_t source, target;  // slots of the first
  int64_t length, angle;
  int64_t before;  // tokens that come first
};

inline std::vector<Run> runs_of(const AlignArgs& args, int64_t tile = kTile) {
  if (args.block_size % tile) tile = args.block_size;
  std::vector<Run> runs;
  for (int64_t i = 0; i < args.tokens; ++i) {
    const int64_t source = args.sources[i], target = args.targets[i], angle = args.angles[i];
    if (!runs.empty()) {
      Run& last = runs.back();
      if (source == last.source + last.length && target == last.target + last.length &&
          angle == last.angle && source % tile && target % tile) {
        ++last.length;
        continue;
      }
    }
    runs.push_back({source, target, 1, angle, i});
  }
  return runs;
}

// A run, with its slots taken apart once for all layers.
struct Span {
  int64_t source = 0, target = 0;       // first elements of its pages
  int from = 0, to = 0, length = 0;  // tokens

  Span() = default;
  Span(const Run& run, const AlignArgs& args)
      : source(run.source / args.block_size * args.read_stride),
        target(run.target / args.block_size * args.page_stride),
        from(static_cast<int>(run.source % args.block_size)),
        to(static_cast<int>(run.target % args.block_size)),
        length(static_cast<int>(run.length)) {}
};

// Up to two runs that fill one tile of a target page: documents move to odd offsets, so that most
// tiles are put together from two.
struct Stretch {
  Span first, second;  // `second` follows `first` in the target; its length may be 0
  int64_t angle;  // first element of its row of the tables
};

// Runs in pairs, where two share a tile of a target page and an angle.
inline std::vector<Stretch> paired(const AlignArgs& args, int64_t tile = kTile) {
  const std::vector<Run> runs = runs_of(args, tile);
  std::vector<Stretch> stretches;
  for (size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    const Span first(run, args);
    Span second;
    if (r + 1 < runs.size()) {
      const Run& next = runs[r + 1];
      if (next.target == run.target + run.length && next.target % tile && next.angle == run.angle) {
        second = Span(next, args);
        ++r;
      }
    }
    stretches.push_back({first, second, run.angle * args.pairs});
  }
  return stretches;
}

}  // namespace segreuse::cpu
