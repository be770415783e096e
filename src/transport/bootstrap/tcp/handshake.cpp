#include "transport/bootstrap/tcp/handshake.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace waybill::detail {
namespace {

using Magic = std::array<std::byte, 8>;

constexpr Magic magic_of(const char (&text)[9]) {
  Magic magic{};
  for (std::size_t i = 0; i < magic.size(); ++i) magic[i] = static_cast<std::byte>(text[i]);
  return magic;
}

constexpr Magic hello_magic = magic_of("waybill?");
constexpr Magic answer_magic = magic_of("waybill!");
constexpr Magic proof_magic = magic_of("waybill=");
constexpr std::uint32_t frame_magic = 0x7761'7962;

/// Puts numbers and bytes one after another; the rest stays zero.
class FieldWriter {
 public:
  explicit FieldWriter(std::span<std::byte> to) : to_(to) {}

  template <class Number>
  void number(Number value) {
    for (std::size_t i = 0; i < sizeof(value); ++i) {
      to_[i] = static_cast<std::byte>(value >> (8 * i) & 0xFF);
    }
    to_ = to_.subspan(sizeof(value));
  }

  void bytes(std::span<const std::byte> from) {
    std::ranges::copy(from, to_.begin());
    to_ = to_.subspan(from.size());
  }

  /// As much as leaves room for a zero.
  void text(std::string_view text) {
    const auto from = std::as_bytes(std::span(text));
    bytes(from.first(std::min(from.size(), to_.size() - 1)));
  }

 private:
  std::span<std::byte> to_;
};

class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> from) : from_(from) {}

  template <class Number>
  Number number() {
    Number value = 0;
    for (std::size_t i = 0; i < sizeof(value); ++i) {
      value |= static_cast<Number>(std::to_integer<Number>(from_[i]) << (8 * i));
    }
    from_ = from_.subspan(sizeof(value));
    return value;
  }

  template <std::size_t Size>
  std::array<std::byte, Size> bytes() {
    std::array<std::byte, Size> to{};
    std::ranges::copy(from_.first(Size), to.begin());
    from_ = from_.subspan(Size);
    return to;
  }

  /// Up to the first zero.
  [[nodiscard]] std::string_view text() const {
    const auto end = std::ranges::find(from_, std::byte{0});
    return {reinterpret_cast<const char*>(from_.data()),
            static_cast<std::size_t>(end - from_.begin())};
  }

 private:
  std::span<const std::byte> from_;
};

}  // namespace

JobField::JobField(std::string_view text) : size_(std::min(text.size(), max_job_id_bytes)) {
  std::copy_n(text.data(), size_, bytes_.data());
}

Greeting judge_greeting(std::span<const std::byte> first_bytes) {
  const auto common = std::min(first_bytes.size(), hello_magic.size());
  if (!std::ranges::equal(first_bytes.first(common), std::span(hello_magic).first(common))) {
    return Greeting::stranger;
  }
  if (first_bytes.size() >= 16 && version_in(first_bytes.first<16>()) != protocol_version) {
    return Greeting::other_version;
  }
  return first_bytes.size() < hello_bytes ? Greeting::incomplete : Greeting::hello;
}

std::uint32_t version_in(std::span<const std::byte, 16> first_bytes) {
  return FieldReader(first_bytes.subspan(8)).number<std::uint32_t>();
}

HelloBytes encode(const Hello& hello) {
  HelloBytes bytes{};
  FieldWriter to(bytes);
  to.bytes(hello_magic);
  to.number(protocol_version);
  to.number(std::uint32_t{hello.has_secret});
  to.number(hello.world_size);
  to.number(hello.rank);
  to.bytes(hello.nonce);
  to.text(hello.job.text());
  return bytes;
}

Hello decode_hello(std::span<const std::byte, hello_bytes> bytes) {
  FieldReader from(bytes.subspan(12));
  Hello hello;
  hello.has_secret = (from.number<std::uint32_t>() & 1) != 0;
  hello.world_size = from.number<std::uint32_t>();
  hello.rank = from.number<std::uint32_t>();
  hello.nonce = from.bytes<sizeof(Nonce)>();
  hello.job = JobField(from.text());
  return hello;
}

AnswerBytes encode(const Answer& answer) {
  AnswerBytes bytes{};
  FieldWriter to(bytes);
  to.bytes(answer_magic);
  to.number(protocol_version);
  to.number(static_cast<std::uint32_t>(answer.kind));
  to.bytes(answer.nonce);
  to.bytes(answer.proof);
  to.text(answer.why);
  return bytes;
}

