#include <algorithm>
#include <numeric>

#include "balance.h"

namespace waybill::detail {
namespace {

// Ranks looked at for one that does not get more bytes than usual.
constexpr int most_tries = 32;

// How often the limit may rise.
constexpr int most_rounds = 8;

}  // namespace

double Balancer::bytes_in_after(const SlabBid& bid, std::int32_t rank) const {
  const Region& region = regions_[bid.last - 1];
  const Slab slab = costs_.slab_down(region.slab, limit_ - load_[rank]);
  return bytes_in_[rank] + costs_.q_row * static_cast<double>(slab.end - slab.begin) +
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
  for (int round = 0; round < most_rounds; ++round) {
    for (SlabBid& bid : bids_) {
      if (static_cast<double>(bid.work) > slab_work_) {
        serve_large(bid);
      } else {
        serve_small(bid);
      }
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
    last.begin = std::max<std::int64_t>(0, last.end - costs_.grid(last.end, last.doc_len));
    step = std::max(step, costs_.work(last));
  }
  if (step == 0) return false;
  limit_ += (step + 1) / 2;
  pool_.reset(home_->world_size, limit_);
  for (std::int32_t rank = 0; rank < home_->world_size; ++rank) {
    if (room(rank) > 0) pool_.put(rank, room(rank));
  }
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
  if (room(rank) > crumb_ / 2) {
    pool_.put(rank, room(rank));
  } else {
    pool_.remove(rank);
  }
}

// Out of the pool; back in it for the next bid if only capacity was lacking.
void Balancer::set_aside(std::int32_t rank) {
  pool_.remove(rank);
  if (capacity_.limited() && room(rank) > crumb_) aside_.push_back(rank);
}

// From the end to the beginning, each rank as much as it has room for; the rest, where keys are
// few, goes where it fits best.
void Balancer::serve_large(SlabBid& bid) {
  serve_homes(bid);
  while (needs_serving(bid)) {
    const std::int32_t most = pool_.most_room();
    if (most < 0) return;
    const std::int32_t rank = bid.work < room(most) ? rank_for_rest(bid) : rank_for_end(bid);
    if (!give_end(bid, rank)) {
      set_aside(rank);
      continue;
    }
    put_back(rank);
  }
}

// Whole to the rank with the least room that holds it, without more bytes than others have.
void Balancer::serve_small(SlabBid& bid) {
  while (needs_serving(bid)) {
    const std::int32_t rank = rank_for_rest(bid);
    if (rank < 0) return;
    if (!give_end(bid, rank)) {
      set_aside(rank);
    } else {
      put_back(rank);
    }
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
  if (ranks_per_node_ >= home_->world_size) return pool_.most_room();
  const std::int32_t home = home_->pieces[regions_[bid.last - 1].piece].rank;
  std::int32_t rank = rank_in_node(home / ranks_per_node_);
  if (rank < 0 && bid.node >= 0) rank = rank_in_node(bid.node);
  return rank >= 0 ? rank : pool_.most_room();
}

std::int32_t Balancer::rank_for_rest(const SlabBid& bid) const {
  std::int32_t best = -1;
  double least = 0;
  std::int32_t rank = pool_.least_room(bid.work);
  for (int i = 0; i < most_tries && rank >= 0; ++i, rank = pool_.roomier(rank)) {
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
    bytes_in_[rank] += costs_.q_row * static_cast<double>(slab.end - slab.begin);
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
