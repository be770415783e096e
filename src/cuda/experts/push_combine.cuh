#pragma once

#include <cstring>
#include <type_traits>

#include "../device/bulk.cuh"
#include "../device/number.cuh"
#include "call.cuh"
#include "kernels.h"

// Sums of rows by one warp, which keeps loads of several rows and pieces in flight.

namespace waybill::cuda {

/// Rows of some tokens, one per lane. The rows of a token are neighbours, and are summed in the
/// order of lanes.
struct WalkRows {
  const std::byte* from;  ///< null: zeros
  std::byte* to;          ///< valid in the first lane of a token
  float weight;
  unsigned token_lanes;  ///< lanes that may hold rows of the same token
};

/// Walks through pieces of rows: over the rows of a token, then over its pieces, then over tokens.
class RowWalk {
 public:
  /// @param here lanes with rows
  __device__ RowWalk(const WalkRows& rows, unsigned here, int begin, int end, int step)
      : lanes_(here), begin_(begin), end_(end), step_(step), offset(begin) {
    begin_token(rows);
  }
  [[nodiscard]] __device__ bool is_over() const { return lanes_ == 0; }
  [[nodiscard]] __device__ int lane() const { return __ffs(static_cast<int>(left_)) - 1; }
  [[nodiscard]] __device__ int first_lane() const { return __ffs(static_cast<int>(token_)) - 1; }
  [[nodiscard]] __device__ bool is_first() const { return left_ == token_; }
  [[nodiscard]] __device__ bool is_last() const { return (left_ & (left_ - 1)) == 0; }
  __device__ void advance(const WalkRows& rows) {
    left_ &= left_ - 1;
    if (left_ != 0) return;
    offset += step_;
    if (offset >= end_) {
      offset = begin_;
      lanes_ &= ~token_;
      begin_token(rows);
    }
    left_ = token_;
  }

 private:
  __device__ void begin_token(const WalkRows& rows) {
    const int first = lanes_ == 0 ? 0 : __ffs(static_cast<int>(lanes_)) - 1;
    token_ = lanes_ & __shfl_sync(all_lanes, rows.token_lanes, first);
    left_ = token_;
  }

  unsigned lanes_;  ///< lanes of this token and of later ones
  unsigned token_ = 0;
  unsigned left_ = 0;  ///< lanes of the token whose rows of this piece are left
  int begin_;
  int end_;
  int step_;

 public:
  int offset;  ///< byte offset of the piece in a row
};

/// A word of 16, 4 or 2 bytes.
template <int Bytes>
using RawWord = std::conditional_t<Bytes == 16, uint4,
                                   std::conditional_t<Bytes == 4, unsigned, unsigned short>>;

/// One lane's words of a piece of a row. They are unpacked into numbers when they are used; in
/// flight they take one register per four bytes.
template <class Number, int Count, int Words>
struct PieceWords {
  static constexpr int words = Words;
  using Packed = Pack<Number, Count>;
  using Raw = RawWord<static_cast<int>(sizeof(Packed))>;
  static constexpr int bytes = words * 32 * static_cast<int>(sizeof(Raw));
  Raw raw[words];

  [[nodiscard]] static __device__ int offset_of(int w) {
    return (w * 32 + lane_id()) * static_cast<int>(sizeof(Raw));
  }

  /// Loads the words without L1, as other ranks may have written them.
  __device__ void load(const std::byte* from, int left) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      raw[w] = Raw{};
      if (from != nullptr && offset_of(w) < left) {
        raw[w] = __ldcg(reinterpret_cast<const Raw*>(from + offset_of(w)));
      }
    }
  }

  __device__ void store(std::byte* to, int left) const {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      if (offset_of(w) < left) *reinterpret_cast<Raw*>(to + offset_of(w)) = raw[w];
    }
  }
};

/// One lane's part of a sum. Each product and each sum is rounded.
template <class Number, int Count, int NumWords>
struct PieceSum {
  using Words = PieceWords<Number, Count, NumWords>;
  float sums[Words::words][Count];

  __device__ void clear() {
#pragma unroll
    for (int w = 0; w < Words::words; ++w) {
#pragma unroll
      for (int e = 0; e < Count; ++e) sums[w][e] = 0;
    }
  }

  /// @param w index of the word, a constant
  template <bool Weighted>
  __device__ void add_word(int w, const typename Words::Raw& raw, float weight) {
    typename Words::Packed numbers;
    std::memcpy(&numbers, &raw, sizeof(numbers));
#pragma unroll
    for (int e = 0; e < Count; ++e) {
      const float x = Number::load(numbers.values[e]);
      sums[w][e] = __fadd_rn(sums[w][e], Weighted ? __fmul_rn(weight, x) : x);
    }
  }
  template <bool Weighted>
  __device__ void add(const Words& words, float weight) {
#pragma unroll
    for (int w = 0; w < Words::words; ++w) add_word<Weighted>(w, words.raw[w], weight);
  }

