
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "waybill/core/error.h"
#include "waybill/core/random.h"
#include "waybill/planner/planner.h"
#include "waybill/report/html_report.h"

namespace waybill::test {
namespace {

using nlohmann::json;

AttentionPlan small_plan() {
  const std::vector<std::int64_t> lengths = {40000, 3000, 2000, 500, 9000, 700, 1, 4000};
  PlannerOptions options{.world_size = 6, .tokens_per_rank = 10000};
  options.hardware.ranks_per_node = 2;
  return plan_attention(lengths, options);
}

std::vector<NamedStep> small_steps() {
  const AttentionPlan plan = small_plan();
  return compare_transfers(StepPredictor(plan), StepOptions::of(plan), plan.plan.num_shards());
}

TEST(StepTable, HasALineAFigureAndAColumnAPrediction) {
  const std::vector<NamedStep> steps = small_steps();
  ASSERT_EQ(steps.size(), 3U);
  const std::string table = step_table(steps);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 6 + num_step_phases + 2);
  for (const char* part : {"direct", "once per node", "relay", "work, max / mean", "bytes out, max",
                           "dispatch Q K V", "return dK dV", "\n  step "})
    EXPECT_NE(table.find(part), std::string::npos) << part << "\n" << table;
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << line;
  EXPECT_LE(steps[2].step.seconds, steps[0].step.seconds);
}

TEST(PhaseTable, NamesRankLinkAndDocument) {
  const StepPrediction step = predict_step(small_plan());
  const std::string table = phase_table(step);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + num_step_phases + 1);
  EXPECT_NE(table.find("document 0, "), std::string::npos) << table;
  EXPECT_NE(table.find(" pairs"), std::string::npos) << table;
  const std::string rank = rank_table(step, 5);
  EXPECT_EQ(std::count(rank.begin(), rank.end(), '\n'), 1 + num_step_phases) << rank;
  EXPECT_NE(rank.find("rank 5"), std::string::npos);
  EXPECT_THROW((void)rank_table(step, 6), InvalidArgument);
}

TEST(ExplainStep, SaysWhatIsSlowAndWhatWouldHelp) {
  const AttentionPlan plan = small_plan();
  const StepPredictor predictor(plan);
  StepOptions options = StepOptions::of(plan);
  options.transfer = TransferMode::direct;
  options.hardware.network_bytes_per_second = 1e9;  // then the network is what hurts
  const StepPrediction step = predictor.predict(options);
  const auto sentences = explain_step(step, step_remedies(predictor, step));
  ASSERT_GE(sentences.size(), 6U);
  EXPECT_EQ(sentences[0].rfind("The step takes ", 0), 0U) << sentences[0];
  EXPECT_NE(sentences[0].find("6 ranks, 2 per node"), std::string::npos) << sentences[0];
  EXPECT_NE(sentences[1].find("network"), std::string::npos) << sentences[1];
  EXPECT_NE(sentences[1].find("because of document 0"), std::string::npos) << sentences[1];
  EXPECT_NE(sentences[2].find("Moving rows takes "), std::string::npos) << sentences[2];
  std::string all;
  for (const std::string& sentence : sentences) {
    EXPECT_EQ(sentence.back(), '.');
    EXPECT_EQ(sentence.find('\n'), std::string::npos);
    all += sentence;
  }
  EXPECT_NE(all.find("relay schedule says would save"), std::string::npos) << all;
  EXPECT_NE(all.find("Twice the network speed would save"), std::string::npos) << all;
  EXPECT_NE(all.find("less than 1%"), std::string::npos) << all;
}

/// The line of a table that begins with this label.
std::string line_of(const std::string& table, std::string_view label) {
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  " + std::string(label) + "  ")) return line;
  }
  ADD_FAILURE() << "no line " << label << " in\n" << table;
  return {};
}

/// What lies between two parts of a text.
std::string between(const std::string& text, std::string_view before, std::string_view after) {
  const std::size_t begin = text.find(before);
  const std::size_t end = text.find(after, begin + before.size());
  if (begin == text.npos || end == text.npos) {
    ADD_FAILURE() << before << " ... " << after << " is not in: " << text;
    return {};
  }
  return text.substr(begin + before.size(), end - begin - before.size());
}

/// A sentence about a phase names the time, the rank and the document's share of its line.
void expect_same(const std::string& sentence, const StepPrediction& step, std::string_view before,
                 std::string_view after) {
  const std::string phase = between(sentence, "is \"", "\": ");
  const std::string line = line_of(phase_table(step), phase);
  const std::string time = between(sentence, before, after);
  EXPECT_NE(line.find(" " + time + " "), line.npos) << sentence << "\n" << line;
  std::string rank = sentence.substr(sentence.find("rank ", sentence.find("\": ")) + 5);
  rank = rank.substr(0, rank.find_first_not_of("0123456789"));
  EXPECT_NE(line.find("  " + rank + "  "), line.npos) << sentence << "\n" << line;
  if (sentence.find("because of") == sentence.npos) return;
  const std::string share = between(sentence, ", ", "% of it because of");
  EXPECT_TRUE(line.ends_with(", " + share.substr(share.rfind(' ') + 1) + "%")) << sentence << "\n"
                                                                               << line;
}

