// Trees and gathers as XLA custom calls for the CPU; native.py tells when they are used.
//
// A tree here is what tree_kernels.py builds, and every sum, comparison and residual is computed in
// the same order as there: the results agree bit for bit.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Numbers = ffi::Span<const int64_t>;

// FANOUT in tree_kernels.py.
constexpr int kShift = 4;
constexpr int kFanout = 1 << kShift;

// With fewer rows, telling another thread of them takes longer than doing their work.
constexpr int64_t kManyRows = 1024;

// Runs work(0), ..., work(tasks - 1) on the threads of the pool and on this one, and waits for all.
// This thread takes whatever no other has begun: a pool that is busy delays nothing.
template <typename Work>
void ForEach(ffi::ThreadPool& pool, int64_t tasks, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // One that begins late finds no task left, and does not touch `work`, which is gone by then.
  auto run = [progress, tasks, &work] {
    for (int64_t task; (task = progress->next++) < tasks; ++progress->done) work(task);
  };
  const int64_t helpers = std::min(tasks, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (progress->done < tasks) std::this_thread::yield();
}

// Trees

// In the order of OPS in tree_kernels.py.
enum Op : int64_t { kSum, kMin, kMax, kMinPositive };

inline float Sum4(const float* c) { return ((c[0] + c[1]) + c[2]) + c[3]; }

inline float Sum(const float* c) {
  return ((Sum4(c) + Sum4(c + 4)) + Sum4(c + 8)) + Sum4(c + 12);
}

// The winner among all children, found by halves. Spelled out, for a loop keeps them in memory.
template <typename Pick>
inline float Pairwise(const float* children, Pick pick) {
  static_assert(kFanout == 16);
  const auto of2 = [&](int i) { return pick(children[i], children[i + 8]); };
  const auto of4 = [&](int i) { return pick(of2(i), of2(i + 4)); };
  const auto of8 = [&](int i) { return pick(of4(i), of4(i + 2)); };
  return pick(of8(0), of8(1));
}

// The least of those that are positive, and zero if none is.
//
// As signed numbers, one less than their bits with the first one flipped, positive floats keep their
// order and zero comes last.
inline float MinPositive(const float* children) {
  using Bits = uint32_t __attribute__((vector_size(16)));
  using Order = int32_t __attribute__((vector_size(16)));
  constexpr uint32_t kFirst = 0x80000000u;
  static_assert(kFanout == 16);
  const auto order = [&](int i) {
    Bits bits;
    std::memcpy(&bits, children + i, sizeof(bits));
    return Order((bits ^ kFirst) - 1);
  };
  const auto least = [](Order a, Order b) {
    const Order less = a < b;
    return (a & less) | (b & ~less);
  };
  const Order four = least(least(order(0), order(4)), least(order(8), order(12)));
  const int32_t one = std::min(std::min(four[0], four[1]), std::min(four[2], four[3]));
  const uint32_t bits = (static_cast<uint32_t>(one) + 1) ^ kFirst;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float Combine(int64_t op, const float* children) {
  if (op == kSum) return Sum(children);
  if (op == kMax) return Pairwise(children, [](float a, float b) { return a > b ? a : b; });
  if (op == kMin) return Pairwise(children, [](float a, float b) { return a < b ? a : b; });
  return MinPositive(children);
}

// How many nodes ahead to fetch what is needed from memory.
constexpr size_t kAhead = 16;

// Recomputes the nodes above changed leaves, level by level, as far as they change.
//
// `nodes` holds the parents of the leaves, `starts` and `counts` tell where each level begins and
// how many nodes it has, from the leaves to the root.
void Refresh(int64_t op, float* tree, const int64_t* starts, Numbers counts,
             std::vector<int32_t> nodes) {
  for (size_t level = 1; level < counts.size() && !nodes.empty(); ++level) {
    const float* below = tree + starts[level - 1];
    float* here = tree + starts[level];
    const int64_t count = counts.begin()[level];
    if (static_cast<int64_t>(nodes.size()) > count) {
      nodes.resize(count);
      for (int64_t i = 0; i < count; ++i) nodes[i] = static_cast<int32_t>(i);
    }
    size_t kept = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const int32_t node = nodes[i], soon = nodes[std::min(i + kAhead, nodes.size() - 1)];
      __builtin_prefetch(below + int64_t{soon} * kFanout);
      __builtin_prefetch(here + soon, 1);
      const float value = Combine(op, below + int64_t{node} * kFanout);
      // Bits, because -0 is not 0 here.
      if (std::memcmp(&value, here + node, sizeof(value)) == 0) continue;
      here[node] = value;
      const int32_t parent = node >> kShift;
      if (kept == 0 || nodes[kept - 1] != parent) nodes[kept++] = parent;
    }
    nodes.resize(kept);
  }
}

// All in one thread: two of them wait for each other longer than one takes.
ffi::Error SetLeaves(Floats nodes, Ints index, Floats value, ffi::Result<Floats> out,
                     ffi::Result<Floats> roots, ffi::Result<Ints> gained, Numbers ops,
                     Numbers starts, Numbers counts) {
  const int64_t trees = index.dimensions()[0], rows = index.dimensions()[1];
  if (trees == 0) return ffi::Error::Success();
  const int64_t size = nodes.element_count() / trees;
  const int64_t capacity = counts.begin()[0], levels = counts.size(), num_ops = ops.size();
  if (out->typed_data() != nodes.typed_data()) {
    std::memcpy(out->typed_data(), nodes.typed_data(), nodes.size_bytes());
  }
  std::vector<int32_t> parents;
  for (int64_t t = 0; t < trees; ++t) {
    float* tree = out->typed_data() + t * size;
    const int32_t* at = index.typed_data() + t * rows;
    const float* to = value.typed_data() + t * rows;
    const auto legal = [&](int64_t i) { return at[i] >= 0 && at[i] < capacity; };
    for (int64_t i = 0; i < rows; ++i) {
      if (legal(i)) __builtin_prefetch(tree + at[i], 1);
    }
    parents.clear();
    parents.reserve(rows);
    int32_t gain = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (!legal(i)) continue;
      float& leaf = tree[at[i]];
      gain += (to[i] > 0) - (leaf > 0);
      leaf = to[i];
      const int32_t parent = at[i] >> kShift;
      if (parents.empty() || parents.back() != parent) parents.push_back(parent);
    }
    gained->typed_data()[t] = gain;
    // No two operations share a node above the leaves.
    for (int64_t k = 0; k < num_ops; ++k) {
      const int64_t* level_starts = starts.begin() + k * levels;
      Refresh(ops.begin()[k], tree, level_starts, counts, parents);
      roots->typed_data()[t * num_ops + k] = tree[level_starts[levels - 1]];
    }
  }
  return ffi::Error::Success();
}

