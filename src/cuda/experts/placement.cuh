#pragma once

#include "../device/peers.cuh"
#include "../rank/device_limits.h"
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

// The counts of all ranks say where each rank keeps the rows of each expert.

/// Waits for a count of rank r.
/// @param word an earlier value of the flagged word
__device__ inline std::int32_t wait_count(const RouteParams& p, std::int32_t r, std::int32_t e,
                                          std::uint64_t word, std::uint64_t epoch) {
  if (is_flagged(word, epoch)) return static_cast<std::int32_t>(word);
  return wait_flagged(p, r, p.own_counts + std::int64_t{r} * num_counts(p.shape) + e, epoch);
}

/// A count that has arrived.
__device__ inline std::int32_t count_at(const RouteParams& p, const Scratch& scratch,
                                        std::int32_t r, std::int32_t e) {
  const std::int64_t i = std::int64_t{r} * num_counts(p.shape) + e;
  return scratch.counts != nullptr ? scratch.counts[i]
                                   : static_cast<std::int32_t>(load_word(p.own_counts + i));
}

/// Stores the topk slots of one expert: the sum over all ranks, and over lower ranks.
__device__ inline void note_sums(const RouteParams& p, const Scratch& scratch, std::int32_t e,
                                 std::int32_t sum, std::int32_t lower) {
  const MoeShape& s = p.shape;
  if (e >= s.num_experts) return;
  scratch.starts[e] = sum;
  scratch.before[e] = lower;
  const std::int32_t local = e - s.rank * s.experts_per_rank;
  if (block_idx() == 0 && 0 <= local && local < s.experts_per_rank) p.expert_counts[local] = sum;
}

/// Sums the counts that ranks have of each expert. It loads counts of several ranks at once.
/// @param ask(r, e) starts to load a count of rank r
/// @param take(r, e, asked) returns the count
template <int Together, class Ask, class Take>
__device__ void add_counts(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                           Ask&& ask, Take&& take) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t sum = 0;
    std::int32_t lower = 0;
    for (std::int32_t first = 0; first < s.world_size; first += Together) {
      decltype(ask(0, 0)) asked[Together];
#pragma unroll
      for (int i = 0; i < Together; ++i) {
        if (first + i < s.world_size) asked[i] = ask(first + i, e);
      }
#pragma unroll
      for (int i = 0; i < Together; ++i) {
        const std::int32_t r = first + i;
        if (r >= s.world_size) continue;
        const std::int32_t own = take(r, e, asked[i]);
        if (r < part.source) lower += own;
        sum += own;
      }
    }
    note_sums(p, scratch, e, sum, lower);
  }
}

/// Waits for the counts of all ranks, and sums those of each expert.
__device__ inline void take_counts(const RouteParams& p, const RoutePart& part,
                                   const Scratch& scratch, std::uint64_t epoch) {
  const std::int32_t n = num_counts(p.shape);
  add_counts<8>(
      p, part, scratch,
      [&](std::int32_t r, std::int32_t e) {
        return load_word(p.own_counts + std::int64_t{r} * n + e);
      },
      [&](std::int32_t r, std::int32_t e, std::uint64_t word) {
        const std::int32_t own = wait_count(p, r, e, word, epoch);
        if (scratch.counts != nullptr) scratch.counts[std::int64_t{r} * n + e] = own;
        return own;
      });
}

