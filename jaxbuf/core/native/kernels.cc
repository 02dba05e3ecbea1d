// Trees and gathers as XLA custom calls for the CPU. __init__.py says when they are used.
//
// The trees are those of segment_tree.py, and every sum, comparison and residual is computed in the
// same order as there, so that the results are bitwise equal.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Words = ffi::Buffer<ffi::U32>;
using Flags = ffi::Buffer<ffi::PRED>;
using Numbers = ffi::Span<const int64_t>;

// Attributes as parameters, from which their names are known.
constexpr char kCapacity[] = "capacity", kOps[] = "ops", kStarts[] = "starts";
constexpr char kPastEnd[] = "past_end", kSizes[] = "sizes";
using Capacity = ffi::Attr<int64_t, kCapacity>;
using Sizes = ffi::Attr<Numbers, kSizes>;

// FANOUT in segment_tree.py.
constexpr int kShift = 4;
constexpr int kFanout = 1 << kShift;

// Below this amount of work, handing it to another thread takes longer than doing it.
constexpr int64_t kManyRows = 1024;
constexpr int64_t kManyBytes = 1 << 18;
// More parts than threads, so that all threads end at about the same time.
constexpr int64_t kManyParts = 16;

// The number of rows or nodes by which to prefetch from memory.
constexpr int64_t kAhead = 16;

// Runs work(0), ..., work(tasks - 1), so many `together`, on the pool's threads and on this one, and
// waits for them. This thread runs all tasks that no other thread has begun, so a busy pool causes
// no delay.
template <typename Work>
void ForEach(ffi::ThreadPool& pool, int64_t tasks, int64_t together, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  // A thread that begins late finds no task left and does not touch `work`, which is gone by then.
  auto run = [progress, tasks, together, &work] {
    for (int64_t task; (task = progress->next.fetch_add(together)) < tasks;) {
      const int64_t end = std::min(task + together, tasks), count = end - task;
      while (task < end) work(task++);
      progress->done += count;
    }
  };
  const int64_t parts = tasks > together ? (tasks + together - 1) / together : 1;
  const int64_t helpers = std::min(parts, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  run();
  while (progress->done < tasks) std::this_thread::yield();
}

// Returns which part of an operand the t-th lane under vmap works on. An operand that is the same
// for all lanes of an axis has length 1 along it.
int64_t PartOf(int64_t t, ffi::Span<const int64_t> own, ffi::Span<const int64_t> all,
               size_t axes) {
  int64_t part = 0, stride = 1;
  for (size_t k = axes; k-- > 0;) {
    if (own[k] > 1) part += t % all[k] * stride;
    t /= all[k];
    stride *= own[k];
  }
  return part;
}

int64_t Product(ffi::Span<const int64_t> dimensions, size_t axes) {
  int64_t product = 1;
  for (size_t k = 0; k < axes; ++k) product *= dimensions[k];
  return product;
}

// Calls work(rows, lane) for each lane under vmap of a result that has rows. lane(array) is where
// the numbers of the lane begin in an operand or a result.
template <typename Result, typename Work>
ffi::Error ForLanes(const Result& result, const Work& work) {
  const auto all = result.dimensions();
  const size_t axes = all.size() - 1;
  const int64_t lanes = Product(all, axes);
  for (int64_t t = 0; t < lanes; ++t) {
    work(all[axes], [&](const auto& array) {
      const auto own = array.dimensions();
      const int64_t length = array.element_count() / Product(own, axes);
      return array.typed_data() + PartOf(t, own, all, axes) * length;
    });
  }
  return ffi::Error::Success();
}

// Copies an array to a result that XLA has not laid in the memory of it.
template <typename Array>
void CopyUnlessSame(const Array& from, Array& to) {
  if (to.typed_data() != from.typed_data()) {
    std::memcpy(to.typed_data(), from.typed_data(), from.size_bytes());
  }
}

// Trees

struct Level {
  int64_t count, start, width;
};

// From the leaves to the children of the root.
std::vector<Level> Levels(int64_t capacity, int64_t ops) {
  std::vector<Level> levels{{capacity, 0, kFanout}};
  while (levels.back().count > kFanout) {
    const Level below = levels.back();
    const int64_t blocks = (below.count + kFanout - 1) / kFanout;
    levels.push_back({blocks, below.start + blocks * below.width, kFanout * (ops + 1)});
  }
  return levels;
}

// In the order of OPS in segment_tree.py. The count comes after the operations of a tree.
enum Op : int64_t { kSum, kMin, kMax, kMinPositive, kCount };

inline int32_t AsBits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

constexpr int32_t kInfinity = 0x7F800000;

// The bits of floats, with the lower bits of negative ones flipped, have their order as integers.
inline int32_t Ordered(int32_t bits) { return bits < 0 ? bits ^ 0x7FFFFFFF : bits; }

// Reads a float from an array of bits.
using Mass __attribute__((may_alias)) = float;

inline float Sum4(const Mass* c) { return ((c[0] + c[1]) + c[2]) + c[3]; }

inline float Sum(const Mass* c) {
  return ((Sum4(c) + Sum4(c + 4)) + Sum4(c + 8)) + Sum4(c + 12);
}

// Returns whether a leaf counts.
inline bool IsMass(int32_t bits) { return (bits > 0) & (bits < kInfinity); }

inline int32_t Combine(int64_t op, const int32_t* children, bool leaves) {
  if (op == kSum) return AsBits(Sum(reinterpret_cast<const Mass*>(children)));
  if (op == kCount) {
    int32_t count = 0;
    for (int i = 0; i < kFanout; ++i) {
      count += leaves ? IsMass(children[i]) : children[i];
    }
    return count;
  }
  if (op == kMinPositive) {
    int32_t least = kInfinity;
    for (int i = 0; i < kFanout; ++i) {
      least = std::min(least, children[i] > 0 ? children[i] : kInfinity);
    }
    return least < kInfinity ? least : 0;
  }
  int32_t most = Ordered(children[0]);
  for (int i = 1; i < kFanout; ++i) {
    const int32_t other = Ordered(children[i]);
    most = op == kMax ? std::max(most, other) : std::min(most, other);
  }
  return Ordered(most);
}

// Recomputes the nodes above changed leaves, level by level, and stops where nothing changes: a sum
// changes with each of its leaves, an extreme rarely does.
//
// `nodes` holds the parents of the leaves, each with one bit for every row of it that may change.
void Refresh(int32_t* tree, const std::vector<Level>& levels, const std::vector<int64_t>& rows,
             std::vector<std::pair<int32_t, uint32_t>> nodes) {
  const uint32_t every = (1u << rows.size()) - 1;
  for (size_t l = 1; l < levels.size() && !nodes.empty(); ++l) {
    const Level &below = levels[l - 1], &level = levels[l];
    if (static_cast<int64_t>(nodes.size()) > level.count) {
      nodes.resize(level.count);
      for (int64_t i = 0; i < level.count; ++i) nodes[i] = {static_cast<int32_t>(i), every};
    }
    const auto block = [&](int32_t node) { return tree + below.start + node * below.width; };
    const auto place = [&](int32_t node) {
      return tree + level.start + (node >> kShift) * level.width + (node & (kFanout - 1));
    };
    size_t kept = 0;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const int32_t soon = nodes[std::min<size_t>(i + kAhead, nodes.size() - 1)].first;
      __builtin_prefetch(block(soon));
      for (size_t r = 0; r < rows.size(); ++r) __builtin_prefetch(place(soon) + r * kFanout, 1);
      const auto [node, may_change] = nodes[i];
      uint32_t changed = 0;
      for (size_t r = 0; r < rows.size(); ++r) {
        if (!(may_change >> r & 1)) continue;
        const int32_t value = Combine(rows[r], block(node) + (l > 1 ? r * kFanout : 0), l == 1);
        int32_t& here = place(node)[r * kFanout];
        changed |= uint32_t{value != here} << r;
        here = value;
      }
      if (!changed) continue;
      const int32_t parent = node >> kShift;
      if (kept > 0 && nodes[kept - 1].first == parent) {
        nodes[kept - 1].second |= changed;
      } else {
        nodes[kept++] = {parent, changed};
      }
    }
    nodes.resize(kept);
  }
}

