#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <thread>

#include "experts/disagreeing_ranks.h"
#include "experts/simulated_copies.h"
#include "support/expect_error.h"
#include "support/run_ranks.h"
#include "waybill/experts/copy_store.h"

namespace waybill::test {
namespace {

/// The tensors of a rank's experts: one part of bytes for each.
std::vector<std::byte*> rows_of(std::span<std::byte> memory, std::int64_t experts,
                                std::int64_t row_bytes) {
  std::vector<std::byte*> rows;
  for (std::int64_t e = 0; e < experts; ++e) rows.push_back(memory.data() + e * row_bytes);
  return rows;
}

struct CopyCase : SimulatedCopies {
  using SimulatedCopies::SimulatedCopies;

  [[nodiscard]] ExpertSlotTable slots() const { return drawn.slots(); }

  /// Fetches weights into memory that held something else, and looks at all of it.
  void fetch(CopyExchange& exchange, std::int32_t rank) const {
    const ExpertSlotTable slots = drawn.slots();
    std::vector<std::byte> own = home[rank];
    std::vector<std::byte> copies(slots.num_spare() * row_bytes, std::byte{0x5A});
    const auto to_home = rows_of(own, slots.experts_per_rank(), row_bytes);
    const auto to_copies = rows_of(copies, slots.num_spare(), row_bytes);
    exchange.fetch_weights(
        {.slots = slots, .parts = {&part, 1}, .home = to_home, .copies = to_copies});
    EXPECT_EQ(own, home[rank]);
    const std::int32_t first = slots.experts_per_rank();
    for (std::int32_t s = 0; s < slots.num_spare(); ++s) {
      const bool is_empty = slots.experts[rank * slots.slots_per_rank() + first + s] < 0;
      for (std::int64_t i = 0; i < row_bytes; ++i) {
        const std::byte wanted =
            is_empty ? std::byte{0x5A} : weights[rank][(first + s) * row_bytes + i];
        ASSERT_EQ(copies[s * row_bytes + i], wanted) << "slot " << s << ", byte " << i;
      }
    }
  }

