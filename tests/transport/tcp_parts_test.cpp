// The parts of the rendezvous over TCP, one by one.

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>

#include "support/rendezvous.h"
#include "support/run_ranks.h"
#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/rendezvous.h"
#include "transport/bootstrap/wire.h"

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

using HmacFunction =
    std::function<std::optional<Digest>(std::string_view key, std::span<const std::byte> message)>;

std::string hmac_text(std::string_view key, std::string_view message, const HmacFunction& hmac) {
  return hex(hmac(key, bytes_of(message)).value());
}

/// RFC 4231, test cases 1, 2 and 6.
void expect_known_digests(const HmacFunction& hmac) {
  EXPECT_EQ(hmac_text(std::string(20, '\x0b'), "Hi There", hmac),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_text("Jefe", "what do ya want for nothing?", hmac),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_text(std::string(131, '\xaa'),
                      "Test Using Larger Than Block-Size Key - Hash Key First", hmac),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Hmac, EverySourceThatIsThereGivesTheKnownDigests) {
  expect_known_digests(hmac_sha256);
  for (auto* const hmac : {hmac_of_libcrypto, hmac_of_kernel}) {
    if (hmac("key", {})) expect_known_digests(hmac);
  }
}

TEST(Hmac, ProofsDifferByRoleHelloAndNonce) {
  const Hello hello{.world_size = 2, .rank = 1};
  const Hello other{.world_size = 3, .rank = 1};
  const Nonce nonce = random_nonce();
  const Digest proof = proof_of(client_side, "secret", hello, nonce);
  EXPECT_TRUE(same_digest(proof, proof_of(client_side, "secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(server_side, "secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(client_side, "Secret", hello, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(client_side, "secret", other, nonce)));
  EXPECT_FALSE(same_digest(proof, proof_of(client_side, "secret", hello, random_nonce())));
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
    const TcpJob job{.rank = rank, .world_size = 2, .host = "127.0.0.1", .port = port, .job = {}};
    if (rank == 0) test::sleep_s(0.2);
    TcpBootstrap bootstrap(rank, 2, 10);
    bootstrap.set_peers(connect(job, 10, port));
    const Bootstrap::Bytes mine(1, static_cast<std::byte>(rank + 1));
    const auto all = bootstrap.exchange(mine, "test");
    EXPECT_EQ(all[0][0], std::byte{1});
    EXPECT_EQ(all[1][0], std::byte{2});
    (void)bootstrap.exchange({}, "end");
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

/// Gives a peer the bytes in pieces of one size, and then nothing more.
std::vector<Frame> frames_in(std::span<const std::byte> bytes, std::size_t piece, bool& is_valid) {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  const Socket sender(ends[1]);
  TcpPeer peer(Socket{ends[0]}, 100);
  std::vector<Frame> frames;
  while (!peer.is_gone() && !bytes.empty()) {
    const std::size_t size = std::min(piece, bytes.size());
    EXPECT_TRUE(sender.send_now(bytes.first(size)));
    bytes = bytes.subspan(size);
    for (peer.read(); peer.frame() != nullptr; peer.read()) frames.push_back(peer.take_frame());
  }
  is_valid = !peer.is_gone();
  return frames;
}

TEST(Frames, AreReadInPiecesOfAnySize) {
  std::vector<std::byte> bytes;
  for (const std::size_t size : {0U, 1U, 100U}) {
    const auto header = test::encode(FrameHeader{.rank = 3, .round = size, .size_bytes = size});
    bytes.insert(bytes.end(), header.begin(), header.end());
    bytes.resize(bytes.size() + size, static_cast<std::byte>(size));
  }
  for (std::size_t piece = 1; piece < 140; ++piece) {
    bool is_valid = false;
    const auto frames = frames_in(bytes, piece, is_valid);
    ASSERT_EQ(frames.size(), 3U);
    EXPECT_EQ(frames[2].header.round, 100U);
    EXPECT_EQ(frames[2].bytes, Bootstrap::Bytes(100, std::byte{100}));
    EXPECT_TRUE(is_valid);
  }
  bool is_valid = true;
  const auto too_large = test::encode(FrameHeader{.size_bytes = 101});
  EXPECT_TRUE(frames_in(too_large, 7, is_valid).empty());
  EXPECT_FALSE(is_valid);
}

}  // namespace
}  // namespace waybill::detail
