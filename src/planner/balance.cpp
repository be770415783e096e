#include "balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr std::int32_t num_buckets = 1024;

// Ranks looked at for one that does not get more bytes than usual.
constexpr int max_tries = 32;

// How often the limit may rise.
constexpr int max_rounds = 8;

}  // namespace

SlabCosts::SlabCosts(const PlannerOptions& options)
    : mask(options.mask.in_chunk()),  // documents have prefixes of their own
      q_row(static_cast<double>(options.model.q_row_bytes())),
      kv_row(static_cast<double>(options.model.kv_row_bytes())),
      block_tokens(options.block_tokens),
      facts(options.hardware),
      tails(options.tails) {}

std::int64_t SlabCosts::grid(std::int64_t position, const Slab& of) const {
  const std::int64_t keys = mask_of(of).keys(position - 1, position, of.doc_len).rows();
  std::int64_t step = block_tokens;
  while (step > 1 && static_cast<double>(step * keys) > fine_work) step = (step + 1) / 2;
  return step;
}

Slab SlabCosts::slab_down(Slab slab, std::int64_t work_limit) const {
  if (work(slab) <= work_limit) return slab;
  if (work_limit <= 0) return slab.part(slab.end, slab.end);
  const auto area = static_cast<double>(std::max<std::int64_t>(0, work_limit - facts.shard_pairs));
  const double begin = mask_of(slab).begin_for(static_cast<double>(slab.end), area, slab.doc_len,
                                               static_cast<double>(facts.row_pairs));
  const std::int64_t step = grid(slab.end, slab);
  Slab part = slab;
  part.begin = static_cast<std::int64_t>(begin) / step * step;
  const auto is_too_much = [&] {
    return work(part.part(std::min(part.begin, part.end), part.end)) > work_limit;
  };
  while (part.begin < slab.begin || is_too_much()) part.begin += step;
  part.begin = std::min(part.begin, part.end);
  return part;
}

double SlabCosts::bytes_of(Slab region, double slab_work) const {
  const double num_slabs =
      std::max(1.0, static_cast<double>(work(region)) / std::max(1.0, slab_work));
  return q_row * static_cast<double>(region.rows()) +
         kv_row *
             mask_of(region).keys_of_parts({region.begin, region.end}, num_slabs, region.doc_len);
}

Slab SlabCosts::cheapest_region(Slab piece, std::int64_t work_wanted, double slab_work) const {
  if (work(piece) <= work_wanted) return piece;
  const AttentionMask its = mask_of(piece);
  const auto end_from = [&](std::int64_t begin) {
    return its.end_for(begin, static_cast<double>(work_wanted), piece.doc_len,
                       static_cast<double>(facts.row_pairs));
  };
  const auto cost = [&](double begin) {
    const auto b = static_cast<std::int64_t>(begin);
    return bytes_of(piece.part(b, end_from(b)), slab_work);
  };
  const std::int64_t tail_begin = slab_down(piece, work_wanted).begin;
  double low = static_cast<double>(piece.begin);
  double high = static_cast<double>(tail_begin);
  const double tail_cost = cost(high);
  // Where queries have the same number of keys, it matters little where the region begins.
  const bool is_even = mask.is_even() || tails;
  if (!is_even) {  // convex in begin: golden section without the gold
    for (int round = 0; round < 12 && high - low > 256; ++round) {
      const double a = low + (high - low) * 0.4;
      const double b = low + (high - low) * 0.6;
      if (cost(a) <= cost(b)) {
        high = b;
      } else {
        low = a;
      }
    }
  }
  const double best = (low + high) / 2;
  // A tail leaves one piece at home in place of two.
  if (is_even || cost(best) > 0.93 * tail_cost) {
    const std::int64_t step = grid(piece.end, piece);
    Slab tail = piece;
    tail.begin = std::max(piece.begin, tail_begin / step * step);
    if (work(tail) < work_wanted) tail.begin = std::max(piece.begin, tail.begin - step);
    return tail;
  }
  const std::int64_t step = grid(static_cast<std::int64_t>(best), piece);
  Slab region = piece;
  region.begin = std::max(piece.begin, static_cast<std::int64_t>(best) / step * step);
  const std::int64_t end = end_from(region.begin);
  const std::int64_t end_step = grid(end, piece);
  region.end = std::min(piece.end, (end / end_step + 1) * end_step);
  return region;
}

