// A healthy job that starts among callers of all kinds: it always does, and who is refused learns
// the reason.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <random>

#include "support/rendezvous.h"
#include "support/run_ranks.h"
#include "transport/bootstrap/tcp/handshake.h"

namespace waybill {
namespace {

using detail::Hello;
using test::encode;
using test::error_of;
using test::expect_no_errors;
using test::free_port;
using test::RawCaller;
using test::sleep_s;

constexpr double deadline_s = 20;

/// Draws whole numbers, the same for a seed on every machine.
class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  std::uint32_t below(std::uint32_t end) { return static_cast<std::uint32_t>(random_()) % end; }

 private:
  std::mt19937 random_;
};

/// How far a job has come.
struct Progress {
  std::atomic<bool> rank_2_is_in = false;
  std::atomic<std::int32_t> called = 0;  ///< strangers that have been answered, or idle
  std::atomic<bool> done = false;
};

void wait_until(const std::function<bool()>& is_true) {
  for (const test::Stopwatch watch; watch.seconds() < deadline_s && !is_true(); sleep_s(0.002)) {
  }
}

/// A rank that does not belong to the job, as a process of this library would be one.
void call_as_a_wrong_rank(std::uint16_t port, std::int32_t world_size, Draw draw,
                          Progress& progress) {
  const std::uint32_t kind = draw.below(3);
  const JobIdentity its{.id = kind == 0 ? "another" : "job", .secret = {}};
  const std::int32_t size = kind == 1 ? world_size + 1 : world_size;
  if (kind == 2) wait_until([&] { return progress.rank_2_is_in.load(); });  // and so there twice
  const std::string error =
      error_of([&] { (void)make_tcp_bootstrap(2, size, "127.0.0.1", port, deadline_s, its); });
  EXPECT_NE(error.find("refused rank 2: "), std::string::npos) << kind << ": " << error;
  ++progress.called;
}

/// Bytes of a hello, whole or a part, right or damaged, or none; perhaps held open to the end.
void say_what_admits_nobody(std::uint16_t port, Draw draw, Progress& progress) {
  const RawCaller caller(port);
  auto bytes = encode(Hello{.has_secret = draw.below(2),
                            .world_size = draw.below(9),
                            .rank = 900 + draw.below(9),
                            .job = "job"});
  const std::uint32_t kind = draw.below(4);
  for (std::uint32_t i = draw.below(8); kind == 1 && i > 0; --i) {
    bytes[draw.below(16)] = static_cast<std::byte>(draw.below(256));
  }
  const auto size = static_cast<std::uint32_t>(bytes.size());
  if (kind != 3) caller.say(bytes.data(), kind == 0 ? draw.below(size) : size);
  ++progress.called;
  if (draw.below(2) == 0) wait_until([&] { return progress.done.load(); });
}

/// Rank 1 comes last, when all strangers have called.
void start_among_strangers(unsigned seed) {
  Draw draw(seed);
  const std::int32_t world_size = 3 + static_cast<std::int32_t>(draw.below(3));
  const std::int32_t strangers = 1 + static_cast<std::int32_t>(draw.below(12));
  const std::uint16_t port = free_port();
  Progress progress;
  expect_no_errors(test::run_ranks(world_size + strangers, [&](std::int32_t i) {
    const Draw mine(seed * 100 + static_cast<unsigned>(i));
    if (i >= world_size) {
      return i % 3 == 0 ? call_as_a_wrong_rank(port, world_size, mine, progress)
                        : say_what_admits_nobody(port, mine, progress);
    }
    if (i == 1) wait_until([&] { return progress.called == strangers; });
    const auto bootstrap = make_tcp_bootstrap(i, world_size, "127.0.0.1", port, deadline_s,
                                              {.id = "job", .secret = {}});
    if (i == 2) progress.rank_2_is_in = true;
    const auto all = all_gather_value(*bootstrap, i, "meet");
    for (std::int32_t r = 0; r < world_size; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], r);
    bootstrap->barrier("end");
    if (i == 0) progress.done = true;
  }));
  EXPECT_TRUE(progress.done);
}

TEST(RandomStrangers, AHealthyJobStartsAmongThem) {
  testing::internal::CaptureStderr();  // a line for each who is hung up on
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    start_among_strangers(seed);
  }
  (void)testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace waybill