// All work is done in one thread, since two would wait for each other longer than one takes.
ffi::Error SetLeaves(Ints nodes, Ints index, Floats value, ffi::Result<Ints> out,
                     ffi::Result<Ints> roots, ffi::Attr<Numbers, kOps> ops, Capacity capacity) {
  const size_t axes = nodes.dimensions().size() - 1;
  const int64_t trees = Product(nodes.dimensions(), axes), size = nodes.dimensions()[axes];
  const int64_t count = index.dimensions()[axes];
  const std::vector<Level> levels = Levels(*capacity, ops->size());
  std::vector<int64_t> rows(ops->begin(), ops->end());
  rows.push_back(kCount);
  const uint32_t every = (1u << rows.size()) - 1;
  CopyUnlessSame(nodes, *out);
  for (int64_t t = 0; t < trees; ++t) {
    int32_t* tree = out->typed_data() + t * size;
    const int32_t* at = index.typed_data() + t * count;
    const int32_t* to = static_cast<const int32_t*>(value.untyped_data()) + t * count;
    const auto legal = [&](int64_t i) { return at[i] >= 0 && at[i] < *capacity; };
    for (int64_t i = 0; i < count; ++i) {
      if (legal(i)) __builtin_prefetch(tree + at[i], 1);
    }
    std::vector<std::pair<int32_t, uint32_t>> parents;
    for (int64_t i = 0; i < count; ++i) {
      if (!legal(i)) continue;
      const int32_t parent = at[i] >> kShift;
      // A sum changes with each of its leaves, a count rarely does.
      const bool counts = IsMass(tree[at[i]]) != IsMass(to[i]);
      tree[at[i]] = to[i];
      const uint32_t may_change = counts ? every : every >> 1;
      if (parents.empty() || parents.back().first != parent) {
        parents.push_back({parent, may_change});
      } else {
        parents.back().second |= may_change;
      }
    }
    Refresh(tree, levels, rows, std::move(parents));
    const bool only = levels.size() == 1;
    for (size_t r = 0; r < rows.size(); ++r) {
      const int32_t* top = tree + levels.back().start + (only ? 0 : r * kFanout);
      roots->typed_data()[t * rows.size() + r] = Combine(rows[r], top, only);
    }
  }
  return ffi::Error::Success();
}

// Compiles a function for several sets of vector instructions; the processor's best one runs.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12
#define JAXBUF_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JAXBUF_VECTORS
#endif

// This many rows descend side by side and prefetch their next nodes. GCC 12 vectorizes loops over
// them only if all that is chosen are floats, by one comparison of floats at a time.
constexpr int kAbreast = 32;
using Lanes = float[kAbreast];

// Like XLA's minimum and maximum, which return NaN if either operand is NaN.
inline float Min(float a, float b) { return a < b ? a : a != a ? a : b; }
inline float Max(float a, float b) { return a > b ? a : a != a ? a : b; }

