#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "json/text.h"
#include "waybill/core/error.h"

namespace waybill::detail {
namespace {

template <class Number>
void append_number(std::string& text, Number number) {
  std::array<char, 32> digits{};
  const auto [end, error] = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  text.append(digits.data(), end);
}

void append_escaped(std::string& text, std::string_view raw) {
  constexpr std::string_view hex = "0123456789abcdef";
  for (const char c : raw) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (byte < 0x20) {
      text += "\\u00";
      text += hex[byte >> 4U];
      text += hex[byte & 15U];
    } else {
      text += c;
    }
  }
}

}  // namespace

void JsonWriter::new_line() {
  if (compact_) return;
  text_ += '\n';
  text_.append(2 * levels_.size(), ' ');
}

void JsonWriter::separate() {
  if (levels_.empty()) return;
  Level& level = levels_.back();
  if (!level.empty) text_ += level.line && !compact_ ? ", " : ",";
  level.empty = false;
  if (!level.line) new_line();
}

void JsonWriter::before_value() {
  if (!after_key_) separate();
  after_key_ = false;
}

JsonWriter& JsonWriter::open(char opening, bool line) {
  before_value();
  text_ += opening;
  const bool inside_line = !levels_.empty() && levels_.back().line;
  levels_.push_back({opening == '{' ? '}' : ']', line || inside_line});
  return *this;
}

JsonWriter& JsonWriter::close() {
  const Level level = levels_.back();
  levels_.pop_back();
  if (!level.line && !level.empty) new_line();
  text_ += level.closing;
  return *this;
}

JsonWriter& JsonWriter::key(std::string_view name) {
  separate();
  text_ += '"';
  append_escaped(text_, name);
  text_ += compact_ ? "\":" : "\": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::word(std::string_view text) {
  before_value();
  text_ += text;
  return *this;
}

JsonWriter& JsonWriter::integer(std::int64_t number) {
  before_value();
  append_number(text_, number);
  return *this;
}

JsonWriter& JsonWriter::real(double number) {
  require(std::isfinite(number), "to_json: a number = ", number, ", expected a finite one");
  before_value();
  append_number(text_, number);
  return *this;
}

JsonWriter& JsonWriter::string(std::string_view text) {
  before_value();
  text_ += '"';
  append_escaped(text_, text);
  text_ += '"';
  return *this;
}

JsonWriter& JsonWriter::header(std::string_view format) {
  return key("format").string(format).key("version").integer(json_version);
}

std::string JsonWriter::finish() && {
  if (!compact_) text_ += '\n';
  return std::move(text_);
}

}  // namespace waybill::detail
