#include "balance.h"

#include <algorithm>
#include <numeric>

#include "waybill/core/at.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

constexpr int most_tries = 32;

}  // namespace

void Balancer::run(const HomeLayout& home, const PlannerOptions& options, double target) {
  home_ = &home;
  moves_.clear();
  regions_.clear();
  offers_.clear();
  settled_.assign(home.pieces.size(), 0);
  costs_ = SlabCosts(options, 0);
  count_home_work();
  mean_ = std::accumulate(load_.begin(), load_.end(), 0.0) / home.world_size;
  costs_ = SlabCosts(options, mean_);
  limit_ = static_cast<std::int64_t>(target * mean_);
  crumb_ = static_cast<std::int64_t>((target - 1) * mean_ / 5);
  capacity_.reset(home, costs_, options.max_tokens_per_rank);
  count_home_bytes();
  reunite_short_tails();
  fill_pool();
  shed_all();
  make_offers();
  serve_offers();
  std::sort(moves_.begin(), moves_.end(), [](const Move& a, const Move& b) {
    return a.piece != b.piece ? a.piece < b.piece : a.slab.begin < b.slab.begin;
  });
}

void Balancer::count_home_work() {
  load_.assign(at(home_->world_size), 0);
  for (const HomePiece& piece : home_->pieces) {
    const std::int64_t work = costs_.work({piece.begin, piece.end});
    require(!__builtin_add_overflow(load_[at(piece.rank)], work, &load_[at(piece.rank)]),
            "plan_attention: the work of rank ", piece.rank, " does not fit int64");
  }
}

// Keys of documents that begin on an earlier rank.
void Balancer::count_home_bytes() {
  bytes_in_.assign(at(home_->world_size), 0);
  for (std::int32_t rank = 1; rank < home_->world_size; ++rank) {
    const std::int32_t first = home_->rank_pieces[at(rank)];
    if (first == home_->rank_pieces[at(rank + 1)]) continue;
    const std::int64_t begin = home_->pieces[at(first)].begin;
    if (begin > 0)
      bytes_in_[at(rank)] +=
          costs_.kv_row * static_cast<double>(begin - costs_.mask.first_key(begin));
  }
}

double Balancer::bytes_in_after(const Offer& offer, std::int32_t rank) const {
  const Region& region = regions_[at(offer.last - 1)];
  const Slab slab =
      costs_.slab_down(region.slab.begin, region.slab.end, limit_ - load_[at(rank)]);
  return bytes_in_[at(rank)] + costs_.q_row * static_cast<double>(slab.end - slab.begin) +
         costs_.kv_row * static_cast<double>(costs_.context(slab));
}

void Balancer::send_whole(std::int32_t piece_idx, std::int32_t dst) {
  const HomePiece& piece = home_->pieces[at(piece_idx)];
  const Slab slab{piece.begin, piece.end};
  const std::int64_t work = costs_.work(slab);
  moves_.push_back({.slab = slab, .piece = piece_idx, .dst = dst});
  settled_[at(piece_idx)] = 1;
  load_[at(piece.rank)] -= work;
  load_[at(dst)] += work;
  bytes_in_[at(piece.rank)] -=
      costs_.kv_row * static_cast<double>(piece.begin - costs_.mask.first_key(piece.begin));
  bytes_in_[at(dst)] += costs_.q_row * static_cast<double>(piece.end - piece.begin);
  capacity_.take_piece(piece_idx);
  capacity_.give(dst, piece.doc, slab);
}

// Where a rank boundary cuts off the short end of a document, its queries go to the rank before:
// that takes fewer bytes than the keys the other way, and hardly any work.
void Balancer::reunite_short_tails() {
  const auto little_work = static_cast<std::int64_t>(mean_ / 50);
  for (std::int32_t rank = 1; rank < home_->world_size; ++rank) {
    const std::int32_t idx = home_->rank_pieces[at(rank)];
    if (idx == home_->rank_pieces[at(rank + 1)]) continue;
    const HomePiece& piece = home_->pieces[at(idx)];
    if (piece.begin == 0) continue;
    const std::int64_t remote = piece.begin - costs_.mask.first_key(piece.begin);
    const bool cheaper = static_cast<double>(piece.end - piece.begin) * costs_.q_row <
                         static_cast<double>(remote) * costs_.kv_row;
    const std::int32_t dst = home_->pieces[at(idx - 1)].rank;
    if (!cheaper || work_of(idx) > little_work || settled_[at(idx - 1)] != 0) continue;
    if (capacity_.limited() &&
        capacity_.fitting(dst, piece.doc, {piece.begin, piece.end}).begin != piece.begin)
      continue;
    send_whole(idx, dst);
  }
}

