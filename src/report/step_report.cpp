#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <utility>

#include "core/checks.h"
#include "core/printable.h"
#include "html_parts.h"
#include "report/format.h"
#include "waybill/core/error.h"
#include "waybill/report/html_report.h"

namespace waybill {
namespace {

using detail::pad_left;
using detail::pad_right;

constexpr std::size_t label_width = 20;
constexpr std::size_t column_width = 15;

double imbalance(const std::vector<std::int64_t>& work) {
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  if (sum <= 0) return 1;
  return static_cast<double>(*std::max_element(work.begin(), work.end())) /
         (sum / static_cast<double>(work.size()));
}

std::int64_t max_bytes(const NamedStep& named, std::int64_t (LinkBytes::*side)() const) {
  const std::vector<LinkBytes>& links = named.step.phase(StepPhase::dispatch).links;
  return std::invoke(side, std::ranges::max(links, {}, side));
}

std::int64_t mean_bytes(const NamedStep& named) {
  std::int64_t sum = 0;
  for (const LinkBytes& link : named.step.phase(StepPhase::dispatch).links) sum += link.in();
  return sum / named.step.world_size;
}

std::string percent(double part, double whole) {
  return format_fixed(whole > 0 ? 100 * part / whole : 0, 0) + "%";
}

/// The share of a cause's document in the amount, such as "66%".
std::string document_percent(const StepCause& cause) {
  return percent(static_cast<double>(cause.document_amount), static_cast<double>(cause.amount));
}

std::string amount_text(const StepCause& cause) {
  return cause.resource == StepResource::compute
             ? format_si(static_cast<double>(cause.amount)) + " pairs"
             : format_bytes(cause.amount);
}

std::string document_text(const StepCause& cause) {
  if (cause.document < 0 || cause.amount == 0) return "";
  return concat("document ", cause.document, ", ", document_percent(cause));
}

}  // namespace

namespace detail {

std::vector<std::pair<std::string, std::vector<std::string>>> step_figures(
    std::span<const NamedStep> steps) {
  std::vector<std::pair<std::string, std::vector<std::string>>> figures;
  const auto add = [&](std::string label, const auto& cell) {
    auto& cells = figures.emplace_back(std::move(label), std::vector<std::string>()).second;
    for (const NamedStep& step : steps) cells.push_back(cell(step));
  };
  if (std::ranges::any_of(steps, [](const NamedStep& s) { return s.degree > 0; })) {
    add("ranks of a group",
        [](const NamedStep& s) { return s.degree > 0 ? format_count(s.degree) : "-"; });
  }
  add("shards", [](const NamedStep& s) { return format_count(s.num_shards); });
  add("work, max / mean",
      [](const NamedStep& s) { return format_fixed(imbalance(s.step.work), 3); });
  add("bytes in, mean", [](const NamedStep& s) { return format_bytes(mean_bytes(s)); });
  add("bytes in, max",
      [](const NamedStep& s) { return format_bytes(max_bytes(s, &LinkBytes::in)); });
  add("bytes out, max",
      [](const NamedStep& s) { return format_bytes(max_bytes(s, &LinkBytes::out)); });
  for (int i = 0; i < num_step_phases; ++i) {
    add(std::string(to_string(static_cast<StepPhase>(i))),
        [&](const NamedStep& s) { return format_seconds(s.step.path[i].seconds); });
  }
  add("forward", [](const NamedStep& s) { return format_seconds(s.step.forward_seconds); });
  add("step", [](const NamedStep& s) { return format_seconds(s.step.seconds); });
  return figures;
}

}  // namespace detail

std::string step_table(std::span<const NamedStep> steps) {
  std::string text = "  " + pad_right("", label_width);
  for (const NamedStep& step : steps) text += pad_left(printable_line(step.name), column_width);
  text += "\n";
  for (const auto& [label, cells] : detail::step_figures(steps)) {
    text += "  " + pad_right(label, label_width);
    for (const std::string& cell : cells) text += pad_left(cell, column_width);
    text += "\n";
  }
  return text;
}

std::string_view meaning_of_step(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 7> meanings = {{
      {"zigzag",
       "static; the packed sequence of a group is cut into two chunks per rank, and rank i has the "
       "i-th and the i-th from the end. Keys and values are gathered."},
      {"per document", "static; the same cut of every document."},
      {"Ulysses",
       "heads are split over the ranks of a group instead of tokens; each attends to whole "
       "documents. Q, K, V, O and their gradients are exchanged by all-to-all; K and V are "
       "repeated where a group has more ranks than KV heads."},
      {"planner",
       "ContextParallelAttention: work is even, rows that stay are attended to while others "
       "travel, and ranks forward K and V where that is predicted to pay."},
      {"direct", "rows go straight to where they are attended to, without relay."},
      {"once per node", "K and V go to each node once, and are forwarded there."},
      {"relay", "receivers forward K and V by the plan's schedule."},
  }};
  const auto found = std::ranges::find(meanings, name, [](const auto& one) { return one.first; });
  return found == meanings.end() ? "" : found->second;
}

std::string phase_table(const StepPrediction& step) {
  std::string text =
      concat("  ", pad_right("phase", 20), pad_left("time", 9), "  ", pad_right("rank", 6),
             pad_right("busy", 12), pad_left("with", 14), "  mostly\n");
  for (const StepCause& cause : step.path) {
    const bool idle = cause.resource == StepResource::nothing;
    text += concat("  ", pad_right(std::string(to_string(cause.phase)), 20),
                   pad_left(format_seconds(cause.seconds), 9), "  ",
                   pad_right(std::to_string(cause.rank), 6),
                   pad_right(std::string(to_string(cause.resource)), 12),
                   pad_left(idle ? "" : amount_text(cause), 14), "  ", document_text(cause), "\n");
  }
  return text +
         concat("  ", pad_right("step", 20), pad_left(format_seconds(step.seconds), 9), "\n");
}

std::string rank_table(const StepPrediction& step, std::int32_t rank) {
  detail::check_range("rank_table", "rank", rank, 0, step.world_size - 1);
  std::string text = concat("  ", pad_right(concat("rank ", rank), 20), pad_left("begins", 11),
                            pad_left("ends", 11), pad_left("alone", 11), pad_left("in", 11),
                            pad_left("out", 11), "  waits for\n");
  for (const PhasePrediction& phase : step.phases) {
    const bool moves = moves_rows(phase.phase);
    const LinkBytes link = moves ? phase.links[rank] : LinkBytes{};
    const std::int32_t other = phase.waits_for[rank];
    text += concat("  ", pad_right(std::string(to_string(phase.phase)), 20),
                   pad_left(format_moment(phase.begin[rank]), 11),
                   pad_left(format_seconds(phase.end[rank]), 11),
                   pad_left(format_seconds(phase.seconds[rank]), 11),
                   pad_left(moves ? format_bytes(link.in()) : "", 11),
                   pad_left(moves ? format_bytes(link.out()) : "", 11), "  ",
                   other == rank ? "nobody" : concat("rank ", other), "\n");
  }
  return text;
}

namespace {

constexpr double worth_saying = 0.01;  // this part of the step

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
    text += concat(", ", document_percent(cause), " of it because of document ", cause.document);
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
  const double factor = imbalance(step.work);
  return concat("Attention work is ", factor <= 1.05 ? "even" : "uneven", ": rank ",
                std::ranges::max_element(step.work) - step.work.begin(), " has the most, ",
                format_fixed(factor, 3), " times the mean.");
}

std::string remedy_text(const Remedy& remedy) {
  constexpr std::string_view texts[] = {"Forwarding K and V as the relay schedule says",
                                        "Sending K and V over the network once per node",
                                        "Perfectly even work",
                                        "Twice the NVLink speed",
                                        "Twice the network speed",
                                        "Twice the attention speed",
                                        "Sending K and V without a relay"};
  return std::string(texts[static_cast<std::size_t>(remedy.kind)]);
}

void add_remedies(const StepPrediction& step, std::span<const Remedy> remedies,
                  std::vector<std::string>& sentences) {
  std::string useless;
  for (const Remedy& remedy : remedies) {
    const double saved = step.seconds - remedy.seconds;
    if (remedy.kind == RemedyKind::no_relay && saved < -worth_saying * step.seconds) {
      sentences.push_back(concat("Forwarding K and V saves ", format_seconds(-saved), " (",
                                 percent(-saved, remedy.seconds),
                                 "): without a relay, the step "
                                 "would take ",
                                 format_seconds(remedy.seconds), "."));
      continue;
    }
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

namespace {

/// `text` holds no control characters.
std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

std::string microseconds(double seconds) { return format_fixed(seconds * 1e6, 3); }

std::string name_event(std::string_view what, std::int64_t pid, std::int32_t rank,
                       std::string_view name) {
  return concat("{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", pid, ",\"tid\":", rank,
                ",\"args\":{\"name\":", json_string(name), "}}");
}

std::string phase_event(std::int64_t pid, std::int32_t rank, const PhasePrediction& phase) {
  std::string text =
      concat("{\"ph\":\"X\",\"cat\":", moves_rows(phase.phase) ? "\"transfer\"" : "\"kernel\"",
             ",\"name\":", json_string(to_string(phase.phase)), ",\"pid\":", pid, ",\"tid\":", rank,
             ",\"ts\":", microseconds(phase.begin[rank]),
             ",\"dur\":", microseconds(std::max(0.0, phase.end[rank] - phase.begin[rank])),
             ",\"args\":{\"alone_us\":", microseconds(phase.seconds[rank]));
  if (!phase.links.empty()) {
    const LinkBytes& links = phase.links[rank];
    text += concat(
        ",\"nvlink_in_bytes\":", links.nvlink_in, ",\"nvlink_out_bytes\":", links.nvlink_out,
        ",\"network_in_bytes\":", links.network_in, ",\"network_out_bytes\":", links.network_out);
  }
  return text + concat(",\"waits_for_rank\":", phase.waits_for[rank], "}}");
}

}  // namespace

std::string chrome_trace(std::span<const NamedStep> steps) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const auto add = [&](const std::string& event) {
    text += text.back() == '[' ? "\n" : ",\n";
    text += event;
  };
  std::int64_t first_pid = 0;
  for (const NamedStep& named : steps) {
    const StepPrediction& step = named.step;
    const std::int32_t ranks_per_node = step.options.hardware.ranks_per_node;
    for (std::int32_t rank = 0; rank < step.world_size; ++rank) {
      const std::int32_t node = rank / ranks_per_node;
      const std::int64_t pid = first_pid + node;
      if (rank % ranks_per_node == 0)
        add(name_event("process_name", pid, rank,
                       concat(printable_line(named.name), ", node ", node)));
      add(name_event("thread_name", pid, rank, concat("rank ", rank)));
      for (const PhasePrediction& phase : step.phases) add(phase_event(pid, rank, phase));
    }
    first_pid += (step.world_size + ranks_per_node - 1) / ranks_per_node;
  }
  return text + "\n]}\n";
}

}  // namespace waybill
