#include "validate_damage.h"

// Damage to one entry of the sparse form. Run by validate_damage_test.cpp.

namespace waybill::test {
namespace {

using enum FindingKind;
using Result = std::optional<Symptom>;
using Kinds = std::vector<FindingKind>;

std::string name_of(const char* what, const NamedTable& table) {
  return concat(what, "_", table.name);
}

Symptom at_copy(Kinds kinds, const NamedTable& table, const char* field, const CopyPlace& place) {
  return {std::move(kinds), table.name,  field,
          place.rank,       place.shard, table.forward ? place.slot : -1};
}

/// Changes the offset of a copy with rows.
template <class Change>
Damage offset_changes(const char* what, const NamedTable& table, Kinds kinds, Change change) {
  return {name_of(what, table), Form::sparse, [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const std::int64_t c = pick(random, m.num_destinations(), [&](std::int64_t i) {
              return m.seq_len[place_of_copy(m, i).entry] > 0;
            });
            if (c < 0) return {};
            if (!change(m.dst_offset[c])) return {};
            return at_copy(kinds, table, "dst_offset", place_of_copy(m, c));
          }};
}

Damage rank_becomes(const char* what, const NamedTable& table, std::int32_t beyond,
                    FindingKind kind) {
  return {name_of(what, table), Form::sparse, [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const std::int64_t c =
                pick(random, m.num_destinations(), [](std::int64_t) { return true; });
            if (c < 0) return {};
            m.dst_rank[c] = beyond >= 0 ? m.world_size + beyond : beyond;
            return at_copy({kind}, table, "dst_rank", place_of_copy(m, c));
          }};
}

/// Another rank of the world.
Damage rank_moves(const NamedTable& table, FindingKind kind) {
  return {
      name_of("rank_moves", table), Form::sparse, [=](Patient& patient, Random& random) -> Result {
        SparseMetadata& m = patient.routing.*table.sparse;
        const std::int64_t c = pick(random, m.num_destinations(), [&](std::int64_t i) {
          return m.world_size > 1 && m.seq_len[place_of_copy(m, i).entry] > 0;
        });
        if (c < 0) return {};
        std::int32_t& rank = m.dst_rank[c];
        rank =
            static_cast<std::int32_t>((rank + 1 + random.below(m.world_size - 1)) % m.world_size);
        Symptom symptom = at_copy({kind}, table, "dst_rank", place_of_copy(m, c));
        // Where it lands beside another copy of its shard, either one is superfluous.
        if (kind == causality) symptom.copy = -1;
        return symptom;
      }};
}

Damage length_changes(const char* what, const NamedTable& table, std::int64_t by, Kinds kinds) {
  return {name_of(what, table), Form::sparse, [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const std::int64_t entry = pick(random, m.num_entries(), [&](std::int64_t i) {
              return m.seq_len[i] > 0 && m.destination_end(i) > m.destination_begin(i);
            });
            if (entry < 0) return {};
            // Beyond small steps the length becomes the value itself.
            m.seq_len[entry] = std::abs(by) == 1 ? m.seq_len[entry] + by : by;
            const auto [rank, shard] = locate(m.rank_offsets, entry);
            return Symptom{kinds, table.name, "seq_len", rank, shard};
          }};
}

/// Two copies of equal length on the same rank change places.
Damage offsets_swap(const NamedTable& table, FindingKind kind) {
  return {name_of("offsets_swap", table), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const auto len = [&](std::int64_t c) { return m.seq_len[place_of_copy(m, c).entry]; };
            std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
            for (std::int64_t a = 0; a < m.num_destinations(); ++a) {
              for (std::int64_t b = a + 1; b < std::min(m.num_destinations(), a + 40); ++b) {
                const bool other = place_of_copy(m, a).entry != place_of_copy(m, b).entry;
                if (other && m.dst_rank[a] == m.dst_rank[b] && len(a) == len(b) && len(a) > 0) {
                  pairs.emplace_back(a, b);
                }
              }
            }
            if (pairs.empty()) return {};
            const auto [a, b] = pairs[random.below(std::ssize(pairs))];
            std::swap(m.dst_offset[a], m.dst_offset[b]);
            return at_copy({kind}, table, kind == order ? "dst_offset" : "dst_rank",
                           place_of_copy(m, random.below(2) == 0 ? a : b));
          }};
}

Damage pair_rows_change(const NamedTable& table, std::int64_t by, Kinds kinds) {
  return {concat("pair_rows_",
                 by > 0     ? "more_"
                 : by == -1 ? "less_"
                            : "negative_",
                 table.name),
          Form::sparse, [=](Patient& patient, Random& random) -> Result {
            RecvCounts& recv = (patient.routing.*table.sparse).recv;
            const std::int64_t p =
                pick(random, std::ssize(recv.tokens), [](std::int64_t) { return true; });
            if (p < 0) return {};
            recv.tokens[p] += by;
            return Symptom{kinds, table.name, "recv.tokens", locate(recv.offsets, p).first};
          }};
}

Damage total_changes(const NamedTable& table, std::int64_t by) {
  return {concat("total_", by > 0 ? "more_" : "less_", table.name), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            RecvCounts& recv = (patient.routing.*table.sparse).recv;
            const std::int64_t r = random.below(std::ssize(recv.total));
            recv.total[r] += by;
            return Symptom{{recv.total[r] < 0 ? negative : count}, table.name, "recv.total", r};
          }};
}

