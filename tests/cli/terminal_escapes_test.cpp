// Nothing that comes from files, names or arguments reaches the terminal as more than characters.

#include "core/printable.h"
#include "program_runner.h"

namespace waybill::test {
namespace {

using TerminalEscapesTest = ProgramTest;

/// Sets the window's title, clears the screen, and begins a sequence in each of the other ways.
const std::string evil =
    "\x1b]0;owned\x07\x1b[2J\x08\x7f\xC2\x9B"
    "31m\x9B"
    "31m\u202Efgh";

/// The same as it stands in JSON.
const std::string evil_json = "\\u001b]0;owned\\u0007\\u001b[2J\\b\\u007f\\u009b31m\\u202efgh";

void expect_plain(const ProgramResult& result) {
  for (const std::string& text : {result.out, result.err}) EXPECT_EQ(text, printable(text));
}

/// It fails, and says at what.
void expect_plain_error(const ProgramResult& result, const std::string& part = "\\x1b") {
  EXPECT_NE(result.exit_code, 0);
  EXPECT_NE(result.err.find("error: "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find(part), std::string::npos) << printable(result.err);
  expect_plain(result);
}

TEST_F(TerminalEscapesTest, names_of_files) {
  const std::string name = "'" + evil + "'";
  for (const std::string command : {"show ", "validate ", "simulate ", "metadata ", "explain ",
                                    "plan --lengths ", "plan --corpus ", "experts --ids "})
    expect_plain_error(run(command + name));
  for (const std::string command : {"plan -o ", "demo --html ", "explain --trace "})
    expect_plain_error(run(command + "'no such folder/" + evil + "'"));
  write(evil + "/a.txt", "some words of text");
  write(evil + "/lengths", "100 200");
  for (const std::string& text :
       {"demo --no-html --world-size 2 --corpus " + name,
        "demo --world-size 2 --lengths " + name + "/lengths --html " + name + "/r.html",
        "compare --world-size 2 --corpus " + name,
        "explain --world-size 2 --lengths " + name + "/lengths --trace " + name + "/t.json",
        "plan --world-size 2 --corpus " + name + " -o " + name + "/p.json",
        "validate " + name + "/p.json", "explain " + name + "/p.json"}) {
    const ProgramResult result = run(text);
    EXPECT_EQ(result.exit_code, 0) << printable(result.err);
    expect_plain(result);
  }
  const std::string page = text_of(path(evil + "/r.html"));
  EXPECT_EQ(page, printable(page));
  const std::string trace = text_of(path(evil + "/t.json"));
  EXPECT_EQ(trace, printable(trace));
}

/// A name cannot pretend to be a line of its own.
TEST_F(TerminalEscapesTest, line_feeds_in_names) {
  write("a\nwaybill: all is well/a.txt", "some words of text");
  const ProgramResult good =
      run("demo --no-html --world-size 2 --corpus 'a\nwaybill: all is well'");
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_EQ(good.out.find("\nwaybill:"), std::string::npos) << good.out;
  const ProgramResult bad = run("show 'a\nwaybill: all is well'");
  EXPECT_NE(bad.exit_code, 0);
  EXPECT_EQ(bad.err.find("\nwaybill:"), std::string::npos) << bad.err;
}

TEST_F(TerminalEscapesTest, arguments) {
  const std::string name = "'" + evil + "'";
  expect_plain_error(run(name));
  expect_plain_error(run("demo " + name));
  expect_plain_error(run("demo '--" + evil + "'"));
  for (const std::string option :
       {"demo --distribution ", "demo --dtype ", "demo --kv-layout ", "demo --world-size ",
        "demo --tokens-per-rank ", "demo --gb-per-s ", "demo --seed ", "explain --nvlink ",
        "explain --transfer ", "experts --payload ", "show plan.json --table "})
    expect_plain_error(run(option + name));
}

TEST_F(TerminalEscapesTest, contents_of_files) {
  for (const std::string& text :
       {"{\"format\": \"" + evil_json + "\"}",
        "{\"format\": \"waybill.plan\", \"version\": \"" + evil_json + "\"}",
        "{\"" + evil_json + "\": 1, \"format\": \"waybill.plan\", \"version\": 1}",
        "{\"format\": \"waybill.plan\", \"" + evil_json + "\": 1, \"" + evil_json + "\": 2}",
        "{\"" + evil_json + "\": [}", evil, "\"" + evil + "\"", "[\"" + evil_json + "\"",
        "\"\\" + evil}) {
    for (const std::string command :
         {"show -", "validate -", "simulate -", "metadata -", "explain -"}) {
      const ProgramResult result = run(command, text);
      EXPECT_EQ(result.exit_code, 1);
      expect_plain(result);
    }
  }
  for (const std::string& text : {evil, "5 " + evil, "[" + evil + "]", "[\"" + evil_json + "\"]"}) {
    EXPECT_NE(run("plan --lengths -", text).exit_code, 0);
    expect_plain(run("plan --lengths -", text));
    expect_plain(run("experts --ids -", text));
  }
}

TEST_F(TerminalEscapesTest, the_page_has_the_command_without_them) {
  ASSERT_EQ(run("demo --world-size 2 --tokens-per-rank 512 --no-simulate --plan-out '" + evil + "'")
                .exit_code,
            0);
  const std::string page = text_of(path("waybill-report.html"));
  EXPECT_NE(page.find("--plan-out"), std::string::npos);
  EXPECT_EQ(page, printable(page));
}

}  // namespace
}  // namespace waybill::test
