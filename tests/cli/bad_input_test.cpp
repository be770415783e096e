#include <numeric>

#include "program_runner.h"
#include "waybill/json/plan_json.h"

namespace waybill::test {
namespace {

using BadInputTest = ProgramTest;

TEST_F(BadInputTest, GpusNeedCuda) {
  if (WAYBILL_TEST_CUDA) GTEST_SKIP() << "this program was built with CUDA";
  const ProgramResult result = run("demo --gpus");
  EXPECT_TRUE(fails(result, 1, {"built without CUDA", "scripts/demo.sh --gpus"}));
  EXPECT_EQ(result.out.find("documents"), std::string::npos);  // at once, before any work
}

TEST_F(BadInputTest, WrongUsageExitsWith2) {
  EXPECT_TRUE(fails(run(""), 2, {"a command is needed"}));
  EXPECT_TRUE(fails(run("fly"), 2, {"fly"}));
  EXPECT_TRUE(fails(run("demo --what"), 2, {"--what"}));
  EXPECT_TRUE(fails(run("demo --world-size 0"), 2, {"--world-size", "0"}));
  EXPECT_TRUE(fails(run("demo --world-size -3"), 2, {"--world-size", "-3"}));
  EXPECT_TRUE(fails(run("demo --world-size x"), 2, {"--world-size", "x"}));
  EXPECT_TRUE(fails(run("demo --world-size 99999999999999999999"), 2, {"--world-size"}));
  EXPECT_TRUE(fails(run("demo --imbalance 1"), 2, {"--imbalance"}));
  EXPECT_TRUE(fails(run("demo --window -1"), 2, {"--window"}));
  EXPECT_TRUE(fails(run("demo --ranks-per-node 0"), 2, {"--ranks-per-node"}));
  EXPECT_TRUE(fails(run("demo --tokens-per-rank 0"), 2, {"--tokens-per-rank", "auto"}));
  EXPECT_TRUE(fails(run("demo --tokens-per-rank auto"), 2, {"--lengths or --corpus"}));
  EXPECT_TRUE(fails(run("demo --payload-bytes 7"), 2, {"--payload-bytes", "7"}));
  EXPECT_TRUE(fails(run("demo --dtype float31"), 2, {"float31", "bfloat16"}));
  EXPECT_TRUE(fails(run("demo --kv-layout x"), 2, {"per_rank", "per_query"}));
  for (const std::string command : {"demo", "experts"}) {
    for (const std::string seed : {"-1", "99999999999999999999", "1e3"})
      EXPECT_TRUE(fails(run(command + " --seed " + seed), 2,
                        {"--seed: got " + seed + ", expected 0..2^64 - 1"}));
  }
  EXPECT_TRUE(fails(run("plan --dtype foo"), 2, {"--dtype: got foo, expected one of bool, int8"}));
  EXPECT_TRUE(fails(run("show"), 2, {"error: show: FILE is required (waybill show --help"}));
  EXPECT_TRUE(fails(run("plan --seed 1 --seed 2"), 2, {"--seed: got it twice, expected once"}));
  EXPECT_TRUE(fails(run("plan --lengths"), 2, {"--lengths: got nothing, expected a value"}));
  EXPECT_TRUE(fails(run("demo --gb-per-s 0"), 2, {"--gb-per-s"}));
  EXPECT_TRUE(fails(run("explain --network 1e308TB/s"), 2, {"--network", "expected a speed"}));
  EXPECT_TRUE(fails(run("demo --lengths a --corpus b"), 2, {"--corpus", "--lengths"}));
  EXPECT_TRUE(fails(run("simulate"), 2, {"FILE"}));
  EXPECT_TRUE(fails(run("metadata p.json --rank 1"), 2, {"--table"}));
  EXPECT_TRUE(
      fails(run("plan --lengths a --seed 1"), 2, {"plan: --lengths cannot be given with --seed"}));
  EXPECT_TRUE(
      fails(run("plan --corpus a --seed 1"), 2, {"plan: --corpus cannot be given with --seed"}));
  EXPECT_TRUE(fails(run("show p.json --rank -3"), 2, {"--rank: got -3, expected a number from 0"}));
  EXPECT_TRUE(
      fails(run("validate p.json --max-findings 0"), 2, {"got 0, expected a number from 1\n"}));
  EXPECT_TRUE(fails(run("explain p.json --prefix 5"), 2, {"--prefix"}));
  EXPECT_FALSE(std::filesystem::exists(path("waybill-report.html")));
}

TEST_F(BadInputTest, NumbersThatAreNone) {
  for (const std::string number : {"nan", "-nan", "inf", "-inf", "1e999", "-1", "x"}) {
    for (const std::string option :
         {"plan --gb-per-s=", "plan --imbalance=", "show plan.json --gb-per-s=", "experts --skew=",
          "explain --pairs-per-s=", "explain --nvlink=", "compare --network=",
          "experts --nvlink="}) {
      EXPECT_TRUE(fails(run(option + number), 2, {"--", "expected a"})) << option << number;
    }
  }
}

TEST_F(BadInputTest, InputWithoutEnd) {
  if (!std::filesystem::exists("/dev/zero")) GTEST_SKIP() << "no /dev/zero here";
  // A gigabyte is read each time; all commands have one reader.
  EXPECT_TRUE(fails(run("validate /dev/zero"), 1, {"/dev/zero", "more than 1 GiB"}));
  EXPECT_TRUE(
      fails(run("show -", "", " >stdout </dev/zero"), 1, {"standard input", "more than 1 GiB"}));
}

TEST_F(BadInputTest, AnUnknownDistributionListsTheNames) {
  EXPECT_TRUE(fails(run("demo --distribution nope"), 2, {"nope", "wlbllm", "prolong"}));
}

TEST_F(BadInputTest, FilesThatAreNotThereOrNotWhatTheyShouldBe) {
  for (const std::string command : {"metadata", "simulate", "validate", "show"}) {
    EXPECT_TRUE(fails(run(command + " nothing.json"), 1, {"nothing.json"}));
    EXPECT_TRUE(fails(run(command + " -"), 1, {"standard input"}));
    EXPECT_TRUE(fails(run(command + " -", R"({"format": "other"})"), 1, {"other", "waybill.plan"}));
  }
  EXPECT_TRUE(fails(run("demo --lengths nothing.txt"), 1, {"nothing.txt"}));
  EXPECT_TRUE(fails(run("demo --lengths -", "12 -3"), 1, {"-3"}));
  EXPECT_TRUE(fails(run("demo --lengths -", ""), 1, {"standard input"}));
  EXPECT_TRUE(fails(run("demo --corpus nothing"), 1, {"nothing"}));
  write("folder/empty.txt", "");
  EXPECT_TRUE(fails(run("demo --corpus folder"), 1, {"folder", "1 empty"}));
}

TEST_F(BadInputTest, TruncatedJsonNamesThePlace) {
  ASSERT_EQ(run("plan --world-size 2 --tokens-per-rank 512 -o plan.json").exit_code, 0);
  const std::string plan = text_of(path("plan.json"));
  for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, plan.size() / 2, plan.size() - 3}) {
    write("cut.json", plan.substr(0, cut));
    for (const std::string command : {"metadata", "simulate", "validate", "show"})
      EXPECT_TRUE(fails(run(command + " cut.json"), 1, {"cut.json"})) << cut;
  }
}

