// SPDX-License-Identifier: Apache-2.0
// `align` of vllm_segreuse/kernels/reference.py: copy cached keys and values from slot to slot, keys turned.
//
// Plain C functions, called by vllm_segreuse/kernels/cuda.py. A thread moves two vectors of one token and head,
// at the same place in `kLayers` layers: all loads first, so that 128 bytes per thread are in
// flight, and slots, offsets and angles are looked up once for all these layers. A vector is 16
// bytes where the layout allows, otherwise one element. Threads run along the channels of a head,
// then along heads, parts and tokens.
//
// Also compiles as plain C++ (g++ -x c++): the same code for every thread, run in a loop over host
// memory, asserting that addresses are aligned as a GPU needs them. That is how it is tested where
// there is none.

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>

#include "segreuse/address.h"
#include "segreuse/rotate.h"

#define SEGREUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace segreuse {

constexpr int kLayers = 4;             // per thread
constexpr int kLayersPerLaunch = 128;  // their addresses are kernel parameters
constexpr int kThreads = 256;
constexpr int kWideBytes = 16;

#if defined(__CUDACC__)
using Status = cudaError_t;
constexpr Status kSuccess = cudaSuccess, kInvalid = cudaErrorInvalidValue;
#else
using Status = int;
constexpr Status kSuccess = 0, kInvalid = 1;
#endif

struct Part {
  TiledStrides strides;
  Rotation rotation;
};

// What vllm_segreuse/kernels/cuda.py passes, field by field.
struct AlignCall {
  void* const* layers;  // first element of the flat pages of each
  int64_t num_layers;
  int64_t page_stride;  // elements
  void* const* read;    // where sources lie: as `layers`, or pages of as many layers elsewhere
  int64_t read_stride;  // elements
  int64_t format;       // see `with_format`
  int64_t num_parts;
  Part parts[2];
  const int64_t *sources, *targets, *angles;
  int64_t num_tokens;
  const float *cos, *sin;
  int64_t num_pairs;       // columns of `cos` and `sin`
  void* scratch;           // 16-byte aligned; null unless sources and targets may overlap
  int64_t scratch_layers;  // how many layers it holds
};

enum class Stage { kDirect, kGather, kScatter };

// One launch.
struct Launch {
  unsigned char* layers[kLayersPerLaunch];
  const unsigned char* read[kLayersPerLaunch];
  unsigned char* scratch;
  int32_t num_layers;
  Stage stage;
  int64_t page_stride, read_stride;
  Part parts[2];
  int32_t items_per_head[2];
  int32_t items_of_keys, items;  // per token: of the first part, of all
  int32_t tokens_per_block;
  int64_t num_tokens;
  const int64_t *sources, *targets, *angles;
  const float *cos, *sin;
  int64_t num_pairs;
};

// The two vectors of one thread.
enum class Turn { kNot, kTogether, kWithin };  // lane i of one with lane i of the other; neighbours
struct Item {
  Turn turn;
  int32_t channels[2];  // the first of each; twice the same where a head has an odd number
  int32_t columns[2];   // of `cos` and `sin`
};

// Vectors of `kLanes` channels of a head are numbered: those that turn, then the others.
template <int kLanes>
SEGREUSE_HD Item find_item(const Part& part, int32_t index) {
  const Rotation& rotation = part.rotation;
  const int32_t turning = rotation.dim / kLanes;
  const int32_t turning_items = (turning + 1) / 2;
  if (index < turning_items) {
    const int32_t first = rotation.first + index * kLanes;
    if (rotation.neox) {
      return {Turn::kTogether, {first, first + rotation.dim / 2}, {index * kLanes, 0}};
    }
    if (kLanes == 1) return {Turn::kTogether, {first + index, first + index + 1}, {index, 0}};
    const int32_t other = index + turning_items < turning ? index + turning_items : index;
    return {Turn::kWithin,
            {first, rotation.first + other * kLanes},
            {index * kLanes / 2, other * kLanes / 2}};
  }
  const int32_t still = part.strides.channels / kLanes - turning;
  const int32_t still_items = (still + 1) / 2;
  const int32_t one = index - turning_items;
  const int32_t other = one + still_items < still ? one + still_items : one;
  const int32_t a = one * kLanes, b = other * kLanes;
  return {Turn::kNot,
          {a < rotation.first ? a : a + rotation.dim, b < rotation.first ? b : b + rotation.dim},
          {0, 0}};
}

