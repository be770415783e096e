#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/core/topology.h"
#include "waybill/routing/metadata.h"

namespace waybill {

/// The meaning of two copies that write the same row.
enum class Overlap : std::uint8_t {
  reject,     ///< an error
  last_wins,  ///< the later one in the global order (source rank, shard, copy) stays
};

struct SimulateOptions {
  Overlap overlap = Overlap::reject;
  int num_threads = 0;  ///< 0: all cores; the result does not depend on it
};

/// Moves rows between ranks as `metadata` says, in one process: what a dispatch on real hardware
/// must produce, bit for bit. Rows that no copy addresses keep what they hold.
///
/// A rank's shards lie back to back from row 0; a shard without destination is skipped with
/// all its rows. Only dst_rank, dst_offset and seq_len are read, in any integer dtype.
///
/// @param tensor [W, n, H], rank by rank; any dtype, any strides
/// @param output [W, m, H], same W, H and dtype; any strides that place no two elements at one
///   address; not the memory of `tensor`
/// @throws InvalidArgument with `output` unchanged: shapes or dtypes that do not fit, a
///   destination outside -1..W-1, negative lengths and offsets, shards longer than the source,
///   rows past the end of the output, overlaps unless allowed, shared memory. The text has source
///   rank, destination rank, shard, copy, offset, length, both shapes and the rows consumed before.
/// Like the function of the same name in DistCA, which refuses less.
void orchestrate_simulate(const ConstTensorView& tensor, const TensorView& output,
                          const Metadata& metadata, const SimulateOptions& options = {});

/// The moves of orchestrate_simulate, as a gather: for every row of the output the row of the
/// tensor that ends there, w * n + row, or -1 where no copy addresses it. For tensors that the CPU
/// cannot reach, such as those on a GPU.
/// @param tensor_shape [W, n, H]
/// @param output_shape [W, m, H]
/// @return [W, m] int64
/// @throws InvalidArgument as orchestrate_simulate, with the same text.
[[nodiscard]] IndexArray source_rows(const Shape& tensor_shape, const Shape& output_shape,
                                     const Metadata& metadata, const SimulateOptions& options = {});

/// orchestrate_simulate for ranks with different numbers of rows, into new buffers that start as
/// zeros.
/// @param tensors W views [n_w, H] of one dtype
/// @return W tensors [R_w, H], R_w the largest value of num_recv_tokens[w], which is its total
/// @throws InvalidArgument as orchestrate_simulate, and when R_w is not the number of rows that
///   the entries send to rank w.
[[nodiscard]] std::vector<HostTensor> simulate_communication(
    std::span<const ConstTensorView> tensors, const Metadata& metadata,
    const SimulateOptions& options = {});

/// orchestrate_simulate for the sparse form: moves the rows of every entry to its copies.
/// @param sources W views [n_w, H] of one dtype; any strides
/// @param outputs W views [m_w, H]; same H and dtype; no address twice, nor one of `sources`
/// @throws InvalidArgument as orchestrate_simulate, with all outputs unchanged, and for tables
/// whose
///   lengths do not fit each other.
void simulate_dispatch(std::span<const ConstTensorView> sources,
                       std::span<const TensorView> outputs, const SparseMetadata& metadata,
                       const SimulateOptions& options = {});

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
/// @throws InvalidArgument with `output` unchanged, for other shapes and dtypes.
void sum_kv_copies(const ConstTensorView& planes, const TensorView& output,
                   const IndexArray& seq_recv_mask, const IndexArray& recv_seq_lens,
                   int num_threads = 0);

/// The same with the tables of `rank` in the reverse metadata of KV: those of all ranks, or the
/// slice of `rank`.
void sum_kv_copies(const ConstTensorView& planes, const TensorView& output, const Metadata& rev_kv,
                   Rank rank, int num_threads = 0);

}  // namespace waybill