/// Computes the first row of each expert on its rank, and the number of rows of each rank. All
/// blocks compute the same.
/// @return whether some rank gets more rows than fit
__device__ inline bool locate_experts(const RouteParams& p, const RoutePart& part,
                                      const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  __syncthreads();
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const auto padded = [&](std::int32_t rows) {
    return s.alignment == 1 ? rows : (rows + s.alignment - 1) / s.alignment * s.alignment;
  };
  const std::int32_t each = (s.experts_per_rank + 31) / 32;  // experts per lane
  for (std::int32_t d = thread / 32; d < s.world_size; d += route_warps) {
    std::int32_t* const starts = scratch.starts + d * s.experts_per_rank;
    const std::int32_t begin = min(lane * each, s.experts_per_rank);
    const std::int32_t end = min(begin + each, s.experts_per_rank);
    std::int32_t own = 0;
    for (std::int32_t e = begin; e < end; ++e) own += padded(starts[e]);
    std::int32_t upto = own;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t left = __shfl_up_sync(all_lanes, upto, step);
      if (lane >= step) upto += left;
    }
    std::int32_t row = upto - own;
    for (std::int32_t e = begin; e < end; ++e) {
      const std::int32_t rows = padded(starts[e]);
      starts[e] = row;
      row += rows;
    }
    if (lane == 31) scratch.totals[d].grouped_rows = upto;
  }
  __syncthreads();
  bool overflows = false;
#pragma unroll 1  // there is one iteration unless there are more ranks than threads
  for (std::int32_t d = thread; d < s.world_size; d += route_threads) {
    RankTotals& totals = scratch.totals[d];
    std::int32_t sum = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      if (r == part.source) totals.compact_base = sum;
      sum += count_at(p, scratch, r, s.num_experts + 1 + d);
    }
    totals.recv_rows = s.compact != 0 ? sum : totals.grouped_rows;
    overflows |= totals.recv_rows > p.fitting_rows;
  }
  return __syncthreads_or(overflows ? 1 : 0) != 0;
}

/// Number of tokens of rank r. One warp.
__device__ inline std::int32_t tokens_of(const RouteParams& p, const Scratch& scratch,
                                         std::int32_t r) {
  const MoeShape& s = p.shape;
  std::int32_t sum = 0;
#pragma unroll 4
  for (auto e = static_cast<std::int32_t>(threadIdx.x % 32); e <= s.num_experts; e += 32) {
    sum += count_at(p, scratch, r, e);
  }
  return __reduce_add_sync(all_lanes, sum) / s.topk;
}

/// Writes what receivers read. The work is spread over the blocks, and their last warps do it, as
/// these have the fewest tokens to place.
__device__ inline void write_receiver_tables(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = route_threads - 1 - static_cast<std::int32_t>(threadIdx.x);
  const auto blocks = static_cast<std::int32_t>(num_blocks());
  for (std::int32_t r = thread / 32 * blocks + static_cast<std::int32_t>(block_idx());
       r < s.world_size; r += blocks * route_warps) {
    const std::int32_t tokens = tokens_of(p, scratch, r);
    if (threadIdx.x % 32 == 0) p.num_input_tokens[r] = tokens;
  }
  if (block_idx() != 0) return;
  for (std::int32_t i = thread; i < s.experts_per_rank; i += route_threads) {
    p.expert_offsets[i] = scratch.starts[s.rank * s.experts_per_rank + i];
  }
  if (thread == 0) p.expert_offsets[s.experts_per_rank] = scratch.totals[s.rank].grouped_rows;
}

/// Writes the other tables. All ranks know the same values.
template <Span S>
__device__ void write_tables(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto step = static_cast<std::int32_t>(num_blocks()) * route_threads;
  const std::int32_t first = static_cast<std::int32_t>(block_idx()) * route_threads + thread;
  for (std::int32_t i = first; i < s.world_size * (s.num_experts + 1); i += step) {
    p.splits[i] = count_at(p, scratch, i / (s.num_experts + 1), i % (s.num_experts + 1));
  }
  for (std::int32_t e = first; e < s.num_experts; e += step) {
    std::int32_t row = scratch.starts[e];
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      p.segment_offsets[std::int64_t{e} * s.world_size + r] = row;
      row += count_at(p, scratch, r, e);
    }
  }
  if constexpr (S != Span::nodes) {  // entries without a token
    for (std::int32_t i = s.num_tokens * s.topk + first; i < s.max_tokens * s.topk; i += step) {
      p.dst_rows[i] = -1;
    }
  }
  if (block_idx() != 0) return;