void Balancer::fill_pool() {
  pool_.reset(home_->world_size, limit_);
  rooms_.clear();
  std::int64_t surplus = 0;
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    const std::int64_t room = limit_ - load_[at(rank)];
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

std::int32_t Balancer::heaviest_piece(std::int32_t rank) const {
  std::int32_t heaviest = -1;
  std::int64_t most = 0;
  for (std::int32_t p = home_->rank_pieces[at(rank)]; p < home_->rank_pieces[at(rank + 1)]; ++p) {
    if (settled_[at(p)] != 0) continue;
    const std::int64_t work = work_of(p);
    if (work > most) {
      most = work;
      heaviest = p;
    }
  }
  return heaviest;
}

// Whether to give away all of `tail`, whose document begins on an earlier rank, before a part of
// `other`: the rank then needs none of that document's keys.
bool Balancer::tail_is_cheaper(std::int32_t tail, std::int32_t other, std::int64_t surplus) const {
  const HomePiece& t = home_->pieces[at(tail)];
  if (t.begin == 0 || settled_[at(tail)] != 0 || work_of(tail) > surplus) return false;
  if (tail == other) return true;
  const auto rows = [](std::int64_t num) { return static_cast<double>(num); };
  const double saved = rows(t.begin - costs_.mask.first_key(t.begin));
  const double tail_bytes = rows(t.end - t.begin) * costs_.q_row +
                            (rows(costs_.context({t.begin, t.end})) - saved) * costs_.kv_row;
  const HomePiece& o = home_->pieces[at(other)];
  const Slab region = costs_.cheapest_region({o.begin, o.end}, surplus, slab_work_);
  const double bytes = rows(region.end - region.begin) * costs_.q_row +
                       rows(costs_.context(region)) * costs_.kv_row;
  return tail_bytes / static_cast<double>(work_of(tail)) <
         bytes / static_cast<double>(std::max<std::int64_t>(1, costs_.work(region)));
}

void Balancer::shed(std::int32_t rank, std::int64_t surplus) {
  while (surplus > 0) {
    std::int32_t idx = heaviest_piece(rank);
    if (idx < 0) return;
    const std::int32_t first = home_->rank_pieces[at(rank)];
    if (tail_is_cheaper(first, idx, surplus)) idx = first;
    const HomePiece& piece = home_->pieces[at(idx)];
    settled_[at(idx)] = 1;
    Slab whole{piece.begin, piece.end};
    if (capacity_.limited() && costs_.mask.is_causal())
      whole.end = std::min(whole.end, capacity_.most_kv_room());
    if (whole.end <= whole.begin) continue;
    const Slab region = costs_.cheapest_region(whole, surplus, slab_work_);
    regions_.push_back({.slab = region, .piece = idx});
    surplus -= costs_.work(region);
  }
}

void Balancer::shed_all() {
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (load_[at(rank)] > limit_) shed(rank, load_[at(rank)] - limit_ + crumb_);
  }
}

void Balancer::make_offers() {
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return a.piece < b.piece; });
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const std::int32_t doc = home_->pieces[at(regions_[i].piece)].doc;
    if (offers_.empty() || offers_.back().doc != doc) {
      offers_.push_back({.doc = doc,
                         .first = static_cast<std::int32_t>(i)});
    }
    Offer& offer = offers_.back();
    offer.last = static_cast<std::int32_t>(i) + 1;
    offer.end = regions_[i].slab.end;
    offer.work += costs_.work(regions_[i].slab);
  }
  double sum = std::accumulate(bytes_in_.begin(), bytes_in_.end(), 0.0);
  for (const Region& region : regions_) sum += costs_.bytes_of(region.slab, slab_work_);
  mean_bytes_in_ = sum / home_->world_size;
  // Large offers before small ones; of the large ones those that end last, of the small ones those
  // with most work.
  const auto is_large = [&](const Offer& offer) {
    return static_cast<double>(offer.work) > slab_work_ / 2;
  };
  std::sort(offers_.begin(), offers_.end(), [&](const Offer& a, const Offer& b) {
    if (is_large(a) != is_large(b)) return is_large(a);
    const auto key = [&](const Offer& offer) { return is_large(a) ? offer.end : offer.work; };
    return key(a) != key(b) ? key(a) > key(b) : a.doc < b.doc;
  });
}

void Balancer::serve_offers() {
  open_ = -1;
  for (Offer& offer : offers_) {
    if (static_cast<double>(offer.work) > slab_work_ / 2) {
      serve_large(offer);
    } else {
      if (open_ >= 0) pool_.put(open_, room(open_));
      open_ = -1;
      serve_small(offer);
    }
  }
}

