// What ranks send each other over TCP: any bytes of a caller, a handshake that is changed on the
// way, and a rank or a rank 0 that sends frames of which some are wrong. All of it ends at once, in
// an error or in what was sent.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_input.h"
#include "transport/bootstrap/tcp/handshake.h"
#include "transport/bootstrap/tcp/rendezvous.h"
#include "waybill/core/error.h"

namespace {

using namespace waybill;
using namespace waybill::detail;
using fuzz::Input;
using Bytes = Bootstrap::Bytes;

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "fuzz_rendezvous: %s\n", what);
  std::abort();
}

/// What rank 0 knows when a client connects.
struct Server {
  TcpJob job;
  std::vector<bool> is_connected;
  std::string failure;
};

Server server_of(Input& input) {
  Server server;
  server.job.world_size = static_cast<std::int32_t>(1 + input.below(8));
  server.is_connected.assign(static_cast<std::size_t>(server.job.world_size), false);
  server.is_connected.back() = input.below(4) == 0;
  if (input.below(2) == 0) server.job.job.id = "job";
  if (input.below(2) == 0) server.job.job.secret = "secret";
  if (input.below(8) == 0) server.failure = "rank 1 failed";
  return server;
}

/// Gives bytes to rank 0's handshake in pieces until it answers or there are none left.
AnswerKind feed(ServerHandshake& handshake, std::span<const std::byte> bytes, const Server& server,
                Input& input) {
  auto kind = AnswerKind::none;
  while (!bytes.empty() && kind == AnswerKind::none) {
    const auto room = handshake.room();
    expect(!room.empty(), "a handshake has no room");
    const auto piece = static_cast<std::size_t>(1 + input.byte() * 2);
    const std::size_t size = std::min({bytes.size(), room.size(), piece});
    std::ranges::copy(bytes.first(size), room.begin());
    bytes = bytes.subspan(size);
    kind = handshake.add(size, server.job, server.is_connected, server.failure);
  }
  return kind;
}

void check_accepted(const ServerHandshake& handshake, const Server& server) {
  const auto rank = handshake.rank();
  expect(0 < rank && rank < server.job.world_size, "a rank out of range is let in");
  expect(!server.is_connected[static_cast<std::size_t>(rank)], "a rank is let in twice");
  expect(server.failure.empty(), "a rank is let in after a failure");
  const Answer& answer = handshake.answer();
  expect(answer.is_valid() && answer.kind == AnswerKind::accepted,
         "an accepted rank is not told so");
}

/// Any bytes at rank 0's door.
void call_with_any_bytes(Input& input) {
  const Server server = server_of(input);
  Bytes bytes(input.below(2) == 0 ? 256U + 64U : 40U);
  Hello hello{.has_secret = static_cast<std::uint32_t>(input.below(2)),
              .world_size = static_cast<std::uint32_t>(input.value(0, 9)),
              .rank = static_cast<std::uint32_t>(input.value(0, 9)),
              .job = "job"};
  if (input.below(2) == 0) hello.job[0] = 0;
  const auto valid = bytes_in(hello);
  std::copy_n(valid.begin(), std::min(valid.size(), bytes.size()), bytes.begin());
  for (std::int64_t i = input.below(16); i > 0; --i) {
    bytes[static_cast<std::size_t>(input.byte() + input.byte()) % bytes.size()] =
        static_cast<std::byte>(input.byte());
  }
  ServerHandshake handshake;
  auto kind = feed(handshake, bytes, server, input);
  if (kind == AnswerKind::prove) {
    kind = feed(handshake, std::span(bytes).last(std::min<std::size_t>(bytes.size(), 64)), server,
                input);
    expect(kind != AnswerKind::accepted, "a client without the secret is accepted");
  }
  if (kind == AnswerKind::accepted) check_accepted(handshake, server);
  if (kind == AnswerKind::rejected) {
    const Answer& answer = handshake.answer();
    expect(answer.is_valid() && answer.kind == AnswerKind::rejected && answer.why[0] != 0,
           "a refused caller gets no reason");
  }
}

/// Changes some of the bytes; true: it did.
bool damage(std::span<std::byte> bytes, Input& input) {
  const Bytes before(bytes.begin(), bytes.end());
  for (std::int64_t i = input.below(4); i > 0; --i) {
    const auto at = static_cast<std::size_t>(input.byte() + input.byte()) % bytes.size();
    bytes[at] ^= static_cast<std::byte>(input.byte());
  }
  return !std::ranges::equal(bytes, before);
}

