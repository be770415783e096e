#include "balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "waybill/core/error.h"

namespace waybill::detail {
void Balancer::run(const HomeLayout& home, const PlannerOptions& options, double target) {
  home_ = &home;
  moves_.clear();
  regions_.clear();
  bids_.clear();
  settled_.assign(home.pieces.size(), 0);
  costs_ = SlabCosts(options, 0);
  count_home_work();
  mean_ = std::accumulate(load_.begin(), load_.end(), 0.0) / home.world_size;
  costs_ = SlabCosts(options, mean_);
  // At most what int64 holds; a crumb stays below what the balance notices.
  limit_ = static_cast<std::int64_t>(std::min(std::max(target * mean_, std::ceil(mean_)), 9.0e18));
  crumb_ = static_cast<std::int64_t>((options.imbalance_target - 1) * mean_ / 3);
  ranks_per_node_ = options.hardware.ranks_per_node;
  capacity_.reset(home, costs_, options.max_tokens_per_rank);
  count_home_bytes();
  keep_capacity();
  reunite_short_ends();
  fill_pool();
  shed_all();
  make_bids();
  serve_bids();
  std::sort(moves_.begin(), moves_.end(), [](const Move& a, const Move& b) {
    return a.piece != b.piece ? a.piece < b.piece : a.slab.begin < b.slab.begin;
  });
}

void Balancer::count_home_work() {
  load_.assign(home_->world_size, 0);
  for (const HomePiece& piece : home_->pieces) {
    const std::int64_t work = costs_.work(slab_of(piece));
    require(!__builtin_add_overflow(load_[piece.rank], work, &load_[piece.rank]),
            "plan_attention: the work of rank ", piece.rank, " does not fit int64");
  }
}

// Keys of documents that lie on other ranks too.
void Balancer::count_home_bytes() {
  bytes_in_.assign(home_->world_size, 0);
  for (const HomePiece& piece : home_->pieces) {
    bytes_in_[piece.rank] +=
        costs_.kv_row * static_cast<double>(costs_.remote_context(slab_of(piece)));
  }
}

void Balancer::send_whole(std::int32_t piece_idx, std::int32_t dst) {
  const HomePiece& piece = home_->pieces[piece_idx];
  const Slab slab = slab_of(piece);
  const std::int64_t work = costs_.work(slab);
  moves_.push_back({.slab = slab, .piece = piece_idx, .dst = dst});
  settled_[piece_idx] = 1;
  load_[piece.rank] -= work;
  load_[dst] += work;
  bytes_in_[piece.rank] -= costs_.kv_row * static_cast<double>(costs_.remote_context(slab));
  bytes_in_[dst] += costs_.q_row * static_cast<double>(piece.end - piece.begin);
  capacity_.take_piece(piece_idx);
  capacity_.give(dst, piece.doc, slab);
}

// The piece whose keys free most of the rank's buffer.
std::int32_t Balancer::piece_to_evict(std::int32_t rank) const {
  std::int32_t best = -1;
  std::int64_t most = 0;
  for (const std::int32_t p : home_->pieces_of(rank)) {
    const HomePiece& piece = home_->pieces[p];
    const std::int64_t rows = costs_.context(slab_of(piece));
    if (settled_[p] != 0 || rows <= most) continue;
    most = rows;
    best = p;
  }
  return best;
}

// Another home of the document, latest first, else the rank that needs least; -1: none has room.
std::int32_t Balancer::rank_that_holds(std::int32_t piece_idx) const {
  const HomePiece& piece = home_->pieces[piece_idx];
  const Slab slab = slab_of(piece);
  const auto holds = [&](std::int32_t rank) {
    return rank != piece.rank && capacity_.fitting(rank, piece.doc, slab).begin == slab.begin;
  };
  for (std::int32_t p = home_->doc_pieces[piece.doc + 1]; p-- > home_->doc_pieces[piece.doc];) {
    if (holds(home_->pieces[p].rank)) return home_->pieces[p].rank;
  }
  std::int32_t best = -1;
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (holds(rank) && (best < 0 || capacity_.needed(rank) < capacity_.needed(best))) best = rank;
  }
  return best;
}

// Whole pieces leave ranks whose buffers are too small for what is at home there.
void Balancer::keep_capacity() {
  if (!capacity_.limited()) return;
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    while (capacity_.exceeded(rank)) {
      const std::int32_t piece = piece_to_evict(rank);
      const std::int32_t dst = piece < 0 ? -1 : rank_that_holds(piece);
      require(dst >= 0, "plan_attention: infeasible: rank ", rank, " needs ",
              capacity_.needed(rank), " tokens, max_tokens_per_rank has ", capacity_.limit());
      send_whole(piece, dst);
    }
  }
}

// Where a rank boundary cuts off the short end of a document, its queries go to the rank before:
// that takes fewer bytes than the keys the other way, and hardly any work. Under a full mask so
// does a short beginning, to the rank behind.
void Balancer::reunite_short_ends() {
  for (std::int32_t rank = 1; rank < home_->world_size; ++rank) {
    const auto pieces = home_->pieces_of(rank);
    if (pieces.empty() || home_->pieces[pieces.front()].begin == 0) continue;
    reunite(pieces.front(), pieces.front() - 1);
  }
  if (!costs_.mask.is_full()) return;
  for (std::int32_t rank = 0; rank + 1 < home_->world_size; ++rank) {
    const auto pieces = home_->pieces_of(rank);
    if (pieces.empty()) continue;
    const HomePiece& piece = home_->pieces[pieces.back()];
    if (piece.begin == 0 && piece.end < piece.doc_len) reunite(pieces.back(), pieces.back() + 1);
  }
}

