#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "experts/expert_executor.h"
#include "experts/expert_memory.h"
#include "moe_workload.h"
#include "waybill/runtime/world.h"

namespace waybill::bench {

/// One rank's layer and its inputs on its GPU. Collective.
class MoeRank {
 public:
  MoeRank(World& world, const MoeWorkload& workload, const EPDispatchOptions& options);
  MoeRank(const MoeRank&) = delete;
  MoeRank& operator=(const MoeRank&) = delete;
  ~MoeRank();

  void use_sms(int num_sms) { num_sms_ = num_sms; }

  /// Counts and places only.
  void route();
  /// The whole dispatch, its tables kept for the next two.
  void dispatch();
  /// With the tables of the last dispatch().
  void dispatch_again();
  /// Of rows that are in the window already.
  void combine() { combine({}, true); }
  /// @param staged the rows are in the window; else they are copied there
  void combine(const EPCombineOptions& options, bool staged);

  /// Compares some rows, or sums, with what they should be. @throws InternalError
  void check_rows();
  /// The same of rows of bfloat16 that were quantised on the way.
  void check_quantized_rows();
  /// @param local each rank's part of a sum was rounded
  void check_sums(bool local = false);

  void synchronize() { world_.executor().synchronize({stream_}); }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  void* memory(std::int64_t bytes);
  ExpertCall next_call(const char* operation, std::uint64_t number);
  [[nodiscard]] std::int64_t row_bytes() const;
  /// What a combine of the rows in the windows gives.
  [[nodiscard]] std::vector<float> sum_of(std::int64_t token, const std::vector<std::int32_t>& rows,
                                          bool local) const;

  World& world_;
  const MoeWorkload& workload_;
  EPConfig config_;
  EPDispatchOptions options_;
  int num_sms_ = 16;
  cudaStream_t stream_ = nullptr;
  Stream as_stream_;
  std::vector<void*> allocated_;
  ExpertMemory memory_;
  std::unique_ptr<ExpertExecutor> executor_;
  ExpertDispatchInput input_;
  TensorView outputs_;  ///< what experts could have made, as the combine windows hold it
  TensorView sums_;
  std::shared_ptr<const ExpertTables> tables_;
  std::uint64_t calls_ = 0;
  std::uint64_t dispatches_ = 0;
  std::uint64_t combines_ = 0;
};

}  // namespace waybill::bench
