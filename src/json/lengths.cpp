#include <charconv>
#include <string>

#include "node.h"
#include "parts.h"
#include "waybill/core/error.h"
#include "waybill/json/file.h"
#include "waybill/json/length_distribution_json.h"

namespace waybill {
namespace {

constexpr std::string_view expected = "a document length in tokens, 1..2^40";
constexpr std::string_view separators = " \t\r,\v\f";

std::int64_t length_from_word(std::string_view word, std::int64_t line, std::string_view origin) {
  std::int64_t length = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), length);
  if (error != std::errc{} || end != word.data() + word.size() || length < 1 ||
      length > detail::longest_document) {
    throw IoError(
        concat(origin, ": line ", line, ": \"", detail::excerpt(word), "\", expected ", expected));
  }
  return length;
}

void add_line(std::string_view text, std::int64_t line, std::string_view origin,
              std::vector<std::int64_t>& lengths) {
  text = text.substr(0, text.find('#'));
  for (std::size_t at = text.find_first_not_of(separators); at != std::string_view::npos;) {
    const std::size_t end = text.find_first_of(separators, at);
    lengths.push_back(length_from_word(text.substr(at, end - at), line, origin));
    at = text.find_first_not_of(separators, end);
  }
}

std::vector<std::int64_t> lengths_from_json(std::string_view text, std::string_view origin) {
  const detail::JsonValue value = detail::parse_json(text, origin);
  std::vector<std::int64_t> lengths = detail::JsonNode(value, origin).integers();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (1 <= lengths[i] && lengths[i] <= detail::longest_document) continue;
    throw IoError(concat(origin, ": /", i, " = ", lengths[i], ", expected ", expected));
  }
  return lengths;
}

std::vector<std::int64_t> lengths_from_lines(std::string_view text, std::string_view origin) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t line = 1; !text.empty(); ++line) {
    const std::size_t end = text.find('\n');
    add_line(text.substr(0, end), line, origin, lengths);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lengths;
}

}  // namespace

std::vector<std::int64_t> lengths_from_text(std::string_view text, std::string_view origin) {
  constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
  if (text.starts_with(byte_order_mark)) text.remove_prefix(byte_order_mark.size());
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json = first != std::string_view::npos && text[first] == '[';
  std::vector<std::int64_t> lengths =
      is_json ? lengths_from_json(text, origin) : lengths_from_lines(text, origin);
  if (lengths.empty()) throw IoError(concat(origin, ": no lengths, expected at least one"));
  return lengths;
}

std::vector<std::int64_t> read_lengths(const std::filesystem::path& path) {
  return lengths_from_text(read_file(path), path.string());
}

}  // namespace waybill