template <int kLanes>
int32_t count_items(const Part& part) {
  const int32_t turning = part.rotation.dim / kLanes;
  return (turning + 1) / 2 + (part.strides.channels / kLanes - turning + 1) / 2;
}

template <int kBytes>
SEGREUSE_HD bool is_multiple(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
}

template <int kBytes>
struct Vector {
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];

  SEGREUSE_HD void load(const unsigned char* from) {
#if defined(__CUDA_ARCH__)
    // Read once: need not displace the angles from the caches.
    if constexpr (kBytes == 16) {
      const uint4 data = __ldcs(reinterpret_cast<const uint4*>(from));
      words[0] = data.x, words[1] = data.y, words[2] = data.z, words[3] = data.w;
    } else if constexpr (kBytes == 4) {
      words[0] = __ldcs(reinterpret_cast<const uint32_t*>(from));
    } else if constexpr (kBytes == 2) {
      words[0] = __ldcs(reinterpret_cast<const uint16_t*>(from));
    } else {
      words[0] = __ldcs(from);
    }
#else
    assert(is_multiple<kBytes>(from));
    words[kWords - 1] = 0;
    std::memcpy(words, from, kBytes);
#endif
  }

  SEGREUSE_HD void store(unsigned char* to) const {
#if defined(__CUDA_ARCH__)
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
    } else {
      *to = static_cast<unsigned char>(words[0]);
    }
#else
    assert(is_multiple<kBytes>(to));
    std::memcpy(to, words, kBytes);
#endif
  }

  template <class Format>
  SEGREUSE_HD float get(int lane) const {
    constexpr int kBits = 8 * sizeof(typename Format::Code), kPerWord = 32 / kBits;
    const uint32_t word = words[lane / kPerWord] >> (lane % kPerWord * kBits);
    return Format::decode(static_cast<typename Format::Code>(word));
  }

  // Adds to a lane that is zero.
  template <class Format>
  SEGREUSE_HD void put(int lane, float value) {
    constexpr int kBits = 8 * sizeof(typename Format::Code), kPerWord = 32 / kBits;
    words[lane / kPerWord] |= uint32_t{Format::encode(value)} << (lane % kPerWord * kBits);
  }
};

template <class Format, int kBytes>
SEGREUSE_HD void turn_together(Vector<kBytes>& a, Vector<kBytes>& b, const float* cos,
                               const float* sin) {
  Vector<kBytes> new_a{}, new_b{};
#pragma unroll
  for (int i = 0; i < kBytes / int(sizeof(typename Format::Code)); ++i) {
    float first = a.template get<Format>(i), second = b.template get<Format>(i);
    turn(first, second, cos[i], sin[i]);
    new_a.template put<Format>(i, first);
    new_b.template put<Format>(i, second);
  }
  a = new_a, b = new_b;
}

template <class Format, int kBytes>
SEGREUSE_HD void turn_within(Vector<kBytes>& a, const float* cos, const float* sin) {
  Vector<kBytes> turned{};
#pragma unroll
  for (int i = 0; i < kBytes / int(sizeof(typename Format::Code)) / 2; ++i) {
    float first = a.template get<Format>(2 * i), second = a.template get<Format>(2 * i + 1);
    turn(first, second, cos[i], sin[i]);
    turned.template put<Format>(2 * i, first);
    turned.template put<Format>(2 * i + 1, second);
  }
  a = turned;
}

template <int kCount>
SEGREUSE_HD void load_floats(float* to, const float* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 data = __ldg(reinterpret_cast<const float4*>(from + i));
      to[i] = data.x, to[i + 1] = data.y, to[i + 2] = data.z, to[i + 3] = data.w;
    }
  } else if constexpr (kCount == 2) {
    const float2 data = __ldg(reinterpret_cast<const float2*>(from));
    to[0] = data.x, to[1] = data.y;
  } else {
    *to = __ldg(from);
  }
#else
  assert(is_multiple<4 * (kCount < 4 ? kCount : 4)>(from));
  std::memcpy(to, from, kCount * sizeof(float));