void Capacity::reset(const HomeLayout& home, const SlabCosts& costs, std::int64_t limit) {
  home_ = &home;
  costs_ = &costs;
  limit_ = limit;
  if (limit == 0) return;
  q_rows_.assign(home.tokens.begin(), home.tokens.end());
  kv_rows_.assign(home.world_size, 0);
  held_.assign(home.world_size, {});
  held_doc_.assign(home.world_size, -1);
  for (const HomePiece& piece : home.pieces) kv_rows_[piece.rank] += keys_of(piece).rows();
}

// Keys are cut at blocks.
Slab Capacity::keys_of(Slab slab) const {
  Slab rows = costs_->keys(slab);
  rows.begin = rows.begin / costs_->block_tokens * costs_->block_tokens;
  return rows;
}

bool Capacity::exceeded(std::int32_t rank) const { return limited() && needed(rank) > limit_; }

std::int64_t Capacity::needed(std::int32_t rank) const {
  return std::max(q_rows_[rank], kv_rows_[rank]);
}

std::int64_t Capacity::new_kv_rows(std::int32_t rank, std::int32_t doc, Slab slab) const {
  const Slab rows = keys_of(slab);
  if (held_doc_[rank] != doc) return rows.rows();
  const Slab& held = held_[rank];
  return std::max<std::int64_t>(0, std::min(held.begin, rows.end) - rows.begin) +
         std::max<std::int64_t>(0, rows.end - std::max(held.end, rows.begin));
}

Slab Capacity::fitting(std::int32_t rank, std::int32_t doc, Slab slab) const {
  if (!limited()) return slab;
  const std::int64_t q_room = limit_ - q_rows_[rank];
  slab.begin = std::max(slab.begin, slab.end - q_room);
  const std::int64_t kv_room = limit_ - kv_rows_[rank];
  if (slab.begin >= slab.end) return {slab.end, slab.end};
  // Fewer queries need less KV only where a window moves with them.
  const std::int64_t excess = new_kv_rows(rank, doc, slab) - kv_room;
  if (excess > 0) slab.begin += excess;
  if (slab.begin >= slab.end || new_kv_rows(rank, doc, slab) > kv_room) return {slab.end, slab.end};
  return slab;
}

std::int64_t Capacity::max_kv_room() const {
  return limit_ - *std::min_element(kv_rows_.begin(), kv_rows_.end());
}

void Capacity::give(std::int32_t rank, std::int32_t doc, Slab slab) {
  if (!limited()) return;
  q_rows_[rank] += slab.rows();
  kv_rows_[rank] += new_kv_rows(rank, doc, slab);
  Slab& held = held_[rank];
  const Slab rows = keys_of(slab);
  if (held_doc_[rank] == doc && rows.begin <= held.end && held.begin <= rows.end) {
    held = {std::min(held.begin, rows.begin), std::max(held.end, rows.end)};
  } else {
    held = rows;
    held_doc_[rank] = doc;
  }
}

void Capacity::take(std::int32_t rank, Slab slab) {
  if (limited()) q_rows_[rank] -= slab.rows();
}

void Capacity::take_piece(std::int32_t piece_idx) {
  if (!limited()) return;
  const HomePiece& piece = home_->pieces[piece_idx];
  q_rows_[piece.rank] -= piece.rows();
  kv_rows_[piece.rank] -= keys_of(piece).rows();
}

void ReceiverPool::reset(std::int32_t world_size, std::int64_t max_room) {
  ranks_.clear();
  places_.assign(world_size, ranks_.end());
  scale_ = max_room > 0 ? (num_buckets - 1) / static_cast<double>(max_room) : 0;
}

std::int32_t ReceiverPool::bucket_of(std::int64_t room) const {
  return std::clamp(static_cast<std::int32_t>(static_cast<double>(room) * scale_), 0,
                    num_buckets - 1);
}

void ReceiverPool::put(std::int32_t rank, std::int64_t room) {
  remove(rank);
  places_[rank] = ranks_.emplace(bucket_of(room), num_puts_++, rank).first;
}

void ReceiverPool::remove(std::int32_t rank) {
  if (!contains(rank)) return;
  ranks_.erase(places_[rank]);
  places_[rank] = ranks_.end();
}

