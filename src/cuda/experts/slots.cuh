#pragma once

#include "../device/peers.cuh"
#include "call.cuh"

namespace waybill::cuda {

// Flagged words: ranks send each other words of 8 bytes that contain the number of the call. A
// reader that sees this number has the value, too, and no signal has to follow.

__device__ inline void store_flagged(std::uint64_t* at, std::int32_t value, std::uint64_t epoch) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at),
               "l"(epoch << count_epoch_shift |
                   static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)))
               : "memory");
}

__device__ inline std::uint64_t load_word(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ inline bool is_flagged(std::uint64_t word, std::uint64_t epoch) {
  return word >> count_epoch_shift == static_cast<std::uint32_t>(epoch);
}

/// Waits for a flagged word of rank r. A rank that means a different call never sends it, so the
/// wait checks that now and then.
__device__ inline std::int32_t wait_flagged(const RouteParams& p, std::int32_t r,
                                            const std::uint64_t* at, std::uint64_t epoch) {
  std::uint64_t word = 0;
  spin_until([&] { return is_flagged(word = load_word(at), epoch); },
             [&](std::uint64_t waited_ns) {
               check_while_waiting(p.m.arrive, epoch, r, word >> count_epoch_shift, waited_ns);
             });
  return static_cast<std::int32_t>(word);
}

// Reading and counting the topk slots of tokens.

inline constexpr int route_threads = 512;
inline constexpr int route_warps = route_threads / 32;

/// One topk slot in a round of a warp. Lanes hold them in order of token and topk slot.
struct TopkSlot {
  bool active;
  std::int32_t token;
  std::int32_t k;
  std::int32_t expert;  ///< num_experts if dropped
  std::int32_t dst;     ///< world_size if dropped
  bool bad;             ///< the id is out of range
  bool absent;          ///< a token that its rank does not have
};

/// Tokens that this rank places. They all have one source rank.
struct RoutePart {
  std::int32_t source;  ///< the rank that has the tokens
  std::int32_t num_tokens;
  const void* ids;  ///< [num_tokens, K]
  bool wide_ids;
  std::int32_t dropped_id;
  const std::byte* weights;  ///< [num_tokens, K] or null
  std::int64_t entry;        ///< index of the first topk slot in the tables
  std::int64_t record;       ///< index of the first token in the records
};

/// Which tokens a rank places.
enum class Span {
  rank,   ///< its own
  nodes,  ///< those that it forwards; the blocks with index y take the source on node y
  world,  ///< those of all ranks, whose ids are here
};

/// The part that this block places.
template <Span S>
__device__ RoutePart part_of(const RouteParams& p) {
  static_assert(S != Span::world);
  const MoeShape& s = p.shape;
  if constexpr (S == Span::rank) {
    return {s.rank,       s.num_tokens, p.ids, p.wide_ids,
            p.dropped_id, p.weights,    0,     std::int64_t{s.rank} * s.max_tokens};
  } else {
    const auto node = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t local = s.rank - s.first_rank;
    const std::int64_t entry = std::int64_t{node} * s.max_tokens * s.topk;
    return {node * s.node_ranks + local,
            s.max_tokens,
            static_cast<const std::int32_t*>(p.ids) + entry,
            false,
            s.num_experts,
            p.weights == nullptr ? nullptr : p.weights + entry * p.weight_bytes,
            entry,
            (std::int64_t{local} * s.num_nodes + node) * s.max_tokens};
  }
}

/// The rank that comes i places after this one on its node, in a ring.
__device__ inline std::int32_t node_rank(const MoeShape& s, std::int32_t i) {
  return s.first_rank + (s.rank - s.first_rank + i) % s.node_ranks;
}

/// Sums for one rank, as each block computes them.
struct RankTotals {
  std::int32_t recv_rows;
  std::int32_t grouped_rows;
  std::int32_t compact_base;  ///< the first compact row of the part's tokens
  std::int32_t first_row;     ///< for scatter indices: rows of lower ranks
  std::int32_t first_token;   ///< for scatter indices: tokens of lower ranks
};

/// Shared memory of a block.
struct Scratch {
  std::byte** bases;      ///< [node_ranks]: where each rank of the node receives counts and records
  RankTotals* totals;     ///< [W]
  std::int32_t* cursors;  ///< [tile_warps, num_counts]
  std::int32_t* starts;   ///< [E]: topk slots of each expert, later its first row
  std::int32_t* before;   ///< [E]: topk slots of lower ranks
  std::int32_t* block_counts;  ///< [num_counts]: counts of this block, later those of the blocks
                               ///< before it
  std::int32_t* counts;        ///< [W, num_counts]: counts of all ranks; null if they do not fit
};

/// Address of a part in that memory of a rank of this node. @pre the block has filled the table
template <class T>
__device__ T* part_at(const MoeShape& s, const Scratch& scratch, std::int64_t part,
                      std::int32_t rank) {
  return reinterpret_cast<T*>(scratch.bases[rank - s.first_rank] + part);
}

struct Tile {
  std::int32_t begin;
  std::int32_t end;
};

/// Tokens of warp `warp` of this block: a range of the part that consists of whole rounds.
__device__ inline Tile tile_of(const MoeShape& s, const RoutePart& part, int warp, int tile_warps) {
  const auto tiles = gridDim.x * static_cast<unsigned>(tile_warps);
  const auto together = 32U / static_cast<unsigned>(s.topk);
  const auto tokens = static_cast<unsigned>(part.num_tokens);
  const unsigned rounds = (tokens + together - 1) / together;
  const unsigned each = (rounds + tiles - 1) / tiles * together;
  const unsigned begin = (blockIdx.x * static_cast<unsigned>(tile_warps) + warp) * each;
  return {static_cast<std::int32_t>(min(begin, tokens)),
          static_cast<std::int32_t>(min(begin + each, tokens))};
}

template <Span S>
__device__ TopkSlot read_topk_slot(const MoeShape& s, const RoutePart& part, std::int32_t first,
                                   std::int32_t end) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  TopkSlot c{};
  c.token = first + lane / s.topk;
  c.k = lane % s.topk;
  c.active = lane / s.topk < 32 / s.topk && c.token < end;
  c.expert = s.num_experts;
  if (c.active) {
    const std::int64_t i = std::int64_t{c.token} * s.topk + c.k;
    const std::int64_t id = index_at(part.ids, part.wide_ids, i);
    const bool in_range = 0 <= id && id < s.num_experts;
    if (in_range) c.expert = static_cast<std::int32_t>(id);
    if constexpr (S != Span::rank) {  // the sender has checked its ids
      c.absent = id < 0;
    } else {
      c.bad = !in_range && id != part.dropped_id;
    }
  }
  c.dst = c.expert / s.experts_per_rank;
  return c;
}

