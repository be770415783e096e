#include <algorithm>
#include <vector>

#include "batch_jobs.h"
#include "batches.h"
#include "batched_plans.h"
#include "network.h"
#include "plan_checks.h"
#include "sort_unique.h"

namespace waybill::detail {
namespace {

/// Rows that the rank has copies of besides the one that a hop brings are copied there.
bool copies_on(const PartRoutes& routes, std::size_t h) { return routes.num_destinations[h] > 1; }

class DispatchCompiler {
 public:
  DispatchCompiler(const char* who, std::span<const SequencePart> parts, const ChosenWay& way,
                   const CompileOptions& options, SequencePlan& plan)
      : who_(who),
        parts_(parts),
        options_(options),
        plan_(plan),
        first_tensor_(first_tensors(parts)),
        routes_(follow(who, parts, way, rows_)),
        windows_(who, parts, rows_, batched_window_bits),
        batches_(parts, routes_, options.batch_bytes,
                 [](const PartRoutes& routes, std::size_t h) {
                   return routes.feeds[h] != 0 || copies_on(routes, h);
                 }),
        writer_(plan, windows_) {}

  void compile() {
    find_batches_behind();
    order_ = order_jobs(plan_.world_size, batches_.jobs, edges_);
    number_slots();
    collect_moves();
    write_leaves_apart();
    write();
    for (std::size_t t = 0; t < plan_.tensors.size(); ++t)
      plan_.window_offsets.push_back(windows_.offset(t, to_int(plan_.rank)));
    if (options_.split_network) split();
    writer_.finish();
    plan_.window_bytes = windows_.largest();
  }

 private:
  static std::vector<PartRoutes> follow(const char* who, std::span<const SequencePart> parts,
                                        const ChosenWay& way, std::vector<WindowRows>& rows) {
    std::vector<PartRoutes> routes;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      std::vector<std::int64_t> needed = rows_needed(parts[p]);
      routes.push_back(follow_hops(who, *parts[p].metadata, way.hops[p], needed));
      for (std::size_t r = 0; r < needed.size(); ++r) needed[r] += routes[p].passed_rows[r];
      rows.push_back({std::move(needed), {}});
    }
    return routes;
  }

  void split() {
    const Topology topology = topology_of(plan_, options_);
    const auto stages = staged_bytes(parts_, routes_, topology);
    const std::int64_t begin = windows_.add_stage(who_, stages, to_int(plan_.rank));
    split_network(plan_, topology, begin, options_.batch_bytes);
    plan_.network.stage_bytes = stages[to_int(plan_.rank)];
  }

  /// Whether somebody at the end of the hop waits for its batch.
  [[nodiscard]] bool is_waited_for(std::size_t p, std::size_t h) const {
    return routes_[p].feeds[h] != 0 || copies_on(routes_[p], h);
  }

