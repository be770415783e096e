#include <algorithm>
#include <utility>

#include "dense_checks.h"
#include "waybill/core/error.h"
#include "waybill/routing/compute_metadata.h"

namespace waybill {
namespace {

constexpr const char* in_attn_layout = "compute_attn_layout_seqlens";

using Lists = std::vector<std::vector<std::int64_t>>;  ///< [W][n_r]

/// The values of the shards that each rank receives, in the global order.
Lists received_by_rank(const IndexArray& values, const IndexArray& dispatch) {
  Lists lists(static_cast<std::size_t>(dispatch.dim(0)));
  for (std::size_t i = 0; i < dispatch.i64().size(); ++i) {
    const std::int64_t dst = dispatch.i64()[i];
    if (dst >= 0) lists[dst].push_back(values.i64()[i]);
  }
  return lists;
}

/// Inclusive sums of the list padded with zeros to `length`, after an optional 0.
std::vector<std::int64_t> cumulative(const std::vector<std::int64_t>& list, std::size_t length,
                                     bool leading_zero) {
  std::vector<std::int64_t> sums;
  std::int64_t sum = 0;
  if (leading_zero) sums.push_back(0);
  for (std::size_t i = 0; i < length; ++i) {
    if (i < list.size()) {
      require(!__builtin_add_overflow(sum, list[i], &sum), in_attn_layout, ": the sum of ", i + 1,
              " lengths that a rank receives exceeds 2^63 - 1");
    }
    sums.push_back(sum);
  }
  return sums;
}

std::vector<IndexArray> cu_seqlens(const Lists& lists, bool leading_zero, bool ragged) {
  std::vector<IndexArray> result;
  if (ragged) {
    for (const auto& list : lists) {
      const std::vector<std::int64_t> sums = cumulative(list, list.size(), leading_zero);
      result.emplace_back(Shape{std::ssize(sums)}, sums);
    }
    return result;
  }
  std::size_t most = 0;
  for (const auto& list : lists) most = std::max(most, list.size());
  std::vector<std::int64_t> all;
  for (const auto& list : lists) {
    const std::vector<std::int64_t> sums = cumulative(list, most, leading_zero);
    all.insert(all.end(), sums.begin(), sums.end());
  }
  const auto columns = static_cast<std::int64_t>(most) + (leading_zero ? 1 : 0);
  result.emplace_back(Shape{std::ssize(lists), columns}, std::move(all));
  return result;
}

/// A number of each list.
template <class Number>
IndexArray of_lists(const Lists& lists, const Number& number) {
  IndexArray result({std::ssize(lists)});
  std::ranges::transform(lists, result.i64().begin(), number);
  return result;
}

IndexArray maxima(const Lists& lists) {
  return of_lists(lists,
                  [](const auto& list) { return list.empty() ? 0 : std::ranges::max(list); });
}

}  // namespace

AttnLayout compute_attn_layout_seqlens(const IndexArray& seq_shard_len,
                                       const IndexArray& seq_shard_cumsum,
                                       const IndexArray& dispatch, bool leading_zero,
                                       bool shard_to_tuple) {
  const detail::Int64Table lens(in_attn_layout, "seq_shard_len", seq_shard_len);
  const detail::Int64Table sums(in_attn_layout, "seq_shard_cumsum", seq_shard_cumsum);
  const detail::Int64Table ranks(in_attn_layout, "dispatch", dispatch);
  const auto [world_size, num_shards] =
      detail::check_world_matrix(in_attn_layout, "seq_shard_len", *lens);
  const Shape shape{world_size, num_shards};
  detail::check_same_shape(in_attn_layout, "seq_shard_cumsum", *sums, shape);
  detail::check_same_shape(in_attn_layout, "dispatch", *ranks, shape);
  detail::check_lengths(in_attn_layout, "seq_shard_len", *lens);
  detail::check_range(in_attn_layout, "seq_shard_cumsum", *sums, 0, detail::max_total_rows,
                      "0..2^40 rows");
  detail::check_ranks(in_attn_layout, "dispatch", *ranks, world_size);
  const Lists q = received_by_rank(*lens, *ranks);
  const Lists kv = received_by_rank(*sums, *ranks);
  AttnLayout layout;
  layout.cu_seqlens_q = cu_seqlens(q, leading_zero, shard_to_tuple);
  layout.cu_seqlens_kv = cu_seqlens(kv, leading_zero, shard_to_tuple);
  layout.max_seqlen_q = maxima(q);
  layout.max_seqlen_kv = maxima(kv);
  layout.num_local_seqs_recv = of_lists(q, [](const auto& list) { return std::ssize(list); });
  return layout;
}

PackedSeqParams mlp_layout_packed_params(const IndexArray& seq_lens) {
  constexpr const char* who = "mlp_layout_packed_params";
  require(seq_lens.ndim() == 1, who, ": seq_lens has shape ", to_string(seq_lens.shape()),
          ", expected [n]");
  const detail::Int64Table lens(who, "seq_lens", seq_lens);
  detail::check_lengths(who, "seq_lens", *lens);
  PackedSeqParams params;
  params.cu_seqlens_q = IndexArray({lens->size() + 1});
  std::int64_t end = 0;
  for (std::int64_t i = 0; i < lens->size(); ++i) {
    end += lens->flat_at(i);
    params.cu_seqlens_q.i64()[i + 1] = end;
    params.max_seqlen_q = std::max(params.max_seqlen_q, lens->flat_at(i));
  }
  params.cu_seqlens_kv = params.cu_seqlens_q;
  params.max_seqlen_kv = params.max_seqlen_q;
  return params;
}

}  // namespace waybill
