#pragma once

#include <cstdint>
#include <iterator>
#include <set>
#include <tuple>
#include <vector>

#include "home_layout.h"
#include "waybill/planner/planner.h"

namespace waybill::detail {

/// Work and bytes of slabs.
struct SlabCosts {
  AttentionMask mask;  ///< inside a chunk, without a prefix
  double q_row = 0;    ///< bytes
  double kv_row = 0;   ///< bytes, K and V
  std::int64_t block_tokens = 128;
  double fine_work = 0;  ///< a block with more work than this is cut finer
  HardwareFacts facts;
  bool tails = false;

  SlabCosts() = default;
  explicit SlabCosts(const PlannerOptions& options);

  /// The mask of the slab's document.
  [[nodiscard]] AttentionMask mask_of(const Slab& slab) const {
    return mask.with_prefix(slab.prefix);
  }

  [[nodiscard]] std::int64_t work(Slab slab) const {
    const bool is_cut = slab.begin < slab.prefix && slab.prefix < slab.end;  // into two shards
    return kernel_work(mask_of(slab), facts, slab.begin, slab.end, slab.doc_len) +
           (is_cut ? facts.shard_pairs : 0);
  }

  /// KV rows [begin, end) of the document that the slab needs.
  [[nodiscard]] Slab keys(Slab slab) const {
    const TokenRange keys = mask_of(slab).keys(slab.begin, slab.end, slab.doc_len);
    return slab.part(keys.begin, keys.end);
  }

  /// KV rows that a rank without any needs for the slab.
  [[nodiscard]] std::int64_t context(Slab slab) const { return keys(slab).rows(); }

  /// KV rows that a home lacks for the queries of its piece.
  [[nodiscard]] std::int64_t remote_context(Slab piece) const {
    return context(piece) - piece.rows();
  }

  /// The grid on which a slab of the document of `of` that ends near `position` is cut: a power of
  /// two times fewer tokens than a block where blocks weigh too much.
  [[nodiscard]] std::int64_t grid(std::int64_t position, const Slab& of) const;

  /// The longest part of `slab` that ends where it ends, begins on the grid, and has at most
  /// `work`; it ends where it begins when not even one step fits.
  [[nodiscard]] Slab slab_down(Slab slab, std::int64_t work) const;

  /// A slab of `piece` with at least `work` (or the whole piece) that costs the ranks which take it
  /// few bytes, when one rank takes `slab_work` of it.
  [[nodiscard]] Slab cheapest_region(Slab piece, std::int64_t work, double slab_work) const;

  /// About the bytes in when ranks without any of its rows share a region, `slab_work` each.
  [[nodiscard]] double bytes_of(Slab region, double slab_work) const;
};

/// Counts the rows of Q and KV in the buffers of each rank while queries move, never too low.
/// Without a limit it does nothing.
class Capacity {
 public:
  void reset(const HomeLayout& home, const SlabCosts& costs, std::int64_t limit);

  [[nodiscard]] bool limited() const { return limit_ > 0; }
  [[nodiscard]] bool exceeded(std::int32_t rank) const;
  [[nodiscard]] std::int64_t needed(std::int32_t rank) const;
  [[nodiscard]] std::int64_t limit() const { return limit_; }

  /// The part of `slab`, from its end, for which `rank` has room; empty where there is none.
  [[nodiscard]] Slab fitting(std::int32_t rank, std::int32_t doc, Slab slab) const;

  /// Rows of KV for which some rank has room.
  [[nodiscard]] std::int64_t max_kv_room() const;

  void give(std::int32_t rank, std::int32_t doc, Slab slab);
  void take(std::int32_t rank, Slab slab);  ///< queries leave; KV is counted on
  void take_piece(std::int32_t piece);      ///< a whole piece leaves its home, and its KV

 private:
  [[nodiscard]] Slab keys_of(Slab slab) const;
  [[nodiscard]] std::int64_t new_kv_rows(std::int32_t rank, std::int32_t doc, Slab slab) const;