/// Both sides with a secret, and somebody between them who changes bytes.
void shake_hands_through_damage(Input& input) {
  const TcpJob job{
      .rank = 2, .world_size = 4, .host = "h", .port = 1, .job = {.id = {}, .secret = "secret"}};
  const Server server{.job = job, .is_connected = std::vector<bool>(4), .failure = {}};
  ServerHandshake handshake;
  const Hello hello = hello_of(job);
  std::optional<Nonce> nonce;
  Hello harmed_hello = hello;
  const bool harmed = damage(room_in(harmed_hello, 0), input);
  auto kind = feed(handshake, bytes_in(harmed_hello), server, input);
  bool is_accepted = false;
  try {
    Answer answer = handshake.answer();
    (void)damage(room_in(answer, 0), input);  // the client reads only kind, nonce and version
    if (kind != AnswerKind::prove) return (void)reply_to(answer, job, hello, nonce);
    auto proof = reply_to(answer, job, hello, nonce);
    if (!proof) expect(false, "a caller with a secret is content without a proof");
    (void)damage(room_in(*proof, 0), input);
    kind = feed(handshake, bytes_in(*proof), server, input);
    expect(kind != AnswerKind::accepted || !harmed, "a changed hello is accepted");
    answer = handshake.answer();
    is_accepted = !reply_to(answer, job, hello, nonce);
    expect(!is_accepted || kind == AnswerKind::accepted, "a rejected client believes otherwise");
  } catch (const TransportError&) {
    expect(!is_accepted, "an error after all was well");
  }
}

void append(Bytes& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

/// A run of frames, right and wrong ones.
Bytes frames_of_a_peer(Input& input, std::int32_t world_size) {
  Bytes all;
  for (std::uint64_t round = 1; round <= 4 && !input.empty(); ++round) {
    const std::int64_t kind = input.below(8);
    Bytes body(static_cast<std::size_t>(input.below(40)), static_cast<std::byte>(round));
    if (kind < 3) {  // what rank 0 answers
      body = pack_entries(std::vector<Bytes>(static_cast<std::size_t>(world_size), body));
    }
    FrameHeader header{.round = round, .size_bytes = body.size()};
    if (kind == 7) {
      header.kind = static_cast<FrameKind>(input.value(0, 6));
      header.rank = static_cast<std::uint32_t>(input.value(0, 9));
      header.round = static_cast<std::uint64_t>(input.value(0, 5));
      if (input.below(2) == 0) header.size_bytes = static_cast<std::uint64_t>(input.value(0, 50));
    }
    if (kind == 6) (void)damage(room_in(header, 0), input);
    if (kind == 5 && !body.empty()) (void)damage(body, input);
    append(all, bytes_in(header));
    append(all, body);
  }
  if (input.below(4) == 0) all.resize(all.size() - all.size() / 3);
  return all;
}

void any_answer_and_table(std::span<const std::byte> bytes) {
  Answer answer;
  std::ranges::copy(bytes.first(std::min(bytes.size(), sizeof(answer))),
                    room_in(answer, 0).begin());
  (void)answer.is_valid();
  const auto entries = unpack_entries(bytes, bytes.size() % 7);
  if (entries) expect(std::ranges::equal(pack_entries(*entries), bytes), "entries change");
}

/// A connection on which these bytes have come and nothing else will.
TcpPeer peer_that_says(const Bytes& bytes, std::int32_t rank, std::int32_t world_size) {
  int ends[2];
  expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
         "no socketpair");
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = send(ends[1], bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) break;  // full: a torn frame
    sent += static_cast<std::size_t>(n);
  }
  (void)close(ends[1]);
  return {Socket(ends[0]), TcpBootstrap::max_frame_bytes(rank, world_size)};
}

/// @param rank whose exchanges run; the other ranks say what the input makes of them
void exchange_with_mutated_peers(std::int32_t rank, Input& input) {
  constexpr std::int32_t world_size = 3;
  std::vector<TcpPeer> peers(rank == 0 ? 1 : 0);
  for (std::int32_t r = rank == 0 ? 1 : 0; r < (rank == 0 ? world_size : 1); ++r) {
    peers.push_back(peer_that_says(frames_of_a_peer(input, world_size), rank, world_size));
  }
  TcpBootstrap bootstrap(rank, world_size, 5);
  bootstrap.set_peers(std::move(peers));
  const Bytes mine(3, std::byte{7});
  try {
    for (int round = 0; round < 5; ++round) {
      const auto all = bootstrap.exchange(mine, "fuzz");
      expect(all.size() == static_cast<std::size_t>(world_size), "entries are missing");
      if (rank == 0) expect(all[0] == mine, "its own entry has changed");
    }
    expect(false, "a peer that has hung up takes part in five exchanges");
  } catch (const Timeout& timeout) {
    expect(rank != 0, "rank 0 waited for a peer that has hung up");
    expect(timeout.missed().seconds < 2, "a wait for a peer that has hung up");
    expect(0 <= timeout.missed().peer && timeout.missed().peer < world_size, "no such peer");
  } catch (const TransportError& error) {
    const std::string text = error.what();
    expect(std::ranges::none_of(text, [](char c) { return c == '\x1b' || c == '\n'; }),
           "a message with what a terminal acts on");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input({data, size});
  switch (input.below(5)) {
    case 0:
      call_with_any_bytes(input);
      break;
    case 1:
      shake_hands_through_damage(input);
      break;
    case 2:
      exchange_with_mutated_peers(1, input);
      break;
    case 3:
      exchange_with_mutated_peers(0, input);
      break;
    default:
      any_answer_and_table(std::as_bytes(std::span(data, size)));
      break;
  }
  return 0;
}