// Copies the children of n nodes, so that the k-th child of all of them is in columns[k].
JAXBUF_VECTORS void Transpose(const int32_t* level, const int32_t* node, int64_t width, int64_t n,
                              Lanes* __restrict columns) {
  using Four = int32_t __attribute__((vector_size(16)));
  for (int64_t i = 0; i < n; i += 4) {
    for (int k = 0; k < kFanout; k += 4) {
      Four row[4];
      for (int j = 0; j < 4; ++j) std::memcpy(&row[j], level + node[i + j] * width + k, sizeof(Four));
      for (int round = 0; round < 2; ++round) {
        const Four a = row[0], b = row[1], c = row[2], d = row[3];
        row[0] = Four{a[0], c[0], a[1], c[1]};
        row[1] = Four{a[2], c[2], a[3], c[3]};
        row[2] = Four{b[0], d[0], b[1], d[1]};
        row[3] = Four{b[2], d[2], b[3], d[3]};
      }
      for (int j = 0; j < 4; ++j) std::memcpy(&columns[k + j][i], &row[j], sizeof(Four));
    }
  }
}

// The sum of four masses of a node.
inline float SumOf4(const Lanes* columns, int k, int i) {
  return ((columns[k][i] + columns[k + 1][i]) + columns[k + 2][i]) + columns[k + 3][i];
}

// Adds to the residuals within their nodes; one past the node's end wraps around to its start.
JAXBUF_VECTORS void Refine(const Lanes* columns, const float* finer, float* __restrict residual) {
  for (int i = 0; i < kAbreast; ++i) {
    const float mass = ((SumOf4(columns, 0, i) + SumOf4(columns, 4, i)) + SumOf4(columns, 8, i)) +
                       SumOf4(columns, 12, i);
    const float r = residual[i] + finer[i], wrapped = Max(r - mass, 0.0f);
    residual[i] = r >= mass ? wrapped : r;
  }
}

// Returns the choice for `r` among four, between which lie three rising bounds.
inline float Past(float r, const float* bounds, float a, float b, float c, float d) {
  const float upto1 = r >= bounds[0] ? b : a, upto2 = r >= bounds[1] ? c : upto1;
  return r >= bounds[2] ? d : upto2;
}

// Chooses the child that holds each residual, tells its mass, and sets the residual to that within.
//
// The child may not exist: for a node without mass it is the last one, and for a node whose mass is
// not the sum of its children's it may be any.
JAXBUF_VECTORS void Choose(const Lanes* columns, float* __restrict residual,
                           float* __restrict child, float* __restrict mass) {
  for (int i = 0; i < kAbreast; ++i) {
    const float first = SumOf4(columns, 0, i), second = first + SumOf4(columns, 4, i);
    const float third = second + SumOf4(columns, 8, i);
    // A rounded residual may equal the node's mass; it is limited to the largest float below it.
    const float r = Min(residual[i], (third + SumOf4(columns, 12, i)) * (1.0f - 0x1p-24f));
    const float groups[3] = {first, second, third};
    float m[4];
    for (int k = 0; k < 4; ++k) {
      const Lanes* c = columns + k;
      m[k] = Past(r, groups, c[0][i], c[4][i], c[8][i], c[12][i]);
    }
    const float base = Past(r, groups, 0.0f, first, second, third), pair = m[0] + m[1];
    const float within[3] = {base + m[0], base + pair, base + (pair + m[2])};
    // If masses are zero, a bound may be smaller than the base by a rounding error.
    residual[i] = r - Max(Past(r, within, 0.0f, within[0], within[1], within[2]), base);
    child[i] = Past(r, groups, 0, 4, 8, 12) + Past(r, within, 0, 1, 2, 3);
    mass[i] = Past(r, within, m[0], m[1], m[2], m[3]);
  }
}

// Returns the last leaf with mass. `start` returns where the sums of a level begin.
template <typename Starts>
int32_t LastLeaf(const std::vector<Level>& levels, const Starts& start) {
  int64_t node = 0;
  for (auto level = levels.rbegin(); level != levels.rend(); ++level) {
    const Mass* masses = reinterpret_cast<const Mass*>(start(*level) + node * level->width);
    int64_t child = kFanout - 1;
    while (child > 0 && !(masses[child] > 0.0f)) --child;
    node = std::min(node * kFanout + child, level->count - 1);
  }
  return static_cast<int32_t>(node);
}

ffi::Error Find(ffi::ThreadPool pool, Ints nodes, Floats prefix, Floats refine,
                ffi::Result<Ints> found, ffi::Result<Floats> value, int64_t refined, int64_t row,
                int64_t ops, int64_t capacity) {
  const auto all = found->dimensions();
  const size_t axes = all.size() - 1;
  const int64_t lanes = Product(all, axes), rows = all[axes], size = nodes.dimensions()[axes];
  if (lanes * rows == 0) return ffi::Error::Success();
  const std::vector<Level> levels = Levels(capacity, ops);
  const size_t depth = levels.size(), middle = refined ? (depth + 1) / 2 : depth;
  const int64_t groups = (rows + kAbreast - 1) / kAbreast, tasks = lanes * groups;
  const auto descend = [&](int64_t task) {
    const int64_t t = task / groups, begin = task % groups * kAbreast;
    const auto part = [&](const auto& array) { return PartOf(t, array.dimensions(), all, axes); };
    const int32_t* tree = nodes.typed_data() + part(nodes) * size;
    const float* from = prefix.typed_data() + part(prefix) * rows + begin;
    const float* finer = refine.typed_data() + part(refine) * rows + begin;
    const int64_t n = std::min<int64_t>(kAbreast, rows - begin);
    // Lanes without a row search for 0.
    Lanes columns[kFanout]{}, residual{}, offset{}, child, mass;
    int32_t node[kAbreast]{};
    std::copy_n(from, n, residual);
    std::copy_n(finer, n, offset);
    const auto start = [&](const Level& of) {
      return tree + of.start + (of.start > 0 ? row * kFanout : 0);
    };
    for (size_t i = 0; i < depth; ++i) {
      const Level& level = levels[depth - 1 - i];
      const Level& next = levels[depth - 1 - std::min(i + 1, depth - 1)];
      Transpose(start(level), node, level.width, n, columns);
      if (i == middle) Refine(columns, offset, residual);
      Choose(columns, residual, child, mass);
      const int32_t* below = start(next);
      for (int64_t k = 0; k < n; ++k) {
        const int64_t below_node = int64_t{node[k]} * kFanout + static_cast<int64_t>(child[k]);
        node[k] = static_cast<int32_t>(std::min<int64_t>(below_node, level.count - 1));
        __builtin_prefetch(below + node[k] * next.width);
      }
    }
    // Rounding may have put a point at the total, or past it.
    const float total = Sum(reinterpret_cast<const Mass*>(start(levels.back())));
    for (int64_t k = 0; k < n; ++k) {
      if (!(from[k] >= total)) continue;
      node[k] = LastLeaf(levels, start);
      mass[k] = *reinterpret_cast<const Mass*>(tree + node[k]);
    }
    std::copy_n(node, n, found->typed_data() + t * rows + begin);
    std::copy_n(mass, n, value->typed_data() + t * rows + begin);
  };
  const bool many = groups > 1 && lanes * rows >= kManyRows;
  ForEach(pool, tasks, many ? std::max<int64_t>(groups / 8, 1) : tasks, descend);
  return ffi::Error::Success();
}

