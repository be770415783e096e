#pragma once

#include <algorithm>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/core/dtype.h"
#include "waybill/core/link_speeds.h"
#include "waybill/planner/attention_mask.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/validate.h"

namespace waybill {

/// The size of a row (token) of the model. Elements of the whole model or of one tensor-parallel
/// slice, as the ranks are.
struct ModelShape {
  std::int64_t q_hidden = 4096;   ///< elements of a row of Q: query heads * head size
  std::int64_t kv_hidden = 1024;  ///< elements of a row of K, and of V: KV heads * head size
  DType dtype = DType::bfloat16;

  [[nodiscard]] static ModelShape of_heads(std::int64_t q_heads, std::int64_t kv_heads,
                                           std::int64_t head_size, DType dtype = DType::bfloat16) {
    return {.q_hidden = q_heads * head_size, .kv_hidden = kv_heads * head_size, .dtype = dtype};
  }

  [[nodiscard]] std::int64_t q_row_bytes() const { return q_hidden * dtype_bytes(dtype); }
  /// K and V together: a row of each crosses.
  [[nodiscard]] std::int64_t kv_row_bytes() const { return 2 * kv_hidden * dtype_bytes(dtype); }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

/// Speeds, one direction, of one rank. Bytes per second are what the wire really gives. Defaults:
/// "measured" is a host with 8 x H200 (NVLink 4 through an NVSwitch, multicast off), 2026-11-20;
/// "nominal" comes from data sheets and was not measured.
struct HardwareFacts {
  double nvlink_bytes_per_second = LinkSpeeds{}.nvlink_bytes_per_second;    ///< measured
  double network_bytes_per_second = LinkSpeeds{}.network_bytes_per_second;  ///< nominal
  std::int32_t ranks_per_node = 8;  ///< consecutive ranks; the last node may have fewer
  /// Time that each peer costs besides the bytes: signals to all are under way together. Fits calls
  /// of few bytes, 4 x H200 (docs/performance/prediction.md).
  double message_seconds = 0.4e-6;
  /// (query, key) pairs a rank attends to, forward. 0: not known.
  double pairs_per_second = 0;
  /// Cost of a row of queries, and of a shard of any length, for the kernel besides their pairs, in
  /// pairs: blocks are computed whole, short shards fill none. 0: nothing, work is pairs alone.
  std::int64_t row_pairs = 0;
  std::int64_t shard_pairs = 0;

  friend bool operator==(const HardwareFacts&, const HardwareFacts&) = default;
};

/// The work of the queries [begin, end) of a document as the kernel takes it, in pairs.
[[nodiscard]] inline std::int64_t kernel_work(const AttentionMask& mask, const HardwareFacts& facts,
                                              std::int64_t begin, std::int64_t end,
                                              std::int64_t doc_len) {
  return mask.pairs(begin, end, doc_len) + facts.row_pairs * (end - begin) +
         (end > begin ? facts.shard_pairs : 0);
}

/// The options of plan_attention.
struct PlannerOptions {
  std::int32_t world_size = 8;
  /// Rows of a rank in the MLP layout. Flat documents are packed by it; lists a rank must keep it.
  /// 0: flat documents fill all ranks evenly (rounded up); lists may have any length.
  std::int64_t tokens_per_rank = 65536;
  ModelShape model = {};
  AttentionMask mask = {};
  /// [D] Of the kind prefix: mask.prefix of each document, where they differ. Documents as given,
  /// rank by rank; pieces as documents first appear. Empty: mask.prefix for all.
  std::vector<std::int64_t> prefixes = {};
  KvLayout kv_layout = KvLayout::per_rank;

  /// The largest work of a rank over the mean that is aimed at, > 1. Tighter costs bytes.
  double imbalance_target = 1.01;
  /// 0: the target holds whatever bytes it costs. Above: of the targets imbalance_target and looser
  /// ones, the plan with the least `largest work / pairs_per_second + byte_weight * limit_seconds`
  /// is taken; needs hardware.pairs_per_second.
  double byte_weight = 0;
  /// Rows of Q, and rows of KV, that the buffers of a rank hold in the attention layout: neither
  /// exceeds it. 0: no limit.
  std::int64_t max_tokens_per_rank = 0;
  /// Documents are cut at multiples of it, from their beginning, where ranks allow; at finer powers
  /// of two where one block of queries weighs more than a quarter of the balance that is aimed at.
  std::int64_t block_tokens = 128;

