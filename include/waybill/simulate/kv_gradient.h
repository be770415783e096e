#pragma once

#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/core/topology.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// Sums the gradients of the copies of a rank's K (or V) rows, after the reverse dispatch: row x of
/// `output` is the sum over copies c, in that order, of row c * T + x of `planes`, where the row's
/// shard uses copy c. Sums run in float32 (float64 for float64) and are rounded once; one copy
/// alone comes out with its bits unchanged. Rows of shards without copies become 0; rows of unused
/// planes are not read.
///
/// @param planes [C * T, H], float32, float64, bfloat16 or float16; plane c holds the copies c
/// @param output [T, H], the dtype of `planes` or float32 (not for float64); not the memory of
/// `planes`
/// @param seq_recv_mask [S, C]: copy c of shard s came back
/// @param recv_seq_lens [S]: rows of the shards; their sum is T
/// @param num_threads 0: all cores; the result does not depend on it
/// @throws InvalidArgument, with `output` unchanged, for other shapes and dtypes.
void sum_kv_copies(const ConstTensorView& planes, const TensorView& output,
                   const IndexArray& seq_recv_mask, const IndexArray& recv_seq_lens,
                   int num_threads = 0);

/// The same with the tables of `rank` in the reverse metadata of KV: those of all ranks, or the
/// slice of `rank`.
void sum_kv_copies(const ConstTensorView& planes, const TensorView& output, const Metadata& rev_kv,
                   Rank rank, int num_threads = 0);

}  // namespace waybill
