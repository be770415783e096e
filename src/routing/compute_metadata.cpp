#include "waybill/routing/compute_metadata.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "dense_checks.h"
#include "waybill/core/error.h"

namespace waybill {
namespace {

constexpr const char* in_compute_metadata = "compute_metadata";

/// The arguments after the checks at the door. The dispatch is flat [W * S * C].
struct Job {
  std::int64_t world_size;
  std::int64_t num_shards;
  std::int64_t num_copies;
  bool has_copies;
  std::span<const std::int64_t> seq_len;
  std::span<const std::int64_t> dispatch;
  std::vector<std::int64_t> shard_begin;  ///< [W * S]: first row at home
  std::vector<std::int64_t> rank_rows;    ///< [W]

  [[nodiscard]] std::size_t shard(std::int64_t rank, std::int64_t idx) const {
    return static_cast<std::size_t>(rank * num_shards + idx);
  }
  [[nodiscard]] std::size_t copy(std::size_t shard_idx, std::int64_t c) const {
    return shard_idx * static_cast<std::size_t>(num_copies) + static_cast<std::size_t>(c);
  }
};

/// Calls body(rank, shard, copy index, destination) for every dispatched copy, in global order.
template <class Body>
void for_each_copy(const Job& job, Body&& body) {
  for (std::int64_t i = 0; i < job.world_size; ++i) {
    for (std::int64_t j = 0; j < job.num_shards; ++j) {
      const std::size_t shard = job.shard(i, j);
      for (std::int64_t c = 0; c < job.num_copies; ++c) {
        const std::int64_t dst = job.dispatch[job.copy(shard, c)];
        if (dst >= 0) body(i, shard, c, dst);
      }
    }
  }
}

void check_destinations(const Job& job, Undispatched undispatched) {
  for (std::int64_t i = 0; i < job.world_size; ++i) {
    for (std::int64_t j = 0; j < job.num_shards; ++j) {
      const std::size_t shard = job.shard(i, j);
      if (job.num_copies == 1 && job.dispatch[shard] >= 0) continue;  // nearly all
      const auto first = job.dispatch.begin() + static_cast<std::ptrdiff_t>(job.copy(shard, 0));
      const bool sent =
          std::any_of(first, first + job.num_copies, [](std::int64_t dst) { return dst >= 0; });
      require(sent || job.seq_len[shard] == 0 || undispatched == Undispatched::keep,
              in_compute_metadata, ": seq_len of rank ", i, ", shard ", j, " = ",
              job.seq_len[shard], " rows, but global_dispatch has no destination for it");
    }
  }
}

Job open_job(const IndexArray& seq_len, const IndexArray& dispatch, Undispatched undispatched) {
  const auto [world_size, num_shards] =
      detail::check_world_matrix(in_compute_metadata, "seq_len", seq_len);
  const bool has_copies = dispatch.ndim() == 3;
  Shape expected{world_size, num_shards};
  if (has_copies) expected.push_back(dispatch.dim(2));
  detail::check_same_shape(in_compute_metadata, "global_dispatch", dispatch, expected);
  detail::check_lengths(in_compute_metadata, "seq_len", seq_len);
  detail::check_ranks(in_compute_metadata, "global_dispatch", dispatch, world_size);
  Job job{.world_size = world_size,
          .num_shards = num_shards,
          .num_copies = has_copies ? dispatch.dim(2) : 1,
          .has_copies = has_copies,
          .seq_len = seq_len.i64(),
          .dispatch = dispatch.i64(),
          .shard_begin = std::vector<std::int64_t>(seq_len.i64().size()),
          .rank_rows = std::vector<std::int64_t>(static_cast<std::size_t>(world_size))};
  require(job.num_copies <= (std::int64_t{1} << 20), in_compute_metadata, ": global_dispatch has ",
          job.num_copies, " copies, expected at most 2^20");
  for (std::int64_t i = 0; i < world_size; ++i) {
    std::int64_t& rows = job.rank_rows[i];
    for (std::int64_t j = 0; j < num_shards; ++j) {
      job.shard_begin[job.shard(i, j)] = rows;
      rows += job.seq_len[job.shard(i, j)];
    }
  }
  check_destinations(job, undispatched);
  return job;
}

/// num_seqs: entries with rows, by rank.
IndexArray count_entries_with_rows(const IndexArray& seq_len) {
  const std::int64_t per_rank = seq_len.dim(1);
  IndexArray result({seq_len.dim(0)});
  for (std::int64_t i = 0; i < seq_len.dim(0); ++i) {
    const auto first = seq_len.i64().begin() + i * per_rank;
    result.i64()[i] =
        std::count_if(first, first + per_rank, [](std::int64_t rows) { return rows > 0; });
  }
  return result;
}

/// Without dst_rank and seq_len, which are the arguments themselves.
Metadata forward_metadata(const Job& job, const IndexArray& seq_len, const IndexArray& dispatch) {
  const std::int64_t world = job.world_size;
  Metadata fwd;
  fwd.dst_offset = IndexArray(dispatch.shape());
  fwd.num_recv_tokens = IndexArray({world, world + 1});
  const auto offset = fwd.dst_offset.i64();
  const auto recv = fwd.num_recv_tokens.i64();
  std::vector<std::int64_t> filled(static_cast<std::size_t>(world));
  for_each_copy(job, [&](std::int64_t i, std::size_t shard, std::int64_t c, std::int64_t dst) {
    std::int64_t& rows = filled[dst];
    offset[job.copy(shard, c)] = rows;
    rows += job.seq_len[shard];
    recv[dst * (world + 1) + i] += job.seq_len[shard];
  });
  for (std::int64_t r = 0; r < world; ++r) {
    recv[r * (world + 1) + world] = filled[r];
  }
  fwd.num_seqs = count_entries_with_rows(seq_len);
  fwd.world_size = world;
  fwd.num_total_recv_tokens = std::move(filled);
  return fwd;
}

std::vector<std::int64_t> count_received(const Job& job) {
  std::vector<std::int64_t> received(static_cast<std::size_t>(job.world_size));
  for (const std::int64_t dst : job.dispatch) {
    if (dst >= 0) ++received[dst];
  }
  return received;
}

Metadata reverse_metadata(const Job& job, const IndexArray& seq_len, const IndexArray& dispatch) {
  const std::vector<std::int64_t> received = count_received(job);
  const std::int64_t most = *std::max_element(received.begin(), received.end());
  Metadata rev;
  rev.dst_rank = IndexArray::full({job.world_size, most}, -1);
  rev.dst_offset = IndexArray({job.world_size, most});
  rev.seq_len = IndexArray({job.world_size, most});
  rev.num_recv_tokens = IndexArray({job.world_size, job.world_size + 1});
  rev.num_total_recv_tokens.assign(static_cast<std::size_t>(job.world_size), 0);
  const auto home = rev.dst_rank.i64();
  const auto offset = rev.dst_offset.i64();
  const auto rows = rev.seq_len.i64();
  const auto recv = rev.num_recv_tokens.i64();  // [i][r] is what i had sent to r
  std::vector<std::int64_t> next(static_cast<std::size_t>(job.world_size));
  for_each_copy(job, [&](std::int64_t i, std::size_t shard, std::int64_t c, std::int64_t dst) {
    const std::int64_t t = next[dst]++;
    const auto entry = static_cast<std::size_t>(dst * most + t);
    home[entry] = i;
    offset[entry] = c * job.rank_rows[i] + job.shard_begin[shard];
    rows[entry] = job.seq_len[shard];
    const std::int64_t row = i * (job.world_size + 1);
    recv[row + dst] += job.seq_len[shard];
    recv[row + job.world_size] += job.seq_len[shard];
    rev.num_total_recv_tokens[i] += job.seq_len[shard];
  });
  rev.num_seqs = count_entries_with_rows(rev.seq_len);
  rev.world_size = job.world_size;
  if (job.has_copies) {
    rev.seq_recv_mask = detail::used_copies(dispatch);
    rev.recv_seq_lens = seq_len;
  }
  return rev;
}

DispatchIntermediates intermediates(const Job& job) {
  const Shape shape{job.world_size, job.num_shards, job.num_copies, job.world_size};
  DispatchIntermediates result{
      .tokens_to_dst_per_dispatch = IndexArray(shape),
      .seq_to_dst = IndexArray(shape),
      .num_received_seqs = IndexArray({job.world_size}, count_received(job))};
  const auto tokens = result.tokens_to_dst_per_dispatch.i64();
  const auto one_hot = result.seq_to_dst.i64();
  for_each_copy(job, [&](std::int64_t, std::size_t shard, std::int64_t c, std::int64_t dst) {
    const std::size_t at = job.copy(shard, c) * static_cast<std::size_t>(job.world_size) +
                           static_cast<std::size_t>(dst);
    tokens[at] = job.seq_len[shard];
    one_hot[at] = 1;
  });
  return result;
}

}  // namespace

DispatchMetadata compute_metadata(IndexArray seq_len, IndexArray global_dispatch,
                                  bool return_intermediate, Undispatched undispatched) {
  if (seq_len.dtype() != DType::int64) {
    seq_len = detail::to_int64(in_compute_metadata, "seq_len", seq_len);
  }
  if (global_dispatch.dtype() != DType::int64) {
    global_dispatch = detail::to_int64(in_compute_metadata, "global_dispatch", global_dispatch);
  }
  const Job job = open_job(seq_len, global_dispatch, undispatched);
  DispatchMetadata result;
  result.fwd = forward_metadata(job, seq_len, global_dispatch);
  result.rev = reverse_metadata(job, seq_len, global_dispatch);
  if (return_intermediate) result.intermediates = intermediates(job);
  result.fwd.dst_rank = std::move(global_dispatch);  // last: the job looks at both
  result.fwd.seq_len = std::move(seq_len);
  return result;
}

}  // namespace waybill
