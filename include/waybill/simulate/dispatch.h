#pragma once

#include <span>

#include "waybill/core/host_tensor.h"
#include "waybill/routing/sparse_metadata.h"
#include "waybill/simulate/orchestrate.h"

namespace waybill {

/// orchestrate_simulate for the sparse form: moves the rows of every entry to its copies.
/// @param sources W views [n_w, H] of one dtype; any strides
/// @param outputs W views [m_w, H]; same H and dtype; no address twice, nor one of `sources`
/// @throws InvalidArgument as orchestrate_simulate, with all outputs unchanged, and for tables
/// whose
///   lengths do not fit each other.
void simulate_dispatch(std::span<const ConstTensorView> sources,
                       std::span<const TensorView> outputs, const SparseMetadata& metadata,
                       const SimulateOptions& options = {});

}  // namespace waybill