// As XLA's minimum and maximum: of a NaN and a number they are NaN.
inline float Min(float a, float b) { return (a < b) | (a != a) ? a : b; }
inline float Max(float a, float b) { return (a > b) | (a != a) ? a : b; }

// The child that holds `r`, which becomes the residual within it. Without a branch, which nobody
// could predict.
//
// It may be a child that is not there: the last one is chosen of a node without mass, and any of a
// node whose mass is not the sum of its children's.
inline int32_t Choose(const float* masses, float& r) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = Sum4(masses + 4 * i);
  const float second = sums[0] + sums[1], third = second + sums[2];
  // A rounded residual may equal the node's whole mass; the last float below keeps it inside.
  r = Min(r, (third + sums[3]) * (1.0f - 0x1p-24f));
  const float before[4] = {0.0f, sums[0], second, third};
  const int group = (r >= before[1]) + (r >= before[2]) + (r >= before[3]);
  const float base = before[group];
  const float* inside = masses + 4 * group;
  const float pair = inside[0] + inside[1];
  const float bounds[4] = {base, base + inside[0], base + pair, base + (pair + inside[2])};
  const int child = (r >= bounds[1]) + (r >= bounds[2]) + (r >= bounds[3]);
  // Of masses that are zero, a bound may lie below the base by a rounding.
  r -= Max(bounds[child], base);
  return 4 * group + child;
}

ffi::Error Find(ffi::ThreadPool pool, Floats nodes, Floats prefix, Floats refine,
                ffi::Result<Ints> found, int64_t middle, Numbers starts, Numbers counts) {
  const int64_t trees = prefix.dimensions()[0], rows = prefix.dimensions()[1];
  if (trees * rows == 0) return ffi::Error::Success();
  const int64_t size = nodes.element_count() / trees, depth = starts.size();
  // So many descend side by side, and fetch their next nodes ahead.
  constexpr int64_t kAbreast = 32;
  const int64_t groups = (rows + kAbreast - 1) / kAbreast;
  const auto descend = [&](int64_t t, int64_t begin) {
    const float* tree = nodes.typed_data() + t * size;
    const int64_t first = t * rows + begin, n = std::min(kAbreast, rows - begin);
    float residual[kAbreast];
    std::copy_n(prefix.typed_data() + first, n, residual);
    int32_t* node = found->typed_data() + first;
    std::fill_n(node, n, 0);
    for (int64_t level = 0; level < depth; ++level) {
      const float* here = tree + starts.begin()[level];
      const float* next = tree + starts.begin()[std::min(level + 1, depth - 1)];
      const int32_t last = static_cast<int32_t>(counts.begin()[level] - 1);
      for (int64_t i = 0; i < n; ++i) {
        const float* children = here + int64_t{node[i]} * kFanout;
        if (level == middle && middle > 0) {
          const float mass = tree[starts.begin()[level - 1] + node[i]];
          residual[i] += refine.typed_data()[first + i];
          if (residual[i] >= mass) residual[i] = Max(residual[i] - mass, 0.0f);
        }
        node[i] = std::min(node[i] * kFanout + Choose(children, residual[i]), last);
        __builtin_prefetch(next + int64_t{node[i]} * kFanout);
      }
    }
  };
  const int64_t together = trees * rows >= kManyRows ? std::max<int64_t>(groups / 8, 1) : groups;
  const int64_t parts = (groups + together - 1) / together;
  const auto part = [&](int64_t task) {
    const int64_t begin = task % parts * together;
    for (int64_t g = begin; g < std::min(begin + together, groups); ++g) {
      descend(task / parts, g * kAbreast);
    }
  };
  if (parts > 1) {
    ForEach(pool, trees * parts, part);
  } else {
    for (int64_t t = 0; t < trees; ++t) part(t);
  }
  return ffi::Error::Success();
}

