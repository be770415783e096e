// experts.
#include <chrono>

#include "program_runner.h"
#include "support/sanitizers.h"
#include "waybill/core/error.h"

namespace waybill::test {
namespace {

using ExpertsCommandTest = ProgramTest;

TEST_F(ExpertsCommandTest, DrawsChoicesAndSaysTheLimit) {
  const ProgramResult even = run("experts --tokens 512");
  ASSERT_EQ(even.exit_code, 0) << even.err;
  EXPECT_TRUE(holds(unwrapped(even.out),
                    {"Choices drawn, seed 0", "4,096 of 14.0 KiB, top-8 of 256 experts",
                     "over NVLink", "345 GB/s", "8.00 experts on 5.29 ranks"}));
  EXPECT_EQ(run("experts --tokens 512").out, even.out);
  EXPECT_NE(run("experts --tokens 512 --seed 1").out, even.out);
  const ProgramResult skewed = run("experts --tokens 512 --skew 1 --payload float8");
  EXPECT_TRUE(holds(unwrapped(skewed.out), {"skew 1", "7.22 KiB", "uneven", "placed by load",
                                            "no dispatch can be faster"}));
  for (const auto& [payload, bytes] :
       {std::pair{"nvfp4", "3.95 KiB"}, {"mxfp8", "7.22 KiB"}, {"'bytes(100, 28)'", "128 B"}}) {
    const ProgramResult run_of = run(concat("experts --tokens 64 --payload ", payload));
    EXPECT_TRUE(holds(unwrapped(run_of.out), {bytes})) << payload;
  }
  const ProgramResult nodes = run("experts --tokens 64 --ranks 16 --network 1GB/s");
  EXPECT_TRUE(
      holds(unwrapped(nodes.out), {"16 on 2 nodes", "over the network", "1.00 GB/s each way",
                                   "crosses the network 1.00 times"}));
}

TEST_F(ExpertsCommandTest, PredictsTheCallsOfOneNodeAndOfMany) {
  const ProgramResult one = run("experts --tokens 512");
  EXPECT_TRUE(holds(unwrapped(one.out), {"dispatch, grouped", "dispatch, known routing",
                                         "combine with local sums", "32 multiprocessors"}));
  EXPECT_EQ(one.out.find("low latency"), std::string::npos);
  const std::string many = "experts --ranks 64 --tokens 128 --payload float8";
  const ProgramResult waiting = run(many + " --path waiting");
  EXPECT_TRUE(holds(unwrapped(waiting.out),
                    {"64 on 8 nodes", "dispatch, low latency", "waiting puts",
                     "not done over network cards", "a message takes 3.00 us (nominal)"}));
  const ProgramResult pipelined = run(many + " --path pipelined --sms 24");
  EXPECT_TRUE(holds(unwrapped(pipelined.out), {"24 multiprocessors", "pipelined puts"}));
  write("links.json", R"({"format": "waybill.links", "version": 1, "nvlink_bytes_per_second": 7e11,
      "network_bytes_per_second": 1e11, "block_bytes_per_second": 1e9})");
  EXPECT_NE(run("experts --tokens 512 --links links.json --nvlink 345GB/s").out, one.out);
}

TEST_F(ExpertsCommandTest, TokensKeepToGroups) {
  const ProgramResult limited = run("experts --ranks 64 --tokens 64 --groups 8 --top-groups 2");
  ASSERT_EQ(limited.exit_code, 0) << limited.err;
  EXPECT_TRUE(holds(limited.out, {"of 2 of 8 groups"}));
  const std::string free = unwrapped(run("experts --ranks 64 --tokens 64").out);
  const std::string text = unwrapped(limited.out);
  const auto crossings = [](const std::string& out) {
    const std::string words = "crosses the network ";
    return std::stod(out.substr(out.find(words) + words.size()));
  };
  EXPECT_LE(crossings(text), 2.0);
  EXPECT_GT(crossings(free), 4.0);
}

TEST_F(ExpertsCommandTest, ReadsChoicesOfARouter) {
  write("ids.txt", "0 1\n2, 3\n\n-1 3\n");
  const std::string options = "experts --ranks 2 --experts 4 --hidden 512 --ids ";
  const ProgramResult read = run(options + "ids.txt");
  ASSERT_EQ(read.exit_code, 0) << read.err;
  EXPECT_TRUE(holds(read.out, {"Choices from ids.txt", "3 of 1.00 KiB, top-2 of 4 experts",
                               "1 topk slot dropped"}));
  const ProgramResult piped = run(options + "-", "0 1\n2 3\n-1 3\n");
  EXPECT_EQ(piped.out.substr(piped.out.find('\n')), read.out.substr(read.out.find('\n')));
  for (const std::string list :
       {"[[0, 1], [2, 3], [-1, 3]]", " {\"ids\": [[0,1],[2,3],[-1,3]]}\n"}) {
    const ProgramResult json = run(options + "-", list);
    ASSERT_EQ(json.exit_code, 0) << json.err;
    EXPECT_EQ(json.out, piped.out) << list;
  }
}

TEST_F(ExpertsCommandTest, NamesWhatIsWrong) {
  const auto fails = [&](const std::string& text, std::initializer_list<std::string> words) {
    write("bad.txt", text);
    const ProgramResult result = run("experts --ranks 2 --experts 4 --ids bad.txt");
    EXPECT_EQ(result.exit_code, 1);
    return holds(result.err, words);
  };
  EXPECT_TRUE(fails("0 1\n2\n", {"bad.txt: line 2: got 1 ids, expected 2"}));
  EXPECT_TRUE(fails("0 x\n", {"line 1: got \"x\", expected the number of an expert"}));
  EXPECT_TRUE(fails("0 -2\n", {"got \"-2\""}));
  EXPECT_TRUE(fails("0 1\n2 5\n", {"token 1 has expert 5, expected 0..3, or -1"}));
  EXPECT_TRUE(fails("0 1\n2 4\n", {"token 1 has expert 4, expected 0..3, or -1"}));
  EXPECT_TRUE(fails("\n", {"got no ids"}));
  EXPECT_TRUE(fails("[[0, 1], [2]]", {"bad.txt", "2 ids as of the first token"}));
  EXPECT_TRUE(fails("[0, 1]", {"bad.txt", "a list of lists"}));
  EXPECT_TRUE(fails("[]", {"bad.txt", "a list of lists"}));
  EXPECT_TRUE(fails("[[0, 1.5]]", {"bad.txt", "a list of ids"}));
  EXPECT_TRUE(fails("[[0, -2]]", {"got -2, expected the number of an expert, or -1"}));
  EXPECT_TRUE(fails("[[0, 5]]", {"token 0 has expert 5, expected 0..3, or -1"}));
  EXPECT_TRUE(fails("{\"id\": []}", {"bad.txt", "ids"}));
  const auto misused = [&](const std::string& options, std::initializer_list<std::string> words) {
    const ProgramResult result = run("experts " + options);
    EXPECT_EQ(result.exit_code, 2) << options;
    return holds(result.err, words);
  };
  EXPECT_TRUE(misused("--experts 9", {"--experts: 9, expected a multiple of --ranks = 8"}));
  EXPECT_TRUE(misused("--topk 9 --experts 8", {"--topk: 9, expected at most 8"}));
  EXPECT_TRUE(misused("--ranks 16 --ranks-per-node 3", {"--ranks-per-node: 3"}));
  EXPECT_TRUE(misused("--skew -1", {"--skew"}));
  EXPECT_TRUE(misused("--groups 7", {"--groups: 7, expected a divisor of --experts = 256"}));
  EXPECT_TRUE(misused("--top-groups 2", {"--top-groups: 2, expected at most --groups = 1"}));
  EXPECT_TRUE(misused("--groups 64 --top-groups 1", {"--topk: 8, expected at most 4"}));
  EXPECT_TRUE(misused("--path fast", {"--path", "waiting"}));
  EXPECT_TRUE(misused("--sms 0", {"--sms"}));
  EXPECT_TRUE(misused("--ids a --topk 2",
                      {"experts: --ids cannot be given with --topk (waybill experts --help"}));
  EXPECT_TRUE(misused("--payload fp4", {"--payload: got fp4", "mxfp8|", "bytes(ROW,SCALES)"}));
  const ProgramResult scales = run("experts --payload float8 --hidden 100 --tokens 4");
  EXPECT_EQ(scales.exit_code, 1);
  EXPECT_TRUE(holds(scales.err, {"hidden = 100", "128"}));
}

/// In time linear in the ranks: their square would take minutes.
TEST_F(ExpertsCommandTest, ManyRanksTakeSeconds) {
  const auto before = std::chrono::steady_clock::now();
  const std::string ranks = sanitized ? "65536" : "262144";  // sanitizers take ten times as long
  const ProgramResult result =
      run(concat("experts --ranks ", ranks, " --experts ", ranks, " --tokens 1"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(
      holds(result.out, {concat(ranks, sanitized ? " on 8,192 nodes" : " on 32,768 nodes")}));
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(60));
}

}  // namespace
}  // namespace waybill::test