  /// Starts the sums from the biases, if there are parameters.
  /// @param at where the piece goes in the output
  __device__ void begin(const PushParams* p, const std::byte* at, int left) {
    clear();
    if (p == nullptr) return;
    for (const std::byte* bias : p->biases) {
      if (bias == nullptr) continue;
      Words words;
      words.load(bias + (at - p->output), left);
      add<false>(words, 0);
    }
  }

  /// @param left bytes of the row from `to` on
  __device__ void write(std::byte* to, int left) const {
#pragma unroll
    for (int w = 0; w < Words::words; ++w) {
      if (Words::offset_of(w) >= left) continue;
      typename Words::Packed numbers;
#pragma unroll
      for (int e = 0; e < Count; ++e) numbers.values[e] = Number::round(sums[w][e]);
      typename Words::Raw raw;
      std::memcpy(&raw, &numbers, sizeof(raw));
      *reinterpret_cast<typename Words::Raw*>(to + Words::offset_of(w)) = raw;
    }
  }
};

/// One lane's pointer, in all lanes.
template <class T>
__device__ T* pointer_of(T* pointer, int lane) {
  return reinterpret_cast<T*>(
      __shfl_sync(all_lanes, reinterpret_cast<std::uint64_t>(pointer), lane));
}

/// Sums with loads and stores of the lanes, for any address and size.
template <class Number, int Count>
class VectorWalk {
 public:
  __device__ void expect_arrived() const {}
  __device__ void wait_stores() const {}

  /// Sums the rows of each token into its destination. With `MayCopy` a token's only row is copied,
  /// so that it keeps its bits. All lanes.
  /// @param begin, end bytes of the rows that are summed
  /// @param p with the biases; null: none
  template <bool Weighted, bool MayCopy>
  __device__ void sum(const WalkRows& rows, unsigned here, int begin, int end,
                      const PushParams* p) {
    if (here == 0) return;
    RowWalk loading(rows, here, begin, end, Words::bytes);
    RowWalk at = loading;
    Words under_way[depth];
    PieceSum<Number, Count, words> sums;
    const auto ask = [&](Words& into) {
      if (loading.is_over()) return;
      const std::byte* const from = pointer_of(rows.from, loading.lane());
      into.load(from == nullptr ? nullptr : from + loading.offset, end - loading.offset);
      loading.advance(rows);
    };
    const auto use = [&](const Words& row) {
      std::byte* const to = pointer_of(rows.to, at.first_lane()) + at.offset;
      const int left = end - at.offset;
      if (MayCopy && at.is_first() && at.is_last()) {
        row.store(to, left);
        return;
      }
      if (at.is_first()) sums.begin(p, to, left);
      sums.template add<Weighted>(row,
                                  Weighted ? __shfl_sync(all_lanes, rows.weight, at.lane()) : 0);
      if (at.is_last()) sums.write(to, left);
    };
#pragma unroll
    for (int d = 0; d < depth; ++d) ask(under_way[d]);
    while (!at.is_over()) {
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        if (at.is_over()) break;
        use(under_way[d]);
        at.advance(rows);
        ask(under_way[d]);
      }
    }
  }

 private:
  static constexpr int words = 2;
  static constexpr int depth = 3;
  using Words = PieceWords<Number, Count, words>;
};

/// How rows pass through shared memory: warps per block, and pieces in flight per warp.
template <int Warps, int Slots, int PieceBytes>
struct WalkShape {
  static constexpr int warps = Warps;
  static constexpr int slots = Slots;
  static constexpr int piece_bytes = PieceBytes;
  static constexpr int bytes = Slots * PieceBytes;  ///< per warp
};

/// A piece of a row in flight, and what to do with it.
struct alignas(16) WalkItem {
  std::byte* to;
  float weight;
  unsigned how;  ///< the number of bytes, and the bits below

  static constexpr unsigned first = 1U << 16U;     ///< the first row of a token
  static constexpr unsigned last = 1U << 17U;      ///< the last row of a token
  static constexpr unsigned is_there = 1U << 18U;  ///< else the row is zeros
  [[nodiscard]] __device__ bool is(unsigned bits) const { return (how & bits) == bits; }
  [[nodiscard]] __device__ int bytes() const { return static_cast<int>(how & 0xFFFFU); }
};

/// Shared memory of a warp in addition to its slots.
template <class Shape>
struct WalkState {
  WalkItem items[Shape::slots];
  std::uint64_t barriers[Shape::slots];
};

