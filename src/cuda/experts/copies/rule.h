#pragma once

#include <cstdint>

// The rule by which copies of experts travel: which rank sends which copy, and in which order a
// home adds gradients. plan_weight_transfers() and plan_gradient_transfers() say the same as lists;
// here each thread of a block asks for one slot. tests/experts runs it on the CPU.

#ifdef __CUDACC__
#define WAYBILL_COPY_RULE __host__ __device__ inline
#else
#define WAYBILL_COPY_RULE inline
#endif

namespace waybill::cuda {

/// The copies that move: spare slot s of rank r is number r * spare + s.
struct CopyTable {
  const std::int32_t* experts;  ///< [R * spare]: the slot's expert; -1: nothing moves
  std::int32_t num_ranks;
  std::int32_t homes;  ///< home experts per rank
  std::int32_t spare;
  std::int32_t node_ranks;  ///< ranks per node, in order

  [[nodiscard]] WAYBILL_COPY_RULE std::int32_t size() const { return num_ranks * spare; }
  [[nodiscard]] WAYBILL_COPY_RULE std::int32_t node_of(std::int32_t copy) const {
    return copy / spare / node_ranks;
  }
};

/// The first copy of an expert on the node of one of its copies; -1: the node is home's.
WAYBILL_COPY_RULE std::int32_t first_of_node(const CopyTable& table, std::int32_t copy) {
  const std::int32_t expert = table.experts[copy], node = table.node_of(copy);
  if (expert / table.homes / table.node_ranks == node) return -1;
  std::int32_t i = node * table.node_ranks * table.spare;
  while (table.experts[i] != expert) ++i;
  return i;
}

/// Whether a slot has a copy whose home is on another node.
WAYBILL_COPY_RULE bool crosses_nodes(const CopyTable& table, std::int32_t copy) {
  const std::int32_t expert = table.experts[copy];
  return expert >= 0 && expert / table.homes / table.node_ranks != table.node_of(copy);
}

/// The place of a copy among those of its home's experts that cross nodes, in order.
WAYBILL_COPY_RULE std::int32_t landing_of(const CopyTable& table, std::int32_t copy) {
  const std::int32_t home = table.experts[copy] / table.homes;
  std::int32_t place = 0;
  for (std::int32_t i = 0; i < copy; ++i)
    place += crosses_nodes(table, i) && table.experts[i] / table.homes == home ? 1 : 0;
  return place;
}

/// Whether two copies of an expert are in one tree. The first copies of nodes are in one, with
/// home; the others of a node are in one with its first copy, or with home on home's node.
WAYBILL_COPY_RULE bool in_one_tree(const CopyTable& table, std::int32_t a, std::int32_t b) {
  if (table.experts[a] != table.experts[b]) return false;
  const bool first = first_of_node(table, a) == a;
  if (first != (first_of_node(table, b) == b)) return false;
  return first || table.node_of(a) == table.node_of(b);
}

/// The copy that sends to a copy: in a binomial tree, the holder whose number lacks the highest
/// bit. The holder that has the expert is 0, copies follow by rank; no rank has an expert twice.
/// -1: home sends.
WAYBILL_COPY_RULE std::int32_t sender_of(const CopyTable& table, std::int32_t copy) {
  std::uint32_t number = 1;
  for (std::int32_t i = 0; i < copy; ++i) number += in_one_tree(table, i, copy) ? 1U : 0U;
  std::uint32_t highest = 1;
  while (highest <= number / 2) highest *= 2;
  std::uint32_t before = number - highest;  // holders up to the sender
  const std::int32_t first = first_of_node(table, copy);
  if (before == 0) return first == copy ? -1 : first;
  std::int32_t i = 0;
  for (;; ++i) {
    if (in_one_tree(table, i, copy) && --before == 0) return i;
  }
}

inline constexpr std::uint64_t no_copy_key = ~std::uint64_t{0};

/// The order in which a rank sends weights: what its homes have, which waits for nobody, before
/// what it forwards; then by expert, then by number. All ranks have one order of what they forward,
/// so that no two wait for each other. no_copy_key: another rank sends to this copy, or nobody.
WAYBILL_COPY_RULE std::uint64_t weight_key(const CopyTable& table, std::int32_t copy,
                                           std::int32_t rank) {
  const std::int32_t expert = table.experts[copy];
  if (expert < 0) return no_copy_key;
  const std::int32_t sender = sender_of(table, copy);
  const std::int32_t from = sender < 0 ? expert / table.homes : sender / table.spare;
  if (from != rank) return no_copy_key;
  const std::uint64_t forwards = sender < 0 ? 0 : 1;
  return forwards << 62U | static_cast<std::uint64_t>(expert) << 31U |
         static_cast<std::uint64_t>(copy);
}

/// The order in which a home adds gradients: by expert, then by rank. no_copy_key: the expert's
/// home is another rank.
WAYBILL_COPY_RULE std::uint64_t gradient_key(const CopyTable& table, std::int32_t copy,
                                             std::int32_t rank) {
  const std::int32_t expert = table.experts[copy];
  if (expert < 0 || expert / table.homes != rank) return no_copy_key;
  return static_cast<std::uint64_t>(expert) << 31U | static_cast<std::uint64_t>(copy);
}

/// The place of a copy in the order of keys.
/// @param keys [count], those of all copies; equal only where they are no_copy_key
WAYBILL_COPY_RULE std::int32_t place_of(const std::uint64_t* keys, std::int32_t count,
                                        std::int32_t copy) {
  std::int32_t place = 0;
  for (std::int32_t i = 0; i < count; ++i) place += keys[i] < keys[copy] ? 1 : 0;
  return place;
}

// Over a network the parts of an expert are one stream of bytes (rounds.h).

inline constexpr std::int64_t stream_alignment = 32;

/// Where the part begins that follows one of so many bytes.
WAYBILL_COPY_RULE std::int64_t next_in_stream(std::int64_t begin, std::int64_t bytes) {
  return (begin + bytes + stream_alignment - 1) / stream_alignment * stream_alignment;
}

// An expert travels in chunks, none of which spans two tensors. Stripe s of copy_stripes has the
// chunks s, s + copy_stripes, ...: one block moves it, and counts it at its target.

inline constexpr std::int32_t copy_stripes = 32;
inline constexpr std::int64_t copy_chunk_bytes = std::int64_t{128} << 10;

WAYBILL_COPY_RULE std::int64_t copy_chunks(std::int64_t bytes) {
  return (bytes + copy_chunk_bytes - 1) / copy_chunk_bytes;
}

/// Chunks of a stripe.
WAYBILL_COPY_RULE std::int64_t chunks_of_stripe(std::int64_t num_chunks, std::int32_t stripe) {
  return stripe < num_chunks ? (num_chunks - 1 - stripe) / copy_stripes + 1 : 0;
}

/// The word that says how many chunks of a stripe have arrived in a call. It grows from call to
/// call.
WAYBILL_COPY_RULE std::uint64_t progress_word(std::uint64_t epoch, std::int64_t chunks) {
  return epoch << 32U | static_cast<std::uint64_t>(chunks);
}

}  // namespace waybill::cuda
