#pragma once

#include <optional>

#include "waybill/core/index_array.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// What compute_metadata derives on its way, for checking. C = 1 for a 2-D dispatch.
struct DispatchIntermediates {
  IndexArray tokens_to_dst_per_dispatch;  ///< [W, S, C, W]: length at the destination, else 0
  IndexArray seq_to_dst;                  ///< [W, S, C, W]: one-hot of the destination
  IndexArray num_received_seqs;           ///< [W]: shards (copies) a rank receives

  friend bool operator==(const DispatchIntermediates&, const DispatchIntermediates&) = default;
};

/// Forward (MLP layout to attention layout) and reverse metadata of one dispatch.
struct DispatchMetadata {
  Metadata fwd;
  Metadata rev;
  std::optional<DispatchIntermediates> intermediates;
};

/// What a shard with rows but without destination means.
enum class Undispatched {
  reject,  ///< an error: its tokens would be lost
  keep,    ///< it stays behind: its rows are skipped and never sent
};

/// Routing of Q (2-D) or of any tensor whose shards go to several ranks (3-D).
///
/// Every destination buffer is filled without gaps in the global order (source rank, shard, copy).
/// The reverse metadata is a send table of the receiving rank: its t-th entry is the t-th shard it
/// received; the rows return to `copy * T + begin`, where T is the home rank's number of rows and
/// begin the shard's first row there (so copies land in planes of T rows).
///
/// The arguments become part of the result: move them in where they are not needed any more.
/// Tables of any type of integers are taken; those of the result are int64.
/// @param seq_len [W, S], rows of each shard in the MLP layout
/// @param global_dispatch [W, S] or [W, S, C], destination rank of the shard (copy), -1 none
/// @throws InvalidArgument for wrong shapes, a rank outside -1..W-1, a negative length, more than
///   2^40 rows in all, and for a shard with rows but without destination unless `undispatched` is
///   keep.
[[nodiscard]] DispatchMetadata compute_metadata(IndexArray seq_len, IndexArray global_dispatch,
                                                bool return_intermediate = false,
                                                Undispatched undispatched = Undispatched::reject);

}  // namespace waybill