std::int32_t ReceiverPool::roomiest() const {
  return ranks_.empty() ? -1 : at(ranks_.lower_bound({std::get<0>(*ranks_.rbegin()), 0, 0}));
}

std::int32_t ReceiverPool::smallest_fit(std::int64_t room) const {
  const std::int32_t rank = at(ranks_.lower_bound({bucket_of(room) + 1, 0, 0}));
  return rank < 0 ? roomiest() : rank;
}

void Balancer::run(const HomeLayout& home, const PlannerOptions& options, double target) {
  home_ = &home;
  moves_.clear();
  regions_.clear();
  bids_.clear();
  settled_.assign(home.pieces.size(), 0);
  costs_ = SlabCosts(options);
  count_home();
  mean_ = std::accumulate(load_.begin(), load_.end(), 0.0) / home.world_size;
  costs_.fine_work = mean_ * (options.imbalance_target - 1) / 4;
  // At most what int64 holds; what is negligible stays below what the balance notices.
  limit_ = static_cast<std::int64_t>(std::min(std::max(target * mean_, std::ceil(mean_)), 9.0e18));
  negligible_ = static_cast<std::int64_t>((options.imbalance_target - 1) * mean_ / 3);
  ranks_per_node_ = options.hardware.ranks_per_node;
  capacity_.reset(home, costs_, options.max_tokens_per_rank);
  keep_capacity();
  reunite_short_ends();
  fill_pool();
  find_slab_work();
  shed_all();
  make_bids();
  serve_bids();
  std::sort(moves_.begin(), moves_.end(), [](const Move& a, const Move& b) {
    return a.piece != b.piece ? a.piece < b.piece : a.slab.begin < b.slab.begin;
  });
}

// Work, and keys of documents that lie on other ranks too.
void Balancer::count_home() {
  load_.assign(home_->world_size, 0);
  bytes_in_.assign(home_->world_size, 0);
  for (const HomePiece& piece : home_->pieces) {
    std::int64_t& load = load_[piece.rank];
    require(!__builtin_add_overflow(load, costs_.work(piece), &load),
            "plan_attention: the work of rank ", piece.rank, " does not fit int64");
    bytes_in_[piece.rank] += costs_.kv_row * static_cast<double>(costs_.remote_context(piece));
  }
}

void Balancer::send_whole(std::int32_t piece_idx, std::int32_t dst) {
  const HomePiece& piece = home_->pieces[piece_idx];
  const Slab slab = piece;
  const std::int64_t work = costs_.work(slab);
  moves_.push_back({.slab = slab, .piece = piece_idx, .dst = dst});
  settled_[piece_idx] = 1;
  load_[piece.rank] -= work;
  load_[dst] += work;
  bytes_in_[piece.rank] -= costs_.kv_row * static_cast<double>(costs_.remote_context(slab));
  bytes_in_[dst] += costs_.q_row * static_cast<double>(piece.rows());
  capacity_.take_piece(piece_idx);
  capacity_.give(dst, piece.doc, slab);
}

// The piece whose keys free most of the rank's buffer.
std::int32_t Balancer::piece_to_evict(std::int32_t rank) const {
  std::int32_t best = -1;
  std::int64_t most = 0;
  for (const std::int32_t p : home_->pieces_of(rank)) {
    const HomePiece& piece = home_->pieces[p];
    const std::int64_t rows = costs_.context(piece);
    if (settled_[p] != 0 || rows <= most) continue;
    most = rows;
    best = p;
  }
  return best;
}

// Another home of the document, latest first, else the rank that needs least; -1: none has room.
std::int32_t Balancer::rank_that_holds(std::int32_t piece_idx) const {
  const HomePiece& piece = home_->pieces[piece_idx];
  const Slab slab = piece;
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
// that takes fewer bytes than the keys the other way, and hardly any work. Where queries
// meet keys after themselves so does a short beginning, to the next rank.
void Balancer::reunite_short_ends() {
  for (std::int32_t rank = 1; rank < home_->world_size; ++rank) {
    const auto pieces = home_->pieces_of(rank);
    if (pieces.empty() || home_->pieces[pieces.front()].begin == 0) continue;
    reunite(pieces.front(), pieces.front() - 1);
  }
  if (!costs_.mask.looks_ahead()) return;
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
  const Slab slab = piece;
  const bool cheaper = static_cast<double>(piece.rows()) * costs_.q_row <
                       static_cast<double>(costs_.remote_context(slab)) * costs_.kv_row;
  const std::int32_t dst = home_->pieces[other].rank;
  if (dst == piece.rank || !cheaper || work_of(idx) > little_work || settled_[other] != 0) return;
  if (capacity_.limited() && capacity_.fitting(dst, piece.doc, slab).begin != piece.begin) return;
  send_whole(idx, dst);
}

void Balancer::fill_pool() {
  pool_.reset(home_->world_size, limit_);
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (room(rank) > 0) pool_.put(rank, room(rank));
  }
}