#endif
}

// Cosines (or sines) of the pairs of an item that turns.
template <int kLanes>
SEGREUSE_HD void load_angles(float* to, const float* row, const Item& item) {
  if (item.turn == Turn::kTogether) {
    load_floats<kLanes>(to, row + item.columns[0]);
  } else if constexpr (kLanes > 1) {
    load_floats<kLanes / 2>(to, row + item.columns[0]);
    load_floats<kLanes / 2>(to + kLanes / 2, row + item.columns[1]);
  }
}

// Byte offset in a layer of each of an item's vectors.
template <int kElementBytes>
SEGREUSE_HD void find_bytes(int64_t* to, int64_t page_stride, const TiledStrides& strides,
                            int64_t slot, const int32_t* in_head) {
  // 32 bits hold every slot (vllm_segreuse/kernels/cuda.py checks the cache's size), and divide quicker.
  const uint32_t block = static_cast<uint32_t>(slot) / static_cast<uint32_t>(strides.block_size);
  const uint32_t token = static_cast<uint32_t>(slot) - block * strides.block_size;
  const int64_t base = block * page_stride + strides.of_token(static_cast<int32_t>(token));
  to[0] = (base + in_head[0]) * kElementBytes;
  to[1] = (base + in_head[1]) * kElementBytes;
}

