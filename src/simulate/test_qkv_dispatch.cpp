#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "check_dense.h"
#include "core/to_size.h"
#include "expected_layout.h"
#include "finding_list.h"
#include "stacked_slices.h"
#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/random.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/kv_gradient.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {
namespace {

using detail::ExpectedLayout;
using detail::FindingList;

using detail::to_size;

bool all_zero(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return value == 0.0F; });
}

/// Rows of [W, n, H] float32.
std::span<const float> row_of(const HostTensor& tensor, std::int64_t rank, std::int64_t row) {
  const std::int64_t hidden = tensor.shape()[2];
  return tensor.as<float>().subspan((rank * tensor.shape()[1] + row) * hidden, hidden);
}

class DenseTester {
 public:
  DenseTester(const QkvDispatch& dispatch, const QkvDispatchTestOptions& options)
      : dispatch_(dispatch),
        plan_(dispatch.plan),
        options_(options),
        expected_(detail::expect_layout(dispatch.plan)),
        findings_(options.max_findings),
        random_(options.seed) {
    most_home_rows_ = std::ranges::max(expected_.home_rows);
    std::int64_t first = 0;
    for (const std::int64_t rows : expected_.home_rows) {
      rank_first_row_.push_back(first);
      first += rows;
    }
  }

  QkvDispatchTest run() {
    if (shapes_are_right()) {
      detail::check_dense_tables(dispatch_, expected_, findings_);
      test_queries();
      test_keys_and_values();
    }
    result_.findings = findings_.take();
    return std::move(result_);
  }

 private:
  /// Everything after this may take the tables' shapes for granted.
  bool shapes_are_right() {
    const auto check = [&](const char* table, const Metadata& metadata, std::int64_t ndim) {
      try {
        metadata.check_shapes(table);
        require(metadata.seq_len.ndim() == 2 && metadata.seq_len.dim(0) == plan_.world_size &&
                    metadata.dst_rank.ndim() == ndim,
                table, ": dst_rank has shape ", to_string(metadata.dst_rank.shape()), ", expected ",
                ndim, " dimensions and ", plan_.world_size, " ranks");
      } catch (const InvalidArgument& error) {
        findings_.add({FindingKind::shape, table, "shapes", -1, -1, -1, error.what(),
                       "arrays that fit each other"});
      }
    };
    check("fwd_q", dispatch_.metadata.fwd_q, 2);
    check("rev_q", dispatch_.metadata.rev_q, 2);
    check("fwd_kv", dispatch_.metadata.fwd_kv, 3);
    check("rev_kv", dispatch_.metadata.rev_kv, 2);
    if (findings_.empty()) {
      check_shard_axis();
    }
    return findings_.empty();
  }

  /// The forward tables have a place for every shard of the plan.
  void check_shard_axis() {
    std::int64_t most = 0;
    for (std::size_t w = 0; w < to_size(plan_.world_size); ++w) {
      most = std::max(most, plan_.rank_shard_offsets[w + 1] - plan_.rank_shard_offsets[w]);
    }
    for (const Metadata* forward : {&dispatch_.metadata.fwd_q, &dispatch_.metadata.fwd_kv}) {
      if (forward->seq_len.dim(1) >= most) continue;
      findings_.add({FindingKind::shape, forward->has_copies() ? "fwd_kv" : "fwd_q", "seq_len", -1,
                     -1, -1, to_string(forward->seq_len.shape()),
                     concat(most, " shards per rank")});
    }
  }

  HostTensor payload(std::int64_t hidden) {
    HostTensor tensor(DType::float32, {plan_.world_size, most_home_rows_, hidden});
    for (float& value : tensor.as<float>()) value = 1.0F + random_.uniform_float();
    return tensor;
  }

  /// Runs a table as it is, from its slices and normalised: all must move the same.
  std::optional<HostTensor> run_table(const char* table, const Metadata& metadata,
                                      const HostTensor& source, std::int64_t rows) {
    const auto run_one = [&](const Metadata& form) {
      HostTensor output(DType::float32, {plan_.world_size, rows, source.shape()[2]});
      orchestrate_simulate(source.view(), output.view(), form,
                           {Overlap::reject, options_.num_threads});
      return output;
    };
    const char* form = "dispatch";
    try {
      std::optional<HostTensor> output = run_one(metadata);
      form = "get_slice";
      expect_same(table, form, run_one(detail::stack_slices(metadata)), *output);
      form = "normalize_dtype";
      const Metadata normalized = metadata.normalize_dtype();
      expect_same(table, form, run_one(normalized), *output);
      check_dtypes(table, normalized);
      form = "get_slice of normalize_dtype";
      expect_same(table, form, run_one(detail::stack_slices(normalized)), *output);
      return output;
    } catch (const InvalidArgument& error) {
      findings_.add({FindingKind::bounds, table, form, -1, -1, -1, error.what(),
                     "a dispatch that can be carried out"});
      return std::nullopt;
    }
  }