  /// A piece gives away its end, never its middle: its home keeps one shard of it. Takes more bytes
  /// where documents are long.
  bool tails = false;

  bool relay = true;  ///< let receivers forward KV to each other
  HardwareFacts hardware = {};

  /// The mask of a document.
  [[nodiscard]] AttentionMask mask_of(std::int64_t document) const {
    return prefixes.empty() ? mask : mask.with_prefix(prefixes[document]);
  }

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const PlannerOptions&, const PlannerOptions&) = default;
};

/// How rows of K and V reach the ranks that need them. Rows of Q, and what belongs to them
/// backward, always go straight.
enum class TransferMode : std::uint8_t {
  direct,         ///< from home to each rank
  once_per_node,  ///< over the network once to each other node, there to the rank with the home's
                  ///< local index where several ranks need them; it forwards over NVLink
  relay,          ///< by the planner's relay schedule; once per node over the network
};

/// "direct", "once_per_node", "relay".
[[nodiscard]] std::string_view to_string(TransferMode transfer);

/// The inverse; nothing for another name.
[[nodiscard]] std::optional<TransferMode> transfer_from_name(std::string_view name);

/// Bytes of one rank by kind of link; rows that stay on a rank do not count. [of one rank]
struct LinkBytes {
  std::int64_t nvlink_in = 0;  ///< from ranks of its node
  std::int64_t nvlink_out = 0;
  std::int64_t network_in = 0;  ///< from other nodes
  std::int64_t network_out = 0;

  [[nodiscard]] std::int64_t in() const { return nvlink_in + network_in; }
  [[nodiscard]] std::int64_t out() const { return nvlink_out + network_out; }

  friend bool operator==(const LinkBytes&, const LinkBytes&) = default;
};

/// Rows [row_begin, row_begin + num_rows) of a KV shard go from one rank to another. A hop whose
/// `after` is not -1 forwards what hop `after`, an earlier one, has brought to src_rank.
struct RelayHop {
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;
  std::int32_t shard = 0;      ///< shard of the plan
  std::int32_t stage = 0;      ///< hops before it on the way from home: 0 from home itself
  std::int64_t row_begin = 0;  ///< rows of the shard
  std::int64_t num_rows = 0;
  std::int32_t after = -1;  ///< hop

  friend bool operator==(const RelayHop&, const RelayHop&) = default;
};

/// How KV rows reach all ranks that need them when receivers forward. Every rank still receives
/// every row that it needs once, so bytes in stay; bytes out spread. Rows of Q go straight from
/// home. A row enters each of several nodes once, and spreads inside it over NVLink. A rank
/// sends in the order of its hops. What arrives, the limits of a plan and the size of its windows
/// are the same in every order in which hops stand after those that feed them.
struct RelaySchedule {
  std::vector<RelayHop> hops;    ///< ordered: a hop comes after the one that feeds it
  std::vector<LinkBytes> links;  ///< [W] Q and KV; empty: no relay was asked for
  std::int32_t num_stages = 0;

  [[nodiscard]] bool empty() const { return links.empty(); }

  friend bool operator==(const RelaySchedule&, const RelaySchedule&) = default;
};

/// A plan with its figures: which rank attends to which queries, and what that costs. Plain data.
/// W = ranks, N = shards. Bytes are wire bytes, forward: rows of Q that leave home, and rows of KV
/// that other ranks need, once per rank and document (per_query: once per query shard), as routing
/// moves them. Backward in and out change places.
struct AttentionPlan {
  PlannerOptions options;  ///< as planned; tokens_per_rank decided
  QkvPlan plan;

  /// [W] what is balanced: (query, key) pairs of the mask, exact, and the pairs that
  /// hardware.row_pairs and shard_pairs add for each row of queries and each shard; see kernel_work
  std::vector<std::int64_t> work;
  std::vector<std::int64_t> home_tokens;       ///< [W] rows in the MLP layout
  std::vector<std::int64_t> attention_tokens;  ///< [W] rows of Q in the attention layout
  std::vector<std::int64_t> kv_tokens;         ///< [W] rows of KV in the attention layout
  std::vector<LinkBytes> links;                ///< [W] direct
  RelaySchedule relay;                         ///< empty unless options.relay

  /// Work of the heaviest block of `options.block_tokens` queries in the plan: what balance by
  /// blocks cannot go below.
  std::int64_t block_work = 0;
  /// No plan whose largest work is as small has fewer bytes in at its worst rank: the end of a long
  /// document goes to ranks that are not its home, as its homes cannot do all of that work.
  std::int64_t least_bytes_in = 0;

