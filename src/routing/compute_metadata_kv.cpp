#include <algorithm>
#include <utility>
#include <vector>

#include "dense_checks.h"
#include "waybill/core/error.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill {
namespace {

constexpr const char* in_metadata_kv = "compute_metadata_kv";

/// The arguments as int64, and where the group of each query lies on its attention rank. Tables are
/// read flat; copies are [W * S * C].
struct KvJob {
  KvJob(const KvMapping& mapping, const IndexArray& lens, const IndexArray& counts,
        const IndexArray& dispatch)
      : query(in_metadata_kv, "kv_to_q_mapping", mapping.kv_to_q_mapping),
        place(in_metadata_kv, "kv_to_q_rank", mapping.kv_to_q_rank),
        context(in_metadata_kv, "kv_context_size", mapping.kv_context_size),
        q_shards(in_metadata_kv, "q_to_num_kv_seq", mapping.q_to_num_kv_seq),
        q_tokens(in_metadata_kv, "q_to_num_kv_token", mapping.q_to_num_kv_token),
        seq_len(in_metadata_kv, "seq_len", lens),
        num_seqs(in_metadata_kv, "num_seqs", counts),
        q_dst(in_metadata_kv, "q_dispatch", dispatch) {}

  detail::Int64Table query;     ///< [copies, 2]
  detail::Int64Table place;     ///< [copies]: among the query's KV shards
  detail::Int64Table context;   ///< [W * S]
  detail::Int64Table q_shards;  ///< [W * S]
  detail::Int64Table q_tokens;  ///< [W * S]
  detail::Int64Table seq_len;   ///< [W * S]
  detail::Int64Table num_seqs;  ///< [W]
  detail::Int64Table q_dst;     ///< [W * S]
  std::int64_t world_size = 0;
  std::int64_t num_shards = 0;
  std::int64_t num_copies = 0;
  // As place_groups finds them, in rows and in KV shards:
  std::vector<std::int64_t> first_row;   ///< [W * S]
  std::vector<std::int64_t> first_slot;  ///< [W * S]
  std::vector<std::int64_t> rank_slots;  ///< [W]
  std::int64_t max_slots = 0;

