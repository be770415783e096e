#include "check_dense.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/to_size.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// Compares an array with what it should be; reports the first difference.
void expect_array(FindingList& findings, FindingKind kind, const char* table, const char* field,
                  const IndexArray& got, const IndexArray& expected) {
  if (got.shape() != expected.shape()) {
    findings.add({FindingKind::shape, table, field, -1, -1, -1, to_string(got.shape()),
                  to_string(expected.shape())});
    return;
  }
  const Int64View values(got);
  const Int64View wanted(expected);
  const auto [differs, want] = std::ranges::mismatch(values.span(), wanted.span());
  if (differs == values.span().end()) return;
  const std::int64_t place = differs - values.span().begin();
  const std::int64_t per_rank = got.size() / got.dim(0);
  findings.add({kind, table, field, place / per_rank, -1, -1,
                concat(*differs, " at entry ", place % per_rank), concat(*want)});
}

/// num_recv_tokens as the entries of the same metadata have it.
IndexArray count_cells(const Metadata& metadata) {
  const std::int64_t world = metadata.seq_len.dim(0);
  IndexArray counts({world, world + 1});
  const Int64View dst(metadata.dst_rank);
  const Int64View len(metadata.seq_len);
  const std::int64_t copies = metadata.has_copies() ? metadata.dst_rank.dim(2) : 1;
  const std::int64_t per_rank = metadata.seq_len.dim(1);
  for (std::int64_t cell = 0; cell < std::ssize(len.span()) * copies; ++cell) {
    const std::int64_t entry = cell / copies;
    const std::int64_t r = dst[cell];
    if (r < 0 || r >= world) continue;
    counts.i64()[r * (world + 1) + entry / per_rank] += len[entry];
    counts.i64()[r * (world + 1) + world] += len[entry];
  }
  return counts;
}

/// Entries of each rank for which `counts(entry)` holds.
template <class Counts>
IndexArray count_entries(const Metadata& metadata, const Counts& counts) {
  const std::int64_t world = metadata.seq_len.dim(0);
  const std::int64_t per_rank = metadata.seq_len.dim(1);
  IndexArray result({world});
  for (std::int64_t entry = 0; entry < world * per_rank; ++entry) {
    if (counts(entry)) ++result.i64()[entry / per_rank];
  }
  return result;
}

void check_received(const char* table, const Metadata& metadata, FindingList& findings) {
  const IndexArray expected = count_cells(metadata);
  expect_array(findings, FindingKind::count, table, "num_recv_tokens", metadata.num_recv_tokens,
               expected);
  const std::int64_t world = expected.dim(0);
  std::vector<std::int64_t> totals;
  for (std::int64_t r = 0; r < world; ++r) totals.push_back(expected.at({r, world}));
  if (metadata.num_total_recv_tokens != totals) {
    findings.add({FindingKind::count, table, "num_total_recv_tokens", -1, -1, -1,
                  to_string(metadata.num_total_recv_tokens), to_string(totals)});
  }
}

void check_num_seqs(const char* table, const Metadata& metadata, const IndexArray& expected,
                    FindingList& findings) {
  if (!metadata.num_seqs) {
    findings.add({FindingKind::count, table, "num_seqs", -1, -1, -1, "none", "one per rank"});
    return;
  }
  const IndexArray& counts = *metadata.num_seqs;
  const bool column = counts.shape() == Shape{expected.size(), 1};
  expect_array(findings, FindingKind::count, table, "num_seqs",
               column ? counts.reshaped(expected.shape()) : counts, expected);
}

IndexArray entries_with_rows(const Metadata& metadata) {
  const Int64View len(metadata.seq_len);
  return count_entries(metadata, [&](std::int64_t entry) { return len[entry] > 0; });
}

