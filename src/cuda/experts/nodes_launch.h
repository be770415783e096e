#pragma once

#include <cuda_runtime_api.h>

#include "nodes/params.h"
#include "waybill/core/dtype.h"

namespace waybill::cuda {

// What a layer over several nodes does beside the kernels of one node. See launch.h.

/// What launch_list_puts and launch_wait_nodes need.
cudaError_t prepare_node_paths();

/// All of it.
cudaError_t prepare_nodes(DType tokens);

/// Writes a network path's program, and ids as other nodes read them. Where the call begins it
/// signals that to the ranks of the node.
cudaError_t launch_list_puts(const ListPutsParams& params, cudaStream_t stream);

/// Raises a counter of the network path of the call that is being made: what was queued before is
/// there.
cudaError_t launch_raise_ready(const MoeArrive& arrive, std::uint64_t* ready, cudaStream_t stream);

cudaError_t launch_wait_nodes(const WaitNodesParams& params, cudaStream_t stream);

cudaError_t launch_node_runs(const NodeRunsParams& params, cudaStream_t stream);

/// Biases, then the sums of nodes in their order, in float32, rounded once; waits for those of
/// other nodes as they come. @param wide 16-byte words
cudaError_t launch_add_partial_sums(const AddPartialSumsParams& params, DType dtype, bool wide,
                                    int blocks, cudaStream_t stream);

}  // namespace waybill::cuda