#pragma unroll 1
  for (std::int32_t r = thread; r < s.world_size; r += route_threads) {
    p.num_recv_rows[r] = scratch.totals[r].recv_rows;
  }
  if (thread / 32 != 1) return;
  std::int32_t max_rows = 0;
  for (std::int32_t r = thread % 32; r < s.world_size; r += 32)
    max_rows = max(max_rows, scratch.totals[r].recv_rows);
  max_rows = __reduce_max_sync(all_lanes, max_rows);
  if (thread == 32) p.num_recv_rows[s.world_size] = max_rows;
}

/// Writes the number of received rows for the host. One warp.
__device__ inline void report_to_host(const RouteParams& p, const Scratch& scratch) {
  for (auto r = static_cast<std::int32_t>(threadIdx.x % 32); r < p.shape.world_size; r += 32) {
    const auto rows = static_cast<std::uint32_t>(scratch.totals[r].recv_rows);
    p.host[r] = p.ticket << ticket_shift | std::uint64_t{rows};
  }
}

/// Sums the tokens and rows of lower ranks, for scatter indices.
__device__ inline void locate_positions(const RouteParams& p, const Scratch& scratch) {
  const MoeShape& s = p.shape;
  if (threadIdx.x < 32) {
    std::int32_t tokens = 0;
    std::int32_t rows = 0;
    for (std::int32_t r = 0; r < s.world_size; ++r) {
      RankTotals& totals = scratch.totals[r];
      if (threadIdx.x == 0) {
        totals.first_token = tokens;
        totals.first_row = rows;
      }
      tokens += tokens_of(p, scratch, r);
      rows += totals.recv_rows;
    }
    if (tokens != p.scatter_tokens) report_scatter_size(p, tokens);
  }
  __syncthreads();
}

// Each topk slot gets its row, from the first row of its expert on.

/// Shared memory that a route may use on the current device. It is at most what sm_80 offers.
inline int max_route_bytes() {
  constexpr int limit = 156 * 1024;
  constexpr int of_kernels = 4096;  // the kernels' static shared memory
  const int room = shared_bytes_of_block() - of_kernels;
  return room < limit ? room : limit;
}

template <class Kernel>
cudaError_t allow_route_memory(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              max_route_bytes());
}

/// Words of shared memory for the tables of ranks.
inline int table_words(const MoeShape& s) {
  constexpr auto word = static_cast<int>(sizeof(std::int32_t));
  return s.node_ranks * static_cast<int>(sizeof(std::byte*)) / word +
         s.world_size * static_cast<int>(sizeof(RankTotals)) / word;
}

/// Warps of a block that count and place a tile each: as many as have space for their counts.
/// @param kept words that are needed for other things
inline int tile_warps_of(const MoeShape& s, int kept = 0) {
  const int room =
      max_route_bytes() / 4 - table_words(s) - 2 * s.num_experts - num_counts(s) - kept;
  const int fit = room / num_counts(s);
  return fit < route_warps ? fit : route_warps;
}

/// Words of shared memory that `Scratch` takes.
/// @param keeps_counts includes the counts of all ranks
inline std::int64_t scratch_words(const MoeShape& s, int tile_warps, bool keeps_counts) {
  const std::int64_t counts = num_counts(s);
  return table_words(s) + (tile_warps + 1) * counts + 2 * s.num_experts +
         (keeps_counts ? s.world_size * counts : 0);
}

/// Lays out `Scratch`.
/// @param shared aligned to 8 bytes
__device__ inline Scratch scratch_in(std::int32_t* shared, const MoeShape& s, int tile_warps,
                                     bool keeps_counts) {
  const std::int32_t n = num_counts(s);
  auto* const bases = reinterpret_cast<std::byte**>(shared);
  auto* const totals = reinterpret_cast<RankTotals*>(bases + s.node_ranks);
  auto* const cursors = reinterpret_cast<std::int32_t*>(totals + s.world_size);
  std::int32_t* const after_cursors = cursors + tile_warps * n;
  return {bases,
          totals,
          cursors,
          after_cursors,
          after_cursors + s.num_experts,
          after_cursors + 2 * s.num_experts,
          keeps_counts ? after_cursors + 2 * s.num_experts + n : nullptr};
}

