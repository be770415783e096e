#include <algorithm>
#include <limits>

#include "compile.h"

namespace waybill::detail {
namespace {

/// A batch of rows that a rank returns to the one from which it had them.
struct ReturnBatch {
  std::int32_t to = 0;
  bool network = false;        ///< `to` is on another node: it does not read, rows are put there
  bool sums = false;           ///< some of it are sums
  std::int32_t own_slot = -1;  ///< raised at the rank itself when the sums are made, before the put
  std::int32_t slot = -1;      ///< raised at `to`
};

/// The rows that come back along the hops of all parts: every forward batch, rank by rank, as one
/// return batch of each of its destinations.
struct GradientReturns {
  GradientReturns(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                  const PartRows& rows_needed, const Topology& topology, std::int64_t batch_bytes)
      : rows(rows_needed), sums(parts.size(), std::vector<std::int64_t>(topology.world_size)) {
    find_kinds(routes, topology);
    find_batches(parts, routes, topology, batch_bytes);
    take_rows(routes);
    order_batches(routes, topology.world_size);
  }

  std::vector<std::vector<ReturnKind>> kind;     ///< [parts][hops]
  std::vector<std::vector<std::int32_t>> batch;  ///< [parts][hops]; -1: read
  std::vector<std::vector<std::int32_t>> key;  ///< [parts][hops] the first copy in what it returns
  std::vector<std::vector<std::int64_t>> sum_row;   ///< [parts][hops] at dst, of the sums there
  std::vector<std::vector<std::int64_t>> land_row;  ///< [parts][hops] at src, where rows are put
  PartRows rows;                                    ///< [parts][W] with those that are put
  PartRows sums;                                    ///< [parts][W]
  std::vector<ReturnBatch> batches;
  std::vector<BatchJob> jobs;       ///< [batches]
  std::vector<std::int32_t> order;  ///< batches, as they can be returned
  std::int32_t num_slots = 0;

 private:
  void find_kinds(std::span<const PartRoutes> routes, const Topology& topology) {
    for (const PartRoutes& part : routes) {
      auto& kinds = kind.emplace_back();
      auto& keys = key.emplace_back(part.hops.size(), std::numeric_limits<std::int32_t>::max());
      for (std::size_t h = 0; h < part.hops.size(); ++h) {
        kinds.push_back(return_kind(topology, part, h));
      }
      // A hop stands after the one that feeds it, so what stands on it has been seen.
      for (std::size_t h = part.hops.size(); h-- > 0;) {
        if (part.first_destination[h] >= 0) keys[h] = std::min(keys[h], part.first_destination[h]);
        if (part.hops[h].after < 0) continue;
        std::int32_t& feed = keys[part.hops[h].after];
        feed = std::min(feed, keys[h]);
      }
    }
  }

  void find_batches(std::span<const SequencePart> parts, std::span<const PartRoutes> routes,
                    const Topology& topology, std::int64_t batch_bytes) {
    const HopBatches forward(parts, routes, batch_bytes,
                             [&](const PartRoutes& part, std::size_t h) {
                               return return_kind(topology, part, h) != ReturnKind::read;
                             });
    std::vector<std::vector<std::int32_t>> of_forward(forward.jobs.size());
    for (std::size_t p = 0; p < parts.size(); ++p) {
      batch.emplace_back(routes[p].hops.size(), -1);
      const std::int64_t row_bytes = row_bytes_of(parts[p]);
      for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
        if (kind[p][h] == ReturnKind::read) continue;
        const RelayHop& hop = routes[p].hops[h];
        auto& candidates = of_forward[forward.of[p][h]];
        const auto found = std::ranges::find_if(
            candidates, [&](std::int32_t b) { return jobs[b].rank == hop.dst_rank; });
        std::int32_t batch_idx = found != candidates.end() ? *found : -1;
        if (batch_idx < 0) {
          batch_idx = static_cast<std::int32_t>(batches.size());
          candidates.push_back(batch_idx);
          jobs.push_back({.rank = hop.dst_rank});
          batches.push_back(
              {.to = hop.src_rank,
               .network = !topology.share_node(Rank{hop.src_rank}, Rank{hop.dst_rank})});
        }
        batch[p][h] = batch_idx;
        jobs[batch_idx].num_bytes += hop.num_rows * row_bytes;
        batches[batch_idx].sums = batches[batch_idx].sums || kind[p][h] == ReturnKind::sum;
      }
    }
  }

