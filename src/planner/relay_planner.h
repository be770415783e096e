#pragma once

#include <cstdint>
#include <vector>

#include "figures.h"
#include "waybill/planner/attention_plan.h"

namespace waybill::detail {

/// Decides who forwards which rows of KV. Keeps its memory.
///
/// A shard, or a part of a large one, leaves home once at least. Those who have it serve those who
/// do not in the order in which they got it, each as long as its bytes out stay within the cap: the
/// largest bytes in of a rank. That keeps trees flat where there is room. Where nobody has room the
/// cap grows. Over nodes the same is done among nodes first, then inside each node.
class RelayPlanner {
 public:
  void plan(const FigureCounter& figures, AttentionPlan& plan);

 private:
  struct Holder {
    std::int32_t rank = 0;
    std::int32_t hop = -1;
    std::int32_t stage = -1;
  };
  /// One kind of link, and who has the rows at hand, in the order in which they got them; those
  /// before `front` have no room.
  struct Tier {
    bool network = false;
    std::int64_t cap = 0;
    std::vector<Holder> holders = {};
    std::size_t front = 0;

    void begin_with(Holder first) {
      holders.assign(1, first);
      front = 0;
    }
  };

  void start(const FigureCounter& figures, AttentionPlan& plan);
  void reserve_first_sends(const FigureCounter& figures, const KvDocument& doc);
  void send_document(const FigureCounter& figures, const KvDocument& doc);
  void send_shard(std::int32_t shard, std::int32_t home);
  void send_part(const RelayHop& part, std::int32_t home);
  void spread_in_node(const RelayHop& part, std::size_t first, std::size_t last, Holder root);
  void order_by_room(std::vector<RankRange>& entries, std::int64_t num_rows, const Tier& tier);
  [[nodiscard]] std::size_t lightest_holder(const Tier& tier) const;
  Holder hop(const RelayHop& part, Tier& tier, std::int32_t dst);
  [[nodiscard]] std::int64_t& bytes_out(std::int32_t rank, const Tier& tier) const;
  [[nodiscard]] std::int32_t entry_of_node(std::size_t first, std::size_t last) const;
  [[nodiscard]] std::size_t end_of_node(std::size_t first) const;

  AttentionPlan* plan_ = nullptr;
  const std::int32_t* nodes_ = nullptr;
  std::int64_t row_bytes_ = 0;
  std::int64_t part_rows_ = 0;
  std::int64_t turn_ = 0;  ///< parts so far: who is served first goes round
  Tier nvlink_;
  Tier network_{.network = true};
  std::vector<std::int32_t> receivers_;  ///< of the shard at hand, by rank
  std::vector<std::int32_t> in_node_;    ///< [shards of the document + 1] receivers near home
  std::vector<std::int32_t> beyond_;     ///< the same in other nodes
  std::vector<std::uint8_t> reserved_;   ///< [N] 1: on NVLink, 2: on the network
  std::vector<RankRange> needs_;         ///< of the document at hand, by rank
  std::vector<RankRange> entries_;
  std::vector<RankRange> in_turn_;
};

}  // namespace waybill::detail