  [[nodiscard]] std::vector<std::int64_t> bytes_in()
      const;  ///< [W] direct; relay does not change it
  [[nodiscard]] std::vector<std::int64_t> bytes_out(
      TransferMode transfer = TransferMode::direct) const;  ///< [W]
  /// Bytes per rank and link. once_per_node computes the routing anew; where ranks do not fill all
  /// nodes it equals direct. Without relay, relay equals direct. [W]
  [[nodiscard]] std::vector<LinkBytes> links_of(TransferMode transfer) const;

  /// Largest work over mean work; 1 where there is none.
  [[nodiscard]] double imbalance() const;
  /// True when the largest work is at most imbalance_target * mean, or within one block of the
  /// mean.
  [[nodiscard]] bool balanced() const;

  /// The least time that the links allow: over ranks, the largest of bytes in and bytes out of each
  /// kind of link over its speed, of links_of(transfer).
  [[nodiscard]] double limit_seconds(TransferMode transfer) const;
  /// With relay where there is one.
  [[nodiscard]] double limit_seconds() const {
    return limit_seconds(relay.empty() ? TransferMode::direct : TransferMode::relay);
  }

  friend bool operator==(const AttentionPlan&, const AttentionPlan&) = default;
};

/// A few lines: ranks, balance, bytes, limits.
[[nodiscard]] std::string to_string(const AttentionPlan& plan);
std::ostream& operator<<(std::ostream& out, const AttentionPlan& plan);

/// Checks a plan against itself: the QkvPlan and the routing computed from it (see validate), the
/// capacity, every figure counted anew from the routing and the mask, and the relay schedule
/// carried out hop by hop: every rank gets every KV row that it needs, once, from a rank that has
/// it. Never throws for what it finds. Empty: all is right.
[[nodiscard]] std::vector<Finding> validate(const AttentionPlan& plan,
                                            const ValidateOptions& options = {});

/// Decides which rank attends to which queries, so that the work is even and few bytes move.
///
/// Queries stay at home where work allows. A rank with too much gives contiguous slabs of its
/// longest documents away, cut so that the bytes of Q and KV for the work are least; the rank with
/// the most room takes the slab that ends last, ranks that hold KV of the document first. Near
/// linear in documents and ranks, deterministic. docs/decisions/planner.md tells why.
///
/// @param doc_lengths tokens, each >= 1, packed in order into the ranks: a document may lie across
///   ranks. Their sum at most world_size * tokens_per_rank.
/// @throws InvalidArgument naming the option or the document, got and expected; and "infeasible:"
///   with rank, tokens needed and tokens there are, when no plan within max_tokens_per_rank is
///   found; and for a relay schedule of more than 2^24 hops.
[[nodiscard]] AttentionPlan plan_attention(std::span<const std::int64_t> doc_lengths,
                                           const PlannerOptions& options);

/// The same for documents that already have a rank: one list per rank, which may be empty.
/// [W][docs]
[[nodiscard]] AttentionPlan plan_attention(
    std::span<const std::vector<std::int64_t>> rank_doc_lengths, const PlannerOptions& options);

/// Plans one step after another in memory that it keeps. Results equal plan_attention's.
class Planner {
 public:
  Planner();
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  /// The result is valid until the next call; a call that throws does not change it.
  const AttentionPlan& plan(std::span<const std::int64_t> doc_lengths,
                            const PlannerOptions& options);
  const AttentionPlan& plan(std::span<const std::vector<std::int64_t>> rank_doc_lengths,
                            const PlannerOptions& options);

  /// Moves the latest result out.
  [[nodiscard]] AttentionPlan take();

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

/// Tokens [offset, offset + length) of a document, as a rank holds them.
struct DocumentRange {
  std::int64_t document = 0;  ///< any number; the same on all ranks
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

/// plan_attention for documents whose tokens lie anywhere: each rank holds pieces, back to back in
/// its rows. The plan alone, without figures and without a relay.
///
/// @param rank_pieces [W][pieces]: every token of a document in one of them
/// @throws InvalidArgument naming rank and piece, or the document whose pieces do not add up; for
///   options as plan_attention, and for max_tokens_per_rank and byte_weight, which need figures.
[[nodiscard]] QkvPlan plan_pieces(std::span<const std::vector<DocumentRange>> rank_pieces,
                                  const PlannerOptions& options);

}  // namespace waybill