void check_mask(const QkvDispatch& dispatch, const QkvPlan& plan, const ExpectedLayout& expected,
                FindingList& findings) {
  const Metadata& rev = dispatch.metadata.rev_kv;
  if (!rev.seq_recv_mask || !rev.recv_seq_lens) {
    findings.add({FindingKind::mask, "rev_kv", "seq_recv_mask", -1, -1, -1, "none",
                  "seq_recv_mask and recv_seq_lens"});
    return;
  }
  const IndexArray& fwd = dispatch.metadata.fwd_kv.dst_rank;
  const std::int64_t num_shards = fwd.dim(1);
  const std::int64_t copies = fwd.dim(2);
  IndexArray mask(fwd.shape());
  IndexArray lens({fwd.dim(0), num_shards});
  for (std::int64_t w = 0; w < plan.world_size; ++w) {
    const std::int64_t first = plan.rank_shard_offsets[w];
    for (std::int64_t s = first; s < plan.rank_shard_offsets[w + 1]; ++s) {
      const std::int64_t entry = w * num_shards + s - first;
      lens.i64()[entry] = plan.shard_len[s];
      for (std::int64_t c = 0; c < std::min(copies, expected.num_destinations[s]); ++c) {
        mask.i64()[entry * copies + c] = 1;
      }
    }
  }
  expect_array(findings, FindingKind::mask, "rev_kv", "seq_recv_mask", *rev.seq_recv_mask, mask);
  expect_array(findings, FindingKind::mask, "rev_kv", "recv_seq_lens", *rev.recv_seq_lens, lens);
}

/// [n + 1]: prefix sums with the leading zero.
IndexArray cumulative(const std::vector<std::int64_t>& lens) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t len : lens) sums.push_back(sums.back() + len);
  return IndexArray({std::ssize(sums)}, sums);
}

void check_ragged(const char* field, const std::vector<IndexArray>& got, std::size_t rank,
                  const std::vector<std::int64_t>& lens, FindingList& findings) {
  const IndexArray expected = cumulative(lens);
  const bool has_rank = rank < got.size();
  if (has_rank && got[rank].shape() == expected.shape() &&
      got[rank].to_vector() == expected.to_vector()) {
    return;
  }
  findings.add({FindingKind::attention, "attention", field, static_cast<std::int64_t>(rank), -1, -1,
                has_rank ? to_string(got[rank]) : "none", to_string(expected)});
}

void check_attention_layout(const QkvPlan& plan, const ExpectedLayout& expected,
                            const AttnLayout& layout, FindingList& findings) {
  IndexArray max_q({plan.world_size});
  IndexArray max_kv({plan.world_size});
  IndexArray received({plan.world_size});
  for (std::int32_t r = 0; r < plan.world_size; ++r) {
    std::vector<std::int64_t> q_lens;
    std::vector<std::int64_t> kv_lens;
    for (std::int64_t i = expected.rank_offsets[r]; i < expected.rank_offsets[r + 1]; ++i) {
      const std::size_t shard = expected.received[i];
      q_lens.push_back(plan.shard_len[shard]);
      kv_lens.push_back(expected.kv_len[shard]);
      max_q.i64()[r] = std::max(max_q.i64()[r], q_lens.back());
      max_kv.i64()[r] = std::max(max_kv.i64()[r], kv_lens.back());
    }
    received.i64()[r] = std::ssize(q_lens);
    check_ragged("cu_seqlens_q", layout.cu_seqlens_q, r, q_lens, findings);
    check_ragged("cu_seqlens_kv", layout.cu_seqlens_kv, r, kv_lens, findings);
  }
  const auto expect = [&](const char* field, const IndexArray& got, const IndexArray& wanted) {
    expect_array(findings, FindingKind::attention, "attention", field, got, wanted);
  };
  expect("max_seqlen_q", layout.max_seqlen_q, max_q);
  expect("max_seqlen_kv", layout.max_seqlen_kv, max_kv);
  expect("num_local_seqs_recv", layout.num_local_seqs_recv, received);
}

}  // namespace

void check_dense_tables(const QkvDispatch& dispatch, const ExpectedLayout& expected,
                        FindingList& findings) {
  const E2eMetadata& metadata = dispatch.metadata;
  check_received("fwd_q", metadata.fwd_q, findings);
  check_received("rev_q", metadata.rev_q, findings);
  check_received("fwd_kv", metadata.fwd_kv, findings);
  check_received("rev_kv", metadata.rev_kv, findings);
  check_num_seqs("fwd_q", metadata.fwd_q, entries_with_rows(metadata.fwd_q), findings);
  check_num_seqs("rev_q", metadata.rev_q, entries_with_rows(metadata.rev_q), findings);
  check_num_seqs("fwd_kv", metadata.fwd_kv, dispatch.raw.num_cp_shards, findings);
  const Int64View dst(metadata.rev_kv.dst_rank);
  check_num_seqs(
      "rev_kv", metadata.rev_kv,
      count_entries(metadata.rev_kv, [&](std::int64_t entry) { return dst[entry] >= 0; }),
      findings);
  check_mask(dispatch, dispatch.plan, expected, findings);
  check_attention_layout(dispatch.plan, expected, metadata.attention, findings);
}

}  // namespace waybill::detail