// The mean room of as many ranks as the surplus needs, those with the most room first.
void Balancer::find_slab_work() {
  rooms_.clear();
  std::int64_t surplus = 0;
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (room(rank) > 0) {
      rooms_.push_back(room(rank));
    } else {
      surplus -= room(rank);
    }
  }
  std::sort(rooms_.begin(), rooms_.end(), std::greater<>());
  std::int64_t sum = 0;
  std::size_t num_ranks = 0;
  while (num_ranks < rooms_.size() && sum < surplus) sum += rooms_[num_ranks++];
  slab_work_ = num_ranks > 0 ? static_cast<double>(sum) / static_cast<double>(num_ranks) : 1;
}

// Whether to give away all of `tail`, whose document begins on an earlier rank, before a part of
// `other`: the rank then needs none of that document's keys.
bool Balancer::tail_is_cheaper(std::int32_t tail, std::int32_t other, std::int64_t surplus) const {
  const HomePiece& t = home_->pieces[tail];
  if (t.begin == 0 || settled_[tail] != 0 || work_of(tail) > surplus) return false;
  if (tail == other) return true;
  const auto rows = [](std::int64_t num) { return static_cast<double>(num); };
  const double saved = rows(costs_.remote_context(t));
  const double tail_bytes =
      rows(t.rows()) * costs_.q_row + (rows(costs_.context(t)) - saved) * costs_.kv_row;
  const HomePiece& o = home_->pieces[other];
  const Slab region = costs_.cheapest_region(o, surplus, slab_work_);
  const double bytes =
      rows(region.rows()) * costs_.q_row + rows(costs_.context(region)) * costs_.kv_row;
  return tail_bytes / static_cast<double>(work_of(tail)) <
         bytes / static_cast<double>(std::max<std::int64_t>(1, costs_.work(region)));
}

void Balancer::shed(std::int32_t rank, std::int64_t surplus) {
  const auto pieces = home_->pieces_of(rank);
  if (pieces.empty()) return;  // all of its work is that of others
  const std::int32_t first = pieces.front();
  const auto has_less_work = [&](std::int32_t a, std::int32_t b) {
    const std::int64_t work_a = work_of(a);
    const std::int64_t work_b = work_of(b);
    return work_a != work_b ? work_a < work_b : a > b;
  };
  by_work_.assign(pieces.begin(), pieces.end());
  std::make_heap(by_work_.begin(), by_work_.end(), has_less_work);
  while (surplus > 0 && !by_work_.empty()) {
    std::int32_t idx = by_work_.front();
    if (settled_[idx] != 0) {
      std::pop_heap(by_work_.begin(), by_work_.end(), has_less_work);
      by_work_.pop_back();
      continue;
    }
    if (tail_is_cheaper(first, idx, surplus)) idx = first;
    const HomePiece& piece = home_->pieces[idx];
    settled_[idx] = 1;
    Slab whole = piece;
    if (capacity_.limited()) {
      const std::int64_t room = capacity_.max_kv_room();
      whole.end = std::min(whole.end, costs_.mask_of(whole).end_within(room, whole.doc_len));
    }
    if (whole.end <= whole.begin) continue;
    // The rest of a piece is still a shard of its home, or two, with the work of a shard.
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
    if (load_[rank] > limit_) shed(rank, load_[rank] - limit_ + negligible_);
  }
}

double Balancer::bytes_in_after(const SlabBid& bid, std::int32_t rank) const {
  const Region& region = regions_[bid.last - 1];
  const Slab slab = costs_.slab_down(region.slab, limit_ - load_[rank]);
  return bytes_in_[rank] + costs_.q_row * static_cast<double>(slab.rows()) +
         costs_.kv_row * static_cast<double>(costs_.context(slab));
}