ffi::Error Read(Ints nodes, Ints index, ffi::Result<Ints> same, ffi::Result<Ints> bits,
                Capacity capacity) {
  return ForLanes(*bits, [&](int64_t rows, const auto& lane) {
    const int32_t *tree = lane(nodes), *at = lane(index);
    std::copy_n(at, rows, lane(*same));
    int32_t* to = lane(*bits);
    for (int64_t i = 0; i < rows; ++i) to[i] = tree[std::clamp<int64_t>(at[i], 0, *capacity - 1)];
  });
}

// Ranking

// Puts rows into the tree of ranking.py, best first. Each row replaces the lowest item if that ranks
// below it. Items placed earlier rank above all remaining rows, so that they are not replaced.
ffi::Error Place(Words nodes, Words next, Words held, Words rank, Words arrival,
                 ffi::Result<Words> out, ffi::Result<Ints> slot, Capacity capacity) {
  const size_t axes = slot->dimensions().size() - 1;
  const int64_t trees = Product(slot->dimensions(), axes), rows = slot->dimensions()[axes];
  const int64_t size = 2 * nodes.dimensions()[axes];
  std::vector<Level> levels = Levels(*capacity, 0);
  const size_t top = levels.size();
  // The root lies behind the block of its children.
  levels.push_back({1, levels.back().start + kFanout, kFanout});
  CopyUnlessSame(nodes, *out);
  std::vector<int32_t> order(rows);
  for (int64_t t = 0; t < trees; ++t) {
    uint32_t* tree = out->typed_data() + t * size;
    const uint32_t *ranks = rank.typed_data() + t * rows, *arrivals = arrival.typed_data() + t * rows;
    int32_t* to = slot->typed_data() + t * rows;
    // Relative to the oldest possible number all numbers rise, even where they wrap.
    const uint32_t zero = next.typed_data()[t] ^ (1u << 31);
    const auto key = [&](uint32_t rank, uint32_t number) {
      return uint64_t{rank} << 32 | (number - zero);
    };
    const auto read = [&](int64_t node) { return key(tree[2 * node], tree[2 * node + 1]); };
    const auto write = [&](int64_t node, uint64_t item) {
      tree[2 * node] = static_cast<uint32_t>(item >> 32);
      tree[2 * node + 1] = static_cast<uint32_t>(item) + zero;
    };
    // Returns the lowest of a block of siblings, given the first of them.
    const auto lowest = [&](int64_t first) {
      std::pair<uint64_t, int64_t> least{read(first), first};
      for (int64_t i = 1; i < kFanout; ++i) {
        const uint64_t item = read(first + i);
        least = {std::min(item, least.first), item < least.first ? first + i : least.second};
      }
      return least;
    };
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a > b;
    });
    std::fill_n(to, rows, static_cast<int32_t>(*capacity));
    for (int64_t i = 0; i < rows && ranks[order[i]] > 0; ++i) {
      const uint64_t item = key(ranks[order[i]], arrivals[order[i]]);
      int64_t node = int64_t{held.typed_data()[t]} + i;
      if (node >= *capacity) {
        if (read(levels[top].start) >= item) break;
        node = 0;
        for (size_t l = top; l-- > 0;) {
          const int64_t start = levels[l].start;
          node = std::min(lowest(start + node * kFanout).second - start, levels[l].count - 1);
        }
      }
      to[order[i]] = static_cast<int32_t>(node);
      write(node, item);
      for (size_t l = 0; l < top; ++l) {
        const uint64_t least = lowest(levels[l].start + (node & ~int64_t{kFanout - 1})).first;
        node >>= kShift;
        if (read(levels[l + 1].start + node) == least) break;
        write(levels[l + 1].start + node, least);
      }
    }
  }
  return ffi::Error::Success();
}

// Sets

// Adds numbers to a set of bitset.py or removes them: changes a bit in a word of the lowest level
// and the counts above it by one. If a number has several rows, the last one counts.
ffi::Error Mark(Words nodes, Ints index, Flags member, ffi::Result<Words> out,
                ffi::Attr<Numbers, kStarts> starts, Capacity capacity) {
  constexpr int kBits = 5;
  const size_t axes = nodes.dimensions().size() - 1;
  const int64_t sets = Product(nodes.dimensions(), axes), size = nodes.dimensions()[axes];
  const int64_t rows = index.dimensions()[axes];
  CopyUnlessSame(nodes, *out);
  for (int64_t t = 0; t < sets; ++t) {
    uint32_t* set = out->typed_data() + t * size;
    for (int64_t i = t * rows; i < (t + 1) * rows; ++i) {
      const int64_t number = index.typed_data()[i];
      if (number < 0 || number >= *capacity) continue;
      uint32_t& word = set[number >> kBits];
      const uint32_t bit = 1u << (number & ((1 << kBits) - 1));
      const bool joins = member.typed_data()[i];
      if (joins == ((word & bit) != 0)) continue;
      word ^= bit;
      int64_t node = number >> kBits;
      for (size_t l = 1; l < starts->size(); ++l) {
        node >>= kBits;
        set[(*starts)[l] + node] += joins ? 1 : -1;
      }
    }
  }
  return ffi::Error::Success();
}