template <class Format, int kBytes>
SEGREUSE_HD void move_item(const Launch& launch, int64_t token, int32_t number, int32_t layer) {
  constexpr int kElementBytes = sizeof(typename Format::Code), kLanes = kBytes / kElementBytes;
  const int32_t which = number >= launch.items_of_keys;
  const Part& part = launch.parts[which];
  const int32_t in_part = number - (which ? launch.items_of_keys : 0);
  const int32_t head = in_part / launch.items_per_head[which];
  const Item item = find_item<kLanes>(part, in_part - head * launch.items_per_head[which]);
  const int32_t in_head[2] = {part.strides.of_channel(head, item.channels[0]),
                              part.strides.of_channel(head, item.channels[1])};

  // In the scratch, `[layer, token, 2, item]` vectors.
  const int64_t scratch_layer = launch.num_tokens * 2 * launch.items * kBytes;
  const int64_t in_scratch = (token * 2 * launch.items + number) * kBytes;
  int64_t from[2] = {in_scratch, in_scratch + int64_t{launch.items} * kBytes};
  int64_t to[2] = {from[0], from[1]};
  if (launch.stage != Stage::kScatter) {
    find_bytes<kElementBytes>(from, launch.read_stride, part.strides, launch.sources[token],
                              in_head);
  }
  if (launch.stage != Stage::kGather) {
    find_bytes<kElementBytes>(to, launch.page_stride, part.strides, launch.targets[token], in_head);
  }

  Vector<kBytes> data[kLayers][2];
#pragma unroll
  for (int i = 0; i < kLayers; ++i) {
    if (layer + i >= launch.num_layers) continue;
    const unsigned char* base = launch.stage == Stage::kScatter
                                    ? launch.scratch + (layer + i) * scratch_layer
                                    : launch.read[layer + i];
    data[i][0].load(base + from[0]);
    data[i][1].load(base + from[1]);
  }
  if (item.turn != Turn::kNot && launch.stage != Stage::kScatter) {
    float cos[kLanes], sin[kLanes];
    const int64_t row = launch.angles[token] * launch.num_pairs;
    load_angles<kLanes>(cos, launch.cos + row, item);
    load_angles<kLanes>(sin, launch.sin + row, item);
#pragma unroll
    for (int i = 0; i < kLayers; ++i) {
      if (item.turn == Turn::kTogether) {
        turn_together<Format>(data[i][0], data[i][1], cos, sin);
      } else if constexpr (kLanes > 1) {
        turn_within<Format>(data[i][0], cos, sin);
        turn_within<Format>(data[i][1], cos + kLanes / 2, sin + kLanes / 2);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLayers; ++i) {
    if (layer + i >= launch.num_layers) continue;
    unsigned char* base = launch.stage == Stage::kGather
                              ? launch.scratch + (layer + i) * scratch_layer
                              : launch.layers[layer + i];
    data[i][0].store(base + to[0]);
    data[i][1].store(base + to[1]);
  }
}

// One thread of the grid `[token blocks, layer groups]`.
template <class Format, int kBytes>
SEGREUSE_HD void run_thread(const Launch& launch, uint32_t block, uint32_t group, uint32_t thread,
                            uint32_t threads) {
  const uint32_t items = static_cast<uint32_t>(launch.items);
  const uint32_t end = items * static_cast<uint32_t>(launch.tokens_per_block);
  for (uint32_t i = thread; i < end; i += threads) {
    const uint32_t in_block = i / items;
    const int64_t token = int64_t{block} * launch.tokens_per_block + in_block;
    if (token >= launch.num_tokens) return;
    move_item<Format, kBytes>(launch, token, static_cast<int32_t>(i - in_block * items),
                              static_cast<int32_t>(group) * kLayers);
  }
}

#if defined(__CUDACC__)
template <class Format, int kBytes>
__global__ void __launch_bounds__(kThreads) align_kernel(const __grid_constant__ Launch launch) {
  run_thread<Format, kBytes>(launch, blockIdx.x, blockIdx.y, threadIdx.x, blockDim.x);
}
#endif

template <class Format, int kBytes>
Status run_grid(const Launch& launch, void* stream) {
  const int64_t in_block = launch.tokens_per_block;
  const int64_t blocks = (launch.num_tokens + in_block - 1) / in_block;
  const int groups = (launch.num_layers + kLayers - 1) / kLayers;
  const int threads = std::min(launch.tokens_per_block * launch.items + 31, kThreads) / 32 * 32;
  if (blocks > INT32_MAX) return kInvalid;
#if defined(__CUDACC__)
  align_kernel<Format, kBytes><<<dim3(static_cast<unsigned>(blocks), groups), threads, 0,
                                 static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
#else
  static_cast<void>(stream);
  for (int group = 0; group < groups; ++group) {
    for (int64_t block = 0; block < blocks; ++block) {
      for (int thread = 0; thread < threads; ++thread) {
        run_thread<Format, kBytes>(launch, block, group, thread, threads);
      }
    }
  }
  return kSuccess;
#endif
}

// Calls `run` with a value of the format's type.
template <class Run>
auto with_format(int64_t format, Run run) -> decltype(run(Float32{})) {
  switch (format) {
    case 0: return run(Float32{});
    case 1: return run(Float16{});
    case 2: return run(BFloat16{});
    case 3: return run(Float8E4M3{});
    case 4: return run(Float8E5M2{});
    default: return {};
  }
}

// Whether all vectors of `lanes` channels are 16 bytes at a multiple of 16.
bool is_wide(const AlignCall& call, int32_t lanes) {
  bool wide = call.page_stride % lanes == 0 && call.read_stride % lanes == 0 &&
              std::all_of(call.layers, call.layers + call.num_layers, is_multiple<kWideBytes>) &&
              std::all_of(call.read, call.read + call.num_layers, is_multiple<kWideBytes>);
  for (int64_t i = 0; i < call.num_parts; ++i) {
    const auto& [strides, rotation] = call.parts[i];
    const int32_t run = rotation.neox ? rotation.dim / 2 : rotation.dim;
    wide = wide && strides.in_vectors_of(lanes) && run % lanes == 0 && rotation.first % lanes == 0;
    if (rotation.dim == 0) continue;
    wide = wide && is_multiple<kWideBytes>(call.cos) && is_multiple<kWideBytes>(call.sin);
  }
  return wide;
}

template <class Format, int kBytes>
Launch make_launch(const AlignCall& call) {
  constexpr int kLanes = kBytes / sizeof(typename Format::Code);
  Launch launch{};
  launch.scratch = static_cast<unsigned char*>(call.scratch);
  launch.page_stride = call.page_stride, launch.read_stride = call.read_stride;
  for (int64_t i = 0; i < call.num_parts; ++i) {
    launch.parts[i] = call.parts[i];
    launch.items_per_head[i] = count_items<kLanes>(call.parts[i]);
    const int32_t items = call.parts[i].strides.heads * launch.items_per_head[i];
    if (i == 0) launch.items_of_keys = items;
    launch.items += items;
  }
  launch.tokens_per_block = std::max(1, kThreads / launch.items);
  launch.num_tokens = call.num_tokens;
  launch.sources = call.sources, launch.targets = call.targets, launch.angles = call.angles;
  launch.cos = call.cos, launch.sin = call.sin, launch.num_pairs = call.num_pairs;
  return launch;
}

template <class Format, int kBytes>
Status run_call(const AlignCall& call, void* stream) {
  Launch launch = make_launch<Format, kBytes>(call);
  const int64_t step = call.scratch ? std::min<int64_t>(call.scratch_layers, kLayersPerLaunch)
                                    : kLayersPerLaunch;
  if (step < 1) return kInvalid;
  const Stage stages[] = {call.scratch ? Stage::kGather : Stage::kDirect, Stage::kScatter};
  for (int64_t first = 0; first < call.num_layers; first += step) {
    launch.num_layers = static_cast<int32_t>(std::min(step, call.num_layers - first));
    for (int32_t i = 0; i < launch.num_layers; ++i) {
      launch.layers[i] = static_cast<unsigned char*>(call.layers[first + i]);
      launch.read[i] = static_cast<const unsigned char*>(call.read[first + i]);
    }
    for (int i = 0; i < (call.scratch ? 2 : 1); ++i) {
      launch.stage = stages[i];
      if (const Status status = run_grid<Format, kBytes>(launch, stream)) return status;
    }
  }
  return kSuccess;
}

}  // namespace segreuse

// Size of AlignCall: vllm_segreuse/kernels/cuda.py compares it with its own.
SEGREUSE_EXPORT int64_t segreuse_align_call_bytes() { return sizeof(segreuse::AlignCall); }

// 0 if the kernels can run on the current device, or a code for `segreuse_message`: the driver may
// be too old for this build, or the build lack the device's architecture.
SEGREUSE_EXPORT int segreuse_status() {
#if defined(__CUDACC__)
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, segreuse::align_kernel<segreuse::BFloat16, 16>);
#else
  return segreuse::kSuccess;
#endif
}