/// Calls add(number) for each count that a tile's topk slots raise by one: the count of the expert
/// and, with compact rows, one count per token and destination rank. One warp.
/// @return whether an id was out of range
template <Span S, class Add>
__device__ bool count_tile(const MoeShape& s, const RoutePart& part, Tile tile, Add&& add) {
  const int bits = bits_of(s.world_size);
  bool bad = false;
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const TopkSlot c = read_topk_slot<S>(s, part, t, tile.end);
    if (c.active && !c.absent) add(c.expert);
    bad |= c.bad;
    if (s.compact == 0) continue;
    const unsigned same = lanes_with(c.dst, bits) & lanes_of_token(s.topk, c.k);
    if (c.dst < s.world_size && is_first(same)) add(s.num_experts + 1 + c.dst);
  }
  return bad;
}

__device__ inline void clear_counts(std::int32_t* counts, std::int32_t num) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < num; i += route_threads) counts[i] = 0;
}

/// Counts the topk slots of each tile of the block, and of the whole block.
template <Span S>
__device__ void count_block(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                            int tile_warps) {
  const std::int32_t n = num_counts(p.shape);
  const auto warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.shape.node_ranks; i += route_threads) {
    scratch.bases[i] = peer_at(p.peers, i);
  }
  clear_counts(scratch.cursors, tile_warps * n);
  __syncthreads();
  if (warp < tile_warps) {
    std::int32_t* const counts = scratch.cursors + warp * n;
    const bool bad = count_tile<S>(p.shape, part, tile_of(p.shape, part, warp, tile_warps),
                                   [&](std::int32_t i) { atomicAdd(&counts[i], 1); });
    if (S == Span::rank && bad) report_bad_id(p, p.m.arrive.sink, p.m.state);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t sum = 0;
#pragma unroll 4
    for (int w = 0; w < tile_warps; ++w) sum += scratch.cursors[w * n + e];
    scratch.block_counts[e] = sum;
    if (gridDim.x > 1) p.tile_counts[std::int64_t{block_idx()} * n + e] = sum;
  }
}

/// Sums the counts of the part's earlier blocks, and sends this block's portion of the total counts
/// to all ranks of the node.
__device__ inline void send_counts(const RouteParams& p, const RoutePart& part,
                                   const Scratch& scratch, std::uint64_t epoch) {
  const std::int32_t n = num_counts(p.shape);
  const std::int32_t* const tiles = p.tile_counts + std::int64_t{block_idx() - blockIdx.x} * n;
  wait_blocks(p.m);
  for (int e = static_cast<int>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t earlier = 0;
    std::int32_t sum = 0;
    if (gridDim.x == 1) {
      sum = scratch.block_counts[e];
    } else {
#pragma unroll 8
      for (unsigned b = 0; b < gridDim.x; ++b) {
        const std::int32_t own = __ldcg(tiles + std::int64_t{b} * n + e);
        if (b < blockIdx.x) earlier += own;
        sum += own;
      }
    }
    scratch.block_counts[e] = earlier;
    if (static_cast<unsigned>(e) % gridDim.x != blockIdx.x) continue;
    for (std::int32_t i = 0; i < p.shape.node_ranks; ++i) {
      const std::int32_t r = node_rank(p.shape, i);
      std::uint64_t* const counts = part_at<std::uint64_t>(p.shape, scratch, p.counts, r);
      store_flagged(counts + std::int64_t{part.source} * n + e, sum, epoch);
    }
  }
}

}  // namespace waybill::cuda