// Rows

// Puts `past_end` in place of numbers that a later row repeats. The numbers enter a hash table from the
// last one to the first; one that is in it already is repeated.
ffi::Error KeepLast(Ints index, ffi::Result<Ints> out, ffi::Attr<int64_t, kPastEnd> past_end) {
  const size_t axes = index.dimensions().size() - 1;
  const int64_t lanes = Product(index.dimensions(), axes), rows = index.dimensions()[axes];
  // At most a quarter of the table is full, so a search rarely passes a place that is taken.
  int bits = 1;
  while ((int64_t{1} << bits) < 4 * rows) ++bits;
  const int32_t empty = static_cast<int32_t>(*past_end);
  std::vector<int32_t> table(size_t{1} << bits);
  for (int64_t t = 0; t < lanes; ++t) {
    std::fill(table.begin(), table.end(), empty);
    for (int64_t i = (t + 1) * rows; i-- > t * rows;) {
      const int32_t number = index.typed_data()[i];
      uint64_t at = uint32_t(number) * uint64_t{0x9E3779B97F4A7C15} >> (64 - bits);
      while (table[at] != empty && table[at] != number) at = (at + 1) & (table.size() - 1);
      out->typed_data()[i] = table[at] == empty ? number : empty;
      table[at] = number;
    }
  }
  return ffi::Error::Success();
}

// Occupancies

// The items of a Ring (ring.py).
struct Ring {
  const uint32_t cursor, lap, held;
  const int64_t slots;

  Ring(const uint32_t* cursor, const uint32_t* lap, const uint32_t* held, Numbers sizes)
      : cursor(*cursor), lap(*lap), held(*held), slots(sizes[0]) {}
  bool IsLive(int32_t index) const { return static_cast<uint32_t>(index) < held; }
  uint32_t Generation(int32_t index) const {
    return lap - (index >= static_cast<int32_t>(cursor));
  }
};

// The windows of Rings (rings.py).
struct Rings {
  const uint32_t *cursor, *lap, *held;
  const int64_t rings, starts, period, length, steps, ignored, slots = rings * starts;

  Rings(const uint32_t* cursor, const uint32_t* lap, const uint32_t* held, Numbers sizes)
      : cursor(cursor), lap(lap), held(held), rings(sizes[0]), starts(sizes[1]),
        period(sizes[2]), length(sizes[3]), steps(sizes[4]), ignored(sizes[5]) {}
  // Returns the ring of a window, and the place of its first step in it.
  std::pair<int32_t, int32_t> Split(int32_t index) const {
    const uint32_t number = static_cast<uint32_t>(index), each = static_cast<uint32_t>(starts);
    const int32_t ring = static_cast<int32_t>(number / each);
    return {std::clamp<int32_t>(ring, 0, static_cast<int32_t>(rings) - 1),
            static_cast<int32_t>((number + each) % each * period)};
  }
  bool IsLive(int32_t index) const {
    const auto [ring, start] = Split(index);
    const uint32_t lap_of = static_cast<uint32_t>(length);
    const int64_t behind = static_cast<int32_t>((cursor[ring] - 1 - start + lap_of) % lap_of);
    return (index >= 0) & (index < slots) & (behind >= steps - 1) &
           (behind < static_cast<int32_t>(held[ring]) - ignored);
  }
  uint32_t Generation(int32_t index) const {
    const auto [ring, start] = Split(index);
    return lap[ring] - (start >= static_cast<int32_t>(cursor[ring]));
  }
};

template <typename Items>
ffi::Error RowsToChange(Words cursor, Words lap, Words held, Ints index, Words generation,
                        Flags wanted, Flags legal, ffi::Result<Ints> out,
                        ffi::Result<Words> refused, Sizes sizes) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const Items items(lane(cursor), lane(lap), lane(held), *sizes);
    const int32_t *at = lane(index), past_end = static_cast<int32_t>(items.slots);
    const uint32_t* of = lane(generation);
    const bool *wants = lane(wanted), *may = lane(legal);
    int32_t* __restrict to = lane(*out);
    uint32_t count = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const bool holds = wants[i] & items.IsLive(at[i]) & (items.Generation(at[i]) == of[i]);
      to[i] = holds & may[i] ? at[i] : past_end;
      count += holds & !may[i];
    }
    *lane(*refused) = count;
  });
}

template <typename Items>
ffi::Error SlotsOf(Words cursor, Words lap, Words held, Ints index, Flags valid,
                   ffi::Result<Ints> out, ffi::Result<Words> generation,
                   ffi::Result<Flags> still, Sizes sizes) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const Items items(lane(cursor), lane(lap), lane(held), *sizes);
    const int32_t *from = lane(index);
    const int32_t past_end = static_cast<int32_t>((*sizes)[sizes->size() - 1]);
    const bool* was = lane(valid);
    int32_t* __restrict to = lane(*out);
    uint32_t* __restrict of = lane(*generation);
    bool* __restrict is = lane(*still);
    for (int64_t i = 0; i < rows; ++i) {
      is[i] = was[i] & items.IsLive(from[i]);
      to[i] = is[i] ? from[i] : past_end;
      of[i] = items.Generation(to[i]);
    }
  });
}