  void expect_same(const char* table, const char* form, const HostTensor& got,
                   const HostTensor& expected) {
    result_.elements_compared += got.size_bytes() / 4;
    if (std::ranges::equal(got.bytes(), expected.bytes())) return;
    findings_.add({FindingKind::normalization, table, form, -1, -1, -1, "other rows moved",
                   "the moves of the whole table"});
  }

  void check_dtypes(const char* table, const Metadata& normalized) {
    const auto expect = [&](const char* field, const IndexArray& array, DType dtype) {
      if (array.dtype() == dtype) return;
      findings_.add({FindingKind::normalization, table, field, -1, -1, -1, concat(array.dtype()),
                     concat(dtype)});
    };
    expect("dst_rank", normalized.dst_rank, DType::int32);
    expect("dst_offset", normalized.dst_offset, DType::uint32);
    expect("seq_len", normalized.seq_len, DType::uint32);
    expect("num_recv_tokens", normalized.num_recv_tokens, DType::uint64);
  }

  /// Rows [row, row + count) of `got` at `rank` are the rows of shard `shard` in `source`.
  void expect_shard(Finding place, const HostTensor& got, std::int64_t row, std::int32_t shard,
                    const HostTensor& source) {
    const std::int64_t home = expected_.home_rank[shard];
    const std::int64_t begin = expected_.home_begin[shard] - rank_first_row_[home];
    for (std::int64_t k = 0; k < plan_.shard_len[shard]; ++k) {
      const auto found = row_of(got, place.rank, row + k);
      const auto wanted = row_of(source, home, begin + k);
      result_.elements_compared += std::ssize(wanted);
      if (std::ranges::equal(found, wanted)) continue;
      place.kind = all_zero(found) ? FindingKind::coverage : FindingKind::order;
      place.got = concat(all_zero(found) ? "nothing in row " : "other values in row ", row + k);
      place.expected = concat("row ", begin + k, " of rank ", home);
      findings_.add(std::move(place));
      return;
    }
  }

  /// Nothing may lie past the rows that a rank receives.
  void expect_zeros(const char* table, const HostTensor& got, std::int64_t rank,
                    std::int64_t begin) {
    for (std::int64_t row = begin; row < got.shape()[1]; ++row) {
      if (all_zero(row_of(got, rank, row))) continue;
      findings_.add({FindingKind::bounds, table, "rows", rank, -1, -1,
                     concat("values in row ", row), concat("nothing from row ", begin, " on")});
      return;
    }
  }

  void test_queries() {
    const HostTensor q = payload(options_.hidden_q);
    const std::int64_t rows = std::ranges::max(expected_.q_rows);
    const auto attention = run_table("fwd_q", dispatch_.metadata.fwd_q, q, rows);
    if (!attention) return;
    for (std::int64_t r = 0; r < plan_.world_size; ++r) {
      for (std::int64_t i = expected_.rank_offsets[r]; i < expected_.rank_offsets[r + 1]; ++i) {
        const std::int32_t shard = expected_.received[i];
        expect_shard({{}, "fwd_q", "rows", r, shard, -1, "", ""}, *attention,
                     expected_.q_begin[shard], shard, q);
      }
      expect_zeros("fwd_q", *attention, r, expected_.q_rows[r]);
    }
    const auto back = run_table("rev_q", dispatch_.metadata.rev_q, *attention, most_home_rows_);
    if (!back) return;
    for (std::int32_t s = 0; s < plan_.num_shards(); ++s) {
      const std::int64_t home = expected_.home_rank[s];
      expect_shard({{}, "rev_q", "rows", home, s, -1, "", ""}, *back,
                   expected_.home_begin[s] - rank_first_row_[home], s, q);
    }
    for (std::int64_t w = 0; w < plan_.world_size; ++w) {
      expect_zeros("rev_q", *back, w, expected_.home_rows[w]);
    }
  }

  void test_keys_and_values() {
    const HostTensor kv = payload(options_.hidden_k);
    const std::int64_t rows = std::ranges::max(expected_.kv_rows);
    const auto attention = run_table("fwd_kv", dispatch_.metadata.fwd_kv, kv, rows);
    if (!attention) return;
    for (std::int32_t query = 0; query < plan_.num_shards(); ++query) {
      const std::int64_t rank = plan_.q_dst[query];
      const auto doc = plan_.doc_shard_offsets[expected_.document[query]];
      std::int64_t row = expected_.kv_begin[query];
      for (std::int32_t p = detail::first_needed(plan_, query);
           p <= detail::last_needed(plan_, expected_, query); ++p) {
        const std::int32_t shard = plan_.doc_shards[doc + p];
        expect_shard({{}, "fwd_kv", "context", rank, query, -1, "", ""}, *attention, row, shard,
                     kv);
        row += plan_.shard_len[shard];
      }
    }
    for (std::int64_t r = 0; r < plan_.world_size; ++r) {
      expect_zeros("fwd_kv", *attention, r, expected_.kv_rows[r]);
    }
    const std::int64_t copies = dispatch_.metadata.fwd_kv.dst_rank.dim(2);
    const auto planes = run_table("rev_kv", dispatch_.metadata.rev_kv, *attention,
                                  most_home_rows_ * std::max<std::int64_t>(1, copies));
    if (planes) test_planes(kv, *planes, copies);
  }