/// Sends the records of a round's tokens to all ranks of the node. If this rank has the ids of all
/// ranks, it writes only its own records.
template <Span S>
__device__ void send_records(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                             const TopkSlot& c, std::int32_t row, std::int32_t compact_row,
                             bool first) {
  const MoeShape& s = p.shape;
  const std::int64_t token = part.record + c.token;
  const std::int32_t stride = record_stride(s);
  if (!c.active) return;
  if constexpr (S == Span::world) {
    std::int32_t* const record = p.own_records + token * stride;
    record[c.k] = c.dst == s.rank ? row : -1;
    if (s.compact != 0 && first && c.dst == s.rank) record[s.topk] = compact_row;
  } else {
    for (std::int32_t i = 0; i < s.node_ranks; ++i) {
      const std::int32_t d = node_rank(s, i);
      part_at<std::int32_t>(s, scratch, p.records, d)[token * stride + c.k] = c.dst == d ? row : -1;
    }
    if (s.compact != 0 && first) {
      part_at<std::int32_t>(s, scratch, p.records, c.dst)[token * stride + s.topk] = compact_row;
    }
  }
}

/// The row that the caller's scatter indices give to a topk slot.
__device__ __noinline__ inline std::int32_t scattered_row(const RouteParams& p,
                                                          const RoutePart& part, const TopkSlot& c,
                                                          const RankTotals* totals) {
  const MoeShape& s = p.shape;
  const std::int32_t topk_slot = c.token * s.topk + c.k;
  const std::int64_t position =
      index_at(p.scatter, p.wide_scatter,
               std::int64_t{totals[part.source].first_token} * s.topk + topk_slot);
  const std::int32_t first = totals[c.dst].first_row;
  const std::int32_t rows = totals[c.dst].recv_rows;
  if (position < first || position >= std::int64_t{first} + rows) {
    report_position(p, position, part.source, topk_slot, first, rows, c.dst);
  }
  return static_cast<std::int32_t>(position - first);
}

/// Gives each topk slot of the tile a row. Rows of an expert are in the order of source rank, tile
/// and topk slot.
/// @param overflows some rows may not fit
template <Span S>
__device__ void place_tile(const RouteParams& p, const RoutePart& part, Tile tile,
                           const Scratch& scratch, std::int32_t* cursors, bool overflows) {
  const MoeShape& s = p.shape;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const unsigned below = (1U << lane) - 1;
  const int expert_bits = bits_of(s.num_experts - 1);
  const int rank_bits = bits_of(s.world_size);
  for (std::int32_t t = tile.begin; t < tile.end; t += 32 / s.topk) {
    const TopkSlot c = read_topk_slot<S>(s, part, t, tile.end);
    const bool live = c.active && c.expert < s.num_experts;
    const unsigned same = lanes_with(c.expert, expert_bits) & __ballot_sync(all_lanes, live);
    std::int32_t row = live ? cursors[c.expert] + __popc(same & below) : -1;
    if (live && p.scatter != nullptr) row = scattered_row(p, part, c, scratch.totals);
    const unsigned same_dst = lanes_with(c.dst, rank_bits);
    unsigned on_rank = same_dst & lanes_of_token(s.topk, c.k);
    bool fits = true;
    if (overflows && s.compact == 0) {  // uniform over the warp
      fits = row < p.fitting_rows;
      on_rank &= __ballot_sync(all_lanes, fits);
    }
    const bool first = live && is_first(on_rank);
    const unsigned firsts = same_dst & __ballot_sync(all_lanes, first);
    std::int32_t* const compact = cursors + s.num_experts + 1;
    const std::int32_t own = first ? compact[c.dst] + __popc(firsts & below) : -1;
    const std::int32_t compact_row =
        __shfl_sync(all_lanes, own, __ffs(static_cast<int>(on_rank)) - 1);
    __syncwarp();
    if (live && is_first(same)) cursors[c.expert] += __popc(same);
    if (first && is_first(firsts)) compact[c.dst] += __popc(firsts);
    __syncwarp();
    if (!c.active) continue;  // no later instruction needs all lanes
    const std::int64_t of_part = std::int64_t{c.token} * s.topk + c.k;
    const std::int64_t i = part.entry + of_part;
    const std::int32_t sent = s.compact != 0 ? (live ? compact_row : -1) : row;
    constexpr bool nodes = S == Span::nodes;
    const std::int32_t local_dst = nodes ? c.dst - s.first_rank : c.dst;
    const bool here = live && (!nodes || (0 <= local_dst && local_dst < s.node_ranks));
    send_records<S>(p, part, scratch, c, fits ? row : -1, compact_row, first && here);
    if (S == Span::world && (part.source != s.rank || c.absent)) continue;
    p.out_ids[i] = c.absent ? -1 : c.expert;
    p.dst_rows[i] = here || p.scatter != nullptr ? sent : -1;
    p.addresses[i] =
        here ? (std::int64_t{local_dst} << address_dst_shift) + sent + (first ? primary_row_bit : 0)
             : -1;
    if (part.weights != nullptr) {
      copy_weight(p.out_weights, part.weights, i, of_part, p.weight_bytes);
      if (S != Span::world && here) {
        copy_weight(part_at<std::byte>(s, scratch, p.sent_weights, c.dst), part.weights,
                    part.record * s.topk + of_part, of_part, p.weight_bytes);
      }
    }
  }
}