// Chooses the slots of `rows` new items, one behind the other, and moves the ring on.
ffi::Error RingAppend(Words cursor, Words lap, Words held, ffi::Result<Ints> out,
                      ffi::Result<Words> next, ffi::Result<Words> laps,
                      ffi::Result<Words> size, Sizes sizes) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const int64_t slots = (*sizes)[0], begin = *lane(cursor), end = begin + rows;
    int32_t* __restrict to = lane(*out);
    for (int64_t i = 0, slot = begin; i < rows; ++i) {
      to[i] = static_cast<int32_t>(i + slots >= rows ? slot : slots);
      if (++slot == slots) slot = 0;
    }
    *lane(*next) = static_cast<uint32_t>(end % slots);
    *lane(*laps) = *lane(lap) + static_cast<uint32_t>(end / slots);
    *lane(*size) = static_cast<uint32_t>(std::min(*lane(held) + rows, slots));
  });
}

// Does the same for steps of each ring, and tells which windows they overwrite and complete.
ffi::Error RingsAppend(Words cursor, Words lap, Words held, ffi::Result<Ints> target,
                       ffi::Result<Ints> broken, ffi::Result<Ints> completed,
                       ffi::Result<Words> next, ffi::Result<Words> laps,
                       ffi::Result<Words> size, Sizes sizes) {
  return ForLanes(*target, [&](int64_t, const auto& lane) {
    const Rings rings(lane(cursor), lane(lap), lane(held), *sizes);
    const int64_t rows = (*sizes)[sizes->size() - 1], length = rings.length;
    // In 32 bits, which are divided in a third of the time.
    const auto within = [](int64_t number, int64_t size) {
      return static_cast<uint32_t>(number) % static_cast<uint32_t>(size);
    };
    int32_t *to = lane(*target), *breaks = lane(*broken), *completes = lane(*completed);
    for (int64_t ring = 0; ring < rings.rings; ++ring) {
      const int64_t begin = rings.cursor[ring], had = rings.held[ring], end = begin + rows;
      // Returns the slot of the window that starts so many steps after the first new one.
      const auto slot = [&](int64_t start, bool is) {
        const int64_t place = is ? within(begin + start + length, length) : 0;
        if (!is || (rings.period > 1 && within(place, rings.period) != 0)) return rings.slots;
        return ring * rings.starts + (rings.period > 1 ? place / rings.period : place);
      };
      const int64_t first = rows - std::min(had + rows, length) + rings.ignored;
      for (int64_t i = 0; i < rows; ++i) {
        const bool stays = i + length >= rows;
        *to++ = stays ? ring * length + within(begin + i, length) : rings.rings * length;
        *completes++ = slot(i - (rings.steps - 1), i - (rings.steps - 1) >= first);
      }
      for (int64_t age = 0; age < std::min(rows, rings.steps - 1); ++age) {
        *breaks++ = slot(rows - 1 - age, true);
      }
      for (int64_t i = 0; i < std::min(rows, rings.ignored); ++i) {
        const int64_t start = first - 1 - i;
        *breaks++ = slot(start, start >= rings.ignored - had && start <= rows - rings.steps);
      }
      lane(*next)[ring] = within(end, length);
      lane(*laps)[ring] = rings.lap[ring] + static_cast<uint32_t>(end / length);
      lane(*size)[ring] = static_cast<uint32_t>(std::min(had + rows, length));
    }
  });
}

// Returns the first window of each ring, and the number of its windows.
ffi::Error RingsSpan(Words cursor, Words lap, Words held, ffi::Result<Ints> first,
                     ffi::Result<Ints> count, Sizes sizes) {
  return ForLanes(*first, [&](int64_t, const auto& lane) {
    const Rings rings(lane(cursor), lane(lap), lane(held), *sizes);
    for (int64_t ring = 0; ring < rings.rings; ++ring) {
      const int64_t steps = std::max<int64_t>(rings.held[ring] - rings.ignored, 0);
      const int64_t oldest = (rings.cursor[ring] - steps + rings.length) % rings.length;
      const int64_t windows = std::max<int64_t>(steps - rings.steps + 1, 0);
      const int64_t begin = (oldest + rings.period - 1) / rings.period;
      lane(*first)[ring] = static_cast<int32_t>(begin % rings.starts);
      lane(*count)[ring] =
          static_cast<int32_t>((oldest + windows + rings.period - 1) / rings.period - begin);
    }
  });
}

// Returns the slots of items by rank, of which each ring has `count` from `first` on.
ffi::Error ItemsAt(Ints rank, Ints first, Ints count, ffi::Result<Ints> out, Sizes sizes) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const int64_t rings = first.dimensions().back();
    const int32_t *ranks = lane(rank), *begin = lane(first), *counts = lane(count);
    std::vector<int32_t> until(rings);
    std::partial_sum(counts, counts + rings, until.begin());
    const uint32_t size = static_cast<uint32_t>((*sizes)[0]);
    int32_t* __restrict to = lane(*out);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t ring = std::upper_bound(until.begin(), until.end(), ranks[i]) - until.begin();
      const int64_t r = std::min(ring, rings - 1);
      const uint32_t place = begin[r] + ranks[i] - (until[r] - counts[r]);
      to[i] = static_cast<int32_t>(ring * size + (place + size) % size);
    }
  });
}

// Masses

constexpr float kLeastMass = 0x1p-126f, kLargestMass = 0x1p96f;

ffi::Error MassBase(Floats priority, Floats epsilon, ffi::Result<Floats> out,
                    ffi::Result<Flags> legal) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const float *from = lane(priority), more = *lane(epsilon);
    float* __restrict to = lane(*out);
    bool* __restrict may = lane(*legal);
    for (int64_t i = 0; i < rows; ++i) {
      const int32_t bits = AsBits(from[i]);
      to[i] = (bits > 0 ? Max(from[i], kLeastMass) : 0.0f) + more;
      may[i] = ((bits >= 0) & (bits < kInfinity)) | (bits == INT32_MIN);
    }
  });
}