  void add(CopyExchange& exchange, std::int32_t rank) const {
    const ExpertSlotTable slots = drawn.slots();
    HostTensor own = gradients.first[rank];
    HostTensor copies = gradients.second[rank];
    const std::int64_t copy_bytes =
        slots.num_spare() == 0 ? 0 : copies.size_bytes() / slots.num_spare();
    const auto to_home = rows_of(own.bytes(), slots.experts_per_rank(), row_bytes);
    const auto to_copies = rows_of(copies.bytes(), slots.num_spare(), copy_bytes);
    exchange.add_gradients(
        {.slots = slots, .parts = {&part, 1}, .home = to_home, .copies = to_copies});
    EXPECT_TRUE(std::ranges::equal(own.bytes(), sums[rank].bytes()));
    EXPECT_TRUE(std::ranges::equal(copies.bytes(), gradients.second[rank].bytes()));
  }
};

TEST(CopyExchange, DeliversWhatTheSimulationDeliversOnAllKindsOfRanks) {
  for (const RankWay& way : all_rank_ways()) {
    std::vector<CopyCase> cases;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      cases.emplace_back(way.world_size, 2, 2, seed, 37, DType::float32);
      cases.emplace_back(way.world_size, 3, 1, seed, 5, DType::bfloat16);
    }
    run_way(way, 20, [&](World& world) {
      const std::int32_t rank = to_int(world.rank());
      CopyExchange exchange(world);
      for (const CopyCase& one : cases) {
        one.fetch(exchange, rank);
        one.add(exchange, rank);
      }
      exchange.finalize();
      if (::testing::Test::HasFailure()) throw InternalError(concat("in ", way));
    });
  }
}

TEST(CopyExchange, MovesTensorsOfManyPieces) {
  // 600 KiB in float32, 2.3 pieces; in float64 and in float16, whose gradients are twice as long.
  std::vector<CopyCase> cases;
  for (const DType dtype : {DType::float32, DType::float64, DType::float16}) {
    cases.emplace_back(3, 1, 2, 1, 150'000, dtype);
    cases.emplace_back(3, 2, 2, 4, 65'536, dtype);  // a whole number of pieces
  }
  run_thread_world(3, [&](World& world) {
    CopyExchange exchange(world);
    for (const CopyCase& one : cases) {
      one.fetch(exchange, to_int(world.rank()));
      one.add(exchange, to_int(world.rank()));
    }
  });
}

TEST(CopyExchange, TakesRanksThatAreSlowInTurn) {
  const CopyCase one(4, 2, 2, 3, 100'000, DType::float32);
  run_thread_world(4, [&](World& world) {
    const std::int32_t rank = to_int(world.rank());
    CopyExchange exchange(world);
    for (std::int32_t slow = 0; slow < 4; ++slow) {
      if (rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      one.fetch(exchange, rank);
      if (rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      one.add(exchange, rank);
    }
  });
}

TEST(CopyExchange, WorksAloneWithoutCopiesAndWithoutBytes) {
  const CopyCase alone(1, 3, 2, 0, 7, DType::float32);
  run_thread_world(1, [&](World& world) {
    CopyExchange exchange(world);
    alone.fetch(exchange, 0);
    alone.add(exchange, 0);
    EXPECT_EQ(exchange.exchange_versions(41, 0), (std::vector<std::int64_t>{41}));
  });
  const CopyCase no_spare(2, 3, 0, 1, 7, DType::float32);
  const CopyCase no_bytes(2, 3, 2, 1, 0, DType::float32);
  run_thread_world(2, [&](World& world) {
    CopyExchange exchange(world);
    for (const CopyCase* one : {&no_spare, &no_bytes}) {
      one->fetch(exchange, to_int(world.rank()));
      one->add(exchange, to_int(world.rank()));
    }
  });
}

TEST(CopyExchange, TellsTheVersionsOfAllRanks) {
  for (const RankWay& way :
       {RankWay{RankKind::threads, 4, 2}, RankWay{RankKind::processes, 4, 1}}) {
    run_way(way, 20, [&](World& world) {
      CopyExchange exchange(world);
      const std::int32_t rank = to_int(world.rank());
      for (std::int64_t round = 0; round < 50; ++round) {
        if (rank == round % 4) std::this_thread::sleep_for(std::chrono::microseconds(300));
        const auto got = exchange.exchange_versions(100 * round + rank, 0);
        for (std::int64_t r = 0; r < 4; ++r) {
          if (got[r] != 100 * round + r) throw InternalError(concat("round ", round, ": ", got[r]));
        }
      }
    });
  }
}

TEST(CopyExchangeErrors, ComeBeforeAnyCommunicationAndTheCallMayBeRepeated) {
  const CopyCase one(2, 2, 1, 1, 3, DType::float32);
  run_thread_world(2, [&](World& world) {
    const std::int32_t rank = to_int(world.rank());
    CopyExchange exchange(world);
    std::vector<std::byte> memory(1000);
    const auto home = rows_of(memory, 2, 12);
    const auto copies = rows_of(memory, 1, 12);
    const auto refuses = [&](auto&& change, std::initializer_list<std::string_view> parts) {
      ExpertCopyCall call{
          .slots = one.slots(), .parts = {&one.part, 1}, .home = home, .copies = copies};
      change(call);
      EXPECT_TRUE(rejects([&] { exchange.fetch_weights(call); }, parts));
      EXPECT_TRUE(rejects([&] { exchange.add_gradients(call); }, parts));
    };
    refuses([](auto& call) { call.slots.num_experts = 3; }, {"num_experts = 3"});
    const std::vector<std::int32_t> of_one{0, 1, 2, 3, -1};
    refuses(
        [&](auto& call) {
          call.slots = {1, 4, of_one};
        },
        {"slots are of 1 ranks", "expected 2"});
    refuses([](auto& call) { call.home = call.home.first(1); },
            {"home has 1 tensors, expected 1 for each of 2 experts"});
    refuses([](auto& call) { call.copies = {}; }, {"copies has 0 tensors"});
    const ExpertPart negative{-1, DType::float32};
    refuses([&](auto& call) { call.parts = {&negative, 1}; }, {"a part has -1 elements"});
    const std::vector<std::byte*> null(2, nullptr);
    const std::vector<std::int32_t> all{0, 1, 2, 2, 3, 0};
    refuses([&](auto& call) { call.slots.experts = all, call.home = null; },
            {"part 0 of home expert ", "is null"});
    refuses(
        [&](auto& call) {
          call.slots.experts = all, call.copies = {null.data(), 1};
        },
        {"the copy of expert ", "is null"});
    const ExpertPart whole{3, DType::int32};
    EXPECT_TRUE(rejects(
        [&] {
          exchange.add_gradients(
              {.slots = one.slots(), .parts = {&whole, 1}, .home = home, .copies = copies});
        },
        {"add_gradients: a part is int32"}));
    one.fetch(exchange, rank);  // nothing above has told anybody
    one.add(exchange, rank);
    exchange.finalize();
    exchange.finalize();
    EXPECT_THROW(one.fetch(exchange, rank), TransportError);
  });
}

TEST(CopyExchangeErrors, NameTheRankThatMeansAnotherCall) {
  const CopyCase one(4, 2, 2, 0, 3, DType::float32);
  const CopyCase other(4, 2, 2, 2, 3, DType::float32);
  const CopyCase longer(4, 2, 2, 0, 4, DType::float32);
  const auto odd_one = [&](auto&& call, std::string_view text) {
    const auto results = run_with_bootstrap(4, 5, [&](std::shared_ptr<Bootstrap> bootstrap) {
      World world = make_thread_world(std::move(bootstrap));
      CopyExchange exchange(world);
      try {
        call(exchange, to_int(world.rank()), is_odd(world));
      } catch (...) {
        EXPECT_THROW(one.fetch(exchange, to_int(world.rank())), TransportError);
        throw;
      }
    });
    for (const RankResult& result : results) {
      EXPECT_NE(result.text.find("ranks disagree in call 1: "), std::string::npos) << result.text;
      EXPECT_NE(result.text.find(text), std::string::npos) << result.text;
    }
  };
  odd_one([&](CopyExchange& exchange, std::int32_t rank,
              bool odd) { (odd ? other : one).fetch(exchange, rank); },
          "the plan differs");
  odd_one([&](CopyExchange& exchange, std::int32_t rank,
              bool odd) { (odd ? longer : one).fetch(exchange, rank); },
          "the tensors' format");
  odd_one([&](CopyExchange& exchange, std::int32_t rank,
              bool odd) { odd ? one.add(exchange, rank) : one.fetch(exchange, rank); },
          "add_gradients");
  odd_one([&](CopyExchange& exchange, std::int32_t /*rank*/,
              bool odd) { (void)exchange.exchange_versions(3, odd ? 1 : 0); },
          "an option differs");
}

TEST(CopyExchangeErrors, ARankThatDoesNotComeIsATimeoutThatNamesIt) {
  const CopyCase one(3, 1, 1, 1, 3, DType::float32);
  const auto results = run_with_bootstrap(3, 0.3, [&](std::shared_ptr<Bootstrap> bootstrap) {
    World world = make_thread_world(std::move(bootstrap));
    CopyExchange exchange(world);
    if (to_int(world.rank()) != 1) one.fetch(exchange, to_int(world.rank()));
  });
  EXPECT_EQ(results[1].text, "");
  for (const std::size_t rank : {0, 2}) {
    const TimeoutInfo missed = timeout_of(results[rank]);
    EXPECT_EQ(missed.operation, "fetch_weights");
    EXPECT_EQ(missed.peer, 1);
  }
}

}  // namespace
}  // namespace waybill::test
