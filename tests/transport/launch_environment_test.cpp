#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "waybill/transport/bootstrap.h"

namespace waybill {
namespace {

using test::rejects;
using Variables = std::map<std::string, std::string>;

LaunchEnvironment read_launch(const Variables& variables) {
  return read_launch_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

TEST(LaunchEnvironment, AloneWithoutALauncher) {
  const auto environment = read_launch({});
  EXPECT_EQ(environment.launcher, "none");
  EXPECT_EQ(environment.rank, 0);
  EXPECT_EQ(environment.world_size, 1);
  EXPECT_EQ(make_environment_bootstrap(environment)->world_size(), 1);
}

TEST(LaunchEnvironment, Torchrun) {
  const auto environment = read_launch({{"RANK", "5"},
                                        {"WORLD_SIZE", "8"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"MASTER_ADDR", "node7"},
                                        {"MASTER_PORT", "1234"},
                                        {"SLURM_PROCID", "0"},  // torchrun inside of a Slurm job
                                        {"SLURM_NTASKS", "1"}});
  EXPECT_EQ(environment.launcher, "torchrun");
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.world_size, 8);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.ranks_per_node, 4);
  EXPECT_EQ(environment.rendezvous, "tcp://node7:1235");
}

TEST(LaunchEnvironment, OtherLaunchers) {
  const auto openmpi = read_launch({{"OMPI_COMM_WORLD_RANK", "1"},
                                    {"OMPI_COMM_WORLD_SIZE", "2"},
                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                    {"WAYBILL_RENDEZVOUS", "file:///scratch/x"}});
  EXPECT_EQ(openmpi.launcher, "openmpi");
  EXPECT_EQ(openmpi.ranks_per_node, 2);
  EXPECT_EQ(openmpi.rendezvous, "file:///scratch/x");
  const auto slurm =
      read_launch({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(slurm.launcher, "slurm");
  EXPECT_EQ(slurm.rank, 3);
  EXPECT_EQ(slurm.local_rank, 1);
  EXPECT_EQ(slurm.ranks_per_node, 1);
  const auto pmi = read_launch({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}});
  EXPECT_EQ(pmi.launcher, "pmi");
  EXPECT_EQ(pmi.ranks_per_node, 3);
  EXPECT_EQ(pmi.local_rank, 1);
}

TEST(LaunchEnvironment, NamesTheVariableThatIsWrong) {
  EXPECT_TRUE(rejects(
      [] {
        (void)read_launch({{"RANK", "x"}, {"WORLD_SIZE", "2"}});
      },
      {"RANK = \"x\"", "expected a number"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)read_launch({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
      },
      {"RANK = 2", "expected 0..1"}));
  EXPECT_TRUE(rejects([] { (void)read_launch({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}); }, {"RANK"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)read_launch({{"RANK", "0"}, {"WORLD_SIZE", "0"}});
      },
      {"WORLD_SIZE"}));
  EXPECT_TRUE(rejects(
      [] {
        (void)read_launch({{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "2"}});
      },
      {"LOCAL_WORLD_SIZE = 2", "divisor"}));
}

std::string job_id(const Variables& variables) { return read_launch(variables).job.id; }

TEST(LaunchEnvironment, TheJobIsTheFirstThatIsSaid) {
  EXPECT_EQ(job_id({}), "");
  const Variables slurm{{"SLURM_JOB_ID", "17"}, {"SLURM_STEP_ID", "2"}};
  EXPECT_EQ(job_id(slurm), "slurm 17.2");
  EXPECT_EQ(job_id({{"SLURM_JOB_ID", "17"}}), "slurm 17");
  Variables torchrun = slurm;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";  // torchrun's default, the same in every job
  EXPECT_EQ(job_id(torchrun), "slurm 17.2");
  torchrun["TORCHELASTIC_RUN_ID"] = "run";
  EXPECT_EQ(job_id(torchrun), "torchelastic run, restart 0");
  torchrun["TORCHELASTIC_RESTART_COUNT"] = "3";
  EXPECT_EQ(job_id(torchrun), "torchelastic run, restart 3");
  torchrun["WAYBILL_JOB_ID"] = "mine";
  EXPECT_EQ(job_id(torchrun), "mine");
  torchrun["WAYBILL_JOB_ID"] = "";
  EXPECT_EQ(job_id(torchrun), "torchelastic run, restart 3");
}

TEST(LaunchEnvironment, LongIdsStayDifferent) {
  const auto id_of_run = [](const std::string& run) {
    return job_id({{"TORCHELASTIC_RUN_ID", run}});
  };
  const std::string run(300, 'x');
  EXPECT_LE(id_of_run(run).size(), 120U);
  EXPECT_NE(id_of_run(run), id_of_run(run + "y"));
  EXPECT_EQ(id_of_run(run), id_of_run(run));
  EXPECT_EQ(job_id({{"WAYBILL_JOB_ID", std::string(120, 'x')}}), std::string(120, 'x'));
  EXPECT_TRUE(rejects(
      [] {
        (void)job_id({{"WAYBILL_JOB_ID", std::string(121, 'x')}});
      },
      {"WAYBILL_JOB_ID has 121 bytes", "at most 120"}));
}

TEST(LaunchEnvironment, TheSecretIsReadAndRanksMeetWithIt) {
  EXPECT_EQ(read_launch({}).job.secret, "");
  EXPECT_EQ(read_launch({{"WAYBILL_RENDEZVOUS_SECRET", "s"}}).job.secret, "s");
}

TEST(LaunchEnvironment, AddressesOfIPv6StandInBrackets) {
  const Variables with_port{{"MASTER_ADDR", "fd00::7"}, {"MASTER_PORT", "1234"}};
  EXPECT_EQ(read_launch(with_port).rendezvous, "tcp://[fd00::7]:1235");
  EXPECT_EQ(read_launch({{"MASTER_ADDR", "[fd00::7]"}, {"MASTER_PORT", "1"}}).rendezvous,
            "tcp://[fd00::7]:2");
}

TEST(LaunchEnvironment, APlaceToMeetIsNeeded) {
  LaunchEnvironment environment;
  environment.world_size = 2;
  for (const char* place :
       {"", "tcp://", "tcp://host", "tcp://host:x", "tcp://:5", "http://a:1", "tcp://::1:5",
        "tcp://[::1]", "tcp://[::1:5", "tcp://[]:5", "tcp://a]:5", "tcp://[[::1]]:5", "tcp://h:0",
        "tcp://h:65536", "file://folder", "file://"}) {
    environment.rendezvous = place;
    EXPECT_TRUE(rejects([&] { (void)make_environment_bootstrap(environment); },
                        {place, "WAYBILL_RENDEZVOUS"}))
        << place;
  }
}

TEST(LaunchEnvironment, RanksMeetThroughFiles) {
  const auto folder =
      std::filesystem::temp_directory_path() /
      concat("waybill_environment_",
             std::filesystem::file_time_type::clock::now().time_since_epoch().count());
  test::expect_no_errors(test::run_ranks(2, [&](std::int32_t rank) {
    const auto environment = read_launch({{"RANK", std::to_string(rank)},
                                          {"WORLD_SIZE", "2"},
                                          {"WAYBILL_RENDEZVOUS", "file://" + folder.string()}});
    const auto bootstrap = make_environment_bootstrap(environment, 20);
    const auto ranks = all_gather_value(*bootstrap, to_int(bootstrap->rank()), "test");
    ASSERT_EQ(ranks, (std::vector<std::int32_t>{0, 1}));
  }));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace waybill