/// A receiving rank does not know of one of its senders.
Damage pair_vanishes(const NamedTable& table) {
  return {name_of("pair_vanishes", table), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            RecvCounts& recv = (patient.routing.*table.sparse).recv;
            const std::int64_t p =
                pick(random, std::ssize(recv.tokens), [](std::int64_t) { return true; });
            if (p < 0) return {};
            const std::int64_t r = locate(recv.offsets, p).first;
            recv.tokens.erase(recv.tokens.begin() + p);
            recv.src_rank.erase(recv.src_rank.begin() + p);
            for (std::int64_t i = r + 1; i < std::ssize(recv.offsets); ++i) --recv.offsets[i];
            return Symptom{{count}, table.name, "recv.src_rank", r};
          }};
}

Damage sender_unknown(const NamedTable& table) {
  return {
      name_of("sender_unknown", table), Form::sparse,
      [=](Patient& patient, Random& random) -> Result {
        RecvCounts& recv = (patient.routing.*table.sparse).recv;
        const std::int64_t p =
            pick(random, std::ssize(recv.tokens), [](std::int64_t) { return true; });
        if (p < 0) return {};
        recv.src_rank[p] = random.below(2) == 0 ? -1 : patient.plan.world_size;
        return Symptom{{rank_range}, table.name, "recv.src_rank", locate(recv.offsets, p).first};
      }};
}

/// The counts of the other direction.
Damage counts_of_other_direction(const NamedTable& table, const NamedTable& other) {
  return {name_of("counts_transposed", table), Form::sparse,
          [=](Patient& patient, Random&) -> Result {
            RecvCounts& recv = (patient.routing.*table.sparse).recv;
            const RecvCounts& wrong = (patient.routing.*other.sparse).recv;
            std::int64_t r = 0;
            while (r < patient.plan.world_size && recv.total[r] == wrong.total[r]) ++r;
            if (r == patient.plan.world_size) return {};
            recv = wrong;
            return Symptom{{count}, table.name, "recv.total", r};
          }};
}

template <class Cut>
Damage cut_off(const char* what, const char* field, const NamedTable& table, Cut cut) {
  return {name_of(what, table), Form::sparse, [=](Patient& patient, Random&) -> Result {
            if (!cut(patient.routing.*table.sparse)) return {};
            return Symptom{{shape}, table.name, field};
          }};
}

/// Two neighbours of a reverse table that differ change places.
Damage reverse_swaps(const NamedTable& table) {
  return {name_of("reverse_swaps", table), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const std::int64_t t = pick(random, m.num_entries() - 1, [&](std::int64_t i) {
              return locate(m.rank_offsets, i).first == locate(m.rank_offsets, i + 1).first &&
                     m.seq_len[i] > 0 && m.seq_len[i + 1] > 0;
            });
            if (t < 0) return {};
            std::swap(m.seq_len[t], m.seq_len[t + 1]);
            std::swap(m.dst_rank[t], m.dst_rank[t + 1]);
            std::swap(m.dst_offset[t], m.dst_offset[t + 1]);
            const auto [rank, shard] = locate(m.rank_offsets, t);
            const bool same_rank = m.dst_rank[t] == m.dst_rank[t + 1];
            const bool same_len = m.seq_len[t] == m.seq_len[t + 1];
            const char* field = !same_rank ? "dst_rank" : !same_len ? "seq_len" : "dst_offset";
            const bool home = same_rank && same_len && !table.kv;
            return Symptom{{home ? identity : transpose}, table.name, field, rank, shard};
          }};
}