// From the end to the beginning, each rank as much as it has room for. What is left for the last
// one leaves room on it: that is filled with the beginning of the next offer. So ranks take from two
// documents at most, and where keys are few.
void Balancer::serve_large(Offer& offer) {
  serve_homes(offer);
  if (open_ >= 0 && offer.first < offer.last) {
    give_beginning(offer, open_);
    if (offer.first == offer.last) {
      if (room(open_) < crumb_) open_ = -1;
      return;
    }
    open_ = -1;
  }
  while (offer.first < offer.last) {
    const std::int32_t rank =
        offer.work < room(pool_.most_room()) ? rank_for_rest(offer) : rank_for_end(offer);
    if (rank < 0) return;
    pool_.remove(rank);
    if (!give_end(offer, rank)) continue;
    if (offer.first == offer.last && room(rank) > 4 * crumb_) open_ = rank;
  }
}

// Whole to the rank with the least room that holds it, without more bytes than others have.
void Balancer::serve_small(Offer& offer) {
  while (offer.first < offer.last && offer.work > crumb_ / 2) {
    const std::int32_t rank = rank_for_rest(offer);
    if (rank < 0) return;
    pool_.remove(rank);
    if (give_end(offer, rank) && room(rank) > crumb_ / 2) pool_.put(rank, room(rank));
  }
}

// Ranks with room that hold keys of the document already.
void Balancer::serve_homes(Offer& offer) {
  std::int32_t piece = home_->doc_pieces[at(offer.doc + 1)];
  while (--piece >= home_->doc_pieces[at(offer.doc)] && offer.first < offer.last) {
    const std::int32_t rank = home_->pieces[at(piece)].rank;
    if (static_cast<double>(room(rank)) < slab_work_ / 10 || rank == open_) continue;
    if (give_end(offer, rank)) pool_.remove(rank);
  }
}

std::int32_t Balancer::rank_for_end(const Offer&) const { return pool_.most_room(); }

std::int32_t Balancer::rank_for_rest(const Offer& offer) const {
  std::int32_t best = -1;
  double least = 0;
  std::int32_t rank = pool_.least_room(offer.work);
  for (int i = 0; i < most_tries && rank >= 0; ++i, rank = pool_.after(rank)) {
    const double bytes = bytes_in_after(offer, rank);
    if (best < 0 || bytes < least) {
      best = rank;
      least = bytes;
    }
    if (bytes <= 1.6 * mean_bytes_in_) break;
  }
  return best;
}

bool Balancer::give_end(Offer& offer, std::int32_t rank) {
  bool any = false;
  while (offer.first < offer.last) {
    const Region& region = regions_[at(offer.last - 1)];
    Slab slab = costs_.slab_down(region.slab.begin, region.slab.end, room(rank));
    slab = capacity_.fitting(rank, offer.doc, slab);
    if (slab.begin >= slab.end) break;
    const bool whole = slab.begin == region.slab.begin;
    give(offer, offer.last - 1, slab, rank, !any);
    any = true;
    if (!whole) break;
  }
  return any;
}

bool Balancer::give_beginning(Offer& offer, std::int32_t rank) {
  if (offer.work <= room(rank)) return give_end(offer, rank);
  bool any = false;
  while (offer.first < offer.last) {
    const Region& region = regions_[at(offer.first)];
    const Slab slab = costs_.slab_up(region.slab.begin, region.slab.end, room(rank));
    if (slab.begin >= slab.end ||
        capacity_.fitting(rank, offer.doc, slab).begin != slab.begin)
      break;
    const bool whole = slab.end == region.slab.end;
    give(offer, offer.first, slab, rank, true);
    any = true;
    if (!whole) break;
  }
  return any;
}

// `slab` lies at one end of the region. `first`: the rank gets the keys as well.
void Balancer::give(Offer& offer, std::int32_t region_idx, Slab slab, std::int32_t rank,
                    bool first) {
  Region& region = regions_[at(region_idx)];
  const HomePiece& piece = home_->pieces[at(region.piece)];
  const std::int64_t work = costs_.work(slab);
  if (piece.rank != rank) {
    moves_.push_back({.slab = slab, .piece = region.piece, .dst = rank});
    bytes_in_[at(rank)] += costs_.q_row * static_cast<double>(slab.end - slab.begin);
  }
  if (first) bytes_in_[at(rank)] += costs_.kv_row * static_cast<double>(costs_.context(slab));
  load_[at(rank)] += work;
  load_[at(piece.rank)] -= work;
  capacity_.take(piece.rank, slab);
  capacity_.give(rank, offer.doc, slab);
  offer.work -= work;
  (slab.begin == region.slab.begin ? region.slab.begin : region.slab.end) =
      slab.begin == region.slab.begin ? slab.end : slab.begin;
  if (region.slab.begin < region.slab.end) return;
  if (region_idx == offer.first) {
    ++offer.first;
  } else {
    --offer.last;
  }
}

}  // namespace waybill::detail
