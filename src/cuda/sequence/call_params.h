#pragma once

#include "../rank/gpu_rank.h"
#include "runtime/executor.h"
#include "params.h"

namespace waybill::cuda {

/// The part of the parameters by which ranks synchronize.
/// What the call means on this rank; the plan's part where the host has it, not the device.
[[nodiscard]] FingerprintParams fingerprint_params(const SequenceCall& call);

[[nodiscard]] ArriveParams arrive_params(const SequenceCall& call, const GpuRank& gpu,
                                         FaultKind kind, int share);

/// Everything but the plan's tables. @throws Unsupported for ranks out of reach and more tensors
///   than kernels take
[[nodiscard]] SequenceParams sequence_params(const SequenceCall& call, const GpuRank& gpu,
                                             FaultKind kind, int share);

/// Whether the rows of all tensors lie as bulk copies need them.
[[nodiscard]] bool suits_bulk(const SequenceCall& call);

/// Bytes from row to row.
[[nodiscard]] std::int64_t pitch_of(const ConstTensorView& view);

}  // namespace waybill::cuda