/// The gradient of a copy lands in the plane of another copy.
Result reverse_in_wrong_plane(Patient& patient, Random& random) {
  SparseMetadata& m = patient.routing.rev_kv;
  const QkvPlan& plan = patient.plan;
  const std::int64_t t =
      pick(random, m.num_entries(), [&](std::int64_t i) { return m.seq_len[i] > 0; });
  if (t < 0) return {};
  const std::int32_t home = m.dst_rank[t];
  for (std::int64_t s = plan.rank_shard_offsets[home]; s < plan.rank_shard_offsets[home + 1]; ++s) {
    m.dst_offset[t] += plan.shard_len[s];
  }
  const auto [rank, shard] = locate(m.rank_offsets, t);
  return Symptom{{transpose}, "rev_kv", "dst_offset", rank, shard};
}

Damage reverse_entry_lost(const NamedTable& table) {
  return {name_of("reverse_entry_lost", table), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            SparseMetadata& m = patient.routing.*table.sparse;
            const std::int64_t t = pick(random, m.num_entries(), [](std::int64_t) { return true; });
            if (t < 0) return {};
            const std::int64_t rank = locate(m.rank_offsets, t).first;
            m.seq_len.erase(m.seq_len.begin() + t);
            m.dst_rank.erase(m.dst_rank.begin() + t);
            m.dst_offset.erase(m.dst_offset.begin() + t);
            for (std::int64_t r = rank + 1; r <= m.world_size; ++r) --m.rank_offsets[r];
            return Symptom{{transpose}, table.name, "seq_len", rank};
          }};
}

/// One value of the attention layout. `values` picks the array; by rank where `per_rank`.
template <class Values>
Damage attention_changes(const char* field, bool per_rank, std::int64_t by, Values values) {
  return {concat("attention_", field, by > 0 ? "_more" : "_less"), Form::sparse,
          [=](Patient& patient, Random& random) -> Result {
            auto& array = values(patient.routing.attention);
            const std::int64_t i =
                pick(random, std::ssize(array), [](std::int64_t) { return true; });
            if (i < 0) return {};
            array[i] += static_cast<std::int32_t>(by);
            if (per_rank) return Symptom{{attention}, "attention", field, i};
            const auto [rank, shard] = locate(patient.routing.attention.rank_offsets, i);
            return Symptom{{attention}, "attention", field, rank, shard};
          }};
}

Damage buffer_too_small(const NamedTable& table) {
  return {name_of("buffer_too_small", table), Form::sparse,
          [=](Patient& patient, Random&) -> Result {
            const auto& rows = (patient.routing.*table.sparse).recv.total;
            const auto most = std::max_element(rows.begin(), rows.end());
            if (*most == 0) return {};
            (table.kv ? patient.options.kv_capacity : patient.options.q_capacity) = *most - 1;
            return Symptom{{capacity}, table.name, "num_recv_tokens", most - rows.begin()};
          }};
}

Result other_kv_layout(Patient& patient, Random&) {
  KvLayout& layout = patient.routing.kv_layout;
  layout = layout == KvLayout::per_rank ? KvLayout::per_query : KvLayout::per_rank;
  return Symptom{{plan}, "attention", "kv_layout"};
}

