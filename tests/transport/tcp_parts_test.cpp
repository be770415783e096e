// The parts of the rendezvous over TCP, one by one.

#include <gtest/gtest.h>

#include "support/rendezvous.h"
#include "support/run_ranks.h"
#include "transport/hmac.h"
#include "transport/bootstrap/wire.h"
#include "transport/tcp_caller.h"
#include "transport/bootstrap/tcp/exchange.h"
#include "transport/bootstrap/tcp/rendezvous.h"

namespace waybill::detail {
namespace {

using test::error_of;
using test::holds;

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    constexpr std::string_view digits = "0123456789abcdef";
    text += digits[std::to_integer<std::size_t>(byte >> 4)];
    text += digits[std::to_integer<std::size_t>(byte & std::byte{15})];
  }
  return text;
}

std::string hmac_text(std::string_view key, std::string_view message, HmacSource source) {
  return hex(hmac_sha256(key, std::as_bytes(std::span(message)), source));
}

/// RFC 4231, test cases 1, 2 and 6.
void expect_known_digests(HmacSource source) {
  EXPECT_EQ(hmac_text(std::string(20, '\x0b'), "Hi There", source),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_text("Jefe", "what do ya want for nothing?", source),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_text(std::string(131, '\xaa'),
                      "Test Using Larger Than Block-Size Key - Hash Key First", source),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Hmac, EverySourceThatIsThereGivesTheKnownDigests) {
  expect_known_digests(HmacSource::automatic);
  for (const HmacSource source : {HmacSource::libcrypto, HmacSource::kernel}) {
    const std::string error = error_of([&] { (void)hmac_text("key", "text", source); });
    if (error.empty()) {
      expect_known_digests(source);
    } else {
      EXPECT_TRUE(holds(error, "needs HMAC-SHA256, but neither libcrypto.so.3"));
    }
  }
}

TEST(Hmac, ProofsDifferByRoleHelloAndNonce) {
  const HelloBytes hello = encode(Hello{.world_size = 2, .rank = 1});
  const HelloBytes other = encode(Hello{.world_size = 3, .rank = 1});
  const Nonce nonce = random_nonce();
  const Digest proof = proof_of(Role::caller, "secret", hello, nonce);
  EXPECT_TRUE(same_digest(proof, proof_of(Role::caller, "secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(Role::rank_0, "secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(Role::caller, "Secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(Role::caller, "secret", other, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(Role::caller, "secret", hello, random_nonce())));
}

TEST(PeerText, HasNothingThatATerminalActsOn) {
  EXPECT_EQ(peer_text("plain, \xc3\xa4\xe2\x82\xac"), "plain, \xc3\xa4\xe2\x82\xac");
  EXPECT_EQ(peer_text("a\x1b[2Jb\x07\x7f\nc\td"), "a [2Jb   c d");
  EXPECT_EQ(peer_text("\xc2\x9b"), "  ");
  EXPECT_EQ(peer_text("abcdef", 3), "abc...");
  EXPECT_EQ(quoted_or_none(""), "none");
}

TEST(Deadline, OfAnyLength) {
  EXPECT_TRUE(Deadline(-1).passed());
  EXPECT_TRUE(Deadline(0).passed());
  EXPECT_EQ(Deadline(-1).left_s(), 0);
  for (const double seconds : {1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(Deadline(seconds).passed());
    EXPECT_GT(Deadline(seconds).left_s(), 1e8);
  }
}

TEST(Socket, ACallOfOneselfIsNoticed) {
  const std::uint16_t port = test::free_port();
  const Deadline deadline(5);
  // What the system does by chance where the port is one of those that it gives to callers.
  auto socket = Socket::connect("127.0.0.1", port, deadline, port);
  ASSERT_TRUE(socket);
  EXPECT_TRUE(socket->is_connected_to_itself());
  socket->abort();
  const Socket door = Socket::listen("127.0.0.1", port, deadline);  // the port is free at once
  const auto caller = Socket::connect("127.0.0.1", port, deadline);
  ASSERT_TRUE(caller);
  EXPECT_FALSE(caller->is_connected_to_itself());
}

TEST(Rendezvous, ARankThatCallsItselfFindsRank0Later) {
  const std::uint16_t port = test::free_port();
  test::expect_no_errors(test::run_ranks(2, [&](std::int32_t rank) {
    const Deadline deadline(10);
    std::vector<TcpPeer> peers;
    if (rank == 0) {
      test::sleep_s(0.2);
      Reception reception(Socket::listen("127.0.0.1", port, deadline), 2, "", "");
      peers = reception.admit_all(deadline);
    } else {
      const Call call{.host = "127.0.0.1",
                      .port = port,
                      .rank = 1,
                      .world_size = 2,
                      .job_id = {},
                      .secret = {},
                      .first_source_port = port};
      peers.emplace_back(call_rank_0(call, deadline), TcpExchange::max_frame_bytes(1, 2));
    }
    TcpExchange exchange(rank, 2, std::move(peers), 10);
    const Bootstrap::Bytes mine(1, static_cast<std::byte>(rank + 1));
    const auto all = exchange.run(mine, "test");
    EXPECT_EQ(all[0][0], std::byte{1});
    EXPECT_EQ(all[1][0], std::byte{2});
    (void)exchange.run({}, "end");
  }));
}

TEST(Rendezvous, ListensWhereOthersLookForIt) {
  const std::vector<std::string> loopback{"127.0.1.1"};
  EXPECT_TRUE(listens_everywhere("node7", loopback));
  EXPECT_TRUE(listens_everywhere("node7.cluster", {"::1", "127.0.0.1"}));
  EXPECT_FALSE(listens_everywhere("node7", {"127.0.1.1", "10.0.0.7"}));
  EXPECT_FALSE(listens_everywhere("node7", {"10.0.0.7"}));
  EXPECT_FALSE(listens_everywhere("node7", {}));
  for (const char* local : {"localhost", "localhost.localdomain", "ip6-localhost", "localhost6"}) {
    EXPECT_FALSE(listens_everywhere(local, {"::1"})) << local;
  }
  EXPECT_FALSE(listens_everywhere("127.0.1.1", loopback));
  EXPECT_FALSE(listens_everywhere("127.1", {"127.0.0.1"}));
  EXPECT_FALSE(listens_everywhere("::1", {"::1"}));
}

TEST(Frames, EntriesKeepTheirSizes) {
  const std::vector<Bootstrap::Bytes> entries{{}, {std::byte{1}}, {}, {std::byte{2}, std::byte{3}}};
  const auto packed = pack_entries(entries);
  EXPECT_EQ(unpack_entries(packed, 4), entries);
  EXPECT_EQ(unpack_entries(packed, 3), std::nullopt);
  EXPECT_EQ(unpack_entries(packed, 5), std::nullopt);
  for (std::size_t size = 0; size < packed.size(); ++size) {
    EXPECT_EQ(unpack_entries(std::span(packed).first(size), 4), std::nullopt);
  }
  auto huge = packed;
  huge[7] = std::byte{0xFF};  // the first entry has 2^56 * 255 bytes
  EXPECT_EQ(unpack_entries(huge, 4), std::nullopt);
}

/// A reader is fed in pieces of some size.
std::vector<Frame> frames_in(std::span<const std::byte> bytes, std::size_t piece,
                             FrameReader::State& last) {
  FrameReader reader(100);
  std::vector<Frame> frames;
  while (!bytes.empty()) {
    const auto room = reader.room();
    const std::size_t size = std::min({piece, bytes.size(), room.size()});
    std::ranges::copy(bytes.first(size), room.begin());
    bytes = bytes.subspan(size);
    last = reader.took(size);
    if (last == FrameReader::State::frame) frames.push_back(reader.take());
    if (last == FrameReader::State::broken) break;
  }
  return frames;
}

TEST(Frames, AreReadInPiecesOfAnySize) {
  std::vector<std::byte> bytes;
  for (const std::size_t size : {0U, 1U, 100U}) {
    const auto header = encode(FrameHeader{.rank = 3, .round = size, .size_bytes = size});
    bytes.insert(bytes.end(), header.begin(), header.end());
    bytes.resize(bytes.size() + size, static_cast<std::byte>(size));
  }
  for (std::size_t piece = 1; piece < 140; ++piece) {
    auto last = FrameReader::State::more;
    const auto frames = frames_in(bytes, piece, last);
    ASSERT_EQ(frames.size(), 3U);
    EXPECT_EQ(frames[2].header.round, 100U);
    EXPECT_EQ(frames[2].bytes, Bootstrap::Bytes(100, std::byte{100}));
    EXPECT_EQ(last, FrameReader::State::frame);
  }
  auto last = FrameReader::State::more;
  const auto too_large = encode(FrameHeader{.size_bytes = 101});
  EXPECT_TRUE(frames_in(too_large, 7, last).empty());
  EXPECT_EQ(last, FrameReader::State::broken);
}

}  // namespace
}  // namespace waybill::detail