  /// Of the planes of each row, exactly those of its copies hold it; the others hold nothing.
  void test_planes(const HostTensor& kv, const HostTensor& planes, std::int64_t copies) {
    for (std::int32_t s = 0; s < plan_.num_shards(); ++s) {
      const std::int64_t home = expected_.home_rank[s];
      const std::int64_t num_rows = expected_.home_rows[home];
      const std::int64_t begin = expected_.home_begin[s] - rank_first_row_[home];
      for (std::int64_t c = 0; c < copies; ++c) {
        if (c < expected_.num_destinations[s]) {
          expect_shard({{}, "rev_kv", "planes", home, s, c, "", ""}, planes, c * num_rows + begin,
                       s, kv);
          continue;
        }
        for (std::int64_t k = 0; k < plan_.shard_len[s]; ++k) {
          const std::int64_t row = c * num_rows + begin + k;
          if (all_zero(row_of(planes, home, row))) continue;
          findings_.add({FindingKind::bounds, "rev_kv", "planes", home, s, c,
                         concat("values in row ", row), "nothing: the copy is not used"});
          break;
        }
      }
    }
    for (std::int64_t w = 0; w < plan_.world_size; ++w) {
      expect_zeros("rev_kv", planes, w, copies * expected_.home_rows[w]);
    }
    if (findings_.empty()) test_sums(kv, planes, copies);
  }

  /// The gradient sum of equal copies is their number times the row.
  void test_sums(const HostTensor& kv, const HostTensor& planes, std::int64_t copies) {
    for (std::int32_t w = 0; w < plan_.world_size; ++w) {
      const std::int64_t num_rows = expected_.home_rows[w];
      ConstTensorView rank_planes = planes.view();
      rank_planes.data += w * rank_planes.strides[0] * 4;
      rank_planes.shape = {copies * num_rows, options_.hidden_k};
      rank_planes.strides = {options_.hidden_k, 1};
      HostTensor sums(DType::float32, {1, num_rows, options_.hidden_k});
      sum_kv_copies(rank_planes,
                    {sums.bytes().data(), DType::float32, {num_rows, options_.hidden_k}},
                    dispatch_.metadata.rev_kv, Rank{w}, options_.num_threads);
      for (std::int64_t s = plan_.rank_shard_offsets[w]; s < plan_.rank_shard_offsets[w + 1]; ++s) {
        expect_mean(kv, sums, w, s);
      }
    }
  }

  void expect_mean(const HostTensor& kv, const HostTensor& sums, std::int64_t rank,
                   std::int64_t shard) {
    const auto num = static_cast<float>(expected_.num_destinations[shard]);
    const std::int64_t begin = expected_.home_begin[shard] - rank_first_row_[rank];
    for (std::int64_t row = begin; row < begin + plan_.shard_len[shard]; ++row) {
      const auto sum = row_of(sums, 0, row);
      const auto one = row_of(kv, rank, row);
      result_.elements_compared += std::ssize(one);
      for (std::size_t h = 0; h < one.size(); ++h) {
        // Every addition may round; n of them stay well within this.
        if (std::abs(sum[h] / num - one[h]) <= 1e-7F * num * one[h]) continue;
        findings_.add({FindingKind::identity, "rev_kv", "sum of copies", rank, shard, -1,
                       concat(sum[h] / num, " in row ", row), concat(one[h])});
        return;
      }
    }
  }

  const QkvDispatch& dispatch_;
  const QkvPlan& plan_;
  const QkvDispatchTestOptions& options_;
  const ExpectedLayout expected_;
  FindingList findings_;
  Random random_;
  QkvDispatchTest result_;
  std::int64_t most_home_rows_ = 0;
  std::vector<std::int64_t>
      rank_first_row_;  // [W]: number of its first row, all ranks one after another
};

}  // namespace

QkvDispatchTest test_qkv_dispatch(const QkvDispatch& dispatch,
                                  const QkvDispatchTestOptions& options) {
  const char* who = "test_qkv_dispatch";
  require(options.hidden_q >= 1 && options.hidden_k >= 1, who,
          ": options.hidden_q = ", options.hidden_q, ", hidden_k = ", options.hidden_k,
          ", expected >= 1");
  require(options.num_threads >= 0, who, ": options.num_threads = ", options.num_threads,
          ", expected >= 0");
  require(options.max_findings >= 1, who, ": options.max_findings = ", options.max_findings,
          ", expected >= 1");
  dispatch.plan.check(who);
  require(dispatch.plan.kv_layout == KvLayout::per_query, who,
          ": plan.kv_layout = ", to_string(dispatch.plan.kv_layout), ", expected ",
          to_string(KvLayout::per_query), ", the only one of the dense generators");
  return DenseTester(dispatch, options).run();
}

QkvDispatchTest test_qkv_dispatch(const QkvDispatchTestOptions& options) {
  return test_qkv_dispatch(
      create_qkv_dispatch(options.world_size, options.total_seq_len, options.num_seqs,
                          options.max_cp_degree, options.seed),
      options);
}

}  // namespace waybill