ffi::Error GetLeaves(Floats nodes, Ints index, ffi::Result<Floats> values, int64_t capacity) {
  const int64_t trees = index.dimensions()[0], rows = index.dimensions()[1];
  if (trees * rows == 0) return ffi::Error::Success();
  const int64_t size = nodes.element_count() / trees;
  for (int64_t i = 0; i < trees * rows; ++i) {
    const int64_t at = std::clamp<int64_t>(index.typed_data()[i], 0, capacity - 1);
    values->typed_data()[i] = nodes.typed_data()[i / rows * size + at];
  }
  return ffi::Error::Success();
}

// Storage

// Copies runs of `length` slots of several arrays at once, each from slot `start` of a ring on.
//
// A ring has `slots` slots, one ring lies behind the other, and `start` counts the slots of all of
// them. A slot of the k-th array has `widths[k]` bytes.
ffi::Error Take(Ints start, ffi::RemainingArgs arrays, ffi::RemainingRets outs, int64_t slots,
                int64_t length, Numbers widths) {
  struct Array {
    const char* from;
    char* to;
    int64_t width, last;
  };
  std::vector<Array> all;
  for (size_t k = 0; k < arrays.size(); ++k) {
    auto array = arrays.get<ffi::AnyBuffer>(k);
    auto out = outs.get<ffi::AnyBuffer>(k);
    if (array.has_error()) return array.error();
    if (out.has_error()) return out.error();
    const int64_t width = widths.begin()[k];
    if (width == 0) continue;
    all.push_back({static_cast<const char*>(array->untyped_data()),
                   static_cast<char*>((*out)->untyped_data()), width,
                   static_cast<int64_t>(array->size_bytes()) / width - 1});
  }
  const int64_t rows = start.element_count();
  // One array after the other: a core waits for some ten lines at a time, in few pages.
  const auto copy = [&](const Array& array) {
    constexpr int64_t kAhead = 16, kLine = 64, kFar = 8 * kLine;
    const int64_t bytes = length * array.width;
    const auto first = [&](int64_t row) {
      return std::clamp<int64_t>(start.typed_data()[row], 0, array.last);
    };
    const auto fetch = [&](int64_t row) {
      // Of a longer run the hardware sees the rest coming by itself.
      const char* from = array.from + first(row) * array.width;
      const int64_t near = std::min(bytes, kFar);
      for (int64_t b = 0; b < near; b += kLine) __builtin_prefetch(from + b);
      __builtin_prefetch(from + near - 1);
    };
    for (int64_t row = 0; row < std::min(kAhead, rows); ++row) fetch(row);
    for (int64_t row = 0; row < rows; ++row) {
      if (row + kAhead < rows) fetch(row + kAhead);
      const int64_t slot = first(row), within = length > 1 ? slot % slots : 0;
      const int64_t straight = std::min(length, slots - within) * array.width;
      char* to = array.to + row * bytes;
      std::memcpy(to, array.from + slot * array.width, straight);
      // What goes around the end of a ring.
      if (straight < bytes) {
        std::memcpy(to + straight, array.from + (slot - within) * array.width, bytes - straight);
      }
    }
  };
  for (const Array& array : all) copy(array);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_set_leaves, SetLeaves,
                              ffi::Ffi::Bind()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Ints>()
                                  .Attr<Numbers>("ops")
                                  .Attr<Numbers>("starts")
                                  .Attr<Numbers>("counts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_find, Find,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("middle")
                                  .Attr<Numbers>("starts")
                                  .Attr<Numbers>("counts"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_get_leaves, GetLeaves,
                              ffi::Ffi::Bind()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("capacity"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_take, Take,
                              ffi::Ffi::Bind()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("slots")
                                  .Attr<int64_t>("length")
                                  .Attr<Numbers>("widths"));
