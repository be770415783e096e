#include <algorithm>
#include <functional>
#include <numeric>

#include "core/printable.h"
#include "figures.h"
#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/report/step_report.h"

namespace waybill {
namespace {

constexpr std::size_t label_width = 20;
constexpr std::size_t column_width = 15;

std::string left(std::string text, std::size_t width) {
  text.resize(std::max(text.size(), width), ' ');
  return text;
}

std::string right(const std::string& text, std::size_t width) {
  return std::string(text.size() < width ? width - text.size() : 0, ' ') + text;
}

/// A line of the table: a label, and a cell for each prediction.
std::string row(std::string label, std::span<const NamedStep> steps,
                const std::function<std::string(const NamedStep&)>& cell) {
  std::string text = "  " + left(std::move(label), label_width);
  for (const NamedStep& step : steps) text += right(cell(step), column_width);
  return text + "\n";
}

double imbalance(const std::vector<std::int64_t>& work) {
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  if (sum <= 0) return 1;
  return static_cast<double>(*std::max_element(work.begin(), work.end())) /
         (sum / static_cast<double>(work.size()));
}

std::int64_t most_bytes(const NamedStep& named, std::int64_t (LinkBytes::*side)() const) {
  std::int64_t most = 0;
  for (const LinkBytes& link : named.step.phase(StepPhase::dispatch).links)
    most = std::max(most, (link.*side)());
  return most;
}

std::int64_t mean_bytes(const NamedStep& named) {
  std::int64_t sum = 0;
  for (const LinkBytes& link : named.step.phase(StepPhase::dispatch).links) sum += link.in();
  return sum / named.step.world_size;
}

std::string amount_text(const StepCause& cause) {
  return cause.resource == StepResource::compute
             ? format_si(static_cast<double>(cause.amount)) + " pairs"
             : format_bytes(cause.amount);
}

std::string when(double seconds) { return seconds > 0 ? format_seconds(seconds) : "0"; }

std::string document_text(const StepCause& cause) {
  if (cause.document < 0 || cause.amount == 0) return "";
  return concat("document ", cause.document, ", ", detail::document_percent(cause));
}

}  // namespace

std::string step_table(std::span<const NamedStep> steps) {
  std::string text = row("", steps, [](const NamedStep& s) { return printable_line(s.name); });
  text += row("shards", steps, [](const NamedStep& s) { return format_count(s.num_shards); });
  text += row("work, max / mean", steps,
              [](const NamedStep& s) { return format_fixed(imbalance(s.step.work), 3); });
  text +=
      row("bytes in, mean", steps, [](const NamedStep& s) { return format_bytes(mean_bytes(s)); });
  text += row("bytes in, max", steps,
              [](const NamedStep& s) { return format_bytes(most_bytes(s, &LinkBytes::in)); });
  text += row("bytes out, max", steps,
              [](const NamedStep& s) { return format_bytes(most_bytes(s, &LinkBytes::out)); });
  for (int i = 0; i < num_step_phases; ++i) {
    text += row(std::string(to_string(static_cast<StepPhase>(i))), steps,
                [&](const NamedStep& s) { return format_seconds(s.step.path[i].seconds); });
  }
  text += row("forward", steps,
              [](const NamedStep& s) { return format_seconds(s.step.forward_seconds); });
  text += row("step", steps, [](const NamedStep& s) { return format_seconds(s.step.seconds); });
  return text;
}

std::string phase_table(const StepPrediction& step) {
  std::string text = concat("  ", left("phase", 20), right("time", 9), "  ", left("rank", 6),
                            left("busy", 12), right("with", 14), "  mostly\n");
  for (const StepCause& cause : step.path) {
    const bool idle = cause.resource == StepResource::nothing;
    text +=
        concat("  ", left(std::string(to_string(cause.phase)), 20),
               right(format_seconds(cause.seconds), 9), "  ", left(std::to_string(cause.rank), 6),
               left(std::string(to_string(cause.resource)), 12),
               right(idle ? "" : amount_text(cause), 14), "  ", document_text(cause), "\n");
  }
  return text + concat("  ", left("step", 20), right(format_seconds(step.seconds), 9), "\n");
}

std::string rank_table(const StepPrediction& step, std::int32_t rank) {
  require(0 <= rank && rank < step.world_size, "rank_table: rank = ", rank, ", expected 0..",
          step.world_size - 1);
  std::string text =
      concat("  ", left(concat("rank ", rank), 20), right("begins", 11), right("ends", 11),
             right("alone", 11), right("in", 11), right("out", 11), "  waits for\n");
  for (const PhasePrediction& phase : step.phases) {
    const bool moves = moves_rows(phase.phase);
    const LinkBytes link = moves ? phase.links[rank] : LinkBytes{};
    const std::int32_t other = phase.waits_for[rank];
    text += concat("  ", left(std::string(to_string(phase.phase)), 20),
                   right(when(phase.begin[rank]), 11), right(format_seconds(phase.end[rank]), 11),
                   right(format_seconds(phase.seconds[rank]), 11),
                   right(moves ? format_bytes(link.in()) : "", 11),
                   right(moves ? format_bytes(link.out()) : "", 11), "  ",
                   other == rank ? "nobody" : concat("rank ", other), "\n");
  }
  return text;
}

}  // namespace waybill
