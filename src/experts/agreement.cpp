#include "agreement.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>

#include "core/hash.h"
#include "moe/option_names.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

/// The shortest text that no other number has.
std::string exactly(double value) {
  char text[32];
  return {text, std::to_chars(std::begin(text), std::end(text), value).ptr};
}

/// The one list: calls visit(name, value as text, whether it is part of the tensors' format).
template <class Visit>
void visit_fields(const EPConfig& config, const EPLayerOptions& options, Visit&& visit) {
  const EPDispatchOptions& dispatch = options.dispatch;
  constexpr bool format = true;
  constexpr bool option = false;
  visit("max_tokens", concat(config.max_tokens), option);
  visit("hidden", concat(config.hidden), format);
  visit("topk", concat(config.topk), format);
  visit("num_experts", concat(config.num_experts), option);
  visit("world_size", concat(config.world_size), option);
  visit("local_world_size", concat(config.local_world_size), option);
  visit("token_dtype", concat(config.token_dtype), format);
  visit("weight_dtype", concat(config.weight_dtype), format);
  visit("dropped_id", concat(dispatch.dropped(config)), option);
  visit("rows", std::string(name_of(dispatch.rows)), option);
  visit("expert_alignment", concat(dispatch.expert_alignment), option);
  visit("payload", dispatch.payload.name(), format);
  visit("spare_experts", concat(dispatch.spare_experts), option);
  visit("limit", exactly(dispatch.limit), option);
  visit("min_rows", concat(dispatch.min_rows), option);
  visit("enable_local_combine", std::string(options.enable_local_combine ? "true" : "false"),
        option);
  visit("fixed_rows", concat(options.fixed_rows), option);
  visit("max_per_expert", concat(options.max_per_expert), option);
  visit("capacity", concat(options.capacity_factor), option);
}

std::uint8_t flags_of(std::initializer_list<std::pair<CallFlag, bool>> flags) {
  int bits = 0;
  for (const auto& [flag, is_set] : flags) {
    if (is_set) bits |= static_cast<int>(flag);
  }
  return static_cast<std::uint8_t>(bits);
}

}  // namespace

std::vector<Setting> layer_settings(const EPConfig& config, const EPLayerOptions& options) {
  std::vector<Setting> settings;
  visit_fields(config, options, [&](const char* name, std::string value, bool /*is_format*/) {
    settings.push_back({name, std::move(value)});
  });
  return settings;
}

CallFingerprint layer_fingerprint(const EPConfig& config, const EPLayerOptions& options) {
  Hash formats;
  Hash others;
  visit_fields(config, options,
               [&](const char* /*name*/, const std::string& value, bool is_format) {
                 Hash& hash = is_format ? formats : others;
                 for (const char letter : value) hash.add(std::int32_t{letter});
                 hash.add(std::int32_t{0});
               });
  return {.formats = formats.value(), .options = others.value()};
}

CallFingerprint dispatch_fingerprint(CallFingerprint layer, const ExpertDispatchInput& input,
                                     std::optional<std::uint32_t> routing, std::uint32_t present) {
  layer.call = routing ? CollectiveCall::expert_known_routing : CollectiveCall::expert_dispatch;
  layer.flags =
      flags_of({{CallFlag::weights, is_given(input.weights)},
                {CallFlag::scatter_indices, !routing && is_given(input.full_scatter_indices)},
                {CallFlag::needs_gradients, input.needs_gradients},
                {CallFlag::weights_need_gradients, input.weights_need_gradients},
                {CallFlag::backward, input.of_backward}});
  layer.origin = routing.value_or(input.origin);
  layer.plan = std::uint64_t{present} << fingerprint_tag_bits;
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

namespace {

// An answer: the number of the combine in the upper half; below it the answers for that combine and
// the ones before, as the rank that answers may have queued later combines already.
constexpr int number_shift = 32;
constexpr std::uint64_t max_later_combines = 31;

}  // namespace

LayerSignals::LayerSignals(Transport& transport, const EPConfig& config)
    : transport_(transport),
      config_(config),
      signals_(transport.allocate_signals(std::int64_t{3} * config.world_size,
                                          "signals between calls of experts")) {}

LayerSignals::~LayerSignals() { transport_.defer_release(std::move(signals_.memory)); }

void LayerSignals::barrier(ExpertExecutor& executor, const Stream& stream, bool intra_node_only) {
  const bool of_world = !intra_node_only && !config_.is_intra_node();
  executor.barrier(signals_, of_world, of_world ? ++world_barriers_ : ++node_barriers_, stream);
}

bool LayerSignals::needs_gradients(std::span<const std::int32_t> counts, std::uint64_t number,
                                   bool mine, bool asks) {
  if (std::ranges::find(counts, 0) == counts.end()) return mine;
  const auto with_rows = std::ranges::find_if(counts, [](std::int32_t rows) { return rows > 0; });
  const auto first =
      with_rows == counts.end() ? 0 : static_cast<std::int32_t>(with_rows - counts.begin());
  const bool reaches_all = std::ranges::none_of(
      signals_.memory, [](const auto& part) { return part == nullptr; });  // same on all ranks
  if (!reaches_all) {
    const bool answer = exchange(config_.rank == first && mine);
    return counts[config_.rank] > 0 ? mine : asks && answer;
  }
  if (config_.rank == first) {
    answer(counts, number, mine);
    return mine;
  }
  if (counts[config_.rank] > 0) return mine;
  return asks && ask(first, number);
}

void LayerSignals::answer(std::span<const std::int32_t> counts, std::uint64_t number, bool mine) {
  const std::uint64_t since = number - answered_;
  answers_ = since > max_later_combines ? 0 : answers_ << since;
  answers_ = (answers_ & ~1U) | (mine ? 1U : 0U);  // the same number again: it was refused
  answered_ = number;
  const SignalSlot slot{&signals_, std::int64_t{2} * config_.world_size + config_.rank};
  for (std::int32_t r = 0; r < config_.world_size; ++r) {
    if (r == config_.rank || counts[r] > 0) continue;
    transport_.signal(Rank{r}, slot, number << number_shift | answers_);
  }
}

bool LayerSignals::ask(std::int32_t rank, std::uint64_t number) {
  const SignalSlot slot{&signals_, std::int64_t{2} * config_.world_size + rank};
  const std::uint64_t seen = transport_.wait(slot, number << number_shift, Rank{rank}, "combine");
  const std::uint64_t later = (seen >> number_shift) - number;
  if (later > max_later_combines) {
    throw Unsupported(concat(
        "combine: rank ", rank, " is ", later, " combines ahead, expected at most ",
        max_later_combines, ", as this one received no rows and asks whether they need gradients"));
  }
  return (seen >> later & 1U) != 0;
}

/// Whether any rank says so: an exchange between the hosts of all ranks.
bool LayerSignals::exchange(bool mine) {
  const Setting says[] = {{"needs_gradients", mine ? "true" : "false"}};
  try {
    transport_.require_same("combine", says);
    return mine;
  } catch (const InvalidArgument&) {  // they differ
    return true;
  }
}

void LayerSignals::release() {
  if (signals_.local != nullptr) transport_.release(signals_);
}

}  // namespace waybill::detail