void Balancer::make_bids() {
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return a.piece < b.piece; });
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const std::int32_t doc = home_->pieces[regions_[i].piece].doc;
    if (bids_.empty() || bids_.back().doc != doc) {
      bids_.push_back({.doc = doc, .first = static_cast<std::int32_t>(i)});
    }
    SlabBid& bid = bids_.back();
    bid.last = static_cast<std::int32_t>(i) + 1;
    bid.end = regions_[i].slab.end;
    bid.work += costs_.work(regions_[i].slab);
  }
  double sum = std::accumulate(bytes_in_.begin(), bytes_in_.end(), 0.0);
  for (const Region& region : regions_) sum += costs_.bytes_of(region.slab, slab_work_);
  mean_bytes_in_ = sum / home_->world_size;
  // Large bids before small ones; of the large ones those that end last, of the small ones those
  // with most work.
  const auto is_large = [&](const SlabBid& bid) {
    return static_cast<double>(bid.work) > slab_work_;
  };
  std::sort(bids_.begin(), bids_.end(), [&](const SlabBid& a, const SlabBid& b) {
    if (is_large(a) != is_large(b)) return is_large(a);
    const auto key = [&](const SlabBid& bid) { return is_large(a) ? bid.end : bid.work; };
    return key(a) != key(b) ? key(a) > key(b) : a.doc < b.doc;
  });
}

void Balancer::serve_bids() {
  for (int round = 0; round < max_rounds; ++round) {
    for (SlabBid& bid : bids_) {
      serve(bid);
      for (const std::int32_t rank : aside_) pool_.put(rank, room(rank));
      aside_.clear();
    }
    if (!raise_limit()) return;
  }
}

// Where bids are left because single steps of the grid do not fit into the room there is, which
// happens with few tokens, the limit rises by half a step. False: nothing is left.
bool Balancer::raise_limit() {
  std::int64_t step = 0;
  for (SlabBid& bid : bids_) {
    if (!needs_serving(bid)) continue;
    Slab last = regions_[bid.last - 1].slab;
    last.begin = std::max<std::int64_t>(0, last.end - costs_.grid(last.end, last));
    step = std::max(step, costs_.work(last));
  }
  if (step == 0) return false;
  limit_ += (step + 1) / 2;
  fill_pool();
  return true;
}

// Takes regions back whose home is within the limit without giving them away.
bool Balancer::needs_serving(SlabBid& bid) {
  while (bid.first < bid.last) {
    const Region& region = regions_[bid.last - 1];
    if (load_[home_->pieces[region.piece].rank] > limit_) return true;
    bid.work -= costs_.work(region.slab);
    --bid.last;
  }
  return false;
}

void Balancer::put_back(std::int32_t rank) {
  if (room(rank) > negligible_ / 2) {
    pool_.put(rank, room(rank));
  } else {
    pool_.remove(rank);
  }
}

// Large ones from the end to the beginning, each rank as much as it has room for; the rest, where
// keys are few, and small ones go whole where they fit best.
void Balancer::serve(SlabBid& bid) {
  const bool is_large = static_cast<double>(bid.work) > slab_work_;
  if (is_large) serve_homes(bid);
  while (needs_serving(bid)) {
    const std::int32_t most = pool_.roomiest();
    if (most < 0) return;
    const bool is_rest = !is_large || bid.work < room(most);
    const std::int32_t rank = is_rest ? rank_for_rest(bid) : rank_for_end(bid);
    if (give_end(bid, rank)) {
      put_back(rank);
      continue;
    }
    // Back in the pool for the next bid if only capacity was lacking.
    pool_.remove(rank);
    if (capacity_.limited() && room(rank) > negligible_) aside_.push_back(rank);
  }
}

// Ranks with room that hold keys of the document already.
void Balancer::serve_homes(SlabBid& bid) {
  std::int32_t piece = home_->doc_pieces[bid.doc + 1];
  while (--piece >= home_->doc_pieces[bid.doc] && bid.first < bid.last) {
    const std::int32_t rank = home_->pieces[piece].rank;
    if (static_cast<double>(room(rank)) < slab_work_ / 10) continue;
    if (give_end(bid, rank)) put_back(rank);
  }
}

