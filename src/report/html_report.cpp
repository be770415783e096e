#include "waybill/report/html_report.h"

#include <algorithm>

#include "core/checks.h"
#include "html_parts.h"
#include "report/format.h"
#include "report/plan_figures.h"
#include "waybill/core/error.h"
#include "waybill/report/plan_summary.h"

namespace waybill {
namespace {

using detail::card;
using detail::html_escape;

std::string_view css_class(CheckState state) {
  constexpr std::string_view names[] = {"passed", "failed", "not_run"};
  return names[static_cast<std::size_t>(state)];
}

std::string_view mark(CheckState state) {
  constexpr std::string_view marks[] = {"\u2713", "\u2717", "\u2013"};
  return marks[static_cast<std::size_t>(state)];
}

std::string badge(const std::vector<ReportCheck>& checks) {
  const auto count = [&](CheckState state) {
    return std::count_if(checks.begin(), checks.end(),
                         [&](const ReportCheck& check) { return check.state == state; });
  };
  const auto failed = count(CheckState::failed);
  const auto passed = count(CheckState::passed);
  CheckState state = CheckState::not_run;
  std::string text = "not checked";
  if (failed > 0) {
    state = CheckState::failed;
    text = format_plural(failed, "check") + " failed";
  } else if (passed > 0 && passed == std::ssize(checks)) {
    state = CheckState::passed;
    text = concat("all ", format_plural(passed, "check"), " passed");
  } else if (passed > 0) {
    text = concat(passed, " of ", std::ssize(checks), " checks passed, the others did not run");
  }
  return concat("<span class=\"badge ", css_class(state), "\">", mark(state), " ", text, "</span>");
}

std::string cards(const PlanSummary& s, double gb_per_s) {
  const RankLimit taken = s.taken_limit();
  const bool in = taken.direction == Direction::in;
  std::string limit_remark =
      concat(in ? "into rank " : "out of rank ", taken.rank, s.relay_limit ? ", with relay" : "");
  if (gb_per_s > 0) {
    limit_remark += concat(", ", format_seconds(s.limit_seconds(gb_per_s)), " at ",
                           format_si(gb_per_s * 1e9), "B/s");
  }
  std::int64_t buffer_bytes = 0;
  for (const RankFigures& rank : s.ranks) buffer_bytes = std::max(buffer_bytes, rank.buffer_bytes);
  return "<dl class=\"cards\">\n" + card("Busiest rank", format_bytes(taken.bytes), limit_remark) +
         card("On the wire", format_bytes(s.wire_bytes),
              concat(s.relay_limit ? "without relay: " : "",
                     format_bytes(s.q.rows_in * s.row_bytes.q), " Q, ",
                     format_bytes(s.kv.rows_in * s.row_bytes.kv), " KV")) +
         card("Work", format_fixed(s.rank_work.imbalance(), 3) + " \u00D7",
              concat("largest over mean, rank ", s.rank_work.max_rank)) +
         card("KV copies", format_fixed(s.kv_copies, 2) + " \u00D7",
              concat("stored ", to_string(s.kv_layout))) +
         card("Largest buffers", format_bytes(buffer_bytes), "Q, K and V of one rank") +
         card("Shards", format_count(s.num_shards),
              concat("at most ", format_count(s.longest_shard), " tokens")) +
         "</dl>\n";
}

std::string header(const PlanSummary& s, const ReportContext& context) {
  return concat(
      "<header><div class=\"row\"><h1>", html_escape(context.title), "</h1>", badge(context.checks),
      "</div>\n<p class=\"sub\">", format_plural(s.world_size, "rank"), " \u00B7 ",
      format_plural(s.num_tokens, "token"), " \u00B7 ", format_plural(s.num_documents, "document"),
      " (longest ", format_count(s.longest_document), ", median ", format_count(s.median_document),
      ") \u00B7 a row is ", format_bytes(s.row_bytes.q), " of Q and ", format_bytes(s.row_bytes.kv),
      " of K and V</p>\n", cards(s, context.gb_per_s), "</header>\n");
}

std::string checks_section(const std::vector<ReportCheck>& checks) {
  std::string text = "<section><h2>Checks</h2>\n<ul class=\"checks\">\n";
  for (const ReportCheck& check : checks) {
    text += concat("<li><b class=\"", css_class(check.state), "\">", mark(check.state),
                   "</b><span><b>", html_escape(check.name), "</b>",
                   check.state == CheckState::not_run ? " (not run)" : "", "<small>",
                   html_escape(check.detail), "</small></span></li>\n");
  }
  if (checks.empty()) text += "<li><span></span><span>None were run.</span></li>\n";
  return text + "</ul></section>\n";
}

}  // namespace

namespace detail {

std::string meaning_section(const std::vector<std::string>& sentences) {
  std::string text = "<section><h2>What it means</h2>\n<ul>\n";
  for (const std::string& sentence : sentences)
    text += concat("<li>", html_escape(sentence), "</li>\n");
  return text + "</ul></section>\n";
}

std::string input_section(const ReportContext& context) {
  std::string text = "<section><h2>Input</h2>\n<dl class=\"facts\">\n";
  for (const ReportFact& fact : context.inputs) {
    text +=
        concat("<dt>", html_escape(fact.label), "</dt><dd>", html_escape(fact.value), "</dd>\n");
  }
  text += "</dl>\n";
  if (!context.command.empty()) text += concat("<pre>", html_escape(context.command), "</pre>\n");
  return text + "</section>\n";
}

std::string page_of(const std::string& title, const std::string& sections) {
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>",
      html_escape(title), "</title>\n<style>", html_style(), "</style>\n</head>\n<body>\n<main>\n",
      sections,
      "<footer>Made by waybill. This page stands alone: no scripts, nothing from a network."
      "</footer>\n</main>\n</body>\n</html>\n");
}

}  // namespace detail

std::string html_report(const QkvPlan& plan, const QkvRouting& routing, const PlanSummary& summary,
                        const ReportContext& context) {
  detail::check_belongs(plan, routing, summary.row_bytes, "html_report");
  detail::check_not_negative("html_report", "gb_per_s", context.gb_per_s);
  std::string page = header(summary, context);
  page += "<div class=\"two\">\n";
  page += detail::meaning_section(explain(plan, routing, summary, context.gb_per_s));
  page += checks_section(context.checks);
  page += "</div>\n";
  page += detail::loads_section(summary);
  page += detail::timeline_section(context.steps);
  page += detail::matrix_section(summary);
  page += detail::documents_section(plan, context.max_documents);
  page += detail::input_section(context);
  page += detail::table_section(summary);
  return detail::page_of(context.title, page);
}

}  // namespace waybill