  [[nodiscard]] std::size_t num_entries() const { return seq_len->size(); }
  [[nodiscard]] std::size_t copy(std::size_t shard, std::int64_t c) const {
    return shard * static_cast<std::size_t>(num_copies) + static_cast<std::size_t>(c);
  }
  /// Flat number of the query that a copy serves.
  [[nodiscard]] std::size_t query_of(std::size_t copy_idx) const {
    return static_cast<std::size_t>(query[2 * copy_idx] * num_shards + query[2 * copy_idx + 1]);
  }
  [[nodiscard]] bool used(std::size_t copy_idx) const { return query[2 * copy_idx] >= 0; }
  [[nodiscard]] std::int64_t rank_of(std::size_t shard) const {
    return static_cast<std::int64_t>(shard) / num_shards;
  }
  /// "rank 3, shard 7"
  [[nodiscard]] std::string name(std::size_t shard) const {
    return concat("rank ", rank_of(shard), ", shard ",
                  static_cast<std::int64_t>(shard) % num_shards);
  }
};

void check_copies(const KvJob& job) {
  for (std::size_t shard = 0; shard < job.num_entries(); ++shard) {
    for (std::int64_t c = 0; c < job.num_copies; ++c) {
      const std::size_t at = job.copy(shard, c);
      const std::int64_t a = job.query[2 * at];
      const std::int64_t b = job.query[2 * at + 1];
      const bool unused = a == -1 && b == -1;
      const bool in_range = 0 <= a && a < job.world_size && 0 <= b && b < job.num_shards;
      require(unused || in_range, in_metadata_kv, ": kv_to_q_mapping of ", job.name(shard),
              ", copy ", c, " = (", a, ", ", b, "), expected a query shard of 0..",
              job.world_size - 1, " x 0..", job.num_shards - 1, ", or (-1, -1)");
      if (unused) continue;
      const std::size_t q = job.query_of(at);
      require(job.q_dst[q] >= 0, in_metadata_kv, ": kv_to_q_mapping of ", job.name(shard),
              ", copy ", c, " names the query of ", job.name(q),
              ", which has no destination (q_dispatch = -1)");
      require(0 <= job.place[at] && job.place[at] < job.q_shards[q], in_metadata_kv,
              ": kv_to_q_rank of ", job.name(shard), ", copy ", c, " = ", job.place[at],
              ", expected 0..", job.q_shards[q] - 1, " (q_to_num_kv_seq of ", job.name(q), ")");
    }
  }
}

void check_tables(KvJob& job) {
  const auto [world_size, num_shards] =
      detail::check_world_matrix(in_metadata_kv, "seq_len", *job.seq_len);
  const Shape matrix{world_size, num_shards};
  const IndexArray& map = *job.query;
  require(map.ndim() == 4, in_metadata_kv, ": kv_to_q_mapping has shape ", to_string(map.shape()),
          ", expected [W, S, C, 2]");
  const std::int64_t copies = map.dim(2);
  require(copies <= (std::int64_t{1} << 20), in_metadata_kv, ": kv_to_q_mapping has ", copies,
          " copies, expected at most 2^20");
  const auto expect = [](const char* name, const detail::Int64Table& table, const Shape& shape) {
    detail::check_same_shape(in_metadata_kv, name, *table, shape);
  };
  expect("kv_to_q_mapping", job.query, {world_size, num_shards, copies, 2});
  expect("kv_to_q_rank", job.place, {world_size, num_shards, copies});
  expect("kv_context_size", job.context, matrix);
  expect("q_to_num_kv_seq", job.q_shards, matrix);
  expect("q_to_num_kv_token", job.q_tokens, matrix);
  expect("q_dispatch", job.q_dst, matrix);
  if (job.num_seqs->shape() != Shape{world_size, 1}) expect("num_seqs", job.num_seqs, {world_size});
  const auto check = [](const char* name, const detail::Int64Table& table, std::int64_t most,
                        const char* expected) {
    detail::check_range(in_metadata_kv, name, *table, 0, most, expected);
  };
  check("num_seqs", job.num_seqs, num_shards, "0..S");
  detail::check_lengths(in_metadata_kv, "seq_len", *job.seq_len);
  check("kv_context_size", job.context, detail::max_total_rows, "0..2^40");
  check("q_to_num_kv_seq", job.q_shards, job.seq_len->size(), "0..number of shards");
  check("q_to_num_kv_token", job.q_tokens, detail::max_total_rows, "0..2^40");
  detail::check_ranks(in_metadata_kv, "q_dispatch", *job.q_dst, world_size);
  job.world_size = world_size;
  job.num_shards = num_shards;
  job.num_copies = copies;
}

void place_groups(KvJob& job) {
  job.first_row.resize(job.num_entries());
  job.first_slot.resize(job.num_entries());
  job.rank_slots.resize(job.world_size);
  std::vector<std::int64_t> rank_rows(static_cast<std::size_t>(job.world_size));
  std::int64_t num_slots = 0;
  for (std::size_t q = 0; q < job.num_entries(); ++q) {
    if (job.q_dst[q] < 0) continue;
    const auto r = static_cast<std::size_t>(job.q_dst[q]);
    job.first_row[q] = rank_rows[r];
    job.first_slot[q] = job.rank_slots[r];
    rank_rows[r] += job.q_tokens[q];
    require(rank_rows[r] <= (std::int64_t{1} << 60), in_metadata_kv, ": q_to_num_kv_token of rank ",
            r, "'s queries sums to over 2^60 rows; no such buffer exists");
    job.rank_slots[r] += job.q_shards[q];
    num_slots += job.q_shards[q];
    require(num_slots <= job.place->size(), in_metadata_kv, ": q_to_num_kv_seq up to ", job.name(q),
            " asks for ", num_slots, " KV copies, but kv_to_q_mapping has room for ",
            job.place->size());
  }
  job.max_slots = *std::max_element(job.rank_slots.begin(), job.rank_slots.end());
}

/// The copy that fills each slot of an attention rank, [W, R]; -1 none.
/// @throws InvalidArgument when two copies fill one slot.
std::vector<std::int64_t> fill_slots(const KvJob& job) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(job.world_size * job.max_slots), -1);
  for (std::int64_t at = 0; at < job.place->size(); ++at) {
    if (!job.used(at)) continue;
    const std::size_t q = job.query_of(at);
    const std::int64_t slot = job.q_dst[q] * job.max_slots + job.first_slot[q] + job.place[at];
    std::int64_t& filled_by = slots[slot];
    const auto copies = static_cast<std::size_t>(job.num_copies);
    require(filled_by < 0, in_metadata_kv, ": KV shards of ",
            job.name(static_cast<std::size_t>(std::max<std::int64_t>(filled_by, 0)) / copies),
            " and ", job.name(at / copies), " both have kv_to_q_rank = ", job.place[at],
            " for the query of ", job.name(q));
    filled_by = static_cast<std::int64_t>(at);
  }
  return slots;
}

