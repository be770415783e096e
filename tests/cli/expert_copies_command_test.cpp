// experts --spare: copies of hot experts, and files of counts.

#include "program_runner.h"

namespace waybill::test {
namespace {

using ExpertCopiesCommandTest = ProgramTest;

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

/// Rows of int64 as numpy.save writes them.
std::string npy(const std::string& shape, const std::vector<std::int64_t>& values,
                const std::string& order = "False", const std::string& type = "<i8") {
  const std::string header =
      "{'descr': '" + type + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  std::string text = "\x93NUMPY\x01" + std::string(1, '\0') + little_endian(header.size(), 2);
  text += header;
  for (const std::int64_t value : values) text += little_endian(value, 8);
  return text;
}

/// A ZIP file of these as numpy.savez writes it; checksums are not looked at.
std::string npz(const std::vector<std::pair<std::string, std::string>>& files, int method = 0) {
  std::string text, directory;
  for (const auto& [name, data] : files) {
    const std::string sizes = little_endian(0, 4) + little_endian(data.size(), 4) +
                              little_endian(data.size(), 4) + little_endian(name.size(), 2);
    const std::string common = little_endian(0, 2) + little_endian(method, 2) + little_endian(0, 4);
    directory += "PK\x01\x02" + little_endian(0, 2) + little_endian(20, 2) + common + sizes +
                 little_endian(0, 2) + little_endian(0, 2) + little_endian(0, 2) +
                 little_endian(0, 2) + little_endian(0, 4) + little_endian(text.size(), 4) + name;
    // As numpy: sizes of the local header are in an extra field.
    text += "PK\x03\x04" + little_endian(45, 2) + common + little_endian(0, 4) +
            little_endian(0xFFFFFFFF, 4) + little_endian(0xFFFFFFFF, 4) +
            little_endian(name.size(), 2) + little_endian(20, 2) + name + std::string(20, 'x') +
            data;
  }
  const std::size_t begin = text.size();
  return text + directory + "PK\x05\x06" + little_endian(0, 4) + little_endian(files.size(), 2) +
         little_endian(files.size(), 2) + little_endian(directory.size(), 4) +
         little_endian(begin, 4) + little_endian(0, 2);
}

constexpr const char* table =
    "[[40, 4, 4, 4, 4, 4, 4, 4], [40, 4, 4, 4, 4, 4, 4, 4],"
    " [40, 4, 4, 4, 4, 4, 4, 4], [40, 4, 4, 4, 4, 4, 4, 4]]";
const std::string counted = " --hidden 128 --intermediate 64 ";

std::vector<std::int64_t> values() {
  std::vector<std::int64_t> numbers;
  for (int i = 0; i < 32; ++i) numbers.push_back(i % 8 == 0 ? 40 : 4);
  return numbers;
}

TEST_F(ExpertCopiesCommandTest, SaysWhichExpertIsHotAndWhatItsCopiesCost) {
  write("rows.json", table);
  const ProgramResult result =
      run("experts --counts rows.json --spare 1" + counted + "--nvlink 1GB/s");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const std::string text = unwrapped(result.out);
  EXPECT_TRUE(holds(
      text,
      {"Counts from rows.json; each row is taken for a token of its own",
       "Copies of hot experts (1 spare slot per rank)",
       "Expert 0 of rank 0 is hot: 160 rows, 4.71 times an even share; 3 copies leave 52 at home.",
       "computes 68 rows instead of 176: 1.000 instead of 2.588 times the mean; no choice of "
       "copies gets below 68",
       // 3 x 128 x 64 elements of 2 bytes; one of three copies is forwarded by another.
       "A copy is 48.0 KiB of weights. Rank 0 sends 2 of 3 copies over NVLink: 98.3 us at 1.00 "
       "GB/s",
       // 4 bytes, three times.
       "96.0 KiB of float32 gradient per copy home, 295 us", "Copies do not pay"}));
  // The picture: the fullest rank has a whole bar before, and 68 of 176 rows of one after.
  EXPECT_TRUE(holds(result.out, {"       0       0         160    4.71         52  1, 2, 3",
                                 "     0  ████████        176  ███▏             68      2   0",
                                 "     1  █▌               32  ███▏             68      1   1"}));
}

TEST_F(ExpertCopiesCommandTest, CopiesOfLargeExpertsPayWhereRowsAreMany) {
  write("rows.json", "[[90000, 10, 10, 10], [90000, 10, 10, 10]]");
  const std::string command = "experts --counts rows.json --spare 1 --hidden 512 ";
  const ProgramResult pays = run(command + "--alignment 128");
  EXPECT_TRUE(holds(unwrapped(pays.out),
                    {"In tiles of 128 rows the fullest rank has", "Copies pay: forward gains"}));
  const ProgramResult slow = run(command + "--nvlink 1GB/s --flops 1e18");
  // The copy keeps 90 000 rows of a KiB from a slow link.
  EXPECT_TRUE(holds(unwrapped(slow.out),
                    {"a dispatch takes 396 us instead of 92.3 ms",
                     "nothing hides them: 6.29 ms in forward, and again", "Copies pay: "}));
  EXPECT_TRUE(holds(unwrapped(run(command + "--ranks-per-node 1").out),
                    {"over the network", "at 50.0 GB/s"}));
  EXPECT_TRUE(holds(unwrapped(run(command + "--limit 1e6").out),
                    {"Expert 0 of rank 0 is hot", "No copy is planned"}));
  EXPECT_TRUE(holds(unwrapped(run(command + "--min-rows 200000").out), {"No copy is planned"}));
  // 8 bytes of an element against 6 operations of a row.
  EXPECT_TRUE(holds(unwrapped(run(command + "--nvlink 1TB/s").out), {"from 800 rows on"}));
  const std::string even = command + "--min-rows pays --html pays.html --nvlink ";
  EXPECT_TRUE(holds(unwrapped(run(even + "1TB/s").out), {"1 of 1 copy"}));
  EXPECT_TRUE(holds(text_of(path("pays.html")), {"at least 800 rows"}));
  EXPECT_TRUE(holds(unwrapped(run(even + "1GB/s").out), {"No copy is planned"}));
  write("none.json", "[[0, 0], [0, 0]]");
  EXPECT_TRUE(holds(run("experts --counts none.json --spare 1").out, {"nothing to copy"}));
  EXPECT_TRUE(holds(run("experts --counts rows.json").out, {"Counts from rows.json"}));
  EXPECT_EQ(run("experts --counts rows.json").out.find("Copies of hot"), std::string::npos);
}

TEST_F(ExpertCopiesCommandTest, DrawnIdsHaveCopiesToo) {
  const ProgramResult result = run("experts --skew 1 --tokens 512 --spare 2");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(holds(unwrapped(result.out),
                    {"Choices drawn, skew 1", "(2 spare slots per rank)", "84.0 MiB of weights",
                     "1.000 instead of 1.278 times the mean", "What copies cost and gain"}));
}

TEST_F(ExpertCopiesCommandTest, TheReportHasThePicture) {
  write("rows.json", table);
  const ProgramResult result =
      run("experts --counts rows.json --spare 1 --html copies.html" + counted);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(holds(result.out, {"Report: copies.html"}));
  const std::string page = text_of(path("copies.html"));
  EXPECT_TRUE(holds(page, {"<!DOCTYPE html>", "Copies", "Rows of each rank", "<b>Before</b>",
                           "<b>With copies</b>", "<title>rank 0: 176 rows</title>",
                           "<title>rank 3: 68 rows</title>", "<td>1, 2, 3</td>",
                           "Expert 0 of rank 0 is hot", "--counts rows.json", "</html>"}));
  EXPECT_EQ(page.find("<script"), std::string::npos);
}

TEST_F(ExpertCopiesCommandTest, AllFormsOfCountsSayTheSame) {
  write("rows.json", table);
  const std::string options = " --spare 1 --hidden 512";
  const auto tail = [&](const std::string& file, const std::string& input = "") {
    const ProgramResult result = run("experts --counts " + file + options, input);
    EXPECT_EQ(result.exit_code, 0) << file << ": " << result.err;
    return result.out.substr(std::min(result.out.size(), result.out.find('\n')));
  };
  const std::string expected = tail("rows.json");
  ASSERT_NE(expected.find("1, 2, 3"), std::string::npos);
  EXPECT_EQ(tail("-", table), expected);
  write("object.json", std::string(R"({"rows": )") + table + "}");
  EXPECT_EQ(tail("object.json"), expected);
  write("real.json",
        "[[40.0, 4, 4, 4, 4, 4, 4, 4], [40, 4, 4, 4, 4, 4, 4, 4],"
        " [40, 4, 4, 4, 4, 4, 4, 4], [40, 4, 4, 4, 4, 4, 4, 4]]");
  EXPECT_EQ(tail("real.json"), expected);
  const std::string rows = npy("(4, 8)", values());
  write("rows.npy", rows);
  EXPECT_EQ(tail("rows.npy"), expected);
  write("one.npz", npz({{"arr_0.npy", rows}}));
  EXPECT_EQ(tail("one.npz"), expected);
  write("two.npz", npz({{"other.npy", npy("(1, 1)", {3})}, {"rows.npy", rows}}));
  EXPECT_EQ(tail("two.npz"), expected);
  std::vector<std::int64_t> columns;
  for (int i = 0; i < 32; ++i) columns.push_back(i < 4 ? 40 : 4);
  write("columns.npy", npy("(4, 8)", columns, "True"));
  EXPECT_EQ(tail("columns.npy"), expected);
}

TEST_F(ExpertCopiesCommandTest, NamesWhatIsWrongInAFileOfCounts) {
  const auto refuses = [&](const std::string& text, std::initializer_list<std::string> words) {
    write("rows", text);
    return fails(run("experts --spare 1 --counts rows"), 1, words);
  };
  EXPECT_TRUE(refuses("[[1, 2], [3]]", {"rows: /1", "expected 2 counts, as in the list before"}));
  EXPECT_TRUE(refuses("[[1, -2]]", {"rows of rank 0 for expert 1 = -2, expected an integer"}));
  EXPECT_TRUE(refuses("[[1, 2.5]]", {"rank 0 for expert 1 = 2.5"}));
  EXPECT_TRUE(refuses("[\"x\", [1]]", {"/0", "expected a list of counts, one per expert"}));
  EXPECT_TRUE(refuses("[[1, \"x\"]]", {"/0/1", "expected a number of rows"}));
  EXPECT_TRUE(refuses("[1, 2]", {"rows: / = a list of 2, expected a list of lists"}));
  EXPECT_TRUE(refuses("{\"counts\": 1}", {"rows"}));
  EXPECT_TRUE(refuses("[]", {"shape", "expected [ranks, experts]"}));
  EXPECT_TRUE(refuses("[[1, 2, 3], [1, 2, 3]]", {"3 experts", "a multiple of the 2 ranks"}));
  EXPECT_TRUE(refuses("[[1000000000]]", {"more than 268435456 rows"}));
  const std::string rows = npy("(4, 8)", values());
  EXPECT_TRUE(refuses(rows.substr(0, rows.size() - 1), {"255 bytes", "expected 4 x 8 x 8"}));
  EXPECT_TRUE(refuses(npy("(32,)", values()), {"1 dimensions, expected [ranks, experts]"}));
  EXPECT_TRUE(refuses(npy("(4, 8)", values(), "False", "|O"), {"type |O, expected integers"}));
  EXPECT_TRUE(refuses(npz({{"rows.npy", rows}}, 8), {"rows.npy is compressed", "numpy.savez"}));
  EXPECT_TRUE(refuses(npz({{"a.npy", rows}, {"b.npy", rows}}), {"got the arrays a, b"}));
  EXPECT_TRUE(refuses(npz({}), {"the arrays (none)"}));
  EXPECT_TRUE(refuses(npz({{"rows.npy", rows}}).substr(0, 60), {"npz file is cut off"}));
  EXPECT_TRUE(fails(run("experts --spare 1 --counts gone.npz"), 1, {"gone.npz"}));
}

TEST_F(ExpertCopiesCommandTest, NamesWhatIsWrongInAnOption) {
  write("rows.json", table);
  const auto misused = [&](const std::string& options, std::initializer_list<std::string> words) {
    return fails(run("experts " + options), 2, words);
  };
  EXPECT_TRUE(misused("--spare -1", {"--spare", "-1"}));
  EXPECT_TRUE(misused("--spare 300", {"--spare: 300, expected at most --experts = 256"}));
  EXPECT_TRUE(misused("--spare 1 --limit 0.9", {"--limit", "0.9"}));
  EXPECT_TRUE(misused("--spare 1 --limit nan", {"--limit", "nan"}));
  EXPECT_TRUE(misused("--spare 1 --min-rows -1", {"--min-rows", "-1"}));
  EXPECT_TRUE(misused("--spare 1 --min-rows much", {"--min-rows", "much", "or pays"}));
  EXPECT_TRUE(misused("--spare 1 --alignment 0", {"--alignment", "0"}));
  EXPECT_TRUE(misused("--spare 1 --intermediate 0", {"--intermediate", "0"}));
  EXPECT_TRUE(misused("--spare 1 --flops 0", {"--flops", "0"}));
  EXPECT_TRUE(misused("--limit 2", {"--limit", "--spare"}));
  EXPECT_TRUE(misused("--html x.html", {"--html", "--spare"}));
  EXPECT_TRUE(misused("--counts rows.json --topk 3", {"--counts cannot be given with --topk"}));
  EXPECT_TRUE(misused("--counts rows.json --ids x", {"--counts cannot be given with --ids"}));
  EXPECT_TRUE(misused("--counts rows.json --ranks 2",
                      {"--ranks: 2, expected 4, the ranks (rows of the table) in rows.json"}));
  EXPECT_TRUE(misused("--counts rows.json --experts 4", {"--experts: 4, expected 8"}));
  EXPECT_TRUE(misused("--ranks 16384 --experts 16384 --tokens 1 --spare 1",
                      {"--spare: 16384 ranks x 16384 experts, expected at most 67108864 pairs"}));
  EXPECT_TRUE(fails(run("experts --spare 1 --tokens 4 --html no/such/x.html"), 1, {"x.html"}));
  const ProgramResult help = run("experts --help");
  EXPECT_TRUE(holds(help.out, {"Copies:", "--spare", "--limit", "--min-rows", "--alignment",
                               "--intermediate", "--flops", "--counts", "--html"}));
}

}  // namespace
}  // namespace waybill::test
