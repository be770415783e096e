#pragma once

#include <cstdint>
#include <vector>

#include "cuda/self_test/self_test.h"
#include "self_test_rows.h"

namespace waybill::cuda {

/// What all ranks of a self test read: parts, and where every row that arrives came from.
struct TrialJob {
  /// @throws InvalidArgument as compile_dispatch
  TrialJob(const QkvRouting& routing, const TensorFormat& q, const TensorFormat& kv,
           const GpuSelfTestOptions& options);

  [[nodiscard]] std::vector<SequencePart> forward() const {
    return {{&routing.fwd_q, {q}}, {&routing.fwd_kv, {kv, kv}}};
  }
  [[nodiscard]] std::vector<SequencePart> back() const { return {{&routing.rev_q, {q}}}; }
  [[nodiscard]] std::vector<SequencePart> gradient() const { return {{&routing.fwd_kv, {kv, kv}}}; }

  /// Whether sums of K and V can be checked: a floating type in which they are exact.
  [[nodiscard]] bool has_gradient() const { return number_span > 0; }

  /// The operations, with their bytes, when rank r lies on GPU r modulo `gpus`.
  [[nodiscard]] std::vector<GpuSelfTestStep> steps(int gpus) const;

  /// [rows]: a rank's own rows.
  [[nodiscard]] static std::vector<std::int64_t> home_places(std::int32_t rank, std::int64_t rows);

  const QkvRouting& routing;
  TensorFormat q;
  TensorFormat kv;
  GpuSelfTestOptions options;
  std::vector<std::vector<std::int64_t>> q_places;   ///< [W][window rows]
  std::vector<std::vector<std::int64_t>> kv_places;  ///< [W][window rows]
  std::vector<std::vector<std::int32_t>> copies;     ///< [W][own rows of K and V]
  std::vector<std::uint64_t> byte_codes;             ///< [256]: 0..255 themselves
  std::vector<std::uint64_t> codes;                  ///< [257]: 0..256 in the dtype of K and V
  std::uint32_t number_span = 0;                     ///< gradients are 1..span; 0: none
};

}  // namespace waybill::cuda