// Sends a short piece whole to the home of another one of its document.
void Balancer::reunite(std::int32_t idx, std::int32_t other) {
  const auto little_work = static_cast<std::int64_t>(mean_ / 50);
  if (settled_[idx] != 0) return;
  const HomePiece& piece = home_->pieces[idx];
  const Slab slab = slab_of(piece);
  const bool cheaper = static_cast<double>(piece.end - piece.begin) * costs_.q_row <
                       static_cast<double>(costs_.remote_context(slab)) * costs_.kv_row;
  const std::int32_t dst = home_->pieces[other].rank;
  if (dst == piece.rank || !cheaper || work_of(idx) > little_work || settled_[other] != 0) return;
  if (capacity_.limited() && capacity_.fitting(dst, piece.doc, slab).begin != piece.begin) return;
  send_whole(idx, dst);
}

void Balancer::fill_pool() {
  pool_.reset(home_->world_size, limit_);
  rooms_.clear();
  std::int64_t surplus = 0;
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    const std::int64_t room = limit_ - load_[rank];
    if (room < 0) surplus -= room;
    if (room <= 0) continue;
    pool_.put(rank, room);
    rooms_.push_back(room);
  }
  // The mean room of as many ranks as the surplus needs, those with the most room first.
  std::sort(rooms_.begin(), rooms_.end(), std::greater<>());
  std::int64_t sum = 0;
  std::size_t num_ranks = 0;
  while (num_ranks < rooms_.size() && sum < surplus) sum += rooms_[num_ranks++];
  slab_work_ = num_ranks > 0 ? static_cast<double>(sum) / static_cast<double>(num_ranks) : 1;
}

bool Balancer::has_less_work(std::int32_t a, std::int32_t b) const {
  const std::int64_t work_a = work_of(a);
  const std::int64_t work_b = work_of(b);
  return work_a != work_b ? work_a < work_b : a > b;
}

void Balancer::heap_pieces(std::int32_t rank) {
  const auto pieces = home_->pieces_of(rank);
  by_work_.assign(pieces.begin(), pieces.end());
  std::make_heap(by_work_.begin(), by_work_.end(),
                 [&](std::int32_t a, std::int32_t b) { return has_less_work(a, b); });
}

// The piece with most work that is not settled; -1: none.
std::int32_t Balancer::heaviest_piece() {
  while (!by_work_.empty() && settled_[by_work_.front()] != 0) {
    std::pop_heap(by_work_.begin(), by_work_.end(),
                  [&](std::int32_t a, std::int32_t b) { return has_less_work(a, b); });
    by_work_.pop_back();
  }
  return by_work_.empty() ? -1 : by_work_.front();
}

// Whether to give away all of `tail`, whose document begins on an earlier rank, before a part of
// `other`: the rank then needs none of that document's keys.
bool Balancer::tail_is_cheaper(std::int32_t tail, std::int32_t other, std::int64_t surplus) const {
  const HomePiece& t = home_->pieces[tail];
  if (t.begin == 0 || settled_[tail] != 0 || work_of(tail) > surplus) return false;
  if (tail == other) return true;
  const auto rows = [](std::int64_t num) { return static_cast<double>(num); };
  const double saved = rows(costs_.remote_context(slab_of(t)));
  const double tail_bytes = rows(t.end - t.begin) * costs_.q_row +
                            (rows(costs_.context(slab_of(t))) - saved) * costs_.kv_row;
  const HomePiece& o = home_->pieces[other];
  const Slab region = costs_.cheapest_region(slab_of(o), surplus, slab_work_);
  const double bytes =
      rows(region.end - region.begin) * costs_.q_row + rows(costs_.context(region)) * costs_.kv_row;
  return tail_bytes / static_cast<double>(work_of(tail)) <
         bytes / static_cast<double>(std::max<std::int64_t>(1, costs_.work(region)));
}

void Balancer::shed(std::int32_t rank, std::int64_t surplus) {
  const auto pieces = home_->pieces_of(rank);
  if (pieces.empty()) return;  // all of its work is that of others
  const std::int32_t first = pieces.front();
  heap_pieces(rank);
  while (surplus > 0) {
    std::int32_t idx = heaviest_piece();
    if (idx < 0) return;
    if (tail_is_cheaper(first, idx, surplus)) idx = first;
    const HomePiece& piece = home_->pieces[idx];
    settled_[idx] = 1;
    Slab whole = slab_of(piece);
    if (capacity_.limited() && costs_.mask.is_full()) {
      if (whole.doc_len > capacity_.most_kv_room()) continue;
    } else if (capacity_.limited() && !costs_.mask.has_window()) {
      whole.end = std::min(whole.end, capacity_.most_kv_room());
    }
    if (whole.end <= whole.begin) continue;
    // What is left of a piece still is a shard of its home, or two: they take what they took.
    const std::int64_t shard_pairs = costs_.facts.shard_pairs;
    const Slab slab = costs_.cheapest_region(whole, surplus + shard_pairs, slab_work_);
    const std::int32_t before = slab.begin == piece.begin ? -1 : piece.rank;
    const std::int32_t after = slab.end == piece.end ? -1 : piece.rank;
    const int num_left = (before < 0 ? 0 : 1) + (after < 0 ? 0 : 1);
    const std::int64_t relief = costs_.work(slab) - num_left * shard_pairs;
    if (relief <= 0) continue;
    regions_.push_back({.slab = slab, .piece = idx, .before = before, .after = after});
    surplus -= relief;
  }
}

void Balancer::shed_all() {
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (load_[rank] > limit_) shed(rank, load_[rank] - limit_ + crumb_);
  }
}

}  // namespace waybill::detail
