#include "capacity.h"

#include <algorithm>

namespace waybill::detail {
namespace {

std::int64_t rows_of(Slab slab) { return slab.end - slab.begin; }

}  // namespace

void Capacity::reset(const HomeLayout& home, const SlabCosts& costs, std::int64_t limit) {
  home_ = &home;
  costs_ = &costs;
  limit_ = limit;
  if (limit == 0) return;
  q_rows_.assign(home.tokens.begin(), home.tokens.end());
  kv_rows_.assign(home.world_size, 0);
  held_.assign(home.world_size, {});
  for (const HomePiece& piece : home.pieces)
    kv_rows_[piece.rank] += rows_of(keys_of(slab_of(piece)));
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
  const Held& held = held_[rank];
  if (held.doc != doc) return rows.end - rows.begin;
  return std::max<std::int64_t>(0, std::min(held.rows.begin, rows.end) - rows.begin) +
         std::max<std::int64_t>(0, rows.end - std::max(held.rows.end, rows.begin));
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

std::int64_t Capacity::most_kv_room() const {
  return limit_ - *std::min_element(kv_rows_.begin(), kv_rows_.end());
}

void Capacity::give(std::int32_t rank, std::int32_t doc, Slab slab) {
  if (!limited()) return;
  q_rows_[rank] += slab.end - slab.begin;
  kv_rows_[rank] += new_kv_rows(rank, doc, slab);
  Held& held = held_[rank];
  const Slab rows = keys_of(slab);
  if (held.doc == doc && rows.begin <= held.rows.end && held.rows.begin <= rows.end) {
    held.rows = {std::min(held.rows.begin, rows.begin), std::max(held.rows.end, rows.end)};
  } else {
    held = {.rows = rows, .doc = doc};
  }
}

void Capacity::take(std::int32_t rank, Slab slab) {
  if (limited()) q_rows_[rank] -= slab.end - slab.begin;
}

void Capacity::take_piece(std::int32_t piece_idx) {
  if (!limited()) return;
  const HomePiece& piece = home_->pieces[piece_idx];
  q_rows_[piece.rank] -= piece.end - piece.begin;
  kv_rows_[piece.rank] -= rows_of(keys_of(slab_of(piece)));
}

}  // namespace waybill::detail