std::optional<Answer> decode_answer(std::span<const std::byte, answer_bytes> bytes) {
  FieldReader from(bytes);
  if (from.bytes<sizeof(Magic)>() != answer_magic) return std::nullopt;
  const auto version = from.number<std::uint32_t>();
  const auto kind = from.number<std::uint32_t>();
  Answer answer;
  if (kind < 1 || kind > 3) return std::nullopt;
  answer.kind = static_cast<AnswerKind>(kind);
  if (version != protocol_version && answer.kind != AnswerKind::refused) return std::nullopt;
  answer.nonce = from.bytes<sizeof(Nonce)>();
  answer.proof = from.bytes<sizeof(Digest)>();
  answer.why = from.text();
  return answer;
}

ProofBytes encode_proof(const Digest& proof) {
  ProofBytes bytes{};
  FieldWriter to(bytes);
  to.bytes(proof_magic);
  to.bytes(proof);
  return bytes;
}

std::optional<Digest> decode_proof(std::span<const std::byte, proof_bytes> bytes) {
  FieldReader from(bytes);
  if (from.bytes<sizeof(Magic)>() != proof_magic) return std::nullopt;
  return from.bytes<sizeof(Digest)>();
}

HeaderBytes encode(const FrameHeader& header) {
  HeaderBytes bytes{};
  FieldWriter to(bytes);
  to.number(frame_magic);
  to.number(static_cast<std::uint32_t>(header.kind));
  to.number(header.rank);
  to.number(std::uint32_t{0});
  to.number(header.round);
  to.number(header.size_bytes);
  return bytes;
}

std::optional<FrameHeader> decode_header(std::span<const std::byte> bytes) {
  FieldReader from(bytes);
  if (from.number<std::uint32_t>() != frame_magic) return std::nullopt;
  const auto kind = from.number<std::uint32_t>();
  if (kind < 1 || kind > 4) return std::nullopt;
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.rank = from.number<std::uint32_t>();
  (void)from.number<std::uint32_t>();
  header.round = from.number<std::uint64_t>();
  header.size_bytes = from.number<std::uint64_t>();
  return header;
}

std::span<std::byte> FrameReader::room() {
  constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  if (header_filled_ < header_bytes) return std::span(header_bytes_).subspan(header_filled_);
  const std::size_t missing = header_.size_bytes - body_filled_;
  body_.resize(body_filled_ + std::min(missing, piece_bytes));
  return std::span(body_).subspan(body_filled_);
}

FrameReader::State FrameReader::took(std::size_t num_bytes) {
  if (header_filled_ == header_bytes) {
    body_filled_ += num_bytes;
  } else {
    header_filled_ += num_bytes;
    if (header_filled_ < header_bytes) return State::more;
    const auto header = decode_header(header_bytes_);
    if (!header || header->size_bytes > max_size_bytes_) return State::broken;
    header_ = *header;
  }
  return body_filled_ == header_.size_bytes ? State::frame : State::more;
}

Frame FrameReader::take() {
  body_.resize(body_filled_);
  header_filled_ = 0;
  body_filled_ = 0;
  return {header_, std::exchange(body_, {})};
}

Bootstrap::Bytes pack_entries(const std::vector<Bootstrap::Bytes>& all) {
  std::size_t size = all.size() * sizeof(std::uint64_t);
  for (const auto& entry : all) size += entry.size();
  Bootstrap::Bytes packed(size);
  FieldWriter to(packed);
  for (const auto& entry : all) to.number(std::uint64_t{entry.size()});
  for (const auto& entry : all) to.bytes(entry);
  return packed;
}

std::optional<std::vector<Bootstrap::Bytes>> unpack_entries(std::span<const std::byte> packed,
                                                            std::size_t num_entries) {
  const std::size_t table_bytes = num_entries * sizeof(std::uint64_t);
  if (packed.size() < table_bytes) return std::nullopt;
  FieldReader sizes(packed.first(table_bytes));
  auto rest = packed.subspan(table_bytes);
  std::vector<Bootstrap::Bytes> all(num_entries);
  for (Bootstrap::Bytes& entry : all) {
    const auto size = sizes.number<std::uint64_t>();
    if (size > rest.size()) return std::nullopt;
    const auto bytes = rest.first(size);
    entry.assign(bytes.begin(), bytes.end());
    rest = rest.subspan(size);
  }
  if (!rest.empty()) return std::nullopt;
  return all;
}

}  // namespace waybill::detail