/// The KV shards of every query must follow each other from row 0 to its number of KV rows.
void check_contexts(const KvJob& job, const std::vector<std::int64_t>& slots) {
  for (std::size_t q = 0; q < job.num_entries(); ++q) {
    if (job.q_dst[q] < 0) continue;
    std::int64_t rows = 0;
    for (std::int64_t k = 0; k < job.q_shards[q]; ++k) {
      const std::int64_t at = slots[job.q_dst[q] * job.max_slots + job.first_slot[q] + k];
      require(at >= 0, in_metadata_kv, ": the query of ", job.name(q),
              " has q_to_num_kv_seq = ", job.q_shards[q],
              ", but no KV shard has kv_to_q_rank = ", k, " for it");
      const std::size_t shard =
          static_cast<std::size_t>(at) / static_cast<std::size_t>(job.num_copies);
      require(job.context[shard] == rows, in_metadata_kv, ": kv_context_size of ", job.name(shard),
              " = ", job.context[shard], ", expected ", rows, " (KV shard ", k, " of the query of ",
              job.name(q), ")");
      rows += job.seq_len[shard];
    }
    require(rows == job.q_tokens[q], in_metadata_kv, ": q_to_num_kv_token of ", job.name(q), " = ",
            job.q_tokens[q], ", expected ", rows, ", the rows of its KV shards");
  }
}

/// Both count matrices, by the KV shard's own rank: [r][i] forward, [i][r] reverse, and totals.
void count_rows(const KvJob& job, Metadata& fwd, Metadata& rev) {
  const std::int64_t world = job.world_size;
  fwd.num_recv_tokens = IndexArray({world, world + 1});
  rev.num_recv_tokens = IndexArray({world, world + 1});
  const auto forward = fwd.num_recv_tokens.i64();
  const auto reverse = rev.num_recv_tokens.i64();
  fwd.num_total_recv_tokens.assign(static_cast<std::size_t>(world), 0);
  rev.num_total_recv_tokens.assign(static_cast<std::size_t>(world), 0);
  const auto cell = [&](std::int64_t row, std::int64_t column) {
    return static_cast<std::size_t>(row * (world + 1) + column);
  };
  for (std::int64_t at = 0; at < job.place->size(); ++at) {
    if (!job.used(at)) continue;
    const std::size_t shard = at / static_cast<std::size_t>(job.num_copies);
    const std::int64_t i = job.rank_of(shard);
    const std::int64_t r = job.q_dst[job.query_of(at)];
    const std::int64_t rows = job.seq_len[shard];
    forward[cell(r, i)] += rows;
    forward[cell(r, world)] += rows;
    reverse[cell(i, r)] += rows;
    reverse[cell(i, world)] += rows;
    fwd.num_total_recv_tokens[r] += rows;
    rev.num_total_recv_tokens[i] += rows;
  }
}

void fill_forward(const KvJob& job, const Shape& shape, Metadata& fwd) {
  fwd.dst_rank = IndexArray::full(shape, -1);
  fwd.dst_offset = IndexArray(shape);
  const auto dst_rank = fwd.dst_rank.i64();
  const auto dst_offset = fwd.dst_offset.i64();
  for (std::int64_t at = 0; at < job.place->size(); ++at) {
    if (!job.used(at)) continue;
    const std::size_t q = job.query_of(at);
    dst_rank[at] = job.q_dst[q];
    dst_offset[at] = job.first_row[q] + job.context[at / static_cast<std::size_t>(job.num_copies)];
  }
}

