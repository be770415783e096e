#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <type_traits>

namespace waybill {

/// A value on its way into a text, whatever its type: a function that takes parts need not be a
/// template. It reads like operator<<. Strings and objects are not copied and have to outlive it.
class TextPart {
 public:
  template <class Value>
  TextPart(const Value& value) noexcept {  // NOLINT(google-explicit-constructor): any value is one
    if constexpr (std::same_as<Value, char> || std::same_as<Value, signed char> ||
                  std::same_as<Value, unsigned char>) {
      integer_ = static_cast<char>(value);
      write_ = &write_character;
    } else if constexpr (std::signed_integral<Value> || std::same_as<Value, bool>) {
      integer_ = value;
      write_ = &write_integer;
    } else if constexpr (std::unsigned_integral<Value>) {
      natural_ = value;
      write_ = &write_natural;
    } else if constexpr (std::same_as<Value, double> || std::same_as<Value, float>) {
      real_ = static_cast<double>(value);
      write_ = &write_real;
    } else if constexpr (std::is_convertible_v<const Value&, std::string_view>) {
      const std::string_view text = value;
      object_ = text.data();
      size_ = text.size();
      write_ = &write_text;
    } else {
      object_ = &value;
      write_ = &write_object<Value>;
    }
  }

  /// As `out << value` writes it.
  void write(std::ostream& out) const { write_(out, *this); }

 private:
  static void write_integer(std::ostream& out, const TextPart& part);
  static void write_natural(std::ostream& out, const TextPart& part);
  static void write_real(std::ostream& out, const TextPart& part);
  static void write_character(std::ostream& out, const TextPart& part);
  static void write_text(std::ostream& out, const TextPart& part);
  template <class Value>
  static void write_object(std::ostream& out, const TextPart& part) {
    out << *static_cast<const Value*>(part.object_);
  }

  union {
    std::int64_t integer_;
    std::uint64_t natural_;
    double real_;
    const void* object_;
  };
  std::size_t size_ = 0;  // bytes of a text
  void (*write_)(std::ostream& out, const TextPart& part);
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