void add_table_damages(const NamedTable& table, const NamedTable& other,
                       std::vector<Damage>& list) {
  const Kinds elsewhere = table.forward ? Kinds{overlap, coverage, bounds}
                          : table.kv    ? Kinds{transpose}
                                        : Kinds{identity};
  const auto set = [](std::int64_t value) {
    return [=](std::int64_t& offset) { return std::exchange(offset, value) != value; };
  };
  const auto add = [](std::int64_t by) {
    return [=](std::int64_t& offset) { return (offset += by) >= 0; };
  };
  list.push_back(offset_changes("offset_plus_1", table, elsewhere, add(1)));
  list.push_back(offset_changes("offset_minus_1", table, elsewhere, add(-1)));
  list.push_back(offset_changes("offset_far", table, elsewhere, add(1 << 30)));
  list.push_back(offset_changes("offset_largest", table, {bounds}, set(INT64_MAX)));
  list.push_back(offset_changes("offset_negative", table, {negative}, set(-1)));
  list.push_back(offset_changes("offset_smallest", table, {negative}, set(INT64_MIN)));
  list.push_back(rank_becomes("rank_is_world_size", table, 0, rank_range));
  list.push_back(rank_becomes("rank_minus_2", table, -2, rank_range));
  list.push_back(rank_becomes("rank_smallest", table, INT32_MIN, rank_range));
  list.push_back(rank_moves(table, !table.forward ? transpose : table.kv ? causality : plan));
  const Kinds other_length{table.forward ? plan : transpose};
  list.push_back(length_changes("length_plus_1", table, 1, other_length));
  list.push_back(length_changes("length_minus_1", table, -1, other_length));
  list.push_back(length_changes("length_negative", table, -7, {negative}));
  list.push_back(length_changes("length_largest", table, INT64_MAX, {bounds}));
  list.push_back(pair_rows_change(table, 1, {count}));
  list.push_back(pair_rows_change(table, -1, {count}));
  list.push_back(pair_rows_change(table, INT64_MIN, {negative}));
  list.push_back(total_changes(table, 1));
  list.push_back(total_changes(table, -1));
  list.push_back(pair_vanishes(table));
  list.push_back(sender_unknown(table));
  list.push_back(counts_of_other_direction(table, other));
  const auto pop = [](auto& values) {
    if (values.empty()) return false;
    values.pop_back();
    return true;
  };
  list.push_back(cut_off("offsets_cut", "dst_offset", table,
                         [=](SparseMetadata& m) { return pop(m.dst_offset); }));
  list.push_back(cut_off("ranks_cut", "rank_offsets", table,
                         [=](SparseMetadata& m) { return pop(m.rank_offsets); }));
  list.push_back(cut_off("totals_cut", "recv.total", table,
                         [=](SparseMetadata& m) { return pop(m.recv.total); }));
  list.push_back(cut_off("tokens_cut", "recv.tokens", table,
                         [=](SparseMetadata& m) { return pop(m.recv.tokens); }));
  list.push_back(cut_off("other_world_size", "rank_offsets", table, [](SparseMetadata& m) {
    ++m.world_size;
    return true;
  }));
}

}  // namespace

std::vector<Damage> sparse_damages() {
  std::vector<Damage> list;
  const std::vector<NamedTable>& all = tables();
  for (std::size_t i = 0; i < all.size(); ++i) add_table_damages(all[i], all[i ^ 1], list);
  list.push_back(offsets_swap(all[0], order));
  list.push_back(offsets_swap(all[2], causality));
  list.push_back(reverse_swaps(all[1]));
  list.push_back(reverse_swaps(all[3]));
  list.push_back({"reverse_in_wrong_plane", Form::sparse, reverse_in_wrong_plane});
  list.push_back(reverse_entry_lost(all[1]));
  list.push_back(reverse_entry_lost(all[3]));
  list.push_back(buffer_too_small(all[0]));
  list.push_back(buffer_too_small(all[2]));
  list.push_back({"other_kv_layout", Form::sparse, other_kv_layout});
  for (const std::int64_t by : {1, -1}) {
    using Layout = SparseAttnLayout;
    list.push_back(attention_changes(
        "shard", false, by, [](Layout & a) -> auto& { return a.shard; }));
    list.push_back(attention_changes(
        "q_begin", false, by, [](Layout & a) -> auto& { return a.q_begin; }));
    list.push_back(attention_changes(
        "q_len", false, by, [](Layout & a) -> auto& { return a.q_len; }));
    list.push_back(attention_changes(
        "kv_row", false, by, [](Layout & a) -> auto& { return a.kv_row; }));
    list.push_back(attention_changes(
        "kv_len", false, by, [](Layout & a) -> auto& { return a.kv_len; }));
    list.push_back(attention_changes(
        "max_seqlen_q", true, by, [](Layout & a) -> auto& { return a.max_seqlen_q; }));
    list.push_back(attention_changes(
        "max_seqlen_kv", true, by, [](Layout & a) -> auto& { return a.max_seqlen_kv; }));
    list.push_back(attention_changes(
        "rank_offsets", true, by, [](Layout & a) -> auto& { return a.rank_offsets; }));
  }
  return list;
}

}  // namespace waybill::test