TEST_F(BadInputTest, APlanWithDamageIsRefusedOrFound) {
  const std::string plan = R"({"format": "waybill.plan", "version": 1, "world_size": 2,
    "kv_layout": "per_rank", "rank_shard_offsets": [0, 1, 2], "shard_len": [5, LEN],
    "q_dst": [0, DST], "doc_shard_offsets": [0, 2], "doc_shards": [0, 1]})";
  const auto with = [&](const std::string& length, const std::string& rank) {
    std::string text = plan;
    text.replace(text.find("LEN"), 3, length);
    text.replace(text.find("DST"), 3, rank);
    return text;
  };
  EXPECT_EQ(run("simulate -", with("7", "1")).exit_code, 0);
  for (const std::string& damaged : {with("-7", "1"), with("7", "2"), with("7", "-1")}) {
    EXPECT_TRUE(fails(run("simulate -", damaged), 1, {}));
    const ProgramResult validated = run("validate -", damaged);
    EXPECT_TRUE(fails(validated, 1, {"1 finding"})) << validated.out;
    EXPECT_NE(validated.out.find("plan."), std::string::npos) << validated.out;
  }
  EXPECT_TRUE(fails(run("simulate -", with("99999999999999999999", "1")), 1, {"shard_len"}));
}

TEST_F(BadInputTest, HugeRequestsEndWithAnError) {
  EXPECT_TRUE(fails(run("demo --tokens-per-rank 1099511627776"), 2, {"--tokens-per-rank"}));
  EXPECT_TRUE(
      fails(run("plan --lengths - --world-size 1048576 --tokens-per-rank 1099511627776", "5"), 1,
            {"2^40"}));
  // Every key would be copied for every query: 40,000 shards of one document.
  QkvPlan plan;
  plan.world_size = 1;
  plan.kv_layout = KvLayout::per_query;
  plan.rank_shard_offsets = plan.doc_shard_offsets = {0, 40000};
  plan.shard_len.assign(40000, 1);
  plan.q_dst.assign(40000, 0);
  plan.doc_shards.resize(40000);
  std::iota(plan.doc_shards.begin(), plan.doc_shards.end(), 0);
  EXPECT_TRUE(fails(run("simulate -", to_json(plan)), 1, {"copies", "per_rank"}));
  EXPECT_TRUE(
      fails(run("demo --lengths - --max-tokens 60", "100 20"), 1, {"infeasible: rank", "60"}));
}

