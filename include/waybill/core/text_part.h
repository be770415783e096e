#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <type_traits>

namespace waybill {

/// A value on its way into a text, whatever its type: what takes parts need not be a template. It
/// reads like operator<<. Strings and objects are not copied and have to outlive it.
class TextPart {
 public:
  template <class Value>
  TextPart(const Value& value) noexcept {  // NOLINT(google-explicit-constructor): any value is one
    if constexpr (std::same_as<Value, char> || std::same_as<Value, signed char> ||
                  std::same_as<Value, unsigned char>) {
      kind_ = Kind::character;
      content_.character = static_cast<char>(value);
    } else if constexpr (std::signed_integral<Value> || std::same_as<Value, bool>) {
      kind_ = Kind::integer;
      content_.integer = value;
    } else if constexpr (std::unsigned_integral<Value>) {
      kind_ = Kind::natural;
      content_.natural = value;
    } else if constexpr (std::same_as<Value, double> || std::same_as<Value, float>) {
      kind_ = Kind::real;
      content_.real = static_cast<double>(value);
    } else if constexpr (std::is_convertible_v<const Value&, std::string_view>) {
      const std::string_view text = value;
      kind_ = Kind::text;
      content_.text = {text.data(), text.size()};
    } else {
      kind_ = Kind::object;
      content_.object = {&value, &write_object<Value>};
    }
  }

  /// As `out << value` writes it.
  void write(std::ostream& out) const;

 private:
  enum class Kind : std::uint8_t { integer, natural, real, character, text, object };
  struct Text {
    const char* data;
    std::size_t size;
  };
  struct Object {
    const void* value;
    void (*write)(std::ostream& out, const void* value);
  };

  template <class Value>
  static void write_object(std::ostream& out, const void* value) {
    out << *static_cast<const Value*>(value);
  }

  union Content {
    std::int64_t integer;
    std::uint64_t natural;
    double real;
    char character;
    Text text;
    Object object;
  };

  Content content_;
  Kind kind_;
};

namespace detail {
[[nodiscard]] std::string join_parts(std::initializer_list<TextPart> parts);
}

/// The parts, anything with operator<<, one after another without separators.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  return detail::join_parts({TextPart(parts)...});
}

}  // namespace waybill
