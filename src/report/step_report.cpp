#include <algorithm>
#include <numeric>

#include "figures.h"
#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/report/step_report.h"

namespace waybill {
namespace {

constexpr double worth_saying = 0.01;  // of the step

std::string percent(double part, double whole) {
  return format_fixed(whole > 0 ? 100 * part / whole : 0, 0) + "%";
}

std::string cause_text(const StepCause& cause) {
  if (cause.resource == StepResource::nothing)
    return concat("rank ", cause.rank, ", which has nothing to do in it");
  std::string text =
      cause.resource == StepResource::compute
          ? concat("rank ", cause.rank, " with ", format_si(static_cast<double>(cause.amount)),
                   " (query, key) pairs")
          : concat(format_bytes(cause.amount), " ", to_string(cause.resource), " at rank ",
                   cause.rank);
  if (cause.document >= 0) {
    text += concat(", ", detail::document_percent(cause), " of it because of document ",
                   cause.document);
  }
  return text;
}

std::string bottleneck_sentence(const StepPrediction& step) {
  const StepCause& cause = step.bottleneck();
  return concat("The longest part, ", format_seconds(cause.seconds), " (",
                percent(cause.seconds, step.seconds), "), is \"", to_string(cause.phase),
                "\": ", cause_text(cause), ".");
}

std::string transfer_sentence(const StepPrediction& step) {
  double moving = 0;
  const StepCause* longest = nullptr;
  for (const StepCause& cause : step.path) {
    if (!moves_rows(cause.phase)) continue;
    moving += cause.seconds;
    if (longest == nullptr || cause.seconds > longest->seconds) longest = &cause;
  }
  std::string text = concat("Moving rows takes ", format_seconds(moving), " of it (",
                            percent(moving, step.seconds), ")");
  if (longest == nullptr || longest->resource == StepResource::nothing) return text + ".";
  return concat(text, "; the longest of these phases, ", format_seconds(longest->seconds),
                ", is \"", to_string(longest->phase), "\": ", cause_text(*longest), ".");
}

std::string work_sentence(const StepPrediction& step) {
  const auto most = std::max_element(step.work.begin(), step.work.end());
  const double mean = std::accumulate(step.work.begin(), step.work.end(), 0.0) /
                      static_cast<double>(step.work.size());
  const double factor = mean > 0 ? static_cast<double>(*most) / mean : 1;
  return concat("Attention work is ", factor <= 1.05 ? "even" : "uneven", ": rank ",
                most - step.work.begin(), " has the most, ", format_fixed(factor, 3),
                " times the mean.");
}

std::string remedy_text(const Remedy& remedy) {
  switch (remedy.kind) {
    case RemedyKind::relay:
      return "Forwarding K and V as the relay schedule says";
    case RemedyKind::once_per_node:
      return "Sending K and V over the network once per node";
    case RemedyKind::even_work:
      return "Perfectly even work";
    case RemedyKind::double_nvlink:
      return "Twice the NVLink speed";
    case RemedyKind::double_network:
      return "Twice the network speed";
    case RemedyKind::double_compute:
      return "Twice the attention speed";
  }
  return "?";
}

void add_remedies(const StepPrediction& step, std::span<const Remedy> remedies,
                  std::vector<std::string>& sentences) {
  std::string useless;
  for (const Remedy& remedy : remedies) {
    const double saved = step.seconds - remedy.seconds;
    if (saved < worth_saying * step.seconds) {
      std::string text = remedy_text(remedy);
      text[0] = static_cast<char>(text[0] | 0x20);  // ASCII letters
      useless += (useless.empty() ? "" : "; ") + text;
      continue;
    }
    sentences.push_back(concat(remedy_text(remedy), " would save ", format_seconds(saved), " (",
                               percent(saved, step.seconds), "): a step of ",
                               format_seconds(remedy.seconds), "."));
  }
  if (!useless.empty())
    sentences.push_back("Each of these would save less than 1%: " + useless + ".");
}

}  // namespace

std::string detail::document_percent(const StepCause& cause) {
  return percent(static_cast<double>(cause.document_amount), static_cast<double>(cause.amount));
}

std::vector<std::string> explain_step(const StepPrediction& step,
                                      std::span<const Remedy> remedies) {
  std::vector<std::string> sentences;
  const double backward = step.seconds - step.forward_seconds;
  sentences.push_back(concat("The step takes ", format_seconds(step.seconds), " on ",
                             format_plural(step.world_size, "rank"), ", ",
                             format_count(step.options.hardware.ranks_per_node),
                             " per node: forward ", format_seconds(step.forward_seconds),
                             ", backward ", format_seconds(backward), "."));
  sentences.push_back(bottleneck_sentence(step));
  sentences.push_back(transfer_sentence(step));
  sentences.push_back(work_sentence(step));
  add_remedies(step, remedies, sentences);
  return sentences;
}

}  // namespace waybill
