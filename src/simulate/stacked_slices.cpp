#include "stacked_slices.h"

#include <algorithm>
#include <vector>

namespace waybill::detail {
namespace {

/// Copies the values of a slice's array to where its rank begins.
void put(const IndexArray& from, std::int64_t begin, IndexArray& to) {
  const Int64View values(from);
  std::ranges::copy(values.span(), to.i64().begin() + begin);
}

}  // namespace

Metadata stack_slices(const Metadata& metadata) {
  const std::int64_t world = metadata.seq_len.dim(0);
  std::vector<Metadata> slices;
  std::int64_t longest = 0;
  for (std::int64_t w = 0; w < world; ++w) {
    slices.push_back(metadata.get_slice(Rank{static_cast<std::int32_t>(w)}));
    longest = std::max(longest, slices.back().seq_len.size());
  }
  Shape entries{world, longest};
  if (metadata.has_copies()) entries.push_back(metadata.dst_rank.dim(2));
  const std::int64_t copies = metadata.has_copies() ? metadata.dst_rank.dim(2) : 1;
  Metadata result;
  result.seq_len = IndexArray({world, longest});
  result.dst_rank = IndexArray::full(entries, -1);
  result.dst_offset = IndexArray(entries);
  for (std::int64_t w = 0; w < world; ++w) {
    const Metadata& slice = slices[static_cast<std::size_t>(w)];
    put(slice.seq_len, w * longest, result.seq_len);
    put(slice.dst_rank, w * longest * copies, result.dst_rank);
    put(slice.dst_offset, w * longest * copies, result.dst_offset);
  }
  return result;
}

}  // namespace waybill::detail
