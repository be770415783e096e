#include "waybill/cost_model/remedies.h"

#include <algorithm>
#include <array>

#include "predictor_memory.h"

namespace waybill {

std::string_view to_string(RemedyKind kind) {
  static constexpr std::array<std::string_view, 6> names = {
      "relay", "once_per_node", "even_work", "double_nvlink", "double_network", "double_compute"};
  return names[static_cast<std::size_t>(kind)];
}

std::vector<Remedy> step_remedies(const StepPredictor& predictor, const StepPrediction& step) {
  std::vector<Remedy> remedies;
  const auto add = [&](RemedyKind kind, const StepOptions& options) {
    remedies.push_back({kind, predictor.predict(options).seconds});
  };
  const bool several_nodes = step.world_size > step.options.hardware.ranks_per_node;
  StepOptions options = step.options;
  if (predictor.has_relay() && options.transfer != TransferMode::relay) {
    options.transfer = TransferMode::relay;
    add(RemedyKind::relay, options);
  }
  if (several_nodes && step.options.transfer == TransferMode::direct) {
    options.transfer = TransferMode::once_per_node;
    add(RemedyKind::once_per_node, options);
  }
  options = step.options;
  options.hardware.nvlink_bytes_per_second *= 2;
  add(RemedyKind::double_nvlink, options);
  if (several_nodes) {
    options = step.options;
    options.hardware.network_bytes_per_second *= 2;
    add(RemedyKind::double_network, options);
  }
  options = step.options;
  options.hardware.pairs_per_second *= 2;
  options.costs.forward_flops_per_second *= 2;
  options.costs.backward_flops_per_second *= 2;
  add(RemedyKind::double_compute, options);
  remedies.push_back({RemedyKind::even_work, predictor.predict_even(step.options).seconds});
  std::stable_sort(remedies.begin(), remedies.end(),
                   [](const Remedy& a, const Remedy& b) { return a.seconds < b.seconds; });
  return remedies;
}

}  // namespace waybill
