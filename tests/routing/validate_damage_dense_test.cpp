#include "validate_damage.h"

// Damage to the dense form. Run by validate_damage_test.cpp.

namespace waybill::test {
namespace {

using enum FindingKind;
using Result = std::optional<Symptom>;

std::string name_of(const char* what, const NamedTable& table) {
  return concat("dense_", what, "_", table.name);
}

Damage table_damage(const char* what, const NamedTable& table,
                    std::function<Result(Metadata&, Random&)> plant) {
  return {name_of(what, table), Form::dense,
          [&table, plant = std::move(plant)](Patient& patient, Random& random) {
            return plant(patient.dense.*table.dense, random);
          }};
}

/// The place of a flat element of dst_rank or dst_offset.
Symptom at_entry(const Metadata& m, const NamedTable& table, FindingKind kind, const char* field,
                 std::int64_t element) {
  const std::int64_t copies = m.has_copies() ? m.dst_rank.dim(2) : 1;
  const std::int64_t shards = m.seq_len.dim(1);
  const std::int64_t entry = element / copies;
  return {{kind},         table.name,     field,
          entry / shards, entry % shards, table.forward ? element % copies : -1};
}

Result dirty_offset(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t e =
      pick(random, m.dst_rank.size(), [&](std::int64_t i) { return m.dst_rank.i64()[i] == -1; });
  if (e < 0) return {};
  m.dst_offset.i64()[e] = 1 + random.below(100);
  return at_entry(m, table, padding, "dst_offset", e);
}

/// An unused entry gets a length.
Result dirty_length(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t copies = m.has_copies() ? m.dst_rank.dim(2) : 1;
  const std::int64_t entry = pick(random, m.seq_len.size(), [&](std::int64_t i) {
    for (std::int64_t k = 0; k < copies; ++k) {
      if (m.dst_rank.i64()[i * copies + k] != -1) return false;
    }
    return true;
  });
  if (entry < 0) return {};
  m.seq_len.i64()[entry] = 3;
  Symptom symptom = at_entry(m, table, padding, "seq_len", entry * copies);
  if (table.forward) symptom.kinds.push_back(undispatched);
  if (table.forward) symptom.field = "dst_rank";
  symptom.copy = -1;
  return symptom;
}

/// An entry beyond the shards of the plan gets a destination.
Result padding_sent(Patient& patient, Random& random) {
  Metadata& m = patient.dense.fwd_q;
  const auto& offsets = patient.plan.rank_shard_offsets;
  const std::int64_t shards = m.seq_len.dim(1);
  const std::int64_t e = pick(random, m.dst_rank.size(), [&](std::int64_t i) {
    return i % shards >= offsets[i / shards + 1] - offsets[i / shards];
  });
  if (e < 0) return {};
  m.dst_rank.i64()[e] = 0;
  return Symptom{{padding}, "fwd_q", "seq_len", e / shards, e % shards};
}

Result not_sent(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t entry =
      pick(random, m.seq_len.size(), [&](std::int64_t i) { return m.seq_len.i64()[i] > 0; });
  if (entry < 0) return {};
  const std::int64_t copies = m.has_copies() ? m.dst_rank.dim(2) : 1;
  for (std::int64_t k = 0; k < copies; ++k) {
    m.dst_rank.i64()[entry * copies + k] = -1;
    m.dst_offset.i64()[entry * copies + k] = 0;
  }
  Symptom symptom = at_entry(m, table, undispatched, "dst_rank", entry * copies);
  symptom.copy = -1;
  return symptom;
}

Result rank_beyond(const NamedTable& table, std::int64_t rank, Metadata& m, Random& random) {
  const std::int64_t e = pick(random, m.dst_rank.size(), [](std::int64_t) { return true; });
  if (e < 0) return {};
  m.dst_rank.i64()[e] = rank == 0 ? m.seq_len.dim(0) : rank;
  return at_entry(m, table, rank_range, "dst_rank", e);
}

Result cell_changes(const NamedTable& table, std::int64_t by, Metadata& m, Random& random) {
  const std::int64_t world = m.seq_len.dim(0);
  const std::int64_t cell = random.below(m.num_recv_tokens.size());
  auto& value = m.num_recv_tokens.i64()[cell];
  value += by;
  return Symptom{{value < 0 ? negative : count}, table.name, "num_recv_tokens", cell / (world + 1)};
}

Result sum_column_changes(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t world = m.seq_len.dim(0);
  const std::int64_t rank = random.below(world);
  ++m.num_recv_tokens.i64()[rank * (world + 1) + world];
  return Symptom{{count}, table.name, "num_recv_tokens", rank};
}

Result totals_change(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t rank = random.below(std::ssize(m.num_total_recv_tokens));
  ++m.num_total_recv_tokens[rank];
  return Symptom{{count}, table.name, "num_total_recv_tokens", rank};
}

Result num_seqs_changes(const NamedTable& table, Metadata& m, Random& random) {
  const std::int64_t rank = random.below(m.num_seqs->size());
  m.num_seqs->i64()[rank] += 1 << 10;
  return Symptom{{count}, table.name, "num_seqs", rank};
}

Result world_size_changes(const NamedTable& table, Metadata& m, Random&) {
  ++*m.world_size;
  return Symptom{{shape}, table.name, "world_size"};
}

Result counts_without_sum(const NamedTable& table, Metadata& m, Random&) {
  const std::int64_t world = m.seq_len.dim(0);
  m.num_recv_tokens = IndexArray({world, world});
  return Symptom{{shape}, table.name, "num_recv_tokens"};
}

Result offsets_of_other_shape(const NamedTable& table, Metadata& m, Random&) {
  m.dst_offset = IndexArray({m.seq_len.dim(0), m.seq_len.dim(1) + 1});
  return Symptom{{shape}, table.name, "dst_offset"};
}

Result one_rank_only(const NamedTable& table, Metadata& m, Random&) {
  m = m.get_slice(Rank{0});
  return Symptom{{shape}, table.name, "seq_len"};
}

Result one_dtype(const NamedTable& table, Metadata& m, Random& random) {
  if (random.below(2) == 0) {
    m.dst_rank = m.dst_rank.to(DType::int32);
    return Symptom{{normalization}, table.name, "dst_rank"};
  }
  m.seq_len = m.seq_len.to(DType::uint32);
  return Symptom{{normalization}, table.name, "seq_len"};
}

Result flag_without_dtypes(const NamedTable& table, Metadata& m, Random&) {
  m.normalized = true;
  return Symptom{{normalization}, table.name, "num_recv_tokens"};
}

/// A count that does not even fit int64.
Result cell_over_int64(const NamedTable& table, Metadata& m, Random& random) {
  m = m.normalize_dtype();
  const std::int64_t world = m.seq_len.dim(0);
  const std::int64_t cell = random.below(m.num_recv_tokens.size());
  static_cast<std::uint64_t*>(m.num_recv_tokens.data())[cell] = UINT64_MAX;
  return Symptom{{count}, table.name, "num_recv_tokens", cell / (world + 1)};
}

Result mask_bit_flips(Patient& patient, Random& random) {
  Metadata& m = patient.dense.rev_kv;
  if (m.seq_recv_mask->size() == 0) return {};
  const std::int64_t e = random.below(m.seq_recv_mask->size());
  auto& bit = static_cast<std::uint8_t*>(m.seq_recv_mask->data())[e];
  bit = bit == 0 ? 1 : 0;
  Symptom symptom = at_entry(patient.dense.fwd_kv, tables()[2], mask, "seq_recv_mask", e);
  symptom.table = "rev_kv";
  return symptom;
}

Result recv_seq_lens_change(Patient& patient, Random& random) {
  IndexArray& lens = *patient.dense.rev_kv.recv_seq_lens;
  if (lens.size() == 0) return {};
  const std::int64_t entry = random.below(lens.size());
  ++lens.i64()[entry];
  return Symptom{{mask}, "rev_kv", "recv_seq_lens", entry / lens.dim(1), entry % lens.dim(1)};
}

Result mask_missing(Patient& patient, Random&) {
  patient.dense.rev_kv.seq_recv_mask.reset();
  return Symptom{{mask}, "rev_kv", "seq_recv_mask"};
}

Result mask_for_queries(Patient& patient, Random&) {
  patient.dense.rev_q.seq_recv_mask = IndexArray({1, 1, 1}, DType::boolean);
  return Symptom{{mask}, "rev_q", "seq_recv_mask"};
}

using Arrays = std::vector<IndexArray>;

Damage list_changes(const char* field, Arrays AttnLayout::*list) {
  return {concat("dense_attention_", field), Form::dense,
          [=](Patient& patient, Random& random) -> Result {
            Arrays& arrays = patient.dense.attention.*list;
            const std::int64_t rank = pick(random, std::ssize(arrays),
                                           [&](std::int64_t r) { return arrays[r].size() > 0; });
            if (rank < 0) return {};
            const std::int64_t t = random.below(arrays[rank].size());
            arrays[rank].i64()[t] += 1 - 2 * random.below(2);
            return Symptom{{attention}, "attention", field, rank, t};
          }};
}

Damage list_too_short(const char* field, Arrays AttnLayout::*list) {
  return {concat("dense_attention_short_", field), Form::dense,
          [=](Patient& patient, Random& random) -> Result {
            Arrays& arrays = patient.dense.attention.*list;
            if (arrays.empty()) return {};
            if (random.below(2) == 0) {
              arrays.pop_back();
              return Symptom{{shape}, "attention", field};
            }
            const std::int64_t rank = random.below(std::ssize(arrays));
            arrays[rank] = IndexArray({arrays[rank].size() + 1});
            return Symptom{{shape}, "attention", field, rank};
          }};
}

Damage vector_changes(const char* field, IndexArray AttnLayout::*array) {
  return {concat("dense_attention_", field), Form::dense,
          [=](Patient& patient, Random& random) -> Result {
            IndexArray& values = patient.dense.attention.*array;
            const std::int64_t rank = random.below(values.size());
            ++values.i64()[rank];
            return Symptom{{attention}, "attention", field, rank};
          }};
}

void add_table_damages(const NamedTable& table, std::vector<Damage>& list) {
  const auto add = [&](const char* what, auto plant) {
    list.push_back(table_damage(
        what, table, [=, &table](Metadata& m, Random& random) { return plant(table, m, random); }));
  };
  const auto add_with = [&](const char* what, auto plant, std::int64_t value) {
    list.push_back(table_damage(what, table, [=, &table](Metadata& m, Random& random) {
      return plant(table, value, m, random);
    }));
  };
  add("dirty_offset", dirty_offset);
  add("dirty_length", dirty_length);
  if (table.forward) add("not_sent", not_sent);
  add_with("rank_is_world_size", rank_beyond, 0);
  add_with("rank_minus_2", rank_beyond, -2);
  add_with("rank_largest", rank_beyond, INT64_MAX);
  add_with("cell_more", cell_changes, 1);
  add_with("cell_less", cell_changes, -1);
  add("sum_column", sum_column_changes);
  add("totals", totals_change);
  add("num_seqs", num_seqs_changes);
  add("world_size", world_size_changes);
  add("counts_without_sum", counts_without_sum);
  add("offsets_of_other_shape", offsets_of_other_shape);
  add("one_rank_only", one_rank_only);
  add("one_dtype", one_dtype);
  add("flag_without_dtypes", flag_without_dtypes);
  add("cell_over_int64", cell_over_int64);
}

}  // namespace

std::vector<Damage> dense_damages() {
  std::vector<Damage> list;
  for (const NamedTable& table : tables()) add_table_damages(table, list);
  list.push_back({"dense_padding_sent", Form::dense, padding_sent});
  list.push_back({"dense_mask_bit", Form::dense, mask_bit_flips});
  list.push_back({"dense_recv_seq_lens", Form::dense, recv_seq_lens_change});
  list.push_back({"dense_mask_missing", Form::dense, mask_missing});
  list.push_back({"dense_mask_for_queries", Form::dense, mask_for_queries});
  list.push_back(list_changes("cu_seqlens_q", &AttnLayout::cu_seqlens_q));
  list.push_back(list_changes("cu_seqlens_kv", &AttnLayout::cu_seqlens_kv));
  list.push_back(list_changes("kv_row", &AttnLayout::kv_row));
  list.push_back(list_changes("kv_len", &AttnLayout::kv_len));
  list.push_back(list_too_short("cu_seqlens_q", &AttnLayout::cu_seqlens_q));
  list.push_back(list_too_short("kv_len", &AttnLayout::kv_len));
  list.push_back(vector_changes("max_seqlen_q", &AttnLayout::max_seqlen_q));
  list.push_back(vector_changes("max_seqlen_kv", &AttnLayout::max_seqlen_kv));
  list.push_back(vector_changes("num_local_seqs_recv", &AttnLayout::num_local_seqs_recv));
  return list;
}

}  // namespace waybill::test
