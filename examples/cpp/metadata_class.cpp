// The page of DistCA on the class Metadata, in C++: fields, slices, dtypes for kernels, padding,
// and the loops that send by it. With CUDA and a GPU, the tables on a device, too. Ends with 0 when
// all holds, else with 1.

#include <cstdint>
#include <iostream>
#include <string_view>
#include <vector>

#include "waybill/plan.h"
#ifdef WAYBILL_EXAMPLE_CUDA
#include "waybill/cuda/gpu_world.h"
#endif

namespace {

using namespace waybill;

int num_failures = 0;

void check(std::string_view claim, bool ok) {
  std::cout << (ok ? "  ok      " : "  FAILED  ") << claim << "\n";
  num_failures += ok ? 0 : 1;
}

/// "Simple Query Metadata (2D)": two ranks, at most three sequences each.
DispatchMetadata simple_query_metadata() {
  const IndexArray dst_rank = IndexArray::matrix({{1, 0, -1}, {0, 1, 0}});
  const IndexArray seq_len = IndexArray::matrix({{128, 64, 0}, {96, 128, 32}});
  return compute_metadata(seq_len, dst_rank);
}

/// "Usage Patterns": one line per message. Offsets and lengths are tokens.
void send_by(const Metadata& metadata) {
  for (std::int64_t src = 0; src < metadata.seq_len.dim(0); ++src) {
    for (std::int64_t seq = 0; seq < metadata.seq_len.dim(1); ++seq) {
      const std::int64_t dst = metadata.dst_rank.at({src, seq});
      if (dst < 0) continue;  // padding
      std::cout << "  rank " << src << " sends " << metadata.seq_len.at({src, seq})
                << " rows to rank " << dst << ", row " << metadata.dst_offset.at({src, seq})
                << "\n";
    }
  }
}

/// "Complex KV Metadata (3D with Context Parallelism)": a shard may go to two ranks.
void copies() {
  const IndexArray dst_rank =
      IndexArray::cube({{{1, 0}, {0, -1}, {-1, -1}}, {{0, 1}, {1, 0}, {0, -1}}});
  const IndexArray seq_len = IndexArray::matrix({{128, 64, 0}, {96, 128, 32}});
  const DispatchMetadata made = compute_metadata(seq_len, dst_rank);
  check("a third axis holds the copies", made.fwd.has_copies());
  check("the validator finds nothing", validate(made.fwd, made.rev).empty());
}

void on_a_device(const Metadata& slice) {
#ifdef WAYBILL_EXAMPLE_CUDA
  if (num_gpus() > 0) {
    const DeviceMetadata there = to_device(slice, 0);
    check("the tables come back from the GPU as they were", to_host(there) == slice);
    return;
  }
#endif
  std::cout << "  (" << slice.dst_rank.size() << " entries stay in host memory: no GPU)\n";
}

}  // namespace

int main() {
  try {
    const auto [fwd, rev, intermediates] = simple_query_metadata();
    std::cout << fwd << "Forward Pass Communication:\n";
    send_by(fwd);
    std::cout << "Reverse Pass Communication, sent by those that received:\n";
    send_by(rev);
    check("no two sequences overlap",
          fwd.dst_offset == IndexArray::matrix({{0, 0, 0}, {64, 128, 160}}));
    check("padding does not count", *fwd.num_seqs == IndexArray::vector({2, 3}));

    const Metadata part = fwd.get_slice(Rank{0});
    check("a slice has no padding", part.seq_len == IndexArray::vector({128, 64}));
    const Metadata small = part.normalize_dtype();
    check("dtypes for kernels", small.dst_rank.dtype() == DType::int32 &&
                                    small.seq_len.dtype() == DType::uint32 && small.normalized);
    copies();
    on_a_device(small);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return num_failures == 0 ? 0 : 1;
}
