#include "waybill/core/topology.h"

#include <gtest/gtest.h>

#include <sstream>

namespace waybill {
namespace {

TEST(Rank, converts_and_prints_as_its_number) {
  EXPECT_EQ(to_int(Rank{7}), 7);
  EXPECT_EQ(to_int(Node{2}), 2);
  std::ostringstream text;
  text << Rank{12};
  EXPECT_EQ(text.str(), "12");
}

TEST(Topology, puts_consecutive_ranks_on_a_node) {
  const Topology topology{.world_size = 12, .ranks_per_node = 4};
  EXPECT_NO_THROW(topology.check());
  EXPECT_EQ(topology.num_nodes(), 3);
  EXPECT_EQ(topology.node(Rank{0}), Node{0});
  EXPECT_EQ(topology.node(Rank{3}), Node{0});
  EXPECT_EQ(topology.node(Rank{4}), Node{1});
  EXPECT_EQ(topology.local_rank(Rank{4}), LocalRank{0});
  EXPECT_EQ(topology.local_rank(Rank{11}), LocalRank{3});
}

TEST(Topology, check_accepts_the_limits) {
  EXPECT_NO_THROW((Topology{1, 1}.check()));
  EXPECT_NO_THROW((Topology{max_world_size, max_world_size}.check()));
}

TEST(Topology, check_refuses_what_does_not_divide) {
  EXPECT_THROW((Topology{0, 1}.check()), InvalidArgument);
  EXPECT_THROW((Topology{-1, 1}.check()), InvalidArgument);
  EXPECT_THROW((Topology{max_world_size + 1, 1}.check()), InvalidArgument);
  EXPECT_THROW((Topology{8, 0}.check()), InvalidArgument);
  EXPECT_THROW((Topology{8, -2}.check()), InvalidArgument);
  EXPECT_THROW((Topology{8, 3}.check()), InvalidArgument);
  EXPECT_THROW((Topology{4, 8}.check()), InvalidArgument);
}

}  // namespace
}  // namespace waybill