  void find_batches_behind() {
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t h = 0; h < routes_[p].hops.size(); ++h) {
        if (copies_on(routes_[p], h))
          (void)batches_.behind(batches_.of[p][h], routes_[p].hops[h].dst_rank);
      }
    }
    for (std::size_t b = 0; b < batches_.jobs.size(); ++b) {
      if (batches_.after[b] >= 0)
        edges_.emplace_back(batches_.after[b], static_cast<std::int32_t>(b));
    }
  }

  void number_slots() {
    std::vector<std::uint8_t> signals(batches_.jobs.size());
    for (const std::int32_t before : batches_.after) {
      if (before >= 0) signals[before] = 1;
    }
    slots_.assign(batches_.jobs.size(), -1);
    std::vector<std::int32_t> used(plan_.world_size);
    for (const std::int32_t b : order_.order) {
      const std::int32_t rank = batches_.jobs[b].rank;
      if (signals[b] != 0) slots_[b] = used[rank]++ * plan_.world_size + rank;
    }
    plan_.num_slots = *std::ranges::max_element(used);
  }

  [[nodiscard]] RowMove move_of(std::size_t p, std::int64_t row, std::int64_t rows,
                                std::int32_t dst_rank, std::int64_t dst_row) const {
    return {.tensor = first_tensor_[p],
            .num_tensors = first_tensor_[p + 1] - first_tensor_[p],
            .row = row,
            .rows = rows,
            .dst_rank = dst_rank,
            .dst_row = dst_row};
  }

  /// This rank's rows: of each of its batches, and of none.
  void collect_moves() {
    const std::int32_t me = to_int(plan_.rank);
    moves_.resize(batches_.jobs.size());
    std::vector<std::vector<std::int64_t>> entry_row(parts_.size());
    for (std::size_t p = 0; p < parts_.size(); ++p)
      entry_row[p].assign(parts_[p].metadata->num_entries(), 0);
    for_own_entries(parts_, plan_.rank, [&](std::size_t p, std::int64_t entry, std::int64_t row) {
      entry_row[p][entry] = row;
      collect_entry(p, entry, row);
    });
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const PartRoutes& routes = routes_[p];
      for (std::size_t h = 0; h < routes.hops.size(); ++h) {
        const RelayHop& hop = routes.hops[h];
        if (hop.dst_rank == me && copies_on(routes, h)) collect_copies(p, h);
        if (hop.src_rank != me) continue;
        std::int64_t row = 0;
        if (hop.after < 0) {
          row = entry_row[p][hop.shard] + hop.row_begin;
        } else {
          const std::size_t feed = hop.after;
          row = routes.dst_row[feed] + hop.row_begin - routes.hops[feed].row_begin;
        }
        const std::int32_t batch = batches_.of[p][h];
        auto& moves = batch < 0 ? leaves_ : moves_[batch];
        moves.push_back(move_of(p, row, hop.num_rows, hop.dst_rank, routes.dst_row[h]));
        if (batch >= 0 && is_waited_for(p, h)) signals_.push_back({batch, hop.dst_rank});
      }
    }
    sort_unique(signals_);
  }

  /// Copies that no hop brings: on this rank, and all of entries without hops.
  void collect_entry(std::size_t p, std::int64_t entry, std::int64_t row) {
    const SparseMetadata& metadata = *parts_[p].metadata;
    const bool has_hops = routes_[p].has_hops[entry] != 0;
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      const std::int32_t dst = metadata.dst_rank[c];
      const bool local = dst == to_int(plan_.rank);
      if (has_hops && !local) continue;
      (local && options_.separate_local_copies ? local_ : leaves_)
          .push_back(move_of(p, row, metadata.seq_len[entry], dst, metadata.dst_offset[c]));
    }
  }

  /// The other copies on this rank of what a hop brings.
  void collect_copies(std::size_t p, std::size_t h) {
    const SparseMetadata& metadata = *parts_[p].metadata;
    const RelayHop& hop = routes_[p].hops[h];
    auto& moves = moves_[batches_.behind(batches_.of[p][h], hop.dst_rank)];
    const std::int64_t begin = metadata.destination_begin(hop.shard);
    for (auto c = begin + routes_[p].first_destination[h] + 1;
         c < metadata.destination_end(hop.shard); ++c) {
      if (metadata.dst_rank[c] != hop.dst_rank) continue;
      moves.push_back(move_of(p, routes_[p].dst_row[h], hop.num_rows, hop.dst_rank,
                              metadata.dst_offset[c] + hop.row_begin));
    }
  }

  void write_leaves_apart() {
    for (const RowMove& move : local_) {
      for (std::int32_t t = move.tensor; t < move.tensor + move.num_tensors; ++t) {
        const std::int64_t row_bytes = plan_.cuts[t].row_bytes;
        if (row_bytes == 0) continue;
        plan_.local_segments.push_back(
            {.row = move.row,
             .rows = move.rows,
             .tensor = t,
             .first_destination = static_cast<std::int32_t>(plan_.segment_addresses.size()),
             .num_destinations = 1});
        plan_.segment_addresses.push_back(writer_.address(t, move.dst_rank, move.dst_row));
        plan_.wire_bytes[move.dst_rank] += move.rows * row_bytes;
      }
    }
    leaf_groups_ = group_moves(leaves_, to_int(plan_.rank), plan_.world_size);
    alternate_moves(leaves_, leaf_groups_, plan_, leaf_piece_bytes);
  }

  /// Rows for which nobody waits, as many as fit into `num_bytes`.
  void write_leaves(std::int64_t num_bytes) {
    writer_.begin(BatchKind::send);
    while (num_bytes > 0 && next_leaf_ + 1 < leaf_groups_.size()) {
      const std::size_t begin = leaf_groups_[next_leaf_];
      const std::size_t end = leaf_groups_[++next_leaf_];
      writer_.add(std::span(leaves_).subspan(begin, end - begin));
      for (std::size_t i = begin; i < end; ++i) {
        const RowMove& move = leaves_[i];
        if (move.dst_rank == to_int(plan_.rank)) continue;
        for (std::int32_t t = move.tensor; t < move.tensor + move.num_tensors; ++t)
          num_bytes -= move.rows * plan_.cuts[t].row_bytes;
      }
    }
    writer_.end();
  }

  /// The batches in their order, and others' rows while nothing has arrived.
  void write() {
    std::int64_t busy = 0;
    for (const std::int32_t b : order_.order) {
      if (batches_.jobs[b].rank != to_int(plan_.rank)) continue;
      write_leaves(order_.start[b] - busy);
      busy = order_.finish[b];
      write_batch(b);
    }
    write_leaves(std::numeric_limits<std::int64_t>::max());
  }

  void write_batch(std::int32_t b) {
    const std::int32_t before = batches_.after[b];
    writer_.begin(before < 0 ? BatchKind::send : BatchKind::forward);
    if (before >= 0) writer_.wait({batches_.jobs[before].rank, slots_[before]});
    auto& moves = moves_[b];
    const auto groups = group_moves(moves, to_int(plan_.rank), plan_.world_size);
    for (std::size_t g = 0; g + 1 < groups.size(); ++g)
      writer_.add(std::span(moves).subspan(groups[g], groups[g + 1] - groups[g]));
    for (auto s = std::ranges::lower_bound(signals_, Signal{b, 0});
         s != signals_.end() && s->batch == b; ++s) {
      writer_.signal({s->rank, slots_[b]});
    }
    writer_.end();
  }

  /// Batch `batch` raises its slot at `rank`.
  struct Signal {
    std::int32_t batch = 0;
    std::int32_t rank = 0;
    friend auto operator<=>(const Signal&, const Signal&) = default;
  };

  const char* const who_;
  std::span<const SequencePart> parts_;
  const CompileOptions& options_;
  SequencePlan& plan_;
  std::vector<std::int32_t> first_tensor_;
  std::vector<WindowRows> rows_;
  std::vector<PartRoutes> routes_;
  WindowMap windows_;
  HopBatches batches_;
  BatchWriter writer_;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges_;
  JobOrder order_;
  std::vector<std::int32_t> slots_;          ///< [batches] index in the pad; -1: nobody waits
  std::vector<std::vector<RowMove>> moves_;  ///< [batches] of this rank
  std::vector<RowMove> leaves_;              ///< for which nobody waits
  std::vector<std::size_t> leaf_groups_;
  std::size_t next_leaf_ = 0;
  std::vector<RowMove> local_;
  std::vector<Signal> signals_;
};

}  // namespace

Topology topology_of(const SequencePlan& plan, const CompileOptions& options) {
  return {plan.world_size, options.ranks_per_node == 0 ? plan.world_size : options.ranks_per_node};
}

std::vector<std::int32_t> first_tensors(std::span<const SequencePart> parts) {
  std::vector<std::int32_t> first(1, 0);
  for (const SequencePart& part : parts)
    first.push_back(first.back() + static_cast<std::int32_t>(part.tensors.size()));
  return first;
}

void compile_batched_dispatch(const char* who, std::span<const SequencePart> parts,
                              const ChosenWay& way, const CompileOptions& options,
                              SequencePlan& plan) {
  DispatchCompiler(who, parts, way, options, plan).compile();
}

}  // namespace waybill::detail
