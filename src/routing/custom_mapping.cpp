#include <utility>
#include <vector>

#include "dense_checks.h"
#include "plan_builder.h"
#include "waybill/core/error.h"
#include "waybill/routing/generators.h"

namespace waybill {
namespace {

constexpr const char* in_custom_mapping = "create_qkv_dispatch_with_custom_mapping";

/// One sequence of the arguments.
struct Sequence {
  std::int64_t rank;
  std::int64_t idx;
  std::int64_t len;
  std::int64_t cp;
  std::span<const std::int64_t> dst;         ///< [C]
  std::span<const std::int64_t> shard_lens;  ///< [C]
};

void check_sequence(const Sequence& seq, std::int64_t world_size) {
  const std::string place = concat(" of rank ", seq.rank, ", sequence ", seq.idx);
  const std::int64_t slots = std::ssize(seq.dst);
  require(0 <= seq.cp && seq.cp <= slots && (seq.len == 0) == (seq.cp == 0), in_custom_mapping,
          ": cp_num", place, " = ", seq.cp, ", expected ",
          seq.len == 0 ? "0, as the sequence is empty" : concat("1..", slots));
  std::int64_t rows = 0;
  for (std::int64_t c = 0; c < slots; ++c) {
    const std::int64_t dst = seq.dst[static_cast<std::size_t>(c)];
    const std::int64_t len = seq.shard_lens[static_cast<std::size_t>(c)];
    const bool used = c < seq.cp;
    require(used ? 0 <= dst && dst < world_size : dst == -1, in_custom_mapping, ": cp_dst", place,
            ", shard ", c, " = ", dst, ", expected ",
            used ? concat("0..", world_size - 1) : concat("-1, as cp_num is ", seq.cp));
    require(used ? len > 0 : len == 0, in_custom_mapping, ": seq_shard_lens", place, ", shard ", c,
            " = ", len, ", expected ", used ? "> 0" : concat("0, as cp_num is ", seq.cp));
    require(len <= detail::max_total_rows - rows, in_custom_mapping, ": seq_shard_lens", place,
            " sums to over 2^40 rows");
    rows += len;
  }
  require(rows == seq.len, in_custom_mapping, ": seq_shard_lens", place, " sums to ", rows,
          ", expected ", seq.len, " (seq_lens)");
}

/// Checks the shapes and returns [n, C].
std::pair<std::int64_t, std::int64_t> check_arguments(std::int64_t world_size,
                                                      const IndexArray& seq_lens,
                                                      const IndexArray& cp_num,
                                                      const IndexArray& cp_dst,
                                                      const IndexArray& seq_shard_lens) {
  const auto [rows, num_seqs] = detail::check_world_matrix(in_custom_mapping, "seq_lens", seq_lens);
  require(rows == world_size, in_custom_mapping, ": seq_lens has ", rows,
          " rows, expected world_size = ", world_size);
  require(cp_dst.ndim() == 3, in_custom_mapping, ": cp_dst has shape ", to_string(cp_dst.shape()),
          ", expected [W, n, C]");
  detail::check_same_shape(in_custom_mapping, "cp_num", cp_num, seq_lens.shape());
  detail::check_same_shape(in_custom_mapping, "cp_dst", cp_dst,
                           {world_size, num_seqs, cp_dst.dim(2)});
  detail::check_same_shape(in_custom_mapping, "seq_shard_lens", seq_shard_lens, cp_dst.shape());
  detail::check_lengths(in_custom_mapping, "seq_lens", seq_lens);
  return {num_seqs, cp_dst.dim(2)};
}

}  // namespace

QkvDispatch create_qkv_dispatch_with_custom_mapping(
    std::int64_t world_size, const IndexArray& seq_lens, const IndexArray& cp_num,
    const IndexArray& cp_dst, const IndexArray& seq_shard_lens, bool return_intermediate) {
  const detail::Int64Table lens(in_custom_mapping, "seq_lens", seq_lens);
  const detail::Int64Table degrees(in_custom_mapping, "cp_num", cp_num);
  const detail::Int64Table ranks(in_custom_mapping, "cp_dst", cp_dst);
  const detail::Int64Table shard_lens(in_custom_mapping, "seq_shard_lens", seq_shard_lens);
  const auto [num_seqs, slots] = check_arguments(world_size, *lens, *degrees, *ranks, *shard_lens);
  detail::PlanBuilder builder(world_size, KvLayout::per_query);
  for (std::int64_t w = 0; w < world_size; ++w) {
    bool ended = false;
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const auto flat = static_cast<std::size_t>(w * num_seqs + i);
      const auto first = flat * static_cast<std::size_t>(slots);
      const Sequence seq{
          .rank = w,
          .idx = i,
          .len = lens->i64()[flat],
          .cp = degrees->i64()[flat],
          .dst = ranks->i64().subspan(first, static_cast<std::size_t>(slots)),
          .shard_lens = shard_lens->i64().subspan(first, static_cast<std::size_t>(slots))};
      require(!ended || seq.len == 0, in_custom_mapping, ": seq_lens of rank ", w, ", sequence ", i,
              " = ", seq.len, ", expected 0 after the sequence of length 0 before it");
      ended = seq.len == 0;
      check_sequence(seq, world_size);
      for (std::size_t c = 0; c < static_cast<std::size_t>(seq.cp); ++c) {
        builder.add_shard(seq.shard_lens[c], seq.dst[c]);
      }
      if (seq.cp > 0) builder.end_document();
    }
    builder.end_rank();
  }
  QkvDispatch result;
  result.plan = builder.take();
  result.seq_lens = *lens;
  result.raw = to_raw_dispatch(result.plan, slots);
  result.metadata =
      compute_e2e_metadata(result.raw.cp_seq_lens, result.raw.num_cp_shards,
                           result.raw.cp_query_dst, result.raw.kv, return_intermediate);
  return result;
}

QkvDispatch create_balanced_example(std::int64_t rows_per_rank) {
  require(
      rows_per_rank >= 8 && rows_per_rank % 8 == 0 && rows_per_rank <= detail::max_total_rows / 4,
      "create_balanced_example: rows_per_rank = ", rows_per_rank,
      ", expected a positive multiple of 8");
  constexpr std::int64_t world_size = 4;
  constexpr std::int64_t most = 8;
  constexpr std::int64_t folded[most] = {0, 1, 2, 3, 3, 2, 1, 0};
  IndexArray seq_lens({world_size, most});
  IndexArray cp_num({world_size, most});
  IndexArray cp_dst = IndexArray::full({world_size, most, most}, -1);
  IndexArray shard_lens({world_size, most, most});
  for (std::int64_t w = 0; w < world_size; ++w) {
    const std::int64_t num_seqs = std::int64_t{1} << w;
    for (std::int64_t i = 0; i < num_seqs; ++i) {
      const auto flat = static_cast<std::size_t>(w * most + i);
      const std::int64_t cp = w == 0 ? most : 1;
      seq_lens.i64()[flat] = rows_per_rank / num_seqs;
      cp_num.i64()[flat] = cp;
      for (std::int64_t c = 0; c < cp; ++c) {
        const std::size_t shard = flat * most + static_cast<std::size_t>(c);
        cp_dst.i64()[shard] = w == 0 ? folded[c] : w;
        shard_lens.i64()[shard] = rows_per_rank / num_seqs / cp;
      }
    }
  }
  return create_qkv_dispatch_with_custom_mapping(world_size, seq_lens, cp_num, cp_dst, shard_lens);
}

}  // namespace waybill