TEST(ExplainStep, SaysWhatTheTablesSay) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    std::vector<std::int64_t> lengths = {20000 + random.below(80000)};
    for (int i = 0; i < 30; ++i) lengths.push_back(1 + random.below(6000));
    PlannerOptions planner{.world_size = 8};
    planner.hardware.ranks_per_node = seed % 2 == 0 ? 8 : 4;
    const AttentionPlan plan = plan_attention(lengths, planner);
    const StepPredictor predictor(plan);
    const auto steps = compare_transfers(predictor, StepOptions::of(plan), plan.plan.num_shards());
    for (const NamedStep& named : steps) {
      const StepPrediction& step = named.step;
      const auto sentences = explain_step(step);
      expect_same(sentences[1], step, "The longest part, ", " (");
      expect_same(sentences[2], step, "the longest of these phases, ", ", is");
      const std::string table = step_table(std::span(&named, 1));
      double seconds = 0;
      for (const StepCause& cause : step.path) {
        const std::string_view phase = to_string(cause.phase);
        const std::string time = line_of(phase_table(step), phase).substr(22, 9);
        EXPECT_TRUE(line_of(table, phase).ends_with(time)) << table << phase_table(step);
        seconds += cause.seconds;
      }
      EXPECT_NEAR(seconds, step.seconds, 1e-9);
    }
  }
}

TEST(ExplainStep, AnEmptyPlanIsNoTrouble) {
  QkvPlan plan;
  plan.world_size = 2;
  plan.rank_shard_offsets = {0, 0, 0};
  plan.doc_shard_offsets = {0};
  const StepPrediction step = predict_step(plan);
  for (const std::string& sentence : explain_step(step)) {
    EXPECT_EQ(sentence.find("nan"), std::string::npos) << sentence;
    EXPECT_EQ(sentence.find("document"), std::string::npos) << sentence;
  }
  EXPECT_NE(phase_table(step).find("nothing"), std::string::npos);
}

// The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
TEST(ChromeTrace, IsValidAndHoldsEveryPhaseOfEveryRank) {
  std::vector<NamedStep> steps = small_steps();
  steps[0].name = "a \"quoted\" \\ name\n";
  const json trace = json::parse(chrome_trace(steps));
  EXPECT_EQ(trace.at("displayTimeUnit"), "ms");
  std::map<std::pair<int, int>, std::vector<json>> phases;  // by pid, tid
  std::map<std::pair<int, int>, std::string> names;
  std::set<int> processes;
  for (const json& event : trace.at("traceEvents")) {
    const std::pair place(event.at("pid").get<int>(), event.at("tid").get<int>());
    if (event.at("ph") == "X") {
      EXPECT_GE(event.at("ts").get<double>(), 0);
      EXPECT_GE(event.at("dur").get<double>(), 0);
      EXPECT_TRUE(event.at("args").is_object());
      phases[place].push_back(event);
    } else {
      ASSERT_EQ(event.at("ph"), "M");
      if (event.at("name") == "thread_name") names[place] = event.at("args").at("name");
      if (event.at("name") == "process_name") processes.insert(place.first);
    }
  }
  EXPECT_EQ(processes.size(), 3U * 3U) << "three predictions of three nodes";
  ASSERT_EQ(phases.size(), 3U * 6U);
  for (const auto& [place, events] : phases) {
    const StepPrediction& step = steps[static_cast<std::size_t>(place.first / 3)].step;
    const auto rank = static_cast<std::size_t>(place.second);
    EXPECT_EQ(names.at(place), "rank " + std::to_string(rank));
    EXPECT_EQ(place.first % 3, place.second / 2) << "the rank's node";
    ASSERT_EQ(events.size(), std::size_t{num_step_phases});
    for (std::size_t i = 0; i < events.size(); ++i) {
      EXPECT_EQ(events[i].at("name"), to_string(step.phases[i].phase));
      EXPECT_NEAR(events[i].at("ts").get<double>(), step.phases[i].begin[rank] * 1e6, 2e-3);
      EXPECT_NEAR(events[i].at("ts").get<double>() + events[i].at("dur").get<double>(),
                  step.phases[i].end[rank] * 1e6, 2e-3);
      if (step.phases[i].links.empty()) continue;
      EXPECT_EQ(events[i].at("args").at("network_in_bytes"), step.phases[i].links[rank].network_in);
    }
  }
  EXPECT_EQ(json::parse(chrome_trace({})).at("traceEvents").size(), 0U);
}

TEST(HtmlReport, DrawsTimelines) {
  const AttentionPlan plan = small_plan();
  const QkvRouting routing = compute_qkv_routing(plan.plan);
  ReportContext context;
  const auto page = [&] {
    return html_report(plan.plan, routing, summarize(plan.plan, routing, {.q = 8192, .kv = 4096}),
                       context);
  };
  EXPECT_EQ(page().find("Predicted timeline"), std::string::npos);
  context.steps = small_steps();
  context.steps[0].name = "<direct>";
  const std::string drawn = page();
  EXPECT_NE(drawn.find("Predicted timeline"), std::string::npos);
  EXPECT_NE(drawn.find("&lt;direct&gt;"), std::string::npos);
  EXPECT_EQ(drawn.find("\"nan"), std::string::npos);
  std::size_t rects = 0;
  for (auto at = drawn.find("<rect class=\"p"); at != drawn.npos;
       at = drawn.find("<rect class=\"p", at + 1))
    ++rects;
  EXPECT_EQ(rects, 7U + 3U * 6U * 7U) << "the legend, and each phase of each rank";
}

}  // namespace
}  // namespace waybill::test
