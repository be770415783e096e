#include "check_tables.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/to_size.h"

namespace waybill::detail {
namespace {

/// Compares one number of the attention layout.
struct AttentionField {
  FindingList& findings;
  std::int64_t rank;
  std::int64_t shard;

  void expect(const char* field, std::int64_t got, std::int64_t expected) const {
    if (got == expected) return;
    findings.add({FindingKind::attention, "attention", field, rank, shard, -1, concat(got),
                  concat(expected)});
  }
};

template <class Value>
bool has_size(const char* field, const Value& table, std::int64_t expected, FindingList& findings) {
  if (std::ssize(table) == expected) return true;
  findings.add({FindingKind::shape, "attention", field, -1, -1, -1, concat(table.size(), " values"),
                concat(expected)});
  return false;
}

/// Calls body(source rank, copy, rows) for every copy of a table.
template <class Body>
void for_each_copy(const SparseMetadata& metadata, const Body& body) {
  for (std::int32_t w = 0; w < metadata.world_size; ++w) {
    for (std::int64_t entry = metadata.rank_offsets[w]; entry < metadata.rank_offsets[w + 1];
         ++entry) {
      for (std::int64_t c = metadata.destination_begin(entry); c < metadata.destination_end(entry);
           ++c) {
        body(w, c, metadata.seq_len[entry]);
      }
    }
  }
}

/// What the entries of a table say about received rows.
RecvCounts count_entries(const SparseMetadata& metadata) {
  struct Part {
    std::int32_t src_rank;
    std::int64_t rows;
  };
  std::vector<std::vector<Part>> parts(metadata.world_size);  // by receiving rank
  for_each_copy(metadata, [&](std::int32_t w, std::int64_t copy, std::int64_t rows) {
    std::vector<Part>& list = parts[metadata.dst_rank[copy]];
    if (rows == 0) return;
    if (list.empty() || list.back().src_rank != w) list.push_back({w, 0});
    list.back().rows += rows;
  });
  RecvCounts counts;
  counts.offsets.push_back(0);
  for (const std::vector<Part>& list : parts) {
    std::int64_t total = 0;
    for (const Part& part : list) {
      counts.src_rank.push_back(part.src_rank);
      counts.tokens.push_back(part.rows);
      total += part.rows;
    }
    counts.offsets.push_back(std::ssize(counts.src_rank));
    counts.total.push_back(total);
  }
  return counts;
}

}  // namespace

bool check_attention(const QkvPlan& plan, const ExpectedLayout& expected,
                     const SparseAttnLayout& attention, FindingList& findings) {
  const std::int64_t num_shards = plan.num_shards();
  const bool sizes = has_size("shard", attention.shard, num_shards, findings) &&
                     has_size("q_begin", attention.q_begin, num_shards, findings) &&
                     has_size("q_len", attention.q_len, num_shards, findings) &&
                     has_size("kv_begin", attention.kv_begin, num_shards, findings) &&
                     has_size("kv_len", attention.kv_len, num_shards, findings) &&
                     has_size("max_seqlen_q", attention.max_seqlen_q, plan.world_size, findings) &&
                     has_size("max_seqlen_kv", attention.max_seqlen_kv, plan.world_size, findings);
  if (!sizes) return false;
  if (attention.rank_offsets != expected.rank_offsets) {
    findings.add({FindingKind::attention, "attention", "rank_offsets", -1, -1, -1,
                  "other numbers of received shards", "those of plan.q_dst"});
    return false;
  }
  for (std::int64_t r = 0; r < plan.world_size; ++r) {
    std::int64_t max_q = 0;
    std::int64_t max_kv = 0;
    for (std::int64_t i = expected.rank_offsets[r]; i < expected.rank_offsets[r + 1]; ++i) {
      const std::int32_t shard = expected.received[i];
      const AttentionField field{findings, r, shard};
      field.expect("shard", attention.shard[i], shard);
      field.expect("q_begin", attention.q_begin[i], expected.q_begin[shard]);
      field.expect("q_len", attention.q_len[i], plan.shard_len[shard]);
      field.expect("kv_begin", attention.kv_begin[i], expected.kv_begin[shard]);
      field.expect("kv_len", attention.kv_len[i], expected.kv_len[shard]);
      max_q = std::max(max_q, plan.shard_len[shard]);
      max_kv = std::max(max_kv, expected.kv_len[shard]);
    }
    const AttentionField field{findings, r, -1};
    field.expect("max_seqlen_q", attention.max_seqlen_q[r], max_q);
    field.expect("max_seqlen_kv", attention.max_seqlen_kv[r], max_kv);
  }
  return true;
}

void check_counts(const char* table, const SparseMetadata& metadata, FindingList& findings) {
  const RecvCounts expected = count_entries(metadata);
  const RecvCounts& got = metadata.recv;
  const auto add = [&](const char* field, std::int64_t rank, std::string text, std::string wanted) {
    findings.add(
        {FindingKind::count, table, field, rank, -1, -1, std::move(text), std::move(wanted)});
  };
  if (got.offsets != expected.offsets || got.src_rank != expected.src_rank ||
      got.tokens.size() != expected.tokens.size()) {
    add("recv", -1, "other pairs of ranks", "the pairs that exchange rows");
  } else {
    for (std::size_t r = 0; r + 1 < expected.offsets.size(); ++r) {
      for (std::size_t i = expected.offsets[r]; i < to_size(expected.offsets[r + 1]); ++i) {
        if (got.tokens[i] == expected.tokens[i]) continue;
        add("recv.tokens", static_cast<std::int64_t>(r),
            concat(got.tokens[i], " rows from rank ", expected.src_rank[i]),
            concat(expected.tokens[i]));
      }
    }
  }
  if (got.total.size() != expected.total.size()) {
    add("recv.total", -1, concat(got.total.size(), " values"), concat(expected.total.size()));
    return;
  }
  for (std::size_t r = 0; r < expected.total.size(); ++r) {
    if (got.total[r] == expected.total[r]) continue;
    add("recv.total", static_cast<std::int64_t>(r), concat(got.total[r]),
        concat(expected.total[r]));
  }
}

bool check_copies(const QkvPlan& plan, const ExpectedLayout& expected, const SparseMetadata& fwd_kv,
                  FindingList& findings) {
  if (fwd_kv.rank_offsets != plan.rank_shard_offsets) {
    findings.add({FindingKind::shape, "fwd_kv", "rank_offsets", -1, -1, -1,
                  "other numbers of entries", "those of plan.rank_shard_offsets"});
    return false;
  }
  for (std::int64_t s = 0; s < plan.num_shards(); ++s) {
    const std::int64_t got = fwd_kv.destination_end(s) - fwd_kv.destination_begin(s);
    if (got == expected.num_destinations[s]) continue;
    findings.add({FindingKind::count, "fwd_kv", "copies", expected.home_rank[s], s, -1, concat(got),
                  concat(expected.num_destinations[s])});
  }
  return true;
}

std::int64_t rows_over_the_wire(const SparseMetadata& metadata) {
  std::int64_t sum = 0;
  for_each_copy(metadata, [&](std::int32_t w, std::int64_t copy, std::int64_t rows) {
    if (metadata.dst_rank[copy] != w) sum += rows;
  });
  return sum;
}

}  // namespace waybill::detail
