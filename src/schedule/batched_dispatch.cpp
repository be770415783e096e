#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "compile.h"

namespace waybill::detail {
namespace {

/// Segments of pieces that others do not wait for are no longer, so that destinations alternate.
constexpr std::int64_t leaf_piece_bytes = std::int64_t{256} << 10;

auto rows_of(const RowMove& move) { return std::tuple(move.tensor, move.row, move.rows); }

/// Puts groups into another order.
void reorder(std::vector<RowMove>& moves, std::vector<std::size_t>& groups,
             std::span<const std::size_t> order) {
  std::vector<RowMove> result;
  result.reserve(moves.size());
  std::vector<std::size_t> begins;
  for (const std::size_t g : order) {
    begins.push_back(result.size());
    for (std::size_t i = groups[g]; i < groups[g + 1]; ++i) result.push_back(moves[i]);
  }
  begins.push_back(result.size());
  moves = std::move(result);
  groups = std::move(begins);
}

/// Brings moves of the same rows together, up to max_addresses_sent, the others in the order in
/// which they came. Nearest destinations from rank + 1 on come first.
/// @return where groups begin, and the end
std::vector<std::size_t> group_moves(std::vector<RowMove>& moves, std::int32_t rank,
                                     std::int32_t world_size) {
  std::vector<std::size_t> idx(moves.size());
  std::iota(idx.begin(), idx.end(), std::size_t{0});
  std::ranges::sort(idx, {}, [&](std::size_t i) {
    const RowMove& move = moves[i];
    return std::tuple(rows_of(move), distance(rank, move.dst_rank, world_size), i);
  });
  std::vector<RowMove> sorted;
  sorted.reserve(moves.size());
  std::vector<std::size_t> groups;
  std::vector<std::size_t> earliest;  // [groups] first move
  for (const std::size_t i : idx) {
    const bool joins = !sorted.empty() && rows_of(sorted.back()) == rows_of(moves[i]) &&
                       sorted.size() - groups.back() < static_cast<std::size_t>(max_addresses_sent);
    if (!joins) {
      groups.push_back(sorted.size());
      earliest.push_back(i);
    }
    earliest.back() = std::min(earliest.back(), i);
    sorted.push_back(moves[i]);
  }
  groups.push_back(sorted.size());
  std::vector<std::size_t> order(earliest.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t g) { return earliest[g]; });
  moves = std::move(sorted);
  reorder(moves, groups, order);
  return groups;
}

/// Cuts rows into pieces of at most leaf_piece_bytes and lets those to different ranks alternate,
/// in proportion to their number, beginning with rank + 1.
void alternate_moves(std::vector<RowMove>& moves, std::vector<std::size_t>& groups,
                     const SequencePlan& plan) {
  std::vector<RowMove> pieces;
  std::vector<std::size_t> begins;
  std::vector<std::int64_t> bytes;
  for (std::size_t g = 0; g + 1 < groups.size(); ++g) {
    const RowMove& first = moves[groups[g]];
    std::int64_t row_bytes = 0;
    for (std::int32_t t = first.tensor; t < first.tensor + first.num_tensors; ++t)
      row_bytes += plan.cuts[t].row_bytes;
    // Rows that stay block no link.
    const bool local = groups[g + 1] - groups[g] == 1 && first.dst_rank == to_int(plan.rank);
    const std::int64_t max_rows = std::max<std::int64_t>(
        1, row_bytes == 0 ? first.rows : (local ? 16 : 1) * leaf_piece_bytes / row_bytes);
    for (std::int64_t begin = 0; begin < first.rows; begin += max_rows) {
      begins.push_back(pieces.size());
      bytes.push_back(std::min(max_rows, first.rows - begin) * row_bytes);
      for (std::size_t i = groups[g]; i < groups[g + 1]; ++i) {
        RowMove piece = moves[i];
        piece.row += begin;
        piece.dst_row += begin;
        piece.rows = std::min(max_rows, first.rows - begin);
        pieces.push_back(piece);
      }
    }
  }
  begins.push_back(pieces.size());
  moves = std::move(pieces);
  groups = std::move(begins);
  std::vector<std::int64_t> total(plan.world_size);
  const auto bucket = [&](std::size_t g) {
    return distance(to_int(plan.rank), moves[groups[g]].dst_rank, plan.world_size);
  };
  std::vector<double> middle(bytes.size());
  for (std::size_t g = 0; g < bytes.size(); ++g) {
    middle[g] = static_cast<double>(total[bucket(g)]) + 0.5 * static_cast<double>(bytes[g]);
    total[bucket(g)] += bytes[g];
  }
  for (std::size_t g = 0; g < bytes.size(); ++g)
    middle[g] /= static_cast<double>(std::max<std::int64_t>(1, total[bucket(g)]));
  std::vector<std::size_t> order(bytes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t g) { return std::tuple(middle[g], bucket(g), g); });
  reorder(moves, groups, order);
}

