// What the program says of words that it does not know, and how its texts fit a terminal.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "program_runner.h"

namespace waybill::test {
namespace {

using SuggestTest = ProgramTest;

TEST_F(SuggestTest, NamesThatAreClose) {
  EXPECT_TRUE(fails(run("dem"), 2, {"no command dem, did you mean demo?"}));
  EXPECT_TRUE(fails(run("selftst"), 2, {"no command selftst, did you mean selftest?"}));
  EXPECT_TRUE(fails(run("bench"), 2, {"Python package: python -m waybill bench"}));
  EXPECT_TRUE(fails(run("vaildate x.json"), 2, {"did you mean validate?"}));
  EXPECT_TRUE(fails(run("plan --wrld-size 4"), 2,
                    {"plan: there is no option --wrld-size, did you mean --world-size?"}));
  EXPECT_TRUE(fails(run("plan --lenghts=x"), 2, {"--lenghts, did you mean --lengths?"}));
  EXPECT_TRUE(
      fails(run("experts --num-experts 64"), 2, {"--num-experts, did you mean --experts?"}));
  EXPECT_TRUE(fails(run("plan --mask ful"), 2, {"got ful, expected causal|full", "mean full?"}));
  EXPECT_TRUE(fails(run("demo --distribution prolog"), 2, {"got prolog", "mean prolong?"}));
  EXPECT_TRUE(fails(run("plan --world-size 0"), 2, {"--world-size: got 0, expected 1.."}));
}

TEST_F(SuggestTest, NothingThatIsFar) {
  for (const char* line : {"zzzzzzzz", "plan --zzzzzzzz 1", "demo --distribution zzzzzzzz"}) {
    const ProgramResult result = run(line);
    EXPECT_EQ(result.exit_code, 2) << line;
    EXPECT_EQ(result.err.find("did you mean"), std::string::npos) << result.err;
  }
}

TEST_F(SuggestTest, HelpFitsTheTerminal) {
  for (const int columns : {60, 80, 120}) {
    ::setenv("COLUMNS", std::to_string(columns).c_str(), 1);
    const ProgramResult result = run("plan --help");
    std::size_t longest = 0;
    for (std::size_t begin = 0; begin < result.out.size();) {
      const std::size_t end = std::min(result.out.find('\n', begin), result.out.size());
      longest = std::max(longest, end - begin);
      begin = end + 1;
    }
    EXPECT_LE(longest, static_cast<std::size_t>(columns));
    EXPECT_GT(longest, static_cast<std::size_t>(columns) - 15);
  }
  ::unsetenv("COLUMNS");
}

TEST_F(SuggestTest, HelpListsNamesAndTextsAlone) {
  for (const std::string command :
       {"demo", "plan", "metadata", "simulate", "explain", "validate"}) {
    const std::string help = run(command + " --help").out;
    for (const char* noise : {"Excludes", "Needs:", ":NON", ":POS", "\n\n\n"})
      EXPECT_EQ(help.find(noise), std::string::npos) << help;
  }
  EXPECT_TRUE(fails(run("plan --lengths a --corpus b"), 2, {"--corpus", "--lengths"}));
}

TEST_F(SuggestTest, FullFilesAreTakenWherePlansAre) {
  ASSERT_EQ(run("plan --full --world-size 4 --tokens-per-rank 4096 -o full.json").exit_code, 0);
  ASSERT_EQ(run("plan --world-size 4 --tokens-per-rank 4096 -o plain.json").exit_code, 0);
  for (const std::string command : {"metadata", "show"})
    EXPECT_EQ(run(command + " full.json").out, run(command + " plain.json").out) << command;
  EXPECT_EQ(run("simulate full.json").exit_code, 0);
  EXPECT_NE(run("explain full.json").out.find("travel: relay"), std::string::npos);
  EXPECT_NE(run("validate full.json").out.find("no findings"), std::string::npos);

  const std::string text = text_of(path("full.json"));
  const std::size_t work = text.find("\"work\"");
  const std::size_t digit = text.find_first_of("123456789", text.find('[', work));
  ASSERT_NE(work, std::string::npos);
  std::string wrong = text;
  wrong[digit] = wrong[digit] == '9' ? '8' : '9';
  std::ofstream(path("wrong.json")) << wrong;
  EXPECT_TRUE(fails(run("validate wrong.json"), 1, {"1 finding"}));
}

TEST_F(SuggestTest, AreWrittenInManyWays) {
  const std::string line = "explain --world-size 4 --ranks-per-node 2 --network ";
  const std::string expected = run(line + "50GB/s").out;
  for (const char* rate : {"400Gbps", "400Gb/s", "400Gbit/s", "50GBps", "50"}) {
    EXPECT_EQ(run(line + rate).out, expected) << rate;
  }
}

TEST_F(SuggestTest, FullPlansAreValidAndCarriedOut) {
  EXPECT_NE(run("demo --mask full --world-size 4 --tokens-per-rank 4096 --no-html")
                .out.find("0 findings"),
            std::string::npos);
  EXPECT_TRUE(fails(run("plan --mask full --window 5"), 1, {"the mask is full"}));
}

}  // namespace
}  // namespace waybill::test
