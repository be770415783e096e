#include "agreement.h"

#include <initializer_list>
#include <utility>

#include "core/hash.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

std::uint8_t flags_of(std::initializer_list<std::pair<CallFlag, bool>> flags) {
  int bits = 0;
  for (const auto& [flag, is_set] : flags) {
    if (is_set) bits |= static_cast<int>(flag);
  }
  return static_cast<std::uint8_t>(bits);
}

std::uint8_t flags_of(const ExpertDispatchInput& input, bool counts) {
  return flags_of({{CallFlag::weights, is_given(input.weights)},
                   {CallFlag::scatter_indices, counts && is_given(input.full_scatter_indices)},
                   {CallFlag::needs_gradients, input.needs_gradients},
                   {CallFlag::weights_need_gradients, input.weights_need_gradients},
                   {CallFlag::backward, input.of_backward}});
}

}  // namespace

std::vector<Setting> layer_settings(const EPConfig& config, const EPDispatchOptions& options) {
  return {{"max_tokens", concat(config.max_tokens)},
          {"hidden", concat(config.hidden)},
          {"topk", concat(config.topk)},
          {"num_experts", concat(config.num_experts)},
          {"world_size", concat(config.world_size)},
          {"local_world_size", concat(config.local_world_size)},
          {"token_dtype", concat(config.token_dtype)},
          {"weight_dtype", concat(config.weight_dtype)},
          {"dropped_id", concat(options.dropped(config))},
          {"rows", std::string(name_of(options.rows))},
          {"expert_alignment", concat(options.expert_alignment)},
          {"payload", std::string(name_of(options.payload))}};
}

CallFingerprint layer_fingerprint(const EPConfig& config, const EPDispatchOptions& options,
                                  std::int64_t capacity_rows) {
  CallFingerprint fingerprint;
  fingerprint.formats = Hash()
                            .add(config.hidden)
                            .add(config.topk)
                            .add(static_cast<std::int32_t>(config.token_dtype))
                            .add(static_cast<std::int32_t>(config.weight_dtype))
                            .add(static_cast<std::int32_t>(options.payload))
                            .value();
  fingerprint.options = Hash()
                            .add(config.max_tokens)
                            .add(config.num_experts)
                            .add(config.world_size)
                            .add(config.local_world_size)
                            .add(options.dropped(config))
                            .add(static_cast<std::int32_t>(options.rows))
                            .add(options.expert_alignment)
                            .add(capacity_rows)
                            .value();
  return fingerprint;
}

CallFingerprint counting_fingerprint(CallFingerprint layer, const ExpertDispatchInput& input) {
  layer.call = CollectiveCall::expert_dispatch;
  layer.flags = flags_of(input, true);
  layer.origin = input.origin;
  return layer;
}

CallFingerprint known_fingerprint(CallFingerprint layer, const ExpertDispatchInput& input,
                                  std::uint32_t routing) {
  layer.call = CollectiveCall::expert_known_routing;
  layer.flags = flags_of(input, false);
  layer.origin = routing;
  return layer;
}

CallFingerprint combine_fingerprint(CallFingerprint layer, const ExpertCombineInput& input,
                                    std::uint32_t number) {
  layer.call = CollectiveCall::combine;
  layer.flags = flags_of({{CallFlag::weighted, input.options.weighted},
                          {CallFlag::local_combine, input.options.local_combine},
                          {CallFlag::needs_gradients, input.needs_gradients},
                          {CallFlag::backward, input.of_backward}});
  layer.origin = number;
  return layer;
}

}  // namespace waybill::detail
