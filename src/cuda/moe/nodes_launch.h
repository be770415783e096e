#pragma once

#include <cuda_runtime_api.h>

#include "nodes_params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

// What a layer over several nodes does beside the kernels of one node. See launch.h.

/// What launch_meet_nodes and launch_exchange need.
cudaError_t prepare_exchange();

/// All of it.
cudaError_t prepare_nodes(DType tokens);

/// Tells all ranks that this one has begun the call, and waits until all have. The call ends with a
/// later kernel. @param kind 0: dispatch, 1: combine
cudaError_t launch_meet_nodes(const MoeMeet& meet, int kind, cudaStream_t stream);

/// Ids as other nodes read them.
cudaError_t launch_node_ids(const NodeIdsParams& params, int blocks, cudaStream_t stream);

/// Rows to the ranks of this one's local index; returns when theirs are here. Blocks must fit on
/// the device together with those of ranks that share it.
cudaError_t launch_exchange(const ExchangeParams& params, const PeerWire& wire, int blocks,
                            cudaStream_t stream);

cudaError_t launch_node_runs(const NodeRunsParams& params, cudaStream_t stream);

/// Biases, then the sums of nodes in their order, in float32, rounded once. @param wide 16-byte
/// words
cudaError_t launch_add_shares(const AddSharesParams& params, DType dtype, bool wide, int blocks,
                              cudaStream_t stream);

}  // namespace waybill::cuda