void fill_reverse(const KvJob& job, const std::vector<std::int64_t>& slots, Metadata& rev) {
  std::vector<std::int64_t> shard_begin(job.num_entries());
  std::vector<std::int64_t> rank_rows(static_cast<std::size_t>(job.world_size));
  for (std::size_t shard = 0; shard < job.num_entries(); ++shard) {
    std::int64_t& rows = rank_rows[job.rank_of(shard)];
    shard_begin[shard] = rows;
    rows += job.seq_len[shard];
  }
  const Shape shape{job.world_size, job.max_slots};
  rev.dst_rank = IndexArray::full(shape, -1);
  rev.dst_offset = IndexArray(shape);
  rev.seq_len = IndexArray(shape);
  const auto home = rev.dst_rank.i64();
  const auto offset = rev.dst_offset.i64();
  const auto rows = rev.seq_len.i64();
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot] < 0) continue;
    const std::int64_t c = slots[slot] % job.num_copies;
    const auto shard = static_cast<std::size_t>(slots[slot] / job.num_copies);
    home[slot] = job.rank_of(shard);
    offset[slot] = c * rank_rows[home[slot]] + shard_begin[shard];
    rows[slot] = job.seq_len[shard];
  }
}

/// The inverse of `slots`: a copy's place in [W, R].
IndexArray global_seq_ids(const std::vector<std::int64_t>& slots, const Shape& shape) {
  IndexArray ids = IndexArray::full(shape, -1);
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot] >= 0) {
      ids.i64()[slots[slot]] = static_cast<std::int64_t>(slot);
    }
  }
  return ids;
}

}  // namespace

KvMetadata compute_metadata_kv(const KvMapping& mapping, const IndexArray& seq_len,
                               const IndexArray& num_seqs, const IndexArray& q_dispatch,
                               bool return_intermediate) {
  KvJob job(mapping, seq_len, num_seqs, q_dispatch);
  check_tables(job);
  check_copies(job);
  place_groups(job);
  const std::vector<std::int64_t> slots = fill_slots(job);
  check_contexts(job, slots);

  const Shape copies_shape{job.world_size, job.num_shards, job.num_copies};
  KvMetadata result;
  fill_forward(job, copies_shape, result.fwd);
  fill_reverse(job, slots, result.rev);
  count_rows(job, result.fwd, result.rev);
  result.fwd.seq_len = *job.seq_len;
  result.fwd.num_seqs = job.num_seqs->reshaped({job.world_size});
  result.fwd.world_size = job.world_size;
  result.rev.num_seqs = IndexArray({job.world_size}, job.rank_slots);
  result.rev.world_size = job.world_size;
  result.rev.seq_recv_mask = detail::used_copies(result.fwd.dst_rank);
  result.rev.recv_seq_lens = *job.seq_len;
  if (return_intermediate) {
    result.kv_dst_global_seq_id = global_seq_ids(slots, copies_shape);
  }
  return result;
}

E2eMetadata compute_e2e_metadata(const IndexArray& mlp_seq_len, const IndexArray& mlp_num_seqs,
                                 const IndexArray& mlp_q_dispatch, const KvMapping& mapping,
                                 bool return_intermediate) {
  DispatchMetadata q = compute_metadata(mlp_seq_len, mlp_q_dispatch, return_intermediate);
  KvMetadata kv =
      compute_metadata_kv(mapping, mlp_seq_len, mlp_num_seqs, mlp_q_dispatch, return_intermediate);
  E2eMetadata result;
  result.attention = compute_attn_layout_seqlens(mlp_seq_len, mapping.q_to_num_kv_token,
                                                 mlp_q_dispatch, /*leading_zero=*/true,
                                                 /*shard_to_tuple=*/true);
  result.fwd_q = std::move(q.fwd);
  result.rev_q = std::move(q.rev);
  result.fwd_kv = std::move(kv.fwd);
  result.rev_kv = std::move(kv.rev);
  result.q_intermediates = std::move(q.intermediates);
  result.kv_dst_global_seq_id = std::move(kv.kv_dst_global_seq_id);
  return result;
}

}  // namespace waybill
