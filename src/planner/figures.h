#pragma once

#include <cstdint>
#include <vector>

#include "home_layout.h"
#include "node_routes.h"
#include "waybill/planner/attention_plan.h"

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

/// Counts what a plan, as PlanWriter writes it, costs each rank. Keeps its memory.
class FigureCounter {
 public:
  /// Fills all figures of `plan` but the relay from its `options` and `plan`.
  void count(const HomeLayout& home, AttentionPlan& plan);

  /// What crosses, for the relay.
  std::vector<RankRange> needs;  ///< KV shards of a document that a rank needs, own ones too
  std::vector<RankRange> runs;   ///< consecutive shards of a document with one home
  std::vector<KvDocument> documents;
  std::vector<LinkBytes> q_links;   ///< [W] of Q alone
  std::vector<std::int32_t> nodes;  ///< [W]

 private:
  void bound_bytes_in(const HomeLayout& home, AttentionPlan& plan) const;
  void count_document(std::int64_t first, std::int64_t last, AttentionPlan& plan);
  void add_rows(std::int32_t first, std::int32_t last, std::int32_t dst, const KvDocument& doc,
                AttentionPlan& plan);
  void send_whole_runs(const KvDocument& doc, AttentionPlan& plan) const;
  void add_link(std::vector<LinkBytes>& links, std::int32_t src, std::int32_t dst,
                std::int64_t num_bytes) const {
    add_bytes(links, nodes[src] == nodes[dst], src, dst, num_bytes);
  }

  std::vector<std::int32_t> need_of_rank_;  // [W] into needs, -1
  std::vector<std::int64_t> position_;      // of the shards of a document, and its end
  // [runs of the document + 1] How often each is sent whole, less how often the one before is:
  std::vector<std::int32_t> sent_near_;  // inside its node
  std::vector<std::int32_t> sent_far_;   // to other nodes
  std::int32_t home_rank_ = 0;
};

}  // namespace waybill::detail
