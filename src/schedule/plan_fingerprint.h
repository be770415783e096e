#pragma once

#include <cstdint>
#include <span>

#include "routes.h"
#include "schedule/sequence_plan.h"

namespace waybill::detail {

/// Hash of the entries and copies of all ranks, of the hops on their way and of what else cuts it
/// into pieces for which ranks wait. The same whether copy_offsets are given or not.
[[nodiscard]] std::uint64_t hash_plan(SequenceOperation operation,
                                      std::span<const SequencePart> parts, const ChosenWay& way,
                                      const CompileOptions& options);

/// Hash of the tensors of each part.
[[nodiscard]] std::uint64_t hash_formats(std::span<const SequencePart> parts);

}  // namespace waybill::detail