TEST_F(BadInputTest, AWorldOfAMillionRanks) {
  const std::string world = " --world-size 1048576 --tokens-per-rank 8 ";
  const ProgramResult planned = run("plan --compact -o plan.json" + world);  // in about a second
  EXPECT_EQ(planned.exit_code, 0) << planned.err;
  EXPECT_TRUE(fails(run("plan --full" + world), 1, {"hops", "fewer ranks"}));
  EXPECT_TRUE(fails(run("compare" + world), 1, {"copies of KV shards", "fewer ranks"}));
  EXPECT_TRUE(fails(run("validate plan.json"), 1, {"copies of KV shards"}));
}

TEST_F(BadInputTest, SumsOfAFileThatExceed63Bits) {
  ASSERT_EQ(run("plan --world-size 2 --tokens-per-rank 512 -o plan.json").exit_code, 0);
  ASSERT_EQ(run("metadata plan.json -o metadata.json").exit_code, 0);
  std::string text = text_of(path("metadata.json"));
  const std::size_t begin = text.find('[', text.find("\"num_total_recv_tokens\"")) + 1;
  text.replace(begin, text.find(',', begin) - begin, "9223372036854775807");
  write("metadata.json", text);
  EXPECT_TRUE(fails(run("show metadata.json"), 1, {"num_total_recv_tokens", "fwd_q", "2^63 - 1"}));
}

TEST_F(BadInputTest, AFailureLeavesOldFilesAlone) {
  write("old.json", "precious");
  EXPECT_EQ(run("metadata nothing.json -o old.json").exit_code, 1);
  EXPECT_EQ(run("plan --lengths nothing -o old.json").exit_code, 1);
  EXPECT_EQ(text_of(path("old.json")), "precious");
  EXPECT_TRUE(fails(run("plan --world-size 2 -o no/such/folder/p.json"), 1, {"no/such/folder"}));
  EXPECT_TRUE(fails(run("demo --world-size 2 --tokens-per-rank 512 --html no/such/r.html"), 1,
                    {"no/such"}));
}

TEST_F(BadInputTest, AResultThatCannotBeWrittenIsAnErrorBeforeTheWork) {
  ASSERT_EQ(run("plan --world-size 2 --tokens-per-rank 512 -o plan.json").exit_code, 0);
  for (const std::string command :
       {"calibrate -o", "plan --tokens-per-rank 1 -o", "metadata nothing.json -o",
        "explain nothing.json --html", "explain nothing.json --trace", "simulate --ranks 2 --html",
        "simulate --ranks 2 --trace", "compare --world-size 2 --trace", "demo --world-size 2 -o",
        "demo --world-size 2 --html", "demo --world-size 2 --no-html --trace"}) {
    SCOPED_TRACE(command);
    const ProgramResult result = run(command + " no/such/file");
    EXPECT_TRUE(fails(result, 1, {"no/such/file", "No such file or directory"}));
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(fails(run(command + " ."), 1, {".: cannot open for writing"}));
  }
}

TEST_F(BadInputTest, AFullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EXPECT_TRUE(fails(run("plan --world-size 2", "", " >/dev/full"), 1, {"standard output"}));
}

TEST_F(BadInputTest, ARankOutsideTheWorld) {
  ASSERT_EQ(run("plan --world-size 2 --tokens-per-rank 512 -o plan.json").exit_code, 0);
  EXPECT_TRUE(fails(run("show plan.json --rank 2"), 1, {"rank", "2"}));
  EXPECT_TRUE(fails(run("metadata plan.json --table fwd_q --rank 2"), 1, {"rank", "2"}));
}

}  // namespace
}  // namespace waybill::test
