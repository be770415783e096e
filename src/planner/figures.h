#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "home_layout.h"
#include "node_routes.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {

/// Shards [first, last) of a document, or other things counted, and the rank that has or needs
/// them.
struct RankRange {
  std::int32_t rank = 0;
  std::int32_t first = 0;
  std::int32_t last = 0;
};

/// Documents of which rows of KV cross: who needs them and where they are.
struct KvDocument {
  std::int32_t first_need = 0;
  std::int32_t last_need = 0;
  std::int32_t first_run = 0;
  std::int32_t last_run = 0;
};

/// The rows of KV that cross. Shards are numbered so that those of a document are consecutive.
struct KvNeeds {
  std::vector<RankRange> needs;  ///< KV shards of a document that a rank needs; may hold own ones
  std::vector<RankRange> runs;   ///< consecutive shards of a document with one home
  std::vector<KvDocument> documents;
  std::vector<LinkBytes> q_links;   ///< [W] of Q alone
  std::vector<std::int32_t> nodes;  ///< [W]
};

/// Counts what a plan, as write_plan writes it, costs each rank. Keeps its memory.
class FigureCounter {
 public:
  /// Fills all figures of `plan` but the relay from its `options` and `plan`.
  void count(const HomeLayout& home, AttentionPlan& plan);

  [[nodiscard]] const KvNeeds& crossing() const { return kv_; }

 private:
  void bound_bytes_in(const HomeLayout& home, AttentionPlan& plan) const;
  void count_document(std::int64_t first, std::int64_t last, AttentionPlan& plan);
  void add_rows(std::int32_t first, std::int32_t last, std::int32_t dst, const KvDocument& doc,
                AttentionPlan& plan);
  void send_whole_runs(const KvDocument& doc, AttentionPlan& plan) const;
  void add_link(std::vector<LinkBytes>& links, std::int32_t src, std::int32_t dst,
                std::int64_t num_bytes) const {
    add_bytes(links, kv_.nodes[src] == kv_.nodes[dst], src, dst, num_bytes);
  }

  KvNeeds kv_;
  std::vector<std::int32_t> need_of_rank_;  // [W] into needs, -1
  std::vector<std::int64_t> position_;      // shards of a document, and its end
  // [runs of the document + 1] How often each is sent whole, less how often the one before is:
  std::vector<std::int32_t> sent_near_;  // inside its node
  std::vector<std::int32_t> sent_far_;   // to other nodes
  std::int32_t home_rank_ = 0;
  AttentionMask mask_;  ///< the current document's
};

/// Decides who forwards which rows of KV. Keeps its memory.
///
/// A shard, or a part of a large one, leaves home once at least. Those who have it serve those who
/// do not in the order in which they got it, each as long as its bytes out stay within the cap: the
/// largest bytes in of a rank. That keeps trees flat where there is room. Where nobody has room the
/// cap grows. Over nodes the same is done among nodes first, then inside each node.
class RelayPlanner {
 public:
  /// Fills `relay`.
  /// @param num_rows [N] of each shard
  /// @param direct [W] bytes of Q and KV without forwarding, each row once per rank
  void plan(const KvNeeds& kv, std::span<const std::int64_t> num_rows,
            std::span<const LinkBytes> direct, const PlannerOptions& options, RelaySchedule& relay);

 private:
  /// One kind of link, and who has the rows at hand, in the order in which they got them: hops that
  /// brought them, -1 for home. Those before `front` have no room.
  struct Tier {
    bool network = false;
    std::int64_t cap = 0;
    std::vector<std::int32_t> holders = {};
    std::size_t front = 0;

    void begin_with(std::int32_t first) {
      holders.assign(1, first);
      front = 0;
    }
  };

  void start(const KvNeeds& kv, std::span<const LinkBytes> direct, const PlannerOptions& options);
  void reserve_first_sends(const KvNeeds& kv, const KvDocument& doc);
  void send_document(const KvNeeds& kv, const KvDocument& doc);
  void send_shard(std::int32_t shard);
  void send_part(const RelayHop& part);
  void spread_in_node(const RelayHop& part, std::size_t first, std::size_t last, std::int32_t root);
  void order_by_room(std::vector<RankRange>& entries, std::int64_t num_rows, const Tier& tier);
  std::int32_t hop(const RelayHop& part, Tier& tier, std::int32_t dst);
  [[nodiscard]] std::int32_t rank_of(std::int32_t holder) const {
    return holder < 0 ? home_ : relay_->hops[holder].dst_rank;
  }
  [[nodiscard]] std::int64_t& bytes_out(std::int32_t rank, const Tier& tier) const;
  [[nodiscard]] std::int32_t entry_of_node(std::size_t first, std::size_t last) const;
  [[nodiscard]] std::size_t end_of_node(std::size_t first) const;

  RelaySchedule* relay_ = nullptr;
  std::span<const std::int64_t> num_rows_;  ///< [N]
  const std::int32_t* nodes_ = nullptr;
  std::int64_t row_bytes_ = 0;
  std::int64_t part_rows_ = 0;
  std::int32_t home_ = 0;  ///< home of the shard at hand
  std::int64_t turn_ = 0;  ///< parts so far: who is served first goes round
  Tier nvlink_;
  Tier network_{.network = true};
  std::vector<std::int32_t> receivers_;  ///< receivers of the shard at hand, by rank
  std::vector<std::int32_t> in_node_;    ///< [shards of the document + 1] receivers near home
  std::vector<std::int32_t> beyond_;     ///< the same in other nodes
  std::vector<std::uint8_t> reserved_;   ///< [N] 1: on NVLink, 2: on the network
  std::vector<RankRange> needs_;         ///< needs of the current document, by rank
  std::vector<RankRange> entries_;
  std::vector<RankRange> in_turn_;
};

}  // namespace waybill::detail