  void take_rows(std::span<const PartRoutes> routes) {
    const auto take = [](std::int64_t& used, std::int64_t count) {
      used += count;
      return used - count;
    };
    for (std::size_t p = 0; p < routes.size(); ++p) {
      sum_row.emplace_back(routes[p].hops.size(), -1);
      land_row.emplace_back(routes[p].hops.size(), -1);
      for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
        const RelayHop& hop = routes[p].hops[h];
        if (kind[p][h] == ReturnKind::read) continue;
        const bool sum = kind[p][h] == ReturnKind::sum;
        if (sum) sum_row[p][h] = take(sums[p][hop.dst_rank], hop.num_rows);
        if (!batches[batch[p][h]].network) continue;
        land_row[p][h] = take((sum ? sums : rows)[p][hop.src_rank], hop.num_rows);
      }
    }
  }

  void order_batches(std::span<const PartRoutes> routes, std::int32_t world_size) {
    std::vector<std::pair<std::int32_t, std::int32_t>> edges;
    for (std::size_t p = 0; p < routes.size(); ++p) {
      for (std::size_t h = 0; h < routes[p].hops.size(); ++h) {
        const std::int32_t feed = routes[p].hops[h].after;
        if (feed >= 0 && batch[p][h] >= 0) edges.emplace_back(batch[p][h], batch[p][feed]);
      }
    }
    sort_unique(edges);
    order = order_jobs(world_size, jobs, edges);
    std::vector<std::int32_t> used(world_size);
    for (const std::int32_t b : order) {
      const std::int32_t rank = jobs[b].rank;
      const auto next = [&] { return used[rank]++ * world_size + rank; };
      if (batches[b].network && batches[b].sums) batches[b].own_slot = next();
      batches[b].slot = next();
    }
    num_slots = *std::ranges::max_element(used);
  }
};

/// Rows of an entry that have the same addends.
struct SumPiece {
  std::size_t part = 0;
  std::int64_t to_row = 0;  ///< in the output, or in the sums of the window
  std::int64_t rows = 0;
  std::int64_t ready = 0;  ///< when all that it waits for has come
  std::size_t first_addend = 0;
  std::size_t last_addend = 0;
  std::size_t first_wait = 0;  ///< batches
  std::size_t last_wait = 0;
};

struct Addend {
  std::int32_t key = 0;   ///< the first copy in it
  std::int32_t from = 0;  ///< rank whose gradients they are
  std::int32_t rank = 0;  ///< where they lie
  bool sum = false;
  std::int64_t row = 0;  ///< in the tensor, or in the sums there
};

class GradientCompiler {
 public:
  GradientCompiler(const char* who, std::span<const SequencePart> parts, const PartRows& needed,
                   const ChosenWay& way, const CompileOptions& options, SequencePlan& plan)
      : parts_(parts),
        options_(options),
        plan_(plan),
        first_tensor_(first_tensors(parts)),
        routes_(follow_way(who, parts, needed, way)),
        returns_(parts, routes_, needed, options.topology(plan.world_size),
                 options.plan.batch_bytes),
        windows_(who, parts, returns_.rows, returns_.sums, batched_window_bits),
        read_from_(plan.world_size, -1) {}

  void compile() {
    collect_children();
    collect_returns();
    collect_sums();
    write();
    windows_.write_offsets(plan_);
    // All that crosses lies in the window: there is no stage.
    if (options_.split_network) {
      split_network(plan_, options_.topology(plan_.world_size), windows_.largest(),
                    options_.plan.batch_bytes);
    }
    check_chunk_numbers(plan_);
    plan_.window_bytes = windows_.largest();
    plan_.num_slots = returns_.num_slots;
  }