/// First row of expert e for the part's topk slots. From num_experts + 1 on, e selects a rank, and
/// the result is the first compact row on it.
__device__ inline std::int32_t first_row(const MoeShape& s, const Scratch& scratch,
                                         std::int32_t e) {
  if (e < s.num_experts) return scratch.starts[e] + scratch.before[e];
  return e > s.num_experts ? scratch.totals[e - s.num_experts - 1].compact_base : 0;
}

/// Replaces each tile's counts by the first row that it has of each expert. Reports if this rank
/// has too many topk slots of an expert; exactly one block finds that.
/// @param earlier(e) topk slots in the part's earlier blocks
template <class Earlier>
__device__ void set_cursors(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                            int tile_warps, Earlier&& earlier) {
  const MoeShape& s = p.shape;
  const std::int32_t n = num_counts(s);
  for (auto e = static_cast<std::int32_t>(threadIdx.x); e < n; e += route_threads) {
    std::int32_t own[route_warps];
#pragma unroll
    for (int w = 0; w < route_warps; ++w) {
      own[w] = w < tile_warps ? scratch.cursors[w * n + e] : 0;
    }
    const std::int32_t first = first_row(s, scratch, e);
    std::int32_t row = first + earlier(e);
#pragma unroll
    for (int w = 0; w < route_warps; ++w) {
      if (w < tile_warps) scratch.cursors[w * n + e] = row;
      row += own[w];
    }
    if (row - first > p.max_per_expert && e < s.num_experts && part.source == s.rank) {
      report_many_of_expert(p, e);
    }
  }
  __syncthreads();
}

/// Places the part's topk slots. @pre cursors hold the counts of each tile
/// @param earlier as for set_cursors()
template <Span S, class Earlier>
__device__ void place_block(const RouteParams& p, const RoutePart& part, const Scratch& scratch,
                            int tile_warps, bool overflows, Earlier&& earlier) {
  const MoeShape& s = p.shape;
  set_cursors(p, part, scratch, tile_warps, earlier);
  const auto warp = static_cast<int>(threadIdx.x / 32);
  if (warp >= tile_warps) return;
  place_tile<S>(p, part, tile_of(s, part, warp, tile_warps), scratch,
                scratch.cursors + warp * num_counts(s), overflows);
}

}  // namespace waybill::cuda
