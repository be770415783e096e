#include <algorithm>

#include "program_runner.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"
#include "waybill/routing/qkv_routing.h"

namespace waybill::test {
namespace {

using CommandsTest = ProgramTest;

const std::string small = " --world-size 4 --tokens-per-rank 2048 ";

TEST_F(CommandsTest, VersionAndHelp) {
  EXPECT_EQ(run("--version").out.rfind("waybill ", 0), 0U);
  EXPECT_EQ(run("--help").exit_code, 0);
  for (const std::string command : {"demo", "plan", "metadata", "simulate", "validate", "show"}) {
    const ProgramResult help = run(command + " --help");
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_NE(help.out.find("Examples:\n  waybill "), std::string::npos) << command;
    EXPECT_NE(help.out.find("waybill " + command), std::string::npos) << help.out;
  }
}

TEST_F(CommandsTest, DemoChecksEveryByteAndWritesTheReport) {
  const ProgramResult demo = run("demo" + small + "--html r.html -o plan.json --gb-per-s 100");
  ASSERT_EQ(demo.exit_code, 0) << demo.err;
  EXPECT_EQ(demo.err, "");
  EXPECT_NE(demo.out.find("✓ 0 findings"), std::string::npos) << demo.out;
  EXPECT_NE(demo.out.find("compared byte by byte"), std::string::npos);
  EXPECT_NE(demo.out.find("What it means"), std::string::npos);
  EXPECT_NE(demo.out.find("8,192 tokens"), std::string::npos);
  const std::string page = text_of(path("r.html"));
  EXPECT_NE(page.find("checks passed"), std::string::npos);
  EXPECT_NE(page.find("waybill demo --world-size 4"), std::string::npos);
  EXPECT_EQ(read_plan(path("plan.json")).world_size, 4);
}

TEST_F(CommandsTest, DemoIsTheSameOnAnyNumberOfThreads) {
  ASSERT_EQ(run("demo" + small + "--no-html --threads 1 -o one.json").exit_code, 0);
  ASSERT_EQ(run("demo" + small + "--no-html --threads 3 -o three.json").exit_code, 0);
  EXPECT_EQ(text_of(path("one.json")), text_of(path("three.json")));
  EXPECT_FALSE(std::filesystem::exists(path("waybill-report.html")));
}

TEST_F(CommandsTest, DemoWithoutSimulationSaysSo) {
  const ProgramResult demo = run("demo" + small + "--no-simulate");
  ASSERT_EQ(demo.exit_code, 0);
  EXPECT_EQ(demo.out.find("byte by byte"), std::string::npos);
  const std::string page = text_of(path("waybill-report.html"));
  EXPECT_NE(page.find("(not run)"), std::string::npos);
  EXPECT_NE(page.find("1 of 2 checks passed, the others did not run"), page.npos)
      << "a check that did not run is not called passed";
}

TEST_F(CommandsTest, DemoCountsACorpus) {
  write("corpus/a.txt", "Three words here. And more, not 7!\n");  // 7 words, 3 marks
  write("corpus/deep/b.md",
        "\xE6\x97\xA5\xE6\x9C\xAC stra\xC3\x9F"
        "e\n");  // 2 + 1
  write("corpus/c.bin", std::string("a\0b", 3));
  write("corpus/d.bin", "\xFF\xFE text");
  write("corpus/empty", " \n");
  write("corpus/.hidden", "not counted");
  const ProgramResult demo = run("demo --corpus corpus --world-size 2 --no-html -o p.json");
  ASSERT_EQ(demo.exit_code, 0) << demo.err;
  EXPECT_NE(demo.out.find("2 text files"), std::string::npos) << demo.out;
  EXPECT_NE(demo.out.find("13 tokens"), std::string::npos) << demo.out;
  EXPECT_NE(demo.out.find("2 binary, 1 empty, 0 unreadable"), std::string::npos) << demo.out;
  const QkvPlan plan = read_plan(path("p.json"));
  EXPECT_EQ(plan.num_documents(), 2);
}

TEST_F(CommandsTest, PlanEqualsTheLibrarysOwn) {
  const std::string options =
      "plan --lengths - --world-size 2 --window 3000 --chunk 4096 --q-hidden 512 "
      "--ranks-per-node 1 ";
  ASSERT_EQ(run(options + "-o p.json", "9000 500 4000").exit_code, 0);
  ASSERT_EQ(run(options + "--full -o full.json", "9000 500 4000").exit_code, 0);
  PlannerOptions planner{.world_size = 2, .tokens_per_rank = 6750};
  planner.mask = {.window = 3000, .chunk = 4096};
  planner.model.q_hidden = 512;
  planner.hardware.ranks_per_node = 1;
  const std::vector<std::int64_t> lengths = {9000, 500, 4000};
  const AttentionPlan plan = plan_attention(lengths, planner);
  EXPECT_EQ(read_plan(path("p.json")), plan.plan);
  EXPECT_EQ(read_attention_plan(path("full.json")), plan);

  const std::string prefix =
      "plan --lengths - --world-size 2 --mask prefix --prefix 700 --full -o prefix.json";
  ASSERT_EQ(run(prefix, "9000 500 4000").exit_code, 0);
  const AttentionMask mask{.kind = MaskKind::prefix, .prefix = 700};
  EXPECT_EQ(read_attention_plan(path("prefix.json")),
            plan_attention(lengths, {.world_size = 2, .tokens_per_rank = 6750, .mask = mask}));
}

TEST_F(CommandsTest, TokensAreOnlyLeftOutWhereThatIsMeant) {
  const std::string options = "--lengths - --world-size 2 --tokens-per-rank 100 ";
  for (const std::string command : {"plan ", "explain ", "compare ", "demo --no-simulate "}) {
    const ProgramResult over = run(command + options, "[150, 100, 30]");
    EXPECT_EQ(over.exit_code, 2) << command << over.err;
    EXPECT_EQ(over.out.find("rank"), std::string::npos) << over.out;
    EXPECT_NE(over.err.find("--tokens-per-rank: 100 on 2 ranks has room for 200 of 280 tokens: 80 "
                            "would be left out, 1 whole document among them; pass at least 140, "
                            "auto, or --cut where that is meant"),
              std::string::npos)
        << over.err;
  }
  EXPECT_EQ(run("simulate --ranks 2 --lengths - --tokens-per-rank 139", "150 100 30").exit_code, 2);
  EXPECT_EQ(run("simulate --ranks 2 --lengths - --tokens-per-rank 140", "150 100 30").exit_code, 0);
}

TEST_F(CommandsTest, PlanSaysWhatDoesNotFit) {
  const std::string options = "--lengths - --world-size 2 --tokens-per-rank 100 ";
  const ProgramResult over = run("plan --cut -o p.json " + options, "[150, 100, 30]");
  ASSERT_EQ(over.exit_code, 0) << over.err;
  EXPECT_NE(over.err.find("80 of 280 tokens are left out, 1 whole document"), std::string::npos)
      << over.err;
  const QkvPlan plan = read_plan(path("p.json"));
  std::int64_t tokens = 0;
  for (const std::int64_t length : plan.shard_len) tokens += length;
  EXPECT_EQ(tokens, 200);
  // The line above the figures says that they are of a part.
  const std::string compared = run("compare --cut " + options, "[150, 100, 30]").out;
  EXPECT_EQ(compared.substr(0, compared.find('\n')),
            "3 documents from standard input, cut to 200 of 280 tokens, on 2 ranks");
  const ProgramResult under = run("plan -o p.json " + options, "[50]");
  EXPECT_NE(under.err.find("leave 150 of 200 rows empty"), std::string::npos) << under.err;
}

TEST_F(CommandsTest, EveryStepOfTheRoundTripAgrees) {
  for (const std::string layout : {"per_rank", "per_query"}) {
    ASSERT_EQ(run("plan" + small + "--kv-layout " + layout + " -o plan.json").exit_code, 0);
    ASSERT_EQ(run("metadata plan.json -o dispatch.json").exit_code, 0);
    const DispatchBundle bundle = read_dispatch(path("dispatch.json"));
    EXPECT_EQ(bundle.plan, read_plan(path("plan.json")));
    EXPECT_EQ(bundle.metadata.fwd_kv, to_dense(compute_qkv_routing(bundle.plan)).fwd_kv);
    for (const std::string file : {"plan.json", "dispatch.json"}) {
      EXPECT_EQ(run("validate " + file).exit_code, 0) << layout;
      const ProgramResult simulated = run("simulate " + file + " --payload-bytes 32");
      EXPECT_EQ(simulated.exit_code, 0) << layout << " " << simulated.out << simulated.err;
      EXPECT_NE(simulated.out.find("✓ "), std::string::npos) << simulated.out;
      EXPECT_EQ(run("show " + file).exit_code, 0);
      EXPECT_EQ(run("show " + file + " --rank 3").exit_code, 0);
    }
  }
}

TEST_F(CommandsTest, PipesCarryTheSteps) {
  const ProgramResult plan = run("plan --compact" + small);
  ASSERT_EQ(plan.exit_code, 0);
  const ProgramResult dispatch = run("metadata -", plan.out);
  ASSERT_EQ(dispatch.exit_code, 0) << dispatch.err;
  EXPECT_EQ(run("validate -", dispatch.out).out, "✓ standard input: no findings\n");
  EXPECT_EQ(run("simulate -", dispatch.out).exit_code, 0);
}

TEST_F(CommandsTest, OneMetadataAlone) {
  ASSERT_EQ(run("plan" + small + "-o plan.json").exit_code, 0);
  for (const std::string table : {"fwd_q", "rev_q", "fwd_kv", "rev_kv"})
    ASSERT_EQ(run("metadata plan.json --table " + table + " -o " + table).exit_code, 0);
  EXPECT_EQ(run("validate fwd_q rev_q").exit_code, 0);
  EXPECT_EQ(run("validate fwd_kv rev_kv").exit_code, 0);
  EXPECT_EQ(run("validate fwd_q").exit_code, 0);
  EXPECT_EQ(run("validate rev_q").exit_code, 0);
  EXPECT_EQ(run("validate fwd_kv").exit_code, 0);
  EXPECT_EQ(run("validate rev_kv").exit_code, 0);
  EXPECT_EQ(run("validate fwd_q rev_kv").exit_code, 1);

  ASSERT_EQ(run("metadata plan.json --table fwd_kv --rank 2 --normalize -o slice").exit_code, 0);
  const Metadata slice = read_metadata(path("slice"));
  EXPECT_TRUE(slice.is_slice());
  EXPECT_TRUE(slice.normalized);
  EXPECT_NE(run("show slice").out.find("shard 0"), std::string::npos);
  EXPECT_TRUE(fails(run("show slice --table fwd_q"), 2, {"--table fwd_q", "slice has one table"}));
}

TEST_F(CommandsTest, DamageIsFoundAndNothingIsMoved) {
  ASSERT_EQ(run("plan" + small + "-o plan.json").exit_code, 0);
  ASSERT_EQ(run("metadata plan.json -o dispatch.json").exit_code, 0);
  DispatchBundle bundle = read_dispatch(path("dispatch.json"));
  bundle.metadata.fwd_q.dst_offset.i64()[1] += 1;
  write_dispatch(path("dispatch.json"), bundle);
  const ProgramResult validated = run("validate dispatch.json");
  EXPECT_TRUE(fails(validated, 1, {"dispatch.json", "finding"}));
  EXPECT_NE(validated.out.find("fwd_q.dst_offset"), std::string::npos) << validated.out;
  EXPECT_TRUE(fails(run("simulate dispatch.json"), 1, {"nothing was moved"}));

  write_metadata(path("fwd_q"), bundle.metadata.fwd_q);
  EXPECT_EQ(run("validate fwd_q").exit_code, 1);
}

TEST_F(CommandsTest, AReaderThatLeavesIsNoError) {
  ASSERT_EQ(run("plan" + small + "-o plan.json").exit_code, 0);
  EXPECT_EQ(run("show plan.json", "", " | true").err, "");
  EXPECT_EQ(run("demo" + small + "--html r.html", "", " | true").err, "");
  EXPECT_TRUE(std::filesystem::exists(path("r.html"))) << "the job goes on";
}

}  // namespace
}  // namespace waybill::test