ffi::Error MassWithin(Floats mass, Floats base, ffi::Result<Floats> out) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const float *from = lane(mass), *of = lane(base);
    float* __restrict to = lane(*out);
    for (int64_t i = 0; i < rows; ++i) {
      to[i] = of[i] > 0.0f ? Min(Max(from[i], kLeastMass), kLargestMass) : 0.0f;
    }
  });
}

ffi::Error MassShare(Floats share, Floats mass, Floats total, Floats uniform,
                     ffi::Result<Floats> out) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const float *from = lane(share), *of = lane(mass), instead = *lane(uniform);
    const bool any = *lane(total) > 0.0f;
    float* __restrict to = lane(*out);
    for (int64_t i = 0; i < rows; ++i) {
      to[i] = any ? Max(from[i], of[i] > 0.0f ? kLeastMass : 0.0f) : instead;
    }
  });
}

ffi::Error OrZero(Floats number, Flags valid, ffi::Result<Floats> out) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const float* from = lane(number);
    const bool* is = lane(valid);
    float* __restrict to = lane(*out);
    for (int64_t i = 0; i < rows; ++i) to[i] = is[i] ? from[i] : 0.0f;
  });
}

// Scales probabilities by a factor, or relative to the least of them.
ffi::Error Drawn(Floats probability, Flags valid, Floats scale, ffi::Result<Floats> out,
                 ffi::Result<Flags> drawn, Sizes sizes) {
  const bool relative = (*sizes)[0] != 0;
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const float* from = lane(probability);
    const bool* was = lane(valid);
    float* __restrict to = lane(*out);
    bool* __restrict is = lane(*drawn);
    float least = 1.0f;
    for (int64_t i = 0; i < rows; ++i) {
      is[i] = was[i] & (from[i] > 0.0f);
      to[i] = is[i] ? Max(from[i], kLeastMass) : 1.0f;
      least = Min(least, to[i]);
    }
    const float by = relative ? 1.0f / least : *lane(scale);
    for (int64_t i = 0; i < rows; ++i) to[i] *= by;
  });
}

ffi::Error Points(Words word, Words low, Floats total, ffi::Result<Floats> point,
                  ffi::Result<Floats> refine, Sizes sizes) {
  const int64_t bits = (*sizes)[0], strata = (*sizes)[1], shift = (*sizes)[2];
  const float cell = static_cast<float>(1.0 / static_cast<double>(strata << bits));
  const auto part = [&](float number) { return Min(number * cell, 1.0f - 0x1p-24f); };
  return ForLanes(*point, [&](int64_t rows, const auto& lane) {
    const uint32_t *high = lane(word), *rest = lane(low);
    const float whole = *lane(total);
    float *__restrict to = lane(*point), *__restrict finer = lane(*refine);
    for (int64_t i = 0; i < rows; ++i) {
      const uint32_t stratum = strata > 1 ? static_cast<uint32_t>(i) << bits : 0;
      to[i] = part(static_cast<float>(high[i] >> (32 - bits) | stratum)) * whole;
      finer[i] = part(static_cast<float>(rest[i] << shift >> 8) * 0x1p-24f) * whole;
    }
  });
}

// Random words

// The high half of the product of each word with an upper bound.
ffi::Error ScaleWord(Words word, Words below, ffi::Result<Ints> out) {
  return ForLanes(*out, [&](int64_t rows, const auto& lane) {
    const uint32_t *from = lane(word), *factor = lane(below);
    const bool same = below.dimensions().size() < word.dimensions().size();
    int32_t* __restrict to = lane(*out);
    if (same) {
      const uint64_t by = *factor;
      for (int64_t i = 0; i < rows; ++i) to[i] = from[i] * by >> 32;
    } else {
      for (int64_t i = 0; i < rows; ++i) to[i] = uint64_t{from[i]} * factor[i] >> 32;
    }
  });
}