/// Copies that the rank has besides the one that a hop brings are made there.
bool copies_on(const PartRoutes& routes, std::size_t h) { return routes.num_destinations[h] > 1; }

/// Whether somebody at the end of the hop waits for its batch.
bool is_waited_for(const PartRoutes& routes, std::size_t h) {
  return routes.feeds[h] != 0 || copies_on(routes, h);
}

class DispatchCompiler {
 public:
  DispatchCompiler(const char* who, std::span<const SequencePart> parts, const PartRows& needed,
                   const ChosenWay& way, const CompileOptions& options, SequencePlan& plan)
      : who_(who),
        parts_(parts),
        options_(options),
        separates_local_(options.separate_local_copies &&
                         separates_local_rows(parts, plan.rank, options.num_sms)),
        plan_(plan),
        first_tensor_(first_tensors(parts)),
        routes_(follow_way(who, parts, needed, way)),
        windows_(who, parts, with_passed_rows(needed, routes_), {}, batched_window_bits),
        batches_(parts, routes_, options.plan.batch_bytes, is_waited_for) {}

  void compile() {
    find_following_batches();
    order_ = order_jobs(plan_.world_size, batches_.jobs, edges_);
    number_slots();
    collect_moves();
    for (const RowMove& move : local_) append_local(plan_, windows_, move);
    write();
    windows_.write_offsets(plan_);
    if (options_.split_network) split();
    check_chunk_numbers(plan_);
    plan_.window_bytes = windows_.largest();
  }

 private:
  /// Rows that only pass through a window follow those that it needs.
  static PartRows with_passed_rows(PartRows rows, std::span<const PartRoutes> routes) {
    for (std::size_t p = 0; p < rows.size(); ++p) {
      for (std::size_t r = 0; r < rows[p].size(); ++r) rows[p][r] += routes[p].passed_rows[r];
    }
    return rows;
  }

  void split() {
    const Topology topology = options_.topology(plan_.world_size);
    const auto stages = staged_bytes(parts_, routes_, topology);
    const std::int64_t begin = windows_.add_stage(who_, stages, to_int(plan_.rank));
    split_network(plan_, topology, begin, options_.plan.batch_bytes);
    plan_.network.stage_bytes = stages[to_int(plan_.rank)];
  }

  void find_following_batches() {
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t h = 0; h < routes_[p].hops.size(); ++h) {
        if (copies_on(routes_[p], h))
          (void)batches_.following(batches_.of[p][h], routes_[p].hops[h].dst_rank);
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
    for (const std::int32_t b : order_) {
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
        if (batch >= 0 && is_waited_for(routes, h)) signals_.push_back({batch, hop.dst_rank});
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
      (local && separates_local_ ? local_ : leaves_)
          .push_back(move_of(p, row, metadata.seq_len[entry], dst, metadata.dst_offset[c]));
    }
  }

  /// The other copies on this rank of what a hop brings.
  void collect_copies(std::size_t p, std::size_t h) {
    const SparseMetadata& metadata = *parts_[p].metadata;
    const RelayHop& hop = routes_[p].hops[h];
    auto& moves = moves_[batches_.following(batches_.of[p][h], hop.dst_rank)];
    const std::int64_t begin = metadata.destination_begin(hop.shard);
    for (auto c = begin + routes_[p].first_destination[h] + 1;
         c < metadata.destination_end(hop.shard); ++c) {
      if (metadata.dst_rank[c] != hop.dst_rank) continue;
      moves.push_back(move_of(p, routes_[p].dst_row[h], hop.num_rows, hop.dst_rank,
                              metadata.dst_offset[c] + hop.row_begin));
    }
  }

