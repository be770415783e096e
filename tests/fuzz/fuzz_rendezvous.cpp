// What ranks send each other over TCP: any bytes of a caller, a handshake that is changed on the
// way, and a rank or a rank 0 that sends frames of which some are wrong. All of it ends at once, in
// an error or in what was sent.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fuzz_input.h"
#include "transport/tcp_caller.h"
#include "transport/bootstrap/tcp/exchange.h"
#include "transport/tcp_greeter.h"
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

Admission admission_of(Input& input) {
  Admission admission;
  admission.world_size = static_cast<std::int32_t>(1 + input.below(8));
  admission.taken.assign(static_cast<std::size_t>(admission.world_size), false);
  admission.taken.back() = input.below(4) == 0;
  if (input.below(2) == 0) admission.job_id = "job";
  if (input.below(2) == 0) admission.secret = "secret";
  if (input.below(8) == 0) admission.failure = "rank 1 failed";
  return admission;
}

/// Gives bytes to a Greeter in pieces until it has decided or there are none left.
Greeter::Step feed(Greeter& greeter, std::span<const std::byte> bytes, const Admission& admission,
                   Input& input) {
  auto step = Greeter::Step::more;
  while (!bytes.empty() && (step == Greeter::Step::more || step == Greeter::Step::answer)) {
    const auto room = greeter.room();
    expect(!room.empty(), "a greeter has no room");
    const auto piece = static_cast<std::size_t>(1 + input.byte() * 2);
    const std::size_t size = std::min({bytes.size(), room.size(), piece});
    std::ranges::copy(bytes.first(size), room.begin());
    bytes = bytes.subspan(size);
    step = greeter.took(size, admission);
    if (step == Greeter::Step::answer) break;
  }
  return step;
}

void check_admitted(const Greeter& greeter, const Admission& admission) {
  const auto rank = greeter.rank();
  expect(0 < rank && rank < admission.world_size, "a rank out of range is let in");
  expect(!admission.taken[static_cast<std::size_t>(rank)], "a rank is let in twice");
  expect(admission.failure.empty(), "a rank is let in after a failure");
  const auto answer = decode_answer(greeter.answer());
  expect(answer && answer->kind == AnswerKind::accepted, "an accepted rank is not told so");
}

/// Any bytes at rank 0's door.
void call_with_any_bytes(Input& input) {
  const Admission admission = admission_of(input);
  Bytes bytes(input.below(2) == 0 ? 256U + 64U : 40U);
  const Hello hello{.has_secret = input.below(2) == 0,
                    .world_size = static_cast<std::uint32_t>(input.value(0, 9)),
                    .rank = static_cast<std::uint32_t>(input.value(0, 9)),
                    .job = JobField(input.below(2) == 0 ? "job" : "")};
  const auto valid = encode(hello);
  std::copy_n(valid.begin(), std::min(valid.size(), bytes.size()), bytes.begin());
  for (std::int64_t i = input.below(16); i > 0; --i) {
    bytes[static_cast<std::size_t>(input.byte() + input.byte()) % bytes.size()] =
        static_cast<std::byte>(input.byte());
  }
  Greeter greeter;
  auto step = feed(greeter, bytes, admission, input);
  if (step == Greeter::Step::answer) {
    step = feed(greeter, std::span(bytes).last(std::min<std::size_t>(bytes.size(), 64)), admission,
                input);
    expect(step != Greeter::Step::admit, "a caller without the secret is let in");
  }
  if (step == Greeter::Step::admit) check_admitted(greeter, admission);
  if (step == Greeter::Step::refuse) {
    const auto answer = decode_answer(greeter.answer());
    expect(answer && answer->kind == AnswerKind::refused && !answer->why.empty(),
           "a refused caller gets no reason");
  }
}

/// Changes some of the bytes; true: it did.
template <class Container>
bool damage(Container& bytes, Input& input) {
  const Container before = bytes;
  for (std::int64_t i = input.below(4); i > 0; --i) {
    const auto at = static_cast<std::size_t>(input.byte() + input.byte()) % bytes.size();
    bytes[at] ^= static_cast<std::byte>(input.byte());
  }
  return bytes != before;
}

/// Both sides with a secret, and somebody between them who changes bytes.
void shake_hands_through_damage(Input& input) {
  Admission admission;
  admission.world_size = 4;
  admission.taken.assign(4, false);
  admission.secret = "secret";
  const Call call{
      .host = "h", .port = 1, .rank = 2, .world_size = 4, .job_id = {}, .secret = admission.secret};
  Greeter greeter;
  Introduction introduction(call);
  HelloBytes hello = introduction.hello();
  bool harmed = damage(hello, input);
  auto step = feed(greeter, hello, admission, input);
  bool let_in = false;
  try {
    AnswerBytes answer = greeter.answer();
    (void)damage(answer, input);  // of this only kind, nonce and version are looked at
    if (step != Greeter::Step::answer) return (void)introduction.took(answer);
    auto proof = introduction.took(answer);
    if (!proof) expect(false, "a caller with a secret is content without a proof");
    (void)damage(*proof, input);
    step = feed(greeter, *proof, admission, input);
    expect(step != Greeter::Step::admit || !harmed, "a hello that was changed is let in");
    answer = greeter.answer();
    let_in = !introduction.took(answer);
    expect(!let_in || step == Greeter::Step::admit, "a caller that is refused believes to be in");
  } catch (const TransportError&) {
    expect(!let_in, "an error after all was well");
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
    HeaderBytes bytes = encode(header);
    if (kind == 6) (void)damage(bytes, input);
    if (kind == 5 && !body.empty()) (void)damage(body, input);
    append(all, bytes);
    append(all, body);
  }
  if (input.below(4) == 0) all.resize(all.size() - all.size() / 3);
  return all;
}

void any_answer_and_table(std::span<const std::byte> bytes) {
  AnswerBytes answer{};
  std::ranges::copy(bytes.first(std::min(bytes.size(), answer.size())), answer.begin());
  (void)decode_answer(answer);
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
  return {Socket(ends[0]), TcpExchange::max_frame_bytes(rank, world_size)};
}

/// @param rank whose exchanges run; the other ranks say what the input makes of them
void exchange_with_mutated_peers(std::int32_t rank, Input& input) {
  constexpr std::int32_t world_size = 3;
  std::vector<TcpPeer> peers(rank == 0 ? 1 : 0);
  for (std::int32_t r = rank == 0 ? 1 : 0; r < (rank == 0 ? world_size : 1); ++r) {
    peers.push_back(peer_that_says(frames_of_a_peer(input, world_size), rank, world_size));
  }
  TcpExchange exchange(rank, world_size, std::move(peers), 5);
  const Bytes mine(3, std::byte{7});
  try {
    for (int round = 0; round < 5; ++round) {
      const auto all = exchange.run(mine, "fuzz");
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