/// Sums with bulk copies into shared memory, and also out of it if a row is copied. So more is in
/// flight than registers could hold. Rows and parts are multiples of 16 bytes.
template <class Number, class Shape>
class BulkWalk {
 public:
  /// @param slots shared memory of this warp, Shape::bytes
  /// @param state shared memory of this warp
  __device__ BulkWalk(std::byte* slots, WalkState<Shape>& state) : slots_(slots), state_(state) {
    if (lane_id() == 0) {
      for (int s = 0; s < Shape::slots; ++s) barrier_init(&state_.barriers[s]);
      fence_barrier_init();
    }
    __syncwarp();
  }

  /// Must be called between a wait for rows and the sum that reads them.
  __device__ void expect_arrived() const { fence_async_global(); }

  /// Waits for the stores, before they are signalled. One warp.
  __device__ void wait_stores() const {
    if (lane_id() == 0) bulk_wait_all();
    fence_async_global();
  }

  template <bool Weighted, bool MayCopy>
  __device__ void sum(const WalkRows& rows, unsigned here, int begin, int end,
                      const PushParams* p) {
    RowWalk loading(rows, here, begin, end, Shape::piece_bytes);
    PieceSum<Number, count, words> sums;
    int under_way = 0;
    while (true) {
      for (; under_way < Shape::slots - 1 && !loading.is_over(); ++under_way) {
        ask<Weighted>(rows, loading, end, MayCopy);
        loading.advance(rows);
      }
      if (under_way == 0) return;
      __syncwarp();
      use<Weighted, MayCopy>(sums, p);
      --under_way;
    }
  }

 private:
  static constexpr int count = 16 / static_cast<int>(sizeof(typename Number::Stored));
  static constexpr int words = Shape::piece_bytes / 16 / 32;
  using Words = PieceWords<Number, count, words>;

  [[nodiscard]] static __device__ int next(int slot) {
    return slot + 1 == Shape::slots ? 0 : slot + 1;
  }

  /// Fills the slot after those in flight. Whatever was stored from it has left it before the last
  /// store.
  template <bool Weighted>
  __device__ void ask(const WalkRows& rows, const RowWalk& loading, int end, bool may_copy) {
    const std::byte* const from = pointer_of(rows.from, loading.lane());
    std::byte* const to = pointer_of(rows.to, loading.first_lane());
    const float weight = Weighted ? __shfl_sync(all_lanes, rows.weight, loading.lane()) : 0;
    if (lane_id() == 0) {
      const auto bytes = static_cast<unsigned>(min(end - loading.offset, Shape::piece_bytes));
      state_.items[newest_] = {to + loading.offset, weight,
                               bytes | (loading.is_first() ? WalkItem::first : 0U) |
                                   (loading.is_last() ? WalkItem::last : 0U) |
                                   (from != nullptr ? WalkItem::is_there : 0U)};
      if (may_copy) bulk_wait_read_but_one();
      if (from != nullptr) {
        std::uint64_t* const barrier = &state_.barriers[newest_];
        barrier_expect(barrier, bytes);
        bulk_load_to_read(slots_ + newest_ * Shape::piece_bytes, from + loading.offset, bytes,
                          barrier);
      }
    }
    newest_ = next(newest_);
  }

  /// Uses the oldest piece in flight.
  template <bool Weighted, bool MayCopy>
  __device__ void use(PieceSum<Number, count, words>& sums, const PushParams* p) {
    const WalkItem item = state_.items[oldest_];
    const std::byte* const slot = slots_ + oldest_ * Shape::piece_bytes;
    if (item.is(WalkItem::is_there)) {
      barrier_wait(&state_.barriers[oldest_], phases_ >> oldest_ & 1U);
      phases_ ^= 1U << oldest_;
    }
    if (MayCopy && item.is(WalkItem::first | WalkItem::last)) {
      if (lane_id() == 0) {
        bulk_store(item.to, slot, static_cast<std::uint32_t>(item.bytes()));
        bulk_commit();
      }
      __syncwarp();  // no lane has read the slot: bulk_wait_read_but_one() orders what fills it
                     // next
    } else {
      if (item.is(WalkItem::first)) sums.begin(p, item.to, item.bytes());
      if (item.is(WalkItem::is_there)) add<Weighted>(sums, slot, item);
      if (item.is(WalkItem::last)) sums.write(item.to, item.bytes());
      if (MayCopy && lane_id() == 0) bulk_commit();
      release_stage();
    }
    oldest_ = next(oldest_);
  }

  template <bool Weighted>
  static __device__ void add(PieceSum<Number, count, words>& sums, const std::byte* slot,
                             const WalkItem& item) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      if (Words::offset_of(w) >= item.bytes()) continue;
      const uint4 raw = *reinterpret_cast<const uint4*>(slot + Words::offset_of(w));
      sums.template add_word<Weighted>(w, raw, item.weight);
    }
  }

  std::byte* const slots_;
  WalkState<Shape>& state_;
  int oldest_ = 0;
  int newest_ = 0;
  unsigned phases_ = 0;
};

}  // namespace waybill::cuda
