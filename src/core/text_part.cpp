#include "waybill/core/text_part.h"

#include <sstream>

namespace waybill {

void TextPart::write_integer(std::ostream& out, const TextPart& part) { out << part.integer_; }
void TextPart::write_natural(std::ostream& out, const TextPart& part) { out << part.natural_; }
void TextPart::write_real(std::ostream& out, const TextPart& part) { out << part.real_; }
void TextPart::write_character(std::ostream& out, const TextPart& part) {
  out << static_cast<char>(part.integer_);
}
void TextPart::write_text(std::ostream& out, const TextPart& part) {
  out.write(static_cast<const char*>(part.object_), static_cast<std::streamsize>(part.size_));
}

std::string detail::join_parts(std::initializer_list<TextPart> parts) {
  std::ostringstream text;
  for (const TextPart& part : parts) part.write(text);
  return std::move(text).str();
}

}  // namespace waybill
