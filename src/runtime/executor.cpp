#include "waybill/runtime/executor.h"

#include "waybill/core/error.h"

namespace waybill {

std::unique_ptr<ExpertExecutor> Executor::make_expert_executor(const EPConfig& /*config*/,
                                                               const EPDispatchOptions& /*options*/,
                                                               const ExpertMemory& /*memory*/) {
  throw Unsupported("make_expert_executor: this world has no layers of experts");
}

}  // namespace waybill