  /// Moves as group_moves() made them, with the same rows.
  void write_moves(std::span<const RowMove> moves) {
    const RowMove& first = moves.front();
    for (std::int32_t t = first.tensor; t < first.tensor + first.num_tensors; ++t) {
      addresses_.clear();
      for (const RowMove& move : moves) {
        addresses_.push_back(windows_.address(t, move.dst_rank, move.dst_row));
        plan_.wire_bytes[move.dst_rank] += move.rows * plan_.cuts[t].row_bytes;
      }
      add_segment(plan_, t, first.row, first.rows, addresses_);
    }
  }

  /// Rows for which nobody waits, as many as fit into `num_bytes`.
  void write_leaves(std::int64_t num_bytes) {
    begin_batch(plan_, BatchKind::send);
    while (num_bytes > 0 && next_leaf_ + 1 < leaf_groups_.size()) {
      const std::size_t begin = leaf_groups_[next_leaf_];
      const std::size_t end = leaf_groups_[++next_leaf_];
      write_moves(std::span(leaves_).subspan(begin, end - begin));
      for (std::size_t i = begin; i < end; ++i) {
        const RowMove& move = leaves_[i];
        if (move.dst_rank == to_int(plan_.rank)) continue;
        for (std::int32_t t = move.tensor; t < move.tensor + move.num_tensors; ++t)
          num_bytes -= move.rows * plan_.cuts[t].row_bytes;
      }
    }
    end_batch(plan_);
  }

  /// The batches in their order, and others' rows while nothing has arrived.
  void write() {
    leaf_groups_ = group_moves(leaves_, to_int(plan_.rank), plan_.world_size);
    alternate_moves(leaves_, leaf_groups_, plan_);
    std::int64_t busy = 0;
    for (const std::int32_t b : order_) {
      if (batches_.jobs[b].rank != to_int(plan_.rank)) continue;
      write_leaves(batches_.jobs[b].start - busy);
      busy = batches_.jobs[b].finish;
      write_batch(b);
    }
    write_leaves(std::numeric_limits<std::int64_t>::max());
  }

  void write_batch(std::int32_t b) {
    const std::int32_t before = batches_.after[b];
    begin_batch(plan_, before < 0 ? BatchKind::send : BatchKind::forward);
    if (before >= 0) plan_.waits.push_back({batches_.jobs[before].rank, slots_[before]});
    auto& moves = moves_[b];
    const auto groups = group_moves(moves, to_int(plan_.rank), plan_.world_size);
    for (std::size_t g = 0; g + 1 < groups.size(); ++g)
      write_moves(std::span(moves).subspan(groups[g], groups[g + 1] - groups[g]));
    for (auto s = std::ranges::lower_bound(signals_, std::pair(b, 0));
         s != signals_.end() && s->first == b; ++s) {
      plan_.signals.push_back({s->second, slots_[b]});
    }
    end_batch(plan_);
  }

  const char* const who_;
  std::span<const SequencePart> parts_;
  const CompileOptions& options_;
  bool separates_local_;
  SequencePlan& plan_;
  std::vector<std::int32_t> first_tensor_;
  std::vector<PartRoutes> routes_;
  WindowMap windows_;
  HopBatches batches_;
  std::vector<std::pair<std::int32_t, std::int32_t>> edges_;
  std::vector<std::int32_t> order_;          ///< batches
  std::vector<std::int32_t> slots_;          ///< [batches] index in the pad; -1: nobody waits
  std::vector<std::vector<RowMove>> moves_;  ///< [batches] of this rank
  std::vector<RowMove> leaves_;              ///< for which nobody waits
  std::vector<std::size_t> leaf_groups_;
  std::size_t next_leaf_ = 0;
  std::vector<RowMove> local_;
  std::vector<std::pair<std::int32_t, std::int32_t>>
      signals_;  ///< batch, rank whose slot it raises
  std::vector<std::uint64_t> addresses_;
};

}  // namespace

void compile_batched_dispatch(const char* who, std::span<const SequencePart> parts,
                              const PartRows& needed, const ChosenWay& way,
                              const CompileOptions& options, SequencePlan& plan) {
  DispatchCompiler(who, parts, needed, way, options, plan).compile();
}

}  // namespace waybill::detail