// Bytes that a thread moves at once: 16, or one element; 0 for an unknown format.
SEGREUSE_EXPORT int64_t segreuse_align_vector_bytes(const segreuse::AlignCall* call) {
  return segreuse::with_format(call->format, [&](auto format) -> int64_t {
    constexpr int kElementBytes = sizeof(typename decltype(format)::Code);
    const bool wide = segreuse::is_wide(*call, segreuse::kWideBytes / kElementBytes);
    return wide ? segreuse::kWideBytes : kElementBytes;
  });
}

// Bytes of scratch per layer, if sources and targets may overlap.
SEGREUSE_EXPORT int64_t segreuse_align_scratch_bytes(const segreuse::AlignCall* call) {
  const int64_t vector_bytes = segreuse_align_vector_bytes(call);
  return segreuse::with_format(call->format, [&](auto format) -> int64_t {
    using Format = decltype(format);
    constexpr int kNarrow = sizeof(typename Format::Code), kWide = segreuse::kWideBytes;
    const int32_t items = vector_bytes == kWide
                              ? segreuse::make_launch<Format, kWide>(*call).items
                              : segreuse::make_launch<Format, kNarrow>(*call).items;
    return call->num_tokens * 2 * items * vector_bytes;
  });
}

// Queues the launches on the current device. 0, or a code for `segreuse_message`.
SEGREUSE_EXPORT int segreuse_align(const segreuse::AlignCall* call, void* stream) {
  const int64_t vector_bytes = segreuse_align_vector_bytes(call);
  if (vector_bytes == 0) return segreuse::kInvalid;
  if (call->num_tokens == 0) return segreuse::kSuccess;
  return segreuse::with_format(call->format, [&](auto format) {
    using Format = decltype(format);
    constexpr int kNarrow = sizeof(typename Format::Code), kWide = segreuse::kWideBytes;
    return vector_bytes == kWide ? segreuse::run_call<Format, kWide>(*call, stream)
                                 : segreuse::run_call<Format, kNarrow>(*call, stream);
  });
}

SEGREUSE_EXPORT const char* segreuse_message(int status) {
#if defined(__CUDACC__)
  return cudaGetErrorString(static_cast<cudaError_t>(status));
#else
  return status == segreuse::kSuccess ? "no error" : "invalid argument";
#endif
}
