#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/number.h"
#include "core/to_size.h"
#include "support/sequence_case.h"
#include "waybill/core/topology.h"
#include "waybill/planner/planner.h"

namespace waybill::test {

/// The sums of the copies of K or V when rows come back along hops: docs/decisions/numbers.md,
/// row by row, element by element, with nothing of the library's compiler.
class SumOrder {
 public:
  SumOrder(const SparseMetadata& metadata, std::vector<RelayHop> hops, Topology topology)
      : metadata_(metadata), hops_(std::move(hops)), topology_(topology), on_(hops_.size()) {
    for (std::size_t h = 0; h < hops_.size(); ++h) {
      if (hops_[h].after >= 0) on_[hops_[h].after].push_back(h);
    }
  }

  /// @param gradients [W] of the rows that each rank had received
  [[nodiscard]] std::vector<HostTensor> sums(const std::vector<HostTensor>& gradients,
                                             DType dtype) const {
    std::vector<HostTensor> result;
    const std::int64_t hidden = gradients[0].shape()[1];
    std::vector<std::vector<std::size_t>> from_home(metadata_.num_entries());
    for (std::size_t h = 0; h < hops_.size(); ++h) {
      if (hops_[h].after < 0) from_home[hops_[h].shard].push_back(h);
    }
    for (std::int32_t home = 0; home < metadata_.world_size; ++home) {
      result.emplace_back(dtype, Shape{rows_sent(metadata_)[home], hidden});
      std::int64_t row = 0;
      for (auto j = metadata_.rank_offsets[home]; j < metadata_.rank_offsets[home + 1]; ++j) {
        for (std::int64_t k = 0; k < metadata_.seq_len[j]; ++k, ++row) {
          const auto& children = from_home[j];
          auto addends = addends_of(gradients, home, j, k, children, children.empty());
          write(result.back(), row, added(std::move(addends), hidden));
        }
      }
    }
    return result;
  }

 private:
  struct Addend {
    std::int64_t key;
    std::vector<double> values;  ///< floats are kept exactly
  };

  [[nodiscard]] static double load(const HostTensor& tensor, std::int64_t idx) {
    switch (tensor.dtype()) {
      case DType::bfloat16:
        return static_cast<double>(bfloat16_to_float(tensor.as<std::uint16_t>()[idx]));
      case DType::float16:
        return static_cast<double>(float16_to_float(tensor.as<std::uint16_t>()[idx]));
      case DType::float32:
        return static_cast<double>(tensor.as<float>()[idx]);
      default:
        return tensor.as<double>()[idx];
    }
  }

  static void write(HostTensor& tensor, std::int64_t row, const std::vector<double>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t idx = to_size(row) * values.size() + i;
      const auto single = static_cast<float>(values[i]);
      switch (tensor.dtype()) {
        case DType::bfloat16:
          tensor.as<std::uint16_t>()[idx] = float_to_bfloat16(single);
          break;
        case DType::float16:
          tensor.as<std::uint16_t>()[idx] = float_to_float16(single);
          break;
        case DType::float32:
          tensor.as<float>()[idx] = single;
          break;
        default:
          tensor.as<double>()[idx] = values[i];
      }
    }
  }

  [[nodiscard]] std::vector<double> added(std::vector<Addend> addends, std::int64_t hidden) const {
    std::ranges::sort(addends, {}, &Addend::key);
    std::vector<double> sum(hidden);
    for (std::size_t a = 0; a < addends.size(); ++a) {
      for (std::size_t i = 0; i < sum.size(); ++i) {
        const double value = addends[a].values[i];
        if (a == 0) {
          sum[i] = value;
        } else if (wide_) {
          sum[i] += value;
        } else {
          sum[i] = static_cast<double>(static_cast<float>(sum[i]) + static_cast<float>(value));
        }
      }
    }
    return sum;
  }

  [[nodiscard]] bool is_leaf_nearby(std::size_t h) const {
    return on_[h].empty() &&
           topology_.node(Rank{hops_[h].src_rank}) == topology_.node(Rank{hops_[h].dst_rank});
  }

  /// The first copy on the hop's destination or behind it.
  [[nodiscard]] std::int64_t key_of(std::size_t h) const {
    std::int64_t key = metadata_.num_destinations();
    const RelayHop& hop = hops_[h];
    for (auto c = metadata_.destination_begin(hop.shard); c < metadata_.destination_end(hop.shard);
         ++c) {
      if (metadata_.dst_rank[c] == hop.dst_rank) key = std::min(key, c);
    }
    for (const std::size_t child : on_[h]) key = std::min(key, key_of(child));
    return key;
  }

  /// What a rank adds up of row k of an entry: its own copies and what comes back along hops.
  std::vector<Addend> addends_of(const std::vector<HostTensor>& gradients, std::int32_t rank,
                                 std::int64_t entry, std::int64_t k,
                                 const std::vector<std::size_t>& children, bool all_copies) const {
    const std::int64_t hidden = gradients[0].shape()[1];
    wide_ = gradients[0].dtype() == DType::float64;
    std::vector<Addend> addends;
    std::vector<std::int32_t> read{rank};
    for (const std::size_t h : children) {
      const RelayHop& hop = hops_[h];
      if (k < hop.row_begin || k >= hop.row_begin + hop.num_rows) continue;
      if (is_leaf_nearby(h)) {
        read.push_back(hop.dst_rank);
      } else {
        addends.push_back(
            {key_of(h),
             added(addends_of(gradients, hop.dst_rank, entry, k, on_[h], false), hidden)});
      }
    }
    for (auto c = metadata_.destination_begin(entry); c < metadata_.destination_end(entry); ++c) {
      const std::int32_t from = metadata_.dst_rank[c];
      if (!all_copies && !std::ranges::count(read, from)) continue;
      Addend addend{c, {}};
      const std::int64_t row = metadata_.dst_offset[c] + k;
      for (std::int64_t i = 0; i < hidden; ++i)
        addend.values.push_back(load(gradients[from], row * hidden + i));
      addends.push_back(std::move(addend));
    }
    return addends;
  }

  const SparseMetadata& metadata_;
  std::vector<RelayHop> hops_;
  Topology topology_;
  std::vector<std::vector<std::size_t>> on_;  ///< [hops] hops behind it
  mutable bool wide_ = false;
};

}  // namespace waybill::test