// The rank of a node with the most room, if it can take a good part of a usual slab.
std::int32_t Balancer::rank_in_node(std::int32_t node) const {
  std::int32_t best = -1;
  auto most = static_cast<std::int64_t>(slab_work_);
  const std::int32_t last = std::min(home_->world_size, (node + 1) * ranks_per_node_);
  for (std::int32_t rank = node * ranks_per_node_; rank < last; ++rank) {
    if (!pool_.contains(rank) || room(rank) <= most) continue;
    most = room(rank);
    best = rank;
  }
  return best;
}

// Near home, then where the keys went before: over the network they cross once per node.
std::int32_t Balancer::rank_for_end(const SlabBid& bid) const {
  if (ranks_per_node_ >= home_->world_size) return pool_.roomiest();
  const std::int32_t home = home_->pieces[regions_[bid.last - 1].piece].rank;
  std::int32_t rank = rank_in_node(home / ranks_per_node_);
  if (rank < 0 && bid.node >= 0) rank = rank_in_node(bid.node);
  return rank >= 0 ? rank : pool_.roomiest();
}

std::int32_t Balancer::rank_for_rest(const SlabBid& bid) const {
  std::int32_t best = -1;
  double least = 0;
  std::int32_t rank = pool_.smallest_fit(bid.work);
  for (int i = 0; i < max_tries && rank >= 0; ++i, rank = pool_.roomier(rank)) {
    const double bytes = bytes_in_after(bid, rank);
    if (best < 0 || bytes < least) {
      best = rank;
      least = bytes;
    }
    if (bytes <= 1.6 * mean_bytes_in_) break;
  }
  return best;
}

bool Balancer::give_end(SlabBid& bid, std::int32_t rank) {
  bool any = false;
  while (bid.first < bid.last) {
    const Region& region = regions_[bid.last - 1];
    Slab slab = costs_.slab_down(region.slab, room(rank));
    slab = capacity_.fitting(rank, bid.doc, slab);
    if (slab.begin >= slab.end) break;
    const bool whole = slab.begin == region.slab.begin;
    give(bid, bid.last - 1, slab, rank, !any);
    any = true;
    if (!whole) break;
  }
  return any;
}

// Takes the slab out of the region, and its work from home to the rank. Neighbours that one rank
// attends to are one shard, so shards begin and end with who has the queries on both sides.
void Balancer::move_load(Region& region, Slab slab, std::int32_t rank) {
  const std::int32_t home = home_->pieces[region.piece].rank;
  const bool from_begin = slab.begin == region.slab.begin;
  const bool to_end = slab.end == region.slab.end;
  const std::int32_t before = from_begin ? region.before : home;
  const std::int32_t after = to_end ? region.after : home;
  if (rank != home) {
    const std::int64_t shard_pairs = costs_.facts.shard_pairs;
    const std::int64_t rest = costs_.work(slab) - shard_pairs;
    const auto neighbours = [&](std::int32_t r) {
      return (before == r ? 1 : 0) + (after == r ? 1 : 0);
    };
    load_[home] -= rest + (1 - neighbours(home)) * shard_pairs;
    load_[rank] += rest + (1 - neighbours(rank)) * shard_pairs;
  }
  if (from_begin) {
    region.slab.begin = slab.end;
    region.before = rank;
  } else {
    region.slab.end = slab.begin;
    region.after = rank;
  }
}

// `slab` lies at one end of the region. `first`: the rank gets the keys as well.
void Balancer::give(SlabBid& bid, std::int32_t region_idx, Slab slab, std::int32_t rank,
                    bool first) {
  Region& region = regions_[region_idx];
  const HomePiece& piece = home_->pieces[region.piece];
  if (piece.rank != rank) {
    moves_.push_back({.slab = slab, .piece = region.piece, .dst = rank});
    bytes_in_[rank] += costs_.q_row * static_cast<double>(slab.rows());
  }
  if (first) bytes_in_[rank] += costs_.kv_row * static_cast<double>(costs_.context(slab));
  const std::int64_t left = costs_.work(region.slab);
  move_load(region, slab, rank);
  capacity_.take(piece.rank, slab);
  capacity_.give(rank, bid.doc, slab);
  bid.work -= left - costs_.work(region.slab);
  bid.node = rank / ranks_per_node_;
  if (region.slab.begin < region.slab.end) return;
  if (region_idx == bid.first) {
    ++bid.first;
  } else {
    --bid.last;
  }
}

}  // namespace waybill::detail
