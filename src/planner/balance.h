#pragma once

#include <cstdint>
#include <vector>

#include "capacity.h"
#include "home_layout.h"
#include "receiver_pool.h"
#include "slab.h"
#include "waybill/planner/planner_options.h"

namespace waybill::detail {

/// Queries of a home piece, positions in the document, that another rank attends to.
struct Move {
  Slab slab;
  std::int32_t piece = 0;
  std::int32_t dst = 0;
};

/// Queries that their home has too many of.
struct Region {
  Slab slab;
  std::int32_t piece = 0;
  std::int32_t before = -1;  ///< who attends to the piece's query before the slab; -1: none there
  std::int32_t after = -1;   ///< to the one behind it
};

/// The regions of one document, handed out from both ends.
struct SlabBid {
  std::int64_t end = 0;   ///< of the last region
  std::int64_t work = 0;  ///< left
  std::int32_t doc = 0;
  std::int32_t first = 0;  ///< regions [first, last) are left
  std::int32_t last = 0;
  std::int32_t node = -1;  ///< where the keys went last
};

/// Moves queries from ranks with too much work to ranks with room. Keeps its memory.
class Balancer {
 public:
  /// A target with which queries move only where capacity asks for it.
  static constexpr double no_target = 1e12;

  /// Fills moves(): disjoint, ordered by piece and position.
  /// @throws InvalidArgument where capacity cannot be kept even at home.
  void run(const HomeLayout& home, const PlannerOptions& options, double target);

  [[nodiscard]] const std::vector<Move>& moves() const { return moves_; }
  [[nodiscard]] const std::vector<std::int64_t>& load() const { return load_; }

 private:
  void count_home_work();
  void count_home_bytes();
  void keep_capacity();
  [[nodiscard]] std::int32_t piece_to_evict(std::int32_t rank) const;
  [[nodiscard]] std::int32_t rank_that_holds(std::int32_t piece) const;
  void send_whole(std::int32_t piece, std::int32_t dst);
  void reunite_short_ends();
  void reunite(std::int32_t idx, std::int32_t other);
  void fill_pool();
  void shed_all();
  void shed(std::int32_t rank, std::int64_t surplus);
  [[nodiscard]] bool has_less_work(std::int32_t a, std::int32_t b) const;
  void heap_pieces(std::int32_t rank);
  [[nodiscard]] std::int32_t heaviest_piece();
  [[nodiscard]] bool tail_is_cheaper(std::int32_t tail, std::int32_t other,
                                     std::int64_t surplus) const;
  void make_bids();
  void serve_bids();
  bool raise_limit();
  [[nodiscard]] bool needs_serving(SlabBid& bid);
  void put_back(std::int32_t rank);
  void set_aside(std::int32_t rank);
  void serve_large(SlabBid& bid);
  void serve_small(SlabBid& bid);
  void serve_homes(SlabBid& bid);
  [[nodiscard]] std::int32_t rank_in_node(std::int32_t node) const;
  [[nodiscard]] std::int32_t rank_for_end(const SlabBid& bid) const;
  [[nodiscard]] std::int32_t rank_for_rest(const SlabBid& bid) const;
  bool give_end(SlabBid& bid, std::int32_t rank);
  void give(SlabBid& bid, std::int32_t region, Slab slab, std::int32_t rank, bool first);
  [[nodiscard]] std::int64_t room(std::int32_t rank) const {
    return limit_ - load_[static_cast<std::size_t>(rank)];
  }
  void move_load(Region& region, Slab slab, std::int32_t rank);
  [[nodiscard]] double bytes_in_after(const SlabBid& bid, std::int32_t rank) const;
  [[nodiscard]] std::int64_t work_of(std::int32_t piece) const {
    return costs_.work(slab_of(home_->pieces[static_cast<std::size_t>(piece)]));
  }

  const HomeLayout* home_ = nullptr;
  SlabCosts costs_;
  Capacity capacity_;
  ReceiverPool pool_;
  std::int32_t ranks_per_node_ = 0;
  double mean_ = 0;
  std::int64_t limit_ = 0;             ///< work that no rank shall exceed
  std::int64_t crumb_ = 0;             ///< work that is not worth a move of its own
  double slab_work_ = 0;               ///< what a rank with room takes, typically
  double mean_bytes_in_ = 0;           ///< expected
  std::vector<std::int64_t> load_;     ///< [W]
  std::vector<double> bytes_in_;       ///< [W] about
  std::vector<std::uint8_t> settled_;  ///< [pieces] not to be shed (any more)
  std::vector<std::int64_t> rooms_;    ///< [<= W]
  std::vector<std::int32_t> by_work_;  ///< pieces of the rank at hand, a heap
  std::vector<Region> regions_;
  std::vector<SlabBid> bids_;
  std::vector<std::int32_t> aside_;  ///< ranks that lack capacity for the bid at hand
  std::vector<Move> moves_;
};

}  // namespace waybill::detail