  const HomeLayout* home_ = nullptr;
  const SlabCosts* costs_ = nullptr;
  std::int64_t limit_ = 0;
  std::vector<std::int64_t> q_rows_;    ///< [W]
  std::vector<std::int64_t> kv_rows_;   ///< [W]
  std::vector<Slab> held_;              ///< [W] KV rows of the document that came last
  std::vector<std::int32_t> held_doc_;  ///< [W] that document, or -1
};

/// Ranks by how much work they can still take, roughly: rooms that differ little count the same,
/// and of these ranks those come first that were put first.
class ReceiverPool {
 public:
  /// Empties the pool; room is at most `max_room`.
  void reset(std::int32_t world_size, std::int64_t max_room);

  /// Adds a rank that is not in it, or changes its room.
  void put(std::int32_t rank, std::int64_t room);
  void remove(std::int32_t rank);
  [[nodiscard]] bool contains(std::int32_t rank) const { return places_[rank] != ranks_.end(); }

  /// The rank with the most room, or -1.
  [[nodiscard]] std::int32_t roomiest() const;
  /// The rank with the least room of at least `room`, else the one with the most, or -1.
  [[nodiscard]] std::int32_t smallest_fit(std::int64_t room) const;
  /// The next rank in the pool with about as much room or more; -1: none.
  [[nodiscard]] std::int32_t roomier(std::int32_t rank) const {
    return at(std::next(places_[rank]));
  }

 private:
  /// Bucket, number of the put, rank.
  using Entry = std::tuple<std::int32_t, std::int64_t, std::int32_t>;
  using Place = std::set<Entry>::const_iterator;

  [[nodiscard]] std::int32_t bucket_of(std::int64_t room) const;
  [[nodiscard]] std::int32_t at(Place place) const {
    return place == ranks_.end() ? -1 : std::get<2>(*place);
  }

  std::set<Entry> ranks_;
  std::vector<Place> places_;  ///< [W] ranks_.end(): not in the pool
  std::int64_t num_puts_ = 0;
  double scale_ = 0;
};

/// Queries that their home has too many of.
struct Region {
  Slab slab;
  std::int32_t piece = 0;
  std::int32_t before = -1;  ///< rank of the piece's query before the slab; -1: none there
  std::int32_t after = -1;   ///< rank of the query after it
};

/// The regions of one document, handed out from both ends.
struct SlabBid {
  std::int64_t end = 0;   ///< end of the last region
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
  void count_home();
  void keep_capacity();
  [[nodiscard]] std::int32_t piece_to_evict(std::int32_t rank) const;
  [[nodiscard]] std::int32_t rank_that_holds(std::int32_t piece) const;
  void send_whole(std::int32_t piece, std::int32_t dst);
  void reunite_short_ends();
  void reunite(std::int32_t idx, std::int32_t other);
  void fill_pool();
  void find_slab_work();
  void shed_all();
  void shed(std::int32_t rank, std::int64_t surplus);
  [[nodiscard]] bool tail_is_cheaper(std::int32_t tail, std::int32_t other,
                                     std::int64_t surplus) const;
  void make_bids();
  void serve_bids();
  bool raise_limit();
  [[nodiscard]] bool needs_serving(SlabBid& bid);
  void put_back(std::int32_t rank);
  void serve(SlabBid& bid);
  void serve_homes(SlabBid& bid);
  [[nodiscard]] std::int32_t rank_in_node(std::int32_t node) const;
  [[nodiscard]] std::int32_t rank_for_end(const SlabBid& bid) const;
  [[nodiscard]] std::int32_t rank_for_rest(const SlabBid& bid) const;
  bool give_end(SlabBid& bid, std::int32_t rank);
  void give(SlabBid& bid, std::int32_t region, Slab slab, std::int32_t rank, bool first);
  [[nodiscard]] std::int64_t room(std::int32_t rank) const { return limit_ - load_[rank]; }
  void move_load(Region& region, Slab slab, std::int32_t rank);
  [[nodiscard]] double bytes_in_after(const SlabBid& bid, std::int32_t rank) const;
  [[nodiscard]] std::int64_t work_of(std::int32_t piece) const {
    return costs_.work(home_->pieces[piece]);
  }

  const HomeLayout* home_ = nullptr;
  SlabCosts costs_;
  Capacity capacity_;
  ReceiverPool pool_;
  std::int32_t ranks_per_node_ = 0;
  double mean_ = 0;
  std::int64_t limit_ = 0;             ///< work that no rank shall exceed
  std::int64_t negligible_ = 0;        ///< work that is not worth a move of its own
  double slab_work_ = 0;               ///< typical work that a rank with room takes
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
