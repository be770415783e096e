#include <map>
#include <tuple>

#include "validate_damage.h"

// Damage that leaves forward, reverse and counts in full agreement with each other, so that only
// the plan tells that it is wrong. Run by validate_damage_test.cpp.

namespace waybill::test {
namespace {

using enum FindingKind;
using Result = std::optional<Symptom>;

/// A shard of the plan in a buffer; `copy` orders the copies of the shard.
struct Held {
  std::int64_t shard;
  std::int64_t copy;
};
using Buffers = std::vector<std::vector<Held>>;  ///< by rank, in the order of rows

/// Reads the buffers off the reverse table: it names home and row of all that arrived. Only for
/// plans without empty shards, where a row tells the shard.
Buffers read_buffers(const QkvPlan& plan, const SparseMetadata& rev) {
  std::vector<std::map<std::int64_t, std::int64_t>> shard_at(plan.world_size);
  std::vector<std::int64_t> home_rows(plan.world_size);
  for (std::int64_t s = 0; s < plan.num_shards(); ++s) {
    const std::size_t home = locate(plan.rank_shard_offsets, s).first;
    shard_at[home][home_rows[home]] = s;
    home_rows[home] += plan.shard_len[s];
  }
  Buffers buffers(plan.world_size);
  for (std::int64_t t = 0; t < rev.num_entries(); ++t) {
    const std::size_t home = rev.dst_rank[t];
    const std::int64_t row = rev.dst_offset[t];
    buffers[locate(rev.rank_offsets, t).first].push_back(
        {shard_at[home].at(row % home_rows[home]), row / home_rows[home]});
  }
  return buffers;
}

RecvCounts count_rows(std::int32_t world_size,
                      const std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t>& rows) {
  RecvCounts recv;
  recv.total.resize(world_size);
  recv.offsets.assign(1, 0);
  for (std::int64_t r = 0; r < world_size; ++r) {
    for (auto p = rows.lower_bound({r, 0}); p != rows.end() && p->first.first == r; ++p) {
      recv.src_rank.push_back(static_cast<std::int32_t>(p->first.second));
      recv.tokens.push_back(p->second);
      recv.total[r] += p->second;
    }
    recv.offsets.push_back(std::ssize(recv.tokens));
  }
  return recv;
}

/// Forward and reverse tables that fill the buffers, written down from the definitions.
void write_tables(const QkvPlan& plan, const Buffers& buffers, bool copies, SparseMetadata& fwd,
                  SparseMetadata& rev) {
  struct Landing {
    std::int64_t copy, rank, row, t;
  };
  std::vector<std::vector<Landing>> landings(plan.num_shards());
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> out;
  std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> back;
  rev = {};
  rev.world_size = plan.world_size;
  rev.rank_offsets.assign(1, 0);
  for (std::int64_t r = 0; r < plan.world_size; ++r) {
    std::int64_t row = 0;
    for (const Held& held : buffers[r]) {
      const std::int64_t len = plan.shard_len[held.shard];
      const std::int64_t home = locate(plan.rank_shard_offsets, held.shard).first;
      landings[held.shard].push_back({held.copy, r, row, rev.num_entries()});
      row += len;
      rev.seq_len.push_back(len);
      rev.dst_rank.push_back(static_cast<std::int32_t>(home));
      rev.dst_offset.push_back(0);
      out[{r, home}] += len;
      back[{home, r}] += len;
    }
    rev.rank_offsets.push_back(rev.num_entries());
  }
  fwd = {};
  fwd.world_size = plan.world_size;
  fwd.rank_offsets = plan.rank_shard_offsets;
  if (copies) fwd.copy_offsets.push_back(0);
  for (std::int64_t home = 0; home < plan.world_size; ++home) {
    const std::int64_t first = plan.rank_shard_offsets[home];
    const std::int64_t last = plan.rank_shard_offsets[home + 1];
    std::int64_t rows = 0;
    for (std::int64_t s = first; s < last; ++s) rows += plan.shard_len[s];
    std::int64_t begin = 0;
    for (std::int64_t s = first; s < last; ++s) {
      auto& list = landings[s];
      std::sort(list.begin(), list.end(), [](const Landing& a, const Landing& b) {
        return std::tie(a.copy, a.t) < std::tie(b.copy, b.t);
      });
      for (std::size_t c = 0; c < list.size(); ++c) {
        fwd.dst_rank.push_back(static_cast<std::int32_t>(list[c].rank));
        fwd.dst_offset.push_back(list[c].row);
        rev.dst_offset[list[c].t] = static_cast<std::int64_t>(c) * rows + begin;
      }
      fwd.seq_len.push_back(plan.shard_len[s]);
      if (copies) fwd.copy_offsets.push_back(fwd.num_destinations());
      begin += plan.shard_len[s];
    }
  }
  fwd.recv = count_rows(plan.world_size, out);
  rev.recv = count_rows(plan.world_size, back);
}

/// Changes the KV buffers; `change` returns the symptom, or nothing where it found no place.
template <class Change>
Damage kv_changes(std::string name, Change change) {
  return {std::move(name), Form::sparse, [=](Patient& patient, Random& random) -> Result {
            const QkvPlan& plan = patient.plan;
            if (std::count(plan.shard_len.begin(), plan.shard_len.end(), 0) > 0) return {};
            QkvRouting& routing = patient.routing;
            Buffers buffers = read_buffers(plan, routing.rev_kv);
            const Result symptom = change(patient, buffers, random);
            if (!symptom) return {};
            write_tables(plan, buffers, true, routing.fwd_kv, routing.rev_kv);
            // The damage is one that the pair by itself does not show.
            if (!validate(routing.fwd_kv, routing.rev_kv).empty()) {
              throw InternalError("the damaged pair is not consistent");
            }
            return symptom;
          }};
}

/// A place in the buffers whose shard has other copies too: without any copy at all its rows would
/// be undispatched, which is another damage.
std::pair<std::int64_t, std::int64_t> pick_spare(const Buffers& buffers, Random& random) {
  std::map<std::int64_t, std::int64_t> copies;
  for (const auto& buffer : buffers) {
    for (const Held& held : buffer) ++copies[held.shard];
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> places;
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    for (std::size_t t = 0; t < buffers[r].size(); ++t) {
      if (copies[buffers[r][t].shard] > 1) places.emplace_back(r, t);
    }
  }
  return places.empty() ? std::pair<std::int64_t, std::int64_t>{-1, -1}
                        : places[random.below(std::ssize(places))];
}

std::int64_t pick_buffer(const Buffers& buffers, std::int64_t at_least, Random& random) {
  return pick(random, std::ssize(buffers),
              [&](std::int64_t r) { return std::ssize(buffers[r]) >= at_least; });
}

Symptom at_shard(const QkvPlan& plan, FindingKind kind, std::int64_t shard) {
  const auto [home, place] = locate(plan.rank_shard_offsets, shard);
  return {{kind}, "fwd_kv", "dst_rank", home, place};
}

Result drop_copy(Patient& patient, Buffers& buffers, Random& random) {
  const auto [r, t] = pick_spare(buffers, random);
  if (r < 0) return {};
  auto& buffer = buffers[r];
  const std::int64_t shard = buffer[t].shard;
  buffer.erase(buffer.begin() + t);
  return at_shard(patient.plan, causality, shard);
}

Result add_copy(Patient& patient, Buffers& buffers, Random& random) {
  if (patient.plan.num_shards() == 0) return {};
  const std::int64_t shard = random.below(patient.plan.num_shards());
  auto& buffer = buffers[random.below(std::ssize(buffers))];
  buffer.push_back({shard, 1 << 20});
  return at_shard(patient.plan, causality, shard);
}

Result replace_copy(Patient& patient, Buffers& buffers, Random& random) {
  const auto [r, t] = pick_spare(buffers, random);
  if (r < 0) return {};
  Held& held = buffers[r][t];
  const std::int64_t before = held.shard;
  held.shard = (before + 1) % patient.plan.num_shards();
  return at_shard(patient.plan, causality, before);
}

Result swap_neighbours(Patient& patient, Buffers& buffers, Random& random) {
  const std::int64_t r = pick_buffer(buffers, 2, random);
  if (r < 0) return {};
  auto& buffer = buffers[r];
  const std::int64_t t = random.below(std::ssize(buffer) - 1);
  if (buffer[t].shard == buffer[t + 1].shard) return {};
  std::swap(buffer[t], buffer[t + 1]);
  return at_shard(patient.plan, causality, buffer[t].shard);
}

/// Two copies of a shard change their numbers, hence their planes.
Result swap_copy_numbers(Patient& patient, Buffers& buffers, Random& random) {
  std::vector<std::pair<Held*, Held*>> pairs;
  std::map<std::int64_t, Held*> seen;
  for (auto& buffer : buffers) {
    for (Held& held : buffer) {
      Held*& other = seen[held.shard];
      if (other != nullptr && other->copy != held.copy) pairs.emplace_back(other, &held);
      other = &held;
    }
  }
  if (pairs.empty()) return {};
  const auto [a, b] = pairs[random.below(std::ssize(pairs))];
  std::swap(a->copy, b->copy);
  Symptom symptom = at_shard(patient.plan, order, a->shard);
  if (patient.plan.kv_layout == KvLayout::per_query) symptom.field = "dst_offset";
  return symptom;
}

/// The plan asks for one KV shard more than was routed.
Result window_widens(Patient& patient, Random& random) {
  QkvPlan& plan = patient.plan;
  if (plan.kv_begin.empty() || plan.kv_layout != KvLayout::per_query) return {};
  const auto begin = [&](std::int64_t p) -> std::int32_t& {
    return plan.kv_begin[plan.doc_shards[p]];
  };
  const std::int64_t place = pick(random, plan.num_shards(), [&](std::int64_t p) {
    const bool is_first = locate(plan.doc_shard_offsets, p).second == 0;
    return begin(p) > 0 && !is_first && begin(p - 1) < begin(p);
  });
  if (place < 0) return {};
  --begin(place);
  const std::int64_t document = locate(plan.doc_shard_offsets, place).first;
  const std::int64_t missing = plan.doc_shards[plan.doc_shard_offsets[document] + begin(place)];
  return at_shard(plan, causality, missing);
}

/// Q in another order, with its reverse to match.
Result queries_swap(Patient& patient, Random& random) {
  const QkvPlan& plan = patient.plan;
  QkvRouting& routing = patient.routing;
  if (std::count(plan.shard_len.begin(), plan.shard_len.end(), 0) > 0) return {};
  Buffers buffers = read_buffers(plan, routing.rev_q);
  const std::int64_t r = pick_buffer(buffers, 2, random);
  if (r < 0) return {};
  auto& buffer = buffers[r];
  const std::int64_t t = random.below(std::ssize(buffer) - 1);
  std::swap(buffer[t], buffer[t + 1]);
  write_tables(plan, buffers, false, routing.fwd_q, routing.rev_q);
  const auto [home, place] = locate(plan.rank_shard_offsets, buffer[t].shard);
  return Symptom{{order}, "fwd_q", "dst_offset", home, place, 0};
}

}  // namespace

std::vector<Damage> kv_damages() {
  return {kv_changes("kv_copy_dropped", drop_copy),
          kv_changes("kv_copy_added", add_copy),
          kv_changes("kv_copy_replaced", replace_copy),
          kv_changes("kv_order_swapped", swap_neighbours),
          kv_changes("kv_copy_numbers_swapped", swap_copy_numbers),
          {"window_widens", Form::sparse, window_widens},
          {"q_order_swapped", Form::sparse, queries_swap}};
}

}  // namespace waybill::test
