// explain, compare, and simulate --ranks.
#include <nlohmann/json.hpp>

#include "program_runner.h"

namespace waybill::test {
namespace {

using StepCommandsTest = ProgramTest;

const std::string two_nodes = " --world-size 8 --tokens-per-rank 8192 --ranks-per-node 4 ";

TEST_F(StepCommandsTest, HelpHasExamples) {
  for (const std::string command : {"explain", "compare", "simulate"}) {
    const ProgramResult help = run(command + " --help");
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_TRUE(holds(help.out, {"Examples:\n  waybill " + command, "--network", "--trace"}));
  }
}

TEST_F(StepCommandsTest, ExplainSaysRankDocumentLinkAndRemedy) {
  const ProgramResult direct = run("explain" + two_nodes + "--transfer direct --network 1GB/s");
  ASSERT_EQ(direct.exit_code, 0) << direct.err;
  EXPECT_TRUE(holds(direct.out, {"1.00 GB/s network", "network", "document ", "The step takes ",
                                 "Moving rows takes ", "relay schedule says would save"}));
  const ProgramResult rank = run("explain" + two_nodes + "--rank 3");
  EXPECT_TRUE(holds(rank.out, {"rank 3", "waits for", "return dK dV"}));
}

TEST_F(StepCommandsTest, ExplainReadsPlansWithAndWithoutTheirOptions) {
  ASSERT_EQ(run("plan --full" + two_nodes + "-o full.json").exit_code, 0);
  ASSERT_EQ(run("plan" + two_nodes + "-o plan.json").exit_code, 0);
  const ProgramResult planned = run("explain" + two_nodes);
  const ProgramResult full = run("explain full.json");
  const auto after_origin = [](const std::string& text) { return text.substr(text.find('\n')); };
  EXPECT_EQ(after_origin(full.out), after_origin(planned.out)) << full.err;
  const ProgramResult plain = run("explain plan.json --ranks-per-node 4");
  EXPECT_EQ(plain.exit_code, 0);
  EXPECT_TRUE(holds(plain.out, {"K and V travel: direct", "4 ranks per node"}));
  const ProgramResult direct = run("explain full.json --transfer direct");
  const auto table = [](const std::string& text) {
    const std::size_t begin = text.find("\n  phase ");
    return text.substr(begin, text.find("  - ") - begin);
  };
  EXPECT_EQ(table(direct.out), table(plain.out));
  const ProgramResult wide = run("explain full.json --transfer direct --ranks-per-node 8");
  EXPECT_TRUE(holds(wide.out, {"8 ranks per node", "rows of 8.00 KiB (Q)"}));
  EXPECT_EQ(wide.out.find("network out"), std::string::npos) << "one node has no network";
  EXPECT_TRUE(holds(run("explain full.json --q-hidden 512").out, {"rows of 1.00 KiB (Q)"}));
  EXPECT_TRUE(fails(run("explain plan.json --transfer relay"), 2, {"--transfer", "plan --full"}));
}

TEST_F(StepCommandsTest, CompareShowsAllSideBySide) {
  const ProgramResult compared = run("compare" + two_nodes + "--trace steps.json");
  ASSERT_EQ(compared.exit_code, 0) << compared.err;
  EXPECT_TRUE(
      holds(compared.out, {"zigzag", "per document", "planner", "work, max / mean",
                           "bytes in, mean", "bytes out, max", "attention backward", "\n  step "}));
  const auto trace = nlohmann::json::parse(text_of(path("steps.json")));
  EXPECT_EQ(trace.at("traceEvents").size(), 4U * (8 * (7 + 1) + 2)) << "phases, names, nodes";
}

TEST_F(StepCommandsTest, CompareExplainsColumnsAndGivesAVerdict) {
  const ProgramResult even = run("compare --lengths - --world-size 2", "[4096, 4096]");
  ASSERT_EQ(even.exit_code, 0) << even.err;
  EXPECT_TRUE(holds(even.out, {"Assumed (as on H200): attention 350 TFLOP/s forward",
                               "\"planner\": ContextParallelAttention: work is even",
                               "\"zigzag\": static; the packed sequence",
                               "\nVerdict: ContextParallelAttention's plan (\"planner\") is "}));
  EXPECT_TRUE(holds(even.out, {"Ulysses: heads of 128 elements: 32, and 8 of K and V\n",
                               "ranks of a group", "\"Ulysses\": heads are split"}));
  const ProgramResult odd =
      run("compare --lengths - --world-size 2 --head-dim 1000", "[4096, 4096]");
  EXPECT_TRUE(holds(odd.out, {"No Ulysses: rows are not whole heads of 1,000 elements\n"}));
  // One document over slow links: 8 ranks exchange fewer bytes of heads than of tokens.
  const ProgramResult heads =
      run("compare --lengths - --world-size 8 --kv-hidden 4096 --nvlink 20GB/s", "[524288]");
  EXPECT_TRUE(holds(heads.out, {"times as slow as \"Ulysses\"; split heads here.\n"}));
  const ProgramResult skewed =
      run("compare --lengths - --world-size 2 --network 10", "[60000, 500, 500, 500, 58500]");
  EXPECT_TRUE(
      holds(skewed.out, {"Assumed: attention", "10.0 GB/s network", " as \"per document\""}));
}

TEST_F(StepCommandsTest, CompareOfSeveralWorldsHasALineEach) {
  const std::string drawn = " --tokens-per-rank 4096 --ranks-per-node 4 ";
  const ProgramResult several = run("compare --world-size 2,4,8" + drawn);
  ASSERT_EQ(several.exit_code, 0) << several.err;
  EXPECT_TRUE(holds(several.out, {"\n  ranks ", "per document", "planner", "\"planner\" is\n",
                                  "\n      2 ", "\n      4 ", "\n      8 ", "Columns\n"}));
  const ProgramResult some = run("compare --world-size 3,4" + drawn);
  EXPECT_TRUE(holds(some.out, {" Ulysses ", "\n      3 ", " - "})) << "3 ranks, 32 heads";
  // A line's last step is that of the world alone.
  const std::string alone = run("compare --world-size 4" + drawn).out;
  const std::size_t at = alone.find("\n  step ");
  const std::string step = alone.substr(at + 8, alone.find('\n', at + 1) - at - 8);
  const std::size_t line = several.out.find("\n      4 ");
  const std::string cells = several.out.substr(line, several.out.find('\n', line + 1) - line);
  EXPECT_NE(cells.find(step.substr(step.find_first_not_of(' '))), std::string::npos) << cells;
  EXPECT_TRUE(fails(run("compare --world-size 2,4 --trace t.json"), 2, {"single --world-size"}));
  for (const std::string wrong : {"2,", "0", "2,x", "''"})
    EXPECT_TRUE(fails(run("compare --world-size " + wrong), 2, {"--world-size", "expected 1.."}));
}

TEST_F(StepCommandsTest, ReportsHaveTheColumnsOfCompare) {
  const ProgramResult compared = run("compare" + two_nodes + "--html c.html");
  ASSERT_EQ(compared.exit_code, 0) << compared.err;
  const std::string page = text_of(path("c.html"));
  EXPECT_TRUE(holds(page, {"<th>zigzag</th><th>per document</th><th>Ulysses</th><th>planner</th>",
                           "<th>work, max / mean</th>", "Verdict: ContextParallelAttention",
                           "<dt>per document</dt><dd>static; the same cut of every document.",
                           "Column \"planner\" is ContextParallelAttention's own plan"}));
  ASSERT_EQ(run("demo --html d.html" + two_nodes).exit_code, 0);
  EXPECT_EQ(text_of(path("d.html")).find("Column \"planner\""), std::string::npos);
  EXPECT_TRUE(holds(text_of(path("d.html")), {"with relay", "without relay: ", "<th>direct</th>"}));
}

TEST_F(StepCommandsTest, FilesAreNamedWithWhatTheyHold) {
  const ProgramResult plan = run("plan --full" + two_nodes + "-o p.json");
  EXPECT_TRUE(
      holds(plan.out, {"Wrote p.json: a plan with its figures, ", " on 8 ranks; largest "}));
  const ProgramResult table = run("metadata p.json --table fwd_q -o t.json");
  EXPECT_TRUE(holds(table.out, {"Wrote t.json: fwd_q of p.json, "}));
  EXPECT_EQ(run("plan" + two_nodes).out.find("Wrote"), std::string::npos);
}

TEST_F(StepCommandsTest, SimulatePredictsLargeWorlds) {
  const ProgramResult predicted =
      run("simulate --ranks 4096 --ranks-per-node 8 --network 50GB/s --html r.html --trace t.json");
  ASSERT_EQ(predicted.exit_code, 0) << predicted.err;
  EXPECT_TRUE(holds(predicted.out, {"Predicted, not run", "4,096 ranks", "direct", "once per node",
                                    "relay", "50.0 GB/s network", "The step takes "}));
  EXPECT_NE(text_of(path("r.html")).find("Predicted timeline"), std::string::npos);
  EXPECT_LT(std::filesystem::file_size(path("r.html")), 2U << 20);
  EXPECT_EQ(text_of(path("t.json")).substr(0, 2), "{\"");
}

TEST_F(StepCommandsTest, RatesMeanWhatTheySay) {
  const auto network = [&](const std::string& rate) {
    const std::string out = run("explain" + two_nodes + "--network '" + rate + "'").out;
    const std::size_t end = out.find(" network");
    const std::size_t begin = out.rfind(", ", end) + 2;
    return out.substr(begin, end - begin);
  };
  EXPECT_EQ(network("400Gbit/s"), "50.0 GB/s");
  EXPECT_EQ(network("25"), "25.0 GB/s");
  EXPECT_EQ(network("12500 MB/s"), "12.5 GB/s");
  EXPECT_EQ(network("1.5TB/s"), "1.50 TB/s");
}

TEST_F(StepCommandsTest, WrongUsageExitsWith2) {
  EXPECT_TRUE(fails(run("simulate"), 2, {"FILE", "--ranks"}));
  EXPECT_TRUE(fails(run("simulate plan.json --ranks 4"), 2, {"--ranks", "FILE"}));
  EXPECT_TRUE(fails(run("simulate --ranks 4 --threads 2"), 2, {"--threads", "FILE"}));
  EXPECT_TRUE(fails(run("simulate --ranks 0"), 2, {"--ranks"}));
  EXPECT_TRUE(fails(run("explain --network 0"), 2, {"--network", "50GB/s"}));
  EXPECT_TRUE(fails(run("explain --network 5GB"), 2, {"5GB", "50GB/s"}));
  EXPECT_TRUE(fails(run("explain --nvlink 5XB/s"), 2, {"--nvlink", "5XB/s"}));
  EXPECT_TRUE(fails(run("explain --transfer by_mail"), 2, {"--transfer", "once_per_node"}));
  EXPECT_TRUE(fails(run("explain p.json --world-size 4"), 2, {"--world-size", "FILE"}));
  EXPECT_TRUE(fails(run("explain" + two_nodes + "--rank 8"), 1, {"--rank = 8", "0..7"}));
  EXPECT_TRUE(fails(run("compare" + two_nodes + "--degree 3"), 1, {"degree = 3"}));
  EXPECT_TRUE(fails(run("explain nothing.json"), 1, {"nothing.json"}));
  EXPECT_TRUE(fails(run("explain" + two_nodes + "--trace no/such/t.json"), 1, {"no/such"}));
}

TEST_F(StepCommandsTest, DemoPredictsAndDraws) {
  const ProgramResult demo =
      run("demo --world-size 4 --tokens-per-rank 2048 --html r.html --trace t.json");
  ASSERT_EQ(demo.exit_code, 0) << demo.err;
  EXPECT_TRUE(holds(demo.out, {"Predicted step (relay): "}));
  EXPECT_NE(text_of(path("r.html")).find("Predicted timeline"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(text_of(path("t.json"))).at("displayTimeUnit"), "ms");
}

}  // namespace
}  // namespace waybill::test