// Writes Threefry-2x32 of (0, i) for n counters i, both halves combined by exclusive or.
JAXBUF_VECTORS void Threefry(const uint32_t* key, int64_t n, uint32_t* __restrict words) {
  constexpr int kTurns[2][4] = {{17, 29, 16, 24}, {13, 15, 26, 6}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  for (int64_t i = 0; i < n; ++i) {
    uint32_t one = keys[0], two = static_cast<uint32_t>(i) + keys[1];
#pragma GCC unroll 5
    for (uint32_t step = 1; step < 6; ++step) {
#pragma GCC unroll 4
      for (int turn : kTurns[step % 2]) {
        one += two;
        two = one ^ (two << turn | two >> (32 - turn));
      }
      one += keys[step % 3];
      two += keys[(step + 1) % 3] + step;
    }
    words[i] = one ^ two;
  }
}

ffi::Error RandomWords(Words key, ffi::Result<Words> words) {
  return ForLanes(*words, [&](int64_t rows, const auto& lane) {
    Threefry(lane(key), rows, lane(*words));
  });
}

// Storage

// Copies runs of `length` slots of several arrays at once, each beginning at slot `start` of a ring.
//
// An array holds `rings` rings of `slots` slots, one after the other, and `start` counts the slots
// of all rings. A slot of the k-th array has `widths[k]` bytes.
ffi::Error Take(ffi::ThreadPool pool, Ints start, ffi::RemainingArgs arrays,
                ffi::RemainingRets outs, int64_t rings, int64_t slots, int64_t length,
                Numbers widths) {
  const size_t axes = start.dimensions().size() - 1;
  const int64_t rows = start.dimensions()[axes], last = rings * slots - 1;
  int64_t lanes = 1, width = 0;
  for (size_t k = 0; k < arrays.size(); ++k) {
    auto array = arrays.get<ffi::AnyBuffer>(k);
    auto out = outs.get<ffi::AnyBuffer>(k);
    if (array.has_error()) return array.error();
    if (out.has_error()) return out.error();
    lanes = Product((*out)->dimensions(), axes);
    width += widths[k];
  }
  // Copies rows `begin` to `end` of one array in the t-th lane.
  const auto copy = [&](size_t k, int64_t t, int64_t begin, int64_t end) {
    const ffi::AnyBuffer array = *arrays.get<ffi::AnyBuffer>(k);
    const ffi::AnyBuffer out = **outs.get<ffi::AnyBuffer>(k);
    const auto part = [&](const auto& of) {
      return PartOf(t, of.dimensions(), out.dimensions(), axes);
    };
    const int64_t bytes = length * widths[k];
    const int32_t* at = start.typed_data() + part(start) * rows;
    const char* const slot_0 = static_cast<const char*>(array.untyped_data()) +
                               part(array) * (last + 1) * widths[k];
    const auto slot = [&](int64_t row) { return std::clamp<int64_t>(at[row], 0, last); };
    char* to = static_cast<char*>(out.untyped_data()) + (t * rows + begin) * bytes;
    for (int64_t row = begin; row < end; ++row, to += bytes) {
      if (row + kAhead < end) {
        // The hardware prefetches the lines in between by itself.
        const char* soon = slot_0 + slot(row + kAhead) * widths[k];
        __builtin_prefetch(soon);
        __builtin_prefetch(soon + bytes - 1);
      }
      const char* from = slot_0 + slot(row) * widths[k];
      const int64_t within = length > 1 ? slot(row) % slots : 0;
      const int64_t straight = std::min(length, slots - within) * widths[k];
      std::memcpy(to, from, straight);
      // The rest of a run that wraps around the end of the ring.
      if (straight < bytes) {
        std::memcpy(to + straight, from - within * widths[k], bytes - straight);
      }
    }
  };
  const bool many = lanes * rows * length * width >= kManyBytes;
  const int64_t parts = many ? kManyParts : 1;
  const auto part = [&](int64_t task) {
    const int64_t t = task / parts, p = task % parts;
    // One array after the other: a core waits for about ten cache lines at a time, in few pages.
    for (size_t k = 0; k < arrays.size(); ++k) {
      if (widths[k] > 0) copy(k, t, rows * p / parts, rows * (p + 1) / parts);
    }
  };
  ForEach(pool, lanes * parts, many ? 1 : lanes, part);
  return ffi::Error::Success();
}

// Writes row i of several arrays at slot `index[i]` of as many others, unless it is past the end.
//
// A slot of the k-th array has `widths[k]` bytes.
ffi::Error Put(Ints index, ffi::RemainingArgs arrays, ffi::RemainingRets outs, int64_t slots,
               Numbers widths) {
  const size_t axes = index.dimensions().size() - 1;
  const int64_t rows = index.dimensions()[axes], lanes = Product(index.dimensions(), axes);
  for (size_t k = 0; k < outs.size(); ++k) {
    auto array = arrays.get<ffi::AnyBuffer>(k), items = arrays.get<ffi::AnyBuffer>(outs.size() + k);
    auto out = outs.get<ffi::AnyBuffer>(k);
    if (array.has_error()) return array.error();
    if (items.has_error()) return items.error();
    if (out.has_error()) return out.error();
    const int64_t width = widths[k];
    char* to = static_cast<char*>((*out)->untyped_data());
    if (to != array->untyped_data()) std::memcpy(to, array->untyped_data(), array->size_bytes());
    const char* from = static_cast<const char*>(items->untyped_data());
    const auto copy = [&](auto size) {
      for (int64_t t = 0; t < lanes; ++t) {
        for (int64_t i = 0; i < rows; ++i) {
          const int32_t at = index.typed_data()[t * rows + i];
          if (at < 0 || at >= slots) continue;
          std::memcpy(to + (t * slots + at) * size, from + (t * rows + i) * size, size);
        }
      }
    };
    if (width == 1) {
      copy(std::integral_constant<int64_t, 1>());
    } else if (width == 4) {
      copy(std::integral_constant<int64_t, 4>());
    } else {
      copy(width);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

// The version of XLA's interface that this was compiled for: an older XLA refuses the handlers.
extern "C" int jaxbuf_ffi_version() { return XLA_FFI_API_MAJOR << 16 | XLA_FFI_API_MINOR; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_set_leaves, SetLeaves);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_read, Read);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_place, Place);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_mark, Mark);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_keep_last, KeepLast);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_ring_rows_to_change, RowsToChange<Ring>);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_ring_slots_of, SlotsOf<Ring>);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_rings_rows_to_change, RowsToChange<Rings>);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_rings_slots_of, SlotsOf<Rings>);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_ring_append, RingAppend);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_rings_append, RingsAppend);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_rings_span, RingsSpan);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_items_at, ItemsAt);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_mass_base, MassBase);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_mass_within, MassWithin);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_mass_share, MassShare);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_or_zero, OrZero);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_drawn, Drawn);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_points, Points);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_random_words, RandomWords);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_scale_word, ScaleWord);

// XLA does not infer how to pass threads, or any number of arrays.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_find, Find,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Ints>()
                                  .Ret<Floats>()
                                  .Attr<int64_t>("refined")
                                  .Attr<int64_t>("row")
                                  .Attr<int64_t>("ops")
                                  .Attr<int64_t>("capacity"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_take, Take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("rings")
                                  .Attr<int64_t>("slots")
                                  .Attr<int64_t>("length")
                                  .Attr<Numbers>("widths"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxbuf_put, Put,
                              ffi::Ffi::Bind()
                                  .Arg<Ints>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("slots")
                                  .Attr<Numbers>("widths"));
