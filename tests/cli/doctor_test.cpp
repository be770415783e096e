#include "program_runner.h"

namespace waybill::test {
namespace {

using DoctorTest = ProgramTest;

TEST_F(DoctorTest, SaysWhatIsHere) {
  const ProgramResult doctor = run("doctor");
  EXPECT_EQ(doctor.err, "");
  ASSERT_TRUE(holds(doctor.out, {"on this host", "cores", "/dev/shm", "open files", "ulimit -l",
                                 "host name", "CUDA"}));
  // What is wrong here decides the exit code, and says what to do.
  if (doctor.exit_code != 0) {
    EXPECT_EQ(doctor.exit_code, 1);
    EXPECT_TRUE(holds(doctor.out, {"\n! ", "What to do", "does not work (!)"}));
  }
}

TEST_F(DoctorTest, JsonHasEveryLine) {
  const ProgramResult doctor = run("doctor --json --python 3.12.1 --torch 2.9.0");
  EXPECT_TRUE(
      holds(doctor.out, {"\"format\": \"waybill.doctor\"", "\"version\": 1", "\"host_id\": \"",
                         "\"works\": ", R"({"name": "Python", "state": "good", "value": "3.12.1"})",
                         R"({"name": "torch", "state": "good", "value": "2.9.0"})",
                         R"({"name": "cores", "state": "good", "value": ")"}));
}

TEST_F(DoctorTest, AWrongWishForPeerAccessIsNamed) {
  const auto said = [&](const std::string& value) {
    const std::string command = "cd '" + folder_.string() + "' && WAYBILL_PEER_ACCESS=" + value +
                                " '" WAYBILL_CLI "' doctor >stdout 2>stderr";
    (void)std::system(command.c_str());
    return text_of(path("stdout"));
  };
  EXPECT_TRUE(holds(said("nope"), {"! WAYBILL_PEER_ACCESS", "expected none", "does not work (!)"}));
  EXPECT_TRUE(holds(said("none"), {"  WAYBILL_PEER_ACCESS", "none\n"}));
  EXPECT_EQ(said("").find("WAYBILL_PEER_ACCESS"), std::string::npos);
}

TEST_F(DoctorTest, TorchThatIsMissingIsANote) {
  const ProgramResult doctor = run("doctor --python 3.12.1");
  EXPECT_TRUE(holds(doctor.out, {"- torch", "not installed", "waybill.torch needs it"}));
}

TEST_F(DoctorTest, SmallLimitsComeWithAdvice) {
  // The limits of the shell are those of the program.
  write("small.sh", "ulimit -Sn 200; exec \"$@\"\n");
  const std::string command =
      "cd '" + folder_.string() + "' && sh small.sh '" WAYBILL_CLI "' doctor >stdout 2>stderr";
  (void)std::system(command.c_str());
  EXPECT_TRUE(holds(text_of(path("stdout")),
                    {"- open files", "at most 200 (ulimit -n)", "for more than about 175 ranks"}));
}

TEST_F(DoctorTest, LinesAreAsWideAsTheTerminal) {
  // No output of a test is a terminal: COLUMNS says how wide it would be.
  const std::string command =
      "cd '" + folder_.string() + "' && COLUMNS=40 '" WAYBILL_CLI "' doctor >stdout 2>stderr";
  (void)std::system(command.c_str());
  std::istringstream lines(text_of(path("stdout")));
  for (std::string line; std::getline(lines, line);) {
    // A word, such as the name of this host, may be longer.
    EXPECT_TRUE(line.size() <= 40 || line.find_last_of(' ') < 20) << line;
  }
}

TEST_F(DoctorTest, MeasuringNeedsGpus) {
  if (WAYBILL_TEST_CUDA) GTEST_SKIP() << "built with CUDA: measured where GPUs are";
  EXPECT_TRUE(fails(run("doctor --measure"), 1, {"doctor --measure", "built without CUDA"}));
}

}  // namespace
}  // namespace waybill::test
