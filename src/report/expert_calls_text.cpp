#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/report/expert_summary.h"

namespace waybill {
namespace {

using detail::pad_left;
using detail::pad_right;

/// Most tokens of a rank in a layer that sends rows without waiting for counts.
constexpr std::int64_t few_tokens = 128;

const char* label_of(ExpertCallKind kind) {
  constexpr const char* labels[] = {"dispatch, grouped",     "dispatch, known routing",
                                    "combine, compact rows", "combine with local sums",
                                    "combine, grouped rows", "dispatch, low latency",
                                    "combine, low latency"};
  return labels[static_cast<std::size_t>(kind)];
}

bool is_low_latency(ExpertCallKind kind) {
  return kind == ExpertCallKind::low_latency_dispatch ||
         kind == ExpertCallKind::low_latency_combine;
}

bool is_combine(ExpertCallKind kind) {
  return kind == ExpertCallKind::compact_combine || kind == ExpertCallKind::summed_combine ||
         kind == ExpertCallKind::grouped_combine;
}

std::string line_of(const std::string& label, const ExpertCallPrediction& call) {
  const auto cell = [](double seconds) {
    return pad_left(seconds > 0 ? format_seconds(seconds) : "-", 9);
  };
  return concat("  ", pad_right(label, 24), cell(call.seconds), cell(call.begin_seconds),
                cell(call.network_seconds), cell(call.nvlink_seconds), cell(call.block_seconds),
                cell(call.end_seconds), "\n");
}

std::string basis(const EPConfig& config, const ExpertCostOptions& options, bool low_latency) {
  std::string text =
      concat("Predicted for ", format_plural(options.costs.num_sms, "multiprocessor"),
             ", nothing was run. Rows on the network, on NVLink and through multiprocessors move "
             "side by side: a call takes what is before them, the longest of the three, and what "
             "is behind");
  if (config.num_nodes() == 1) {
    return text +
           ". Combines pull, or push (combine=\"push\"): then rows move at the speed of "
           "stores, and sums need no kernel before; derived from bytes, not measured over "
           "links.";
  }
  text += concat(". Between nodes ", to_string(options.costs.path),
                 options.costs.path == ExpertPath::waiting
                     ? " puts: a block awaits each before the next"
                     : " puts: many are in flight, rows are forwarded piece by piece, and rows to "
                       "other nodes do not wait for counting and adding",
                 "; a message takes ", format_seconds(options.step.network_message_seconds),
                 " (nominal)");
  if (low_latency)
    text += ". Low latency goes straight to the final ranks, which is not done over network cards";
  return text + ".";
}

}  // namespace

std::string expert_calls_text(const EPConfig& config, const EPDispatchOptions& dispatch,
                              std::span<const std::vector<std::int32_t>> ids,
                              const ExpertCostOptions& options, const TextStyle& style) {
  std::string text = detail::heading(
      "  call                        total   before  network   NVLink      SMs   behind", style);
  const bool low_latency = config.max_tokens <= few_tokens;
  ExpertCostOptions push = options;
  push.push_combine = true;
  const auto calls = predict_experts(config, dispatch, ids, options);
  const auto pushed = predict_experts(config, dispatch, ids, push);
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const ExpertCallKind kind = calls[i].kind;
    if (!low_latency && is_low_latency(kind)) continue;
    text += line_of(label_of(kind), calls[i]);
    if (is_combine(kind) && config.num_nodes() == 1) text += line_of("  pushed", pushed[i]);
  }
  return text + detail::wrapped(basis(config, options, low_latency), style);
}

}  // namespace waybill
