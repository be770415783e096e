#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/routing/metadata.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill::detail {

/// A usable view with `ndim` axes: shape and strides agree, no negative extent, every address can
/// be computed, memory is there unless the view is empty. @throws InvalidArgument
void check_view(const char* who, const char* name, const ConstTensorView& view, std::int64_t ndim);

/// The stride of an axis in elements. Where the axis has one element it is never used, may be
/// anything, and counts as 0.
[[nodiscard]] inline std::int64_t step_of(const ConstTensorView& view, std::size_t axis) {
  return view.shape[axis] == 1 ? 0 : view.strides[axis];
}

/// False when two elements may lie at one address. Exact for slices and transposes of an ordinary
/// tensor; a view of another making may be refused though it is fine.
[[nodiscard]] bool is_injective(const ConstTensorView& view);

/// False only when no byte belongs to both. Knows views that lie side by side in one tensor.
[[nodiscard]] bool may_share_memory(const ConstTensorView& a, const ConstTensorView& b);

/// Every output is injective, no two outputs share memory, and none with a source.
/// @throws InvalidArgument naming the two and their shapes
void check_memory(const char* who, std::span<const ConstTensorView> sources,
                  std::span<const TensorView> outputs);

/// One shard's rows on their way to one destination.
struct CopySegment {
  std::int32_t src_rank = 0;
  std::int32_t dst_rank = 0;
  std::int64_t shard = 0;  ///< index on its rank
  std::int64_t copy = 0;
  std::int64_t src_row = 0;  ///< also the rows consumed before
  std::int64_t dst_row = 0;
  std::int64_t rows = 0;
};

/// The two ends of a job, rank by rank.
struct CopyJob {
  const char* who = "";                  ///< begins every error text
  std::vector<ConstTensorView> sources;  ///< W x [n_w, H]
  std::vector<TensorView> outputs;       ///< W x [m_w, H]; data may be null until the copy
  Shape tensor_shape;                    ///< as the caller knows it; empty: that of the rank's view
  Shape output_shape;

  [[nodiscard]] std::int64_t world_size() const {
    return static_cast<std::int64_t>(sources.size());
  }
};

/// Splits [W, n, H] into its ranks.
template <class Byte>
[[nodiscard]] std::vector<BasicTensorView<Byte>> views_of_ranks(const BasicTensorView<Byte>& all) {
  std::vector<BasicTensorView<Byte>> ranks;
  for (std::int64_t w = 0; w < all.shape[0]; ++w) {
    BasicTensorView<Byte> view;
    view.dtype = all.dtype;
    view.shape = {all.shape[1], all.shape[2]};
    view.strides = {all.strides[1], all.strides[2]};
    const bool empty = all.shape[1] == 0 || all.shape[2] == 0;
    if (!empty) view.data = all.data + w * step_of(all, 0) * dtype_bytes(all.dtype);
    ranks.push_back(std::move(view));
  }
  return ranks;
}

/// All ends have one dtype and one H. @throws InvalidArgument
void check_ends(const CopyJob& job);

/// The segments of a job in the global order (source rank, shard, copy), every one checked against
/// both ends; those without rows are checked, then left out. @throws InvalidArgument
[[nodiscard]] std::vector<CopySegment> checked_segments(const CopyJob& job,
                                                        const Metadata& metadata);
[[nodiscard]] std::vector<CopySegment> checked_segments(const CopyJob& job,
                                                        const SparseMetadata& metadata);

/// Throws with everything that is known about a segment, whose `dst_rank` may be no rank at all.
/// @throws InvalidArgument
[[noreturn]] void fail_at(const CopyJob& job, const CopySegment& segment, std::int64_t dst_rank,
                          const std::string& what);

/// Segments by destination rank, in the global order inside a rank; empty unless they overlap.
struct Destinations {
  std::vector<std::int64_t> offsets;   ///< [W + 1]
  std::vector<std::int64_t> segments;  ///< indices
  bool overlapping = false;            ///< two segments write one row
};

/// Looks for rows that two segments write. Linear, but for outputs that are nearly empty and
/// filled out of order: these cost a sort. @throws InvalidArgument unless allowed
[[nodiscard]] Destinations find_destinations(const CopyJob& job,
                                             const std::vector<CopySegment>& segments,
                                             Overlap overlap);

/// Does it. Nothing can fail any more.
void copy_segments(const CopyJob& job, const std::vector<CopySegment>& segments,
                   const Destinations& destinations, int num_threads);

/// Checks a job whose ends have their memory, then does it.
template <class AnyMetadata>
void run_job(const CopyJob& job, const AnyMetadata& metadata, const SimulateOptions& options) {
  const std::vector<CopySegment> segments = checked_segments(job, metadata);
  const Destinations destinations = find_destinations(job, segments, options.overlap);
  copy_segments(job, segments, destinations, options.num_threads);
}

}  // namespace waybill::detail