 private:
  /// Hops from this rank: on each hop to it, and from home on each of its entries.
  void collect_children() {
    const std::int32_t me = to_int(plan_.rank);
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const PartRoutes& routes = routes_[p];
      children_.emplace_back(routes.hops.size());
      from_home_.emplace_back(parts_[p].metadata->num_entries());
      for (std::size_t h = 0; h < routes.hops.size(); ++h) {
        const RelayHop& hop = routes.hops[h];
        if (hop.src_rank != me) continue;
        auto& list = hop.after < 0 ? from_home_[p][hop.shard] : children_[p][hop.after];
        list.push_back(static_cast<std::int32_t>(h));
      }
    }
  }

  /// Cuts rows [begin, end) of an entry where the children's rows begin and end.
  void add_pieces(std::vector<SumPiece>& pieces, std::size_t p, std::int64_t entry,
                  std::int64_t begin, std::int64_t end, std::int64_t to_row,
                  std::span<const std::int32_t> children) {
    std::vector<std::int64_t>& cuts = cuts_;
    cuts.assign({begin, end});
    for (const std::int32_t h : children) {
      const RelayHop& hop = routes_[p].hops[h];
      cuts.push_back(std::clamp(hop.row_begin, begin, end));
      cuts.push_back(std::clamp(hop.row_begin + hop.num_rows, begin, end));
    }
    sort_unique(cuts);
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      SumPiece piece{.part = p, .to_row = to_row + cuts[i] - begin, .rows = cuts[i + 1] - cuts[i]};
      add_addends(piece, entry, cuts[i], children);
      pieces.push_back(piece);
    }
  }

  void add_addends(SumPiece& piece, std::int64_t entry, std::int64_t begin,
                   std::span<const std::int32_t> children) {
    const std::size_t p = piece.part;
    const std::int32_t me = to_int(plan_.rank);
    piece.first_addend = addends_.size();
    piece.first_wait = waits_.size();
    ++stamp_;
    read_from_[me] = stamp_;
    for (const std::int32_t h : children) {
      const RelayHop& hop = routes_[p].hops[h];
      if (begin < hop.row_begin || begin >= hop.row_begin + hop.num_rows) continue;
      if (returns_.kind[p][h] == ReturnKind::read) {
        read_from_[hop.dst_rank] = stamp_;
      } else {
        add_return(piece, h, begin - hop.row_begin);
      }
    }
    const SparseMetadata& metadata = *parts_[p].metadata;
    const bool direct = routes_[p].has_hops[entry] == 0;
    for (auto c = metadata.destination_begin(entry); c < metadata.destination_end(entry); ++c) {
      const std::int32_t rank = metadata.dst_rank[c];
      if (!direct && read_from_[rank] != stamp_) continue;
      addends_.push_back({.key = static_cast<std::int32_t>(c - metadata.destination_begin(entry)),
                          .from = rank,
                          .rank = rank,
                          .sum = false,
                          .row = metadata.dst_offset[c] + begin});
    }
    piece.last_addend = addends_.size();
    piece.last_wait = waits_.size();
    std::sort(addends_.begin() + static_cast<std::ptrdiff_t>(piece.first_addend), addends_.end(),
              [](const Addend& a, const Addend& b) { return a.key < b.key; });
  }

  void add_return(SumPiece& piece, std::int32_t h, std::int64_t row) {
    const std::size_t p = piece.part;
    const std::int32_t batch = returns_.batch[p][h];
    const bool network = returns_.batches[batch].network;
    const std::int32_t dst = routes_[p].hops[h].dst_rank;
    addends_.push_back({.key = returns_.key[p][h],
                        .from = dst,
                        .rank = network ? to_int(plan_.rank) : dst,
                        .sum = returns_.kind[p][h] == ReturnKind::sum,
                        .row = (network ? returns_.land_row : returns_.sum_row)[p][h] + row});
    waits_.push_back(batch);
    piece.ready = std::max(piece.ready, returns_.jobs[batch].finish);
  }

  /// The sums and the puts of each batch that this rank returns.
  void collect_returns() {
    sums_of_.resize(returns_.batches.size());
    puts_of_.resize(returns_.batches.size());
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (std::size_t h = 0; h < routes_[p].hops.size(); ++h) {
        const RelayHop& hop = routes_[p].hops[h];
        if (hop.dst_rank != to_int(plan_.rank) || returns_.batch[p][h] < 0) continue;
        const std::size_t b = returns_.batch[p][h];
        if (returns_.kind[p][h] == ReturnKind::sum) {
          add_pieces(sums_of_[b], p, hop.shard, hop.row_begin, hop.row_begin + hop.num_rows,
                     returns_.sum_row[p][h], children_[p][h]);
        }
        if (returns_.batches[b].network) puts_of_[b].push_back({p, h});
      }
    }
  }

  /// The sums of this rank's rows: those for which nothing must come first, and the others in the
  /// order in which they can be made.
  void collect_sums() {
    std::vector<SumPiece> all;
    for_own_entries(parts_, plan_.rank, [&](std::size_t p, std::int64_t entry, std::int64_t row) {
      add_pieces(all, p, entry, 0, parts_[p].metadata->seq_len[entry], row, from_home_[p][entry]);
    });
    for (const SumPiece& piece : all)
      (piece.first_wait == piece.last_wait ? leaves_ : sums_).push_back(piece);
    std::ranges::stable_sort(sums_, {}, &SumPiece::ready);
  }

  [[nodiscard]] std::int64_t bytes_of(const SumPiece& piece) const {
    return piece.rows * row_bytes_of(parts_[piece.part]) *
           static_cast<std::int64_t>(piece.last_addend - piece.first_addend);
  }

  void write_piece(const SumPiece& piece) {
    for (std::int32_t t = first_tensor_[piece.part]; t < first_tensor_[piece.part + 1]; ++t) {
      addresses_.clear();
      for (std::size_t a = piece.first_addend; a < piece.last_addend; ++a) {
        const Addend& addend = addends_[a];
        const auto tensor = t + (addend.sum ? static_cast<std::int32_t>(plan_.tensors.size()) : 0);
        addresses_.push_back(windows_.address(tensor, addend.rank, addend.row));
        plan_.wire_bytes[addend.from] += piece.rows * plan_.cuts[tensor].row_bytes;
      }
      add_segment(plan_, t, piece.to_row, piece.rows, addresses_);
    }
  }

  /// One batch of sums, with the waits of all its pieces.
  void write_sums(BatchKind kind, std::span<const SumPiece> pieces) {
    begin_batch(plan_, kind);
    std::vector<std::int32_t> batches;
    for (const SumPiece& piece : pieces) {
      write_piece(piece);
      for (std::size_t w = piece.first_wait; w < piece.last_wait; ++w) batches.push_back(waits_[w]);
    }
    sort_unique(batches);
    for (const std::int32_t b : batches)
      plan_.waits.push_back({returns_.jobs[b].rank, returns_.batches[b].slot});
  }

  void write_return(std::size_t b) {
    const ReturnBatch& batch = returns_.batches[b];
    const std::int32_t me = to_int(plan_.rank);
    if (batch.sums) {
      write_sums(BatchKind::partial, sums_of_[b]);
      plan_.signals.push_back(batch.network ? BatchSlot{me, batch.own_slot}
                                            : BatchSlot{batch.to, batch.slot});
      end_batch(plan_);
    }
    if (!batch.network) return;
    begin_batch(plan_, BatchKind::forward);
    if (batch.sums) plan_.waits.push_back({me, batch.own_slot});
    for (const auto& [p, h] : puts_of_[b]) write_put(p, h);
    plan_.signals.push_back({batch.to, batch.slot});
    end_batch(plan_);
  }

  void write_put(std::size_t p, std::size_t h) {
    const RelayHop& hop = routes_[p].hops[h];
    const bool sum = returns_.kind[p][h] == ReturnKind::sum;
    const std::int64_t row = sum ? returns_.sum_row[p][h] : routes_[p].dst_row[h];
    const std::int32_t shift = sum ? static_cast<std::int32_t>(plan_.tensors.size()) : 0;
    for (std::int32_t t = first_tensor_[p] + shift; t < first_tensor_[p + 1] + shift; ++t) {
      const std::uint64_t to =
          windows_.address(t, hop.src_rank, returns_.land_row[p][h]) & ~address_sum_bit;
      add_segment(plan_, t, row, hop.num_rows, {&to, 1});
    }
  }

  /// Sums that wait for nothing, as many as fit into `num_bytes`.
  void write_leaves(std::int64_t num_bytes) {
    const std::size_t first = next_leaf_;
    while (num_bytes > 0 && next_leaf_ < leaves_.size())
      num_bytes -= bytes_of(leaves_[next_leaf_++]);
    if (first == next_leaf_) return;
    write_sums(BatchKind::sum, std::span(leaves_).subspan(first, next_leaf_ - first));
    end_batch(plan_);
  }

  /// Returns that others wait for as soon as they can be made; sums in between.
  void write() {
    std::int64_t total = 0;
    for (const SumPiece& piece : sums_) total += bytes_of(piece);
    const std::int64_t max_bytes = batch_size(total, options_.plan.batch_bytes);
    std::int64_t busy = 0;
    std::size_t next = 0;
    const auto write_until = [&](std::int64_t time) {  // own sums that are ready before
      while (next < sums_.size() && sums_[next].ready < time) {
        const std::size_t first = next;
        std::int64_t bytes = 0;
        while (next < sums_.size() && sums_[next].ready < time && bytes < max_bytes)
          bytes += bytes_of(sums_[next++]);
        write_leaves(sums_[next - 1].ready - busy);
        busy = std::max(busy, sums_[next - 1].ready) + bytes;
        write_sums(BatchKind::sum, std::span(sums_).subspan(first, next - first));
        end_batch(plan_);
      }
    };
    for (const std::int32_t b : returns_.order) {
      if (returns_.jobs[b].rank != to_int(plan_.rank)) continue;
      const std::int64_t ready = returns_.jobs[b].ready;
      write_until(ready);
      write_leaves(ready - busy);
      busy = std::max(busy, ready) + returns_.jobs[b].num_bytes;
      write_return(b);
    }
    write_until(std::numeric_limits<std::int64_t>::max());
    write_leaves(std::numeric_limits<std::int64_t>::max());
  }

  std::span<const SequencePart> parts_;
  const CompileOptions& options_;
  SequencePlan& plan_;
  std::vector<std::int32_t> first_tensor_;
  std::vector<PartRoutes> routes_;
  GradientReturns returns_;
  WindowMap windows_;
  std::vector<std::vector<std::vector<std::int32_t>>> children_;   ///< [parts][hops]
  std::vector<std::vector<std::vector<std::int32_t>>> from_home_;  ///< [parts][entries]
  std::vector<std::int64_t> read_from_;                            ///< [W] stamp of the piece
  std::int64_t stamp_ = 0;
  std::vector<std::int64_t> cuts_;
  std::vector<Addend> addends_;
  std::vector<std::int32_t> waits_;
  std::vector<std::vector<SumPiece>> sums_of_;                             ///< [return batches]
  std::vector<std::vector<std::pair<std::size_t, std::size_t>>> puts_of_;  ///< part, hop
  std::vector<SumPiece> sums_;
  std::vector<SumPiece> leaves_;
  std::size_t next_leaf_ = 0;
  std::vector<std::uint64_t> addresses_;
};

}  // namespace

void compile_batched_gradient(const char* who, std::span<const SequencePart> parts,
                              const PartRows& needed, const ChosenWay& way,
                              const CompileOptions& options, SequencePlan& plan) {
  GradientCompiler(who, parts, needed, way, options, plan).compile();
}

}  // namespace waybill::detail
